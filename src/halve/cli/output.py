"""The files that a command writes, and what may not happen to others on the way.

A command opens its outputs before it does any work, in one line each, so that a mistake shows at once:

    output = Output.open(out, reads(MODEL=model, weights=weights))
    ...
    output.write(masks.save)
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from halve.errors import DataError, FileError
from halve.sources.images import ENDINGS, expand

Inputs = Mapping[str, list[Path]]  # files and folders, by the option that names them


def reads(**given: str | Path | None) -> dict[str, list[Path]]:
    """Return the files that options of a command name; arguments are written in capitals.

    >>> reads(MODEL="zoo.py:net", weights=Path("net.pth"), masks=None)
    {'MODEL': [PosixPath('zoo.py:net'), PosixPath('zoo.py')], '--weights': [PosixPath('net.pth')]}
    """
    return {
        name if name.isupper() else f"--{name.replace('_', '-')}": _named(str(value))
        for name, value in given.items()
        if value is not None
    }


def _named(text: str) -> list[Path]:
    """The files that a text may mean: a path, `file.py:callable`, a glob or `shard-{000..003}.tar`."""
    module = text.rpartition(":")[0]
    shards: list[Path] = []
    with contextlib.suppress(DataError, OSError, ValueError):  # the command reports what cannot be read
        shards = [path for path in expand(text) if str(path) != text]
    return [Path(text), *([Path(module)] if module.endswith(".py") else []), *shards]


@dataclass(frozen=True)
class Output:
    """A file to write. `option` names it on the command line."""

    path: Path
    option: str

    @classmethod
    def open(cls, path: Path, inputs: Inputs, *, option: str = "--out") -> "Output":
        """Check that a file can be written, and that it is none of those that the command reads.

        Args:
            path: The file. A symbolic link is followed.
            inputs: What the command reads, and its other outputs; see `reads`. They are never overwritten.
            option: The option that names the file, for messages. Default: "--out".
        """
        output = cls(path, option)
        output._check_place()
        output._check_inputs(inputs)
        return output

    def write(self, save: Callable[[Path], object]) -> Path:
        """Write the file with a function that takes its path and writes atomically."""
        save(self.path)
        return self.path

    @property
    def _target(self) -> Path:
        return Path(os.path.realpath(self.path))

    def _check_place(self) -> None:
        folder = self._target.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or self.path.is_dir():
            raise self._refused(f"{folder} is not a writable folder, or {self.path.name} is a folder")

    def _check_inputs(self, inputs: Inputs) -> None:
        for option, paths in inputs.items():
            if any(_same_file(self.path, path) for path in paths):
                raise self._refused(f"it is the same file as {option} {paths[0]}")

    def _refused(self, why: str) -> FileError:
        return FileError(f"cannot write {self.option} {self.path}: {why}; choose another {self.option}")


def _same_file(output: Path, path: Path) -> bool:
    """Whether writing the output would replace the file, or an image in it if it is a folder."""
    if os.path.realpath(output) == os.path.realpath(path):
        return True
    if path.is_dir():
        inside = Path(os.path.realpath(output)).is_relative_to(os.path.realpath(path))
        return inside and output.is_file() and output.suffix.lower() in (*ENDINGS, ".tar")
    try:
        return os.path.samefile(output, path)
    except (OSError, ValueError):  # one of them does not exist
        return False
