"""TensorRT's command line: what to run, and how to read what it says about sparsity."""

import codecs
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from halve.errors import FileError
from halve.masks import storage

SIZE = 224  # of images, if the file does not fix it
_MAX_LOG = 1 << 30
# Older: "Layers eligible for sparse math: a, b" and "TRT inference plan picked sparse implementation for layers: a".
# Newer: "Found 2 layer(s) eligible to use sparse tactics: a, b" and "Chose 1 layer(s) using sparse tactics: a".
_MESSAGE = re.compile(r"\(Sparsity\)(?P<words>[^:]*)(?::(?P<names>.*))?")
_PICKED = re.compile(r"picked|chose|using", re.IGNORECASE)
_COUNT = re.compile(r"(\d+) layer\(s\)")
_STAMP = re.compile(r"\[\d\d/\d\d/\d{4}-")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class TrtLog:
    """What a log of TensorRT says: the names of layers, as it fused them; None if it does not say which it picked."""

    eligible: tuple[str, ...]
    picked: tuple[str, ...] | None

    def picks(self, node: str) -> bool | None:
        """Whether a node is part of a layer that runs on a sparse kernel; None if the log does not say."""
        return None if self.picked is None else any(node in _parts(layer) for layer in self.picked)

    def unknown(self, nodes: Iterable[str]) -> list[str]:
        """Layers of the log that have no node of the file in them."""
        known = set(nodes)
        return [layer for layer in dict.fromkeys((*self.eligible, *(self.picked or ()))) if not known & _parts(layer)]


def read_log(path: str | Path) -> TrtLog:
    """Read a log of trtexec or of a builder, written with --verbose and --sparsity=enable."""
    path = Path(path)
    content = storage.read_bytes(path, _MAX_LOG)
    encoding = "utf-16" if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"  # of PowerShell
    text = _COLOUR.sub("", content.decode(encoding, "replace"))
    messages = [match for line in _unwrapped(text) if (match := _MESSAGE.search(line))]
    if not messages:
        raise FileError(
            f"{path} says nothing about sparsity: it has no line with '(Sparsity)'; "
            f"build with trtexec --sparsity=enable --verbose, and keep its whole output"
        )
    eligible = [match for match in messages if "eligible" in match["words"]]
    others = [match for match in messages if "eligible" not in match["words"]]
    picked = [match for match in others if _PICKED.search(match["words"])][-1:]
    for match in picked:  # there is one for each pass of the builder; the last is for the engine
        count = _COUNT.search(match["words"])
        if count and int(count[1]) and not (match["names"] or "").strip():
            raise FileError(f"{path} says that {count[1]} layers were picked, but not which: build with --verbose")
    return TrtLog(_names(eligible), _names(picked) if picked else None)


def _unwrapped(text: str) -> list[str]:
    """The messages of a log, each in one line: long ones may have been broken by a terminal."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if _STAMP.match(line)]
    if not starts:  # each line is a message
        return lines
    ends = [*starts[1:], len(lines)]
    return lines[: starts[0]] + ["".join(lines[start:end]) for start, end in zip(starts, ends, strict=True)]


def _names(messages: Iterable[re.Match[str]]) -> tuple[str, ...]:
    lists = [match["names"] or "" for match in messages]
    return tuple(dict.fromkeys(name.strip() for names in lists for name in names.split(",") if name.strip()))


def _parts(layer: str) -> set[str]:
    """The nodes that TensorRT fused into a layer.

    >>> sorted(_parts("layer1.0.conv1 + node_relu"))
    ['layer1.0.conv1', 'node_relu']
    """
    return {part.strip() for part in layer.split(" + ")}


def commands(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, str]:
    """The lines to paste, for TensorRT 10 and 11.

    >>> print(commands(Path("net.onnx"), {"x": (None, 3, 224, 224)})["11"])
    trtexec --onnx=net.onnx --saveEngine=net.plan --sparsity=enable --verbose --minShapes=x:1x3x224x224 \
--optShapes=x:8x3x224x224 --maxShapes=x:32x3x224x224
    """
    line = ["trtexec", f"--onnx={path}", f"--saveEngine={path.with_suffix('.plan')}", "--sparsity=enable", "--verbose"]
    if any(None in shape for shape in shapes.values()):
        for option, batch in (("min", 1), ("opt", 8), ("max", 32)):
            sizes = ",".join(f"{name}:{_sizes(shape, batch)}" for name, shape in shapes.items())
            line.append(f"--{option}Shapes={sizes}")
    newest = shlex.join(line)
    return {"10": f"{newest} --stronglyTyped", "11": newest}


def _sizes(shape: tuple[int | None, ...], batch: int) -> str:
    free = [SIZE if i else batch for i in range(len(shape))]
    return "x".join(str(default if size is None else size) for size, default in zip(shape, free, strict=True))
