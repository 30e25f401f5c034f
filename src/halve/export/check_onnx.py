"""Check an ONNX file for what TensorRT's sparse kernels can use."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from halve.errors import listed
from halve.export import file, trtexec
from halve.export.eligibility import COLUMNS, OnnxLayer, judged
from halve.export.weights import asymmetric_nodes, products_in
from halve.text import aligned, printable

Status = Literal["ok", "failed", "none"]


@dataclass(frozen=True)
class OnnxCheck:
    """The outcome of `check_onnx`. Prints as a table.

    Args:
        path: The file.
        layers: One entry per convolution and matrix product, in the order of the graph.
        masked: The layers that `export` masked, from the file's metadata; empty for files of other tools.
        commands: `trtexec` lines by the version of TensorRT.
        notes: What else is worth knowing about the file.
        metadata: What `export` wrote about the file, such as "halve.masks", the digest of the masks.
    """

    path: Path
    layers: tuple[OnnxLayer, ...]
    masked: tuple[str, ...] = ()
    commands: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def eligible(self) -> tuple[OnnxLayer, ...]:
        """Layers that TensorRT's sparse kernels can take. Whether they are faster, TensorRT decides."""
        return tuple(layer for layer in self.layers if layer.is_eligible)

    @property
    def likely(self) -> tuple[OnnxLayer, ...]:
        """Eligible layers of a size at which sparse kernels have been faster."""
        return tuple(layer for layer in self.layers if layer.verdict == "likely")

    @property
    def failures(self) -> dict[str, str]:
        """Layers that `export` masked and that are no longer eligible, with the reason."""
        names = {layer.name for layer in self.layers}
        lost = {layer.name: layer.reason for layer in reversed(self.layers) if not layer.is_eligible}
        reasons = lost | {name: "it is not in the graph" for name in self.masked if name not in names}
        return {name: reasons[name] for name in self.masked if name in reasons}

    @property
    def status(self) -> Status:
        """ "ok", "failed" if a masked layer is no longer 2:4, or "none" if no layer is eligible."""
        return "failed" if self.failures else "ok" if self.eligible else "none"

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        able, large = len(self.eligible), len(self.likely)
        text = f"{able} of {len(self.layers)} layers eligible for sparse kernels, {large} likely"
        picked = [layer for layer in self.layers if layer.picked]
        if any(layer.picked is not None for layer in self.layers):
            text += f"; TensorRT picked {len(picked)}"
        if self.status == "failed":
            text += f"; {len(self.failures)} masked layer(s) no longer 2:4: {listed(self.failures, 4)}"
        return text

    @property
    def columns(self) -> tuple[str, ...]:
        return (*COLUMNS[:-1], "picked", COLUMNS[-1]) if self._joined else COLUMNS

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of the table."""
        rows = [layer.cells() for layer in self.layers]
        if not self._joined:
            return rows
        return [
            (*cells[:-1], "yes" if layer.picked else "no", cells[-1])
            for layer, cells in zip(self.layers, rows, strict=True)
        ]

    @property
    def _joined(self) -> bool:
        return any(layer.picked is not None for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            "file": str(self.path),
            "status": self.status,
            "eligible": len(self.eligible),
            "likely": len(self.likely),
            "failures": self.failures,
            "layers": [vars(layer) | {"shape": list(layer.shape)} for layer in self.layers],
            "notes": list(self.notes),
            "trtexec": dict(self.commands),
            "metadata": dict(self.metadata),
        }

    def __str__(self) -> str:
        rows = [self.columns, *self.rows()]
        lines = aligned(rows)
        lines += [f"note: {note}" for note in self.notes]
        lines.append(f"{self.status}: {self.summary}")
        return printable("\n".join(lines))


def check_onnx(path: str | Path, *, trt_log: str | Path | None = None) -> OnnxCheck:
    """Check for every convolution and matrix product of an ONNX file whether TensorRT's sparse kernels can take it.

    The bytes of the file are judged, whichever tool wrote it: a layer is eligible if its weight is a constant, reached
    through nothing but Q/DQ, Cast and Transpose, has at most two nonzero values in every four input channels at each
    kernel position, and is neither grouped nor transposed. It is "likely" if it is large as well. Whether a sparse
    kernel is used is decided by TensorRT, which times both.

    Raises `FileError` for a file that is damaged, and for external data outside of its folder.

    Args:
        path: The file. External data is read from its folder only.
        trt_log: A log of `trtexec --sparsity=enable --verbose` for this file, to show what TensorRT picked.

    Returns:
        An object with `.ok`, `.status`, `.eligible`, `.likely`, `.failures` and `.layers`. It prints as a table.

    >>> import halve, tempfile, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 1)).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = halve.export(model, halve.prune(model), torch.randn(2, 8, 8, 8), f"{folder}/net.onnx")
    ...     print(halve.check_onnx(f"{folder}/net.onnx"))
    layer | operator | weight  | dtype   | TensorRT     | reason
    0     | Conv     | 8x8x3x3 | float32 | eligible     | small: 8 input channels and 8 output channels, fewer than 256
    2     | Conv     | 4x8x1x1 | float32 | not eligible | dense
    note: the weights are float32, which TensorRT 11 then computes in: export in float16 or int8
    ok: 1 of 2 layers eligible for sparse kernels, 0 likely
    """
    log = None if trt_log is None else trtexec.read_log(trt_log)
    return checked(file.read(path), log)


def checked(opened: file.OnnxFile, log: trtexec.TrtLog | None = None) -> OnnxCheck:
    """Check a file that is already read."""
    layers = tuple(judged(product) for product in products_in(opened))
    shapes = shapes_of(opened)
    notes = _notes(opened, layers)
    if any(None in shape[1:] for shape in shapes.values()):
        notes.append(f"image sizes are not fixed in the file: the trtexec lines have {trtexec.SIZE}, change that")
    if log is not None and log.picked is None:
        notes.append("the log does not say which layers TensorRT picked: the build may not have ended")
    if log is not None:
        layers = tuple(replace(layer, picked=log.picks(layer.name)) for layer in layers)
        if unknown := log.unknown(layer.name for layer in layers):
            notes.append(f"the log names {len(unknown)} layer(s) that the file does not have: {listed(unknown, 4)}")
    metadata = {key: value for key, value in opened.metadata.items() if key.startswith("halve.")}
    masked = tuple(_names(metadata.get("halve.layers", "")))
    commands = trtexec.commands(opened.path, shapes)
    return OnnxCheck(opened.path, layers, masked, commands, tuple(notes), metadata)


def shapes_of(opened: file.OnnxFile) -> dict[str, tuple[int | None, ...]]:
    """The shape of each input; None for a size that is not fixed."""
    constants = {tensor.name for tensor in opened.model.graph.initializer}
    inputs = [value for value in opened.model.graph.input if value.name not in constants]
    return {value.name: tuple(dim.dim_value or None for dim in value.type.tensor_type.shape.dim) for value in inputs}


def _notes(opened: file.OnnxFile, layers: tuple[OnnxLayer, ...]) -> list[str]:
    notes = []
    if not layers:
        notes.append("the graph has no convolution or matrix product")
    if any(layer.is_eligible and layer.dtype == "float32" for layer in layers):
        notes.append("the weights are float32, which TensorRT 11 then computes in: export in float16 or int8")
    if shifted := asymmetric_nodes(opened):
        notes.append(
            f"{len(shifted)} Q/DQ nodes have a zero point other than 0, such as {shifted[0]}: "
            f"TensorRT takes symmetric quantisation only"
        )
    if opened.model.functions:
        count = len(opened.model.functions)
        notes.append(f"layers inside of {count} local functions are not listed: inline them first")
    return notes


def _names(text: str) -> list[str]:
    """The names in a metadata entry, which anyone may have written."""
    try:
        found = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
