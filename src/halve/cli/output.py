"""The files that a command writes, and what may not happen to others on the way.

A command opens its outputs before it does any work, in one line each, so that a mistake shows at once:

    output = Output.open(context, out, MASKS, reads(MODEL=model, weights=weights), force)
    ...
    output.write(lambda path: masks.save(path, force=force))
"""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from halve.certify.certificate import is_certificate
from halve.engine.saved import file as compiled
from halve.errors import DataError, FileError
from halve.export import file as onnx_file
from halve.learn import reporting, run_state
from halve.masks import file, packed, storage
from halve.progress import is_first_rank
from halve.report.page import is_report
from halve.select.speed_plan import is_plan
from halve.sources.images import ENDINGS, expand
from halve.sources.weights import made_by

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MADE_BY_DEMO = "made by 'halve demo'"  # in the first line of text files
MADE_BY_FRONTIER = "made by 'halve frontier'"
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
class Kind:
    """A kind of result, and how to tell whether a file is one. A stream may also go to a pipe or a terminal."""

    name: str
    is_kind: Callable[[Path], bool]
    stream: bool = False

    @classmethod
    def of(cls, format_: storage.Format) -> "Kind":
        return cls(format_.kind, lambda path: storage.format_of(path) == format_.name)


def _checkpoint(*commands: str) -> Kind:
    return Kind(f"checkpoint by '{' or '.join(commands)}'", lambda path: made_by(path) in commands)


def _is_results(path: Path) -> bool:
    found = json.loads(path.read_bytes())
    return isinstance(found, dict) and {"measurements", "layers"} <= found.keys()


def _text(name: str, made_by: str) -> Kind:
    """A text file that says in its first line what made it."""

    def is_kind(path: Path) -> bool:
        with path.open("rb") as text:
            return made_by.encode() in text.readline(1 << 10)

    return Kind(name, is_kind)


MASKS, PACKED, RUN_STATE, COMPILED = map(Kind.of, (file.FORMAT, packed.FORMAT, run_state.FORMAT, compiled.FORMAT))
SPARSE_CHECKPOINT = _checkpoint("halve apply", "halve unpack")
DEMO_CHECKPOINT = _checkpoint("halve demo")
DEMO_MODEL = _text("model file of 'halve demo'", MADE_BY_DEMO)
DEMO_PICTURE = _text("picture of 'halve demo'", MADE_BY_DEMO)
FRONTIER_PICTURE = _text("plot of 'halve frontier'", MADE_BY_FRONTIER)
ONNX = Kind("file by 'halve export'", onnx_file.is_exported)
CERTIFICATE = Kind("certificate by 'halve certify'", is_certificate)
REPORT = Kind("page of 'halve report'", is_report)
RESULTS = Kind("result of 'halve bench'", _is_results)
PLAN = Kind("plan of 'halve measure'", is_plan)
LOG = Kind("log of 'halve learn'", reporting.is_log, stream=True)


@dataclass(frozen=True)
class Output:
    """A file to write, of a kind. `option` names it on the command line."""

    path: Path
    kind: Kind
    force: bool | None
    option: str

    @classmethod
    def open(
        cls,
        context: typer.Context,
        path: Path,
        kind: Kind,
        inputs: Inputs,
        force: bool | None,
        *,
        option: str = "--out",
    ) -> "Output":
        """Check that a file can be written, and that nothing is lost by it but an older result of the same kind.

        It is locked until the command ends: of two commands that write the same file, the second is refused here.

        Args:
            context: The command that writes the file.
            path: The file. A symbolic link is followed.
            kind: What will be written.
            inputs: What the command reads, and its other outputs; see `reads`. They are never overwritten.
            force: Whether to replace a file of another kind; None if the command cannot.
            option: The option that names the file, for messages. Default: "--out".
        """
        output = cls(path, kind, force, option)
        output._check_inputs(inputs)
        output._check_place()
        if is_first_rank() and not output._is_stream:
            context.call_on_close(output._lock())
            storage.remove_parts(path)
        output._check_old()
        return output

    def write(self, save: Callable[[Path], object]) -> Path:
        """Write the file with a function that takes its path and writes atomically."""
        self._check_old()  # again: it may have appeared since
        save(self.path)
        return self.path

    @property
    def _target(self) -> Path:
        return Path(os.path.realpath(self.path))

    def _lock(self) -> Callable[[], None]:
        """Lock the file by another one beside it, since the file itself is replaced; returns what releases the lock.

        The system releases the lock of a process that is killed.
        """
        path = self._target.with_name(f".{self._target.name}.lock")
        while fcntl is not None:
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise self._refused(f"{path} cannot be opened: {error.strerror}") from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise self._refused("another run of halve is writing it; wait for it to end") from None
            except OSError:  # a file system without locks
                os.close(lock)
                _remove(path)
                break
            if _is_open_as(path, lock):
                return lambda: _release(path, lock)
            os.close(lock)  # its owner removed the file in between
        return lambda: None

    def _check_place(self) -> None:
        if self._is_stream:
            return
        folder = self._target.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or self.path.is_dir():
            raise self._refused(f"{folder} is not a writable folder, or {self.path.name} is a folder")
        if self.path.exists() and not self.path.is_file():
            raise self._refused("it is not a regular file")

    def _check_old(self) -> None:
        if self.force or self._is_stream or not self.path.exists():
            return
        status = self.path.stat()
        if not status.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            raise self._refused("it is write-protected", forcible=True)
        if status.st_size and not self._is_older_result():
            raise self._refused(f"the file exists and is not a {self.kind.name}", forcible=True)

    def _is_older_result(self) -> bool:
        try:
            return self.kind.is_kind(self.path)
        except (OSError, ValueError, RecursionError):  # FileError among them
            return False

    @property
    def _is_stream(self) -> bool:
        return self.kind.stream and self.path.exists() and not self.path.is_file() and not self.path.is_dir()

    def _check_inputs(self, inputs: Inputs) -> None:
        for option, paths in inputs.items():
            if any(_same_file(self.path, path) for path in paths):
                raise self._refused(f"it is the same file as {option} {paths[0]}")

    def _refused(self, why: str, forcible: bool = False) -> FileError:
        forced = ", or replace it with --force" if forcible and self.force is not None else ""
        advice = f"choose another {self.option}{forced}"
        return FileError(f"cannot write {self.option} {self.path}: {why}; {advice}")


def _release(path: Path, lock: int) -> None:
    _remove(path)  # first, while nobody else can hold it
    os.close(lock)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _is_open_as(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


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
