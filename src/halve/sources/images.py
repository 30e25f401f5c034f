"""Images from folders and WebDataset tars, as map-style datasets of (image, label)."""

import glob
import io
import itertools
import json
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from halve.errors import DataError, first_line, listed

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
LABEL_ENDINGS = (".cls", ".json")


@dataclass(frozen=True)
class Picture:
    """The location of one encoded image; `size` is None if it is the entire file."""

    path: Path
    label: int | None
    offset: int = 0
    size: int | None = None
    name: str = ""

    @property
    def where(self) -> str:
        """The file, and the name inside of a tar."""
        return f"{self.path}{':' + self.name if self.name else ''}"

    def read(self) -> bytes:
        # A picture may have become a pipe since it was listed: opening that would wait for a writer.
        with open(os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("not a regular file")
            file.seek(self.offset)
            return file.read() if self.size is None else file.read(self.size)


class Pictures(Dataset[Any]):
    """A dataset of pictures with labels, which index `class_names`; without labels if there are no class folders."""

    def __init__(
        self, pictures: Sequence[Picture], class_names: Sequence[str], transform: Callable[[Any], Any]
    ) -> None:
        self.pictures, self.class_names, self.transform = list(pictures), list(class_names), transform

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        picture = self.pictures[index]
        with reading(picture):
            content = picture.read()
        return prepared(picture, content, self.transform)


def prepared(picture: Picture, content: bytes, transform: Callable[[Any], Any]) -> Any:
    """Decode a picture and transform it; (result, label) if it has a label."""
    with reading(picture), Image.open(io.BytesIO(content)) as image:
        decoded = as_rgb(image)
    try:
        result = transform(decoded)
    except Exception as error:  # the model's or the user's preprocessing may raise anything
        what = f"preprocessing failed on {picture.where} ({decoded.width}x{decoded.height} pixels)"
        raise DataError(f"{what}: {first_line(error)}") from error
    return result if picture.label is None else (result, picture.label)


@contextmanager
def reading(picture: Picture) -> Iterator[None]:
    """Raise a `DataError` that names the picture if it cannot be read or decoded."""
    try:
        yield
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = "unknown format" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(f"{picture.where} is not a readable image: {why}") from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB; 16-bit and floating-point pixels are scaled by their range, not clipped.

    16-bit integers range over 0..65535. So do 32-bit ones ("I", Pillow's mode of some 16-bit files) unless a pixel is
    outside, and floats range over 0..1; then the image's own minimum and maximum are its range.
    """
    if not image.mode.startswith(("I", "F")):
        return image.convert("RGB")
    pixels = np.asarray(image).astype(np.float64)
    if not np.isfinite(pixels).all():
        raise ValueError("it has pixels that are NaN or infinite")
    low, high = 0.0, 1.0 if image.mode == "F" else 65535.0
    if pixels.size and (pixels.min() < low or pixels.max() > high):
        low, high = float(pixels.min()), float(pixels.max())
    scaled = (pixels - low) * (255 / max(high - low, 1e-300))
    return Image.fromarray(np.clip(np.rint(scaled), 0, 255).astype(np.uint8)).convert("RGB")


def different_sizes(shapes: Iterable[tuple[int, ...]]) -> str:
    """What is wrong with a batch of images of different sizes."""
    return f"a batch has images of different sizes: {listed(sorted(shapes), 4)}; --size N crops all to one size"


def is_hidden(name: str) -> bool:
    """Whether a file or folder belongs to the system: dotfiles (._x.jpg), and the __MACOSX folder of macOS archives."""
    return (name.startswith(".") and name not in (".", "..")) or name == "__MACOSX"


def find_pictures(where: str) -> tuple[list[Picture], list[str]]:
    """Pictures and class names of a folder (with or without class folders), a tar, or `shard-{000..003}.tar`."""
    paths = find_tars(where)
    return _in_tars(paths) if paths else _in_folder(Path(where))


def find_tars(where: str) -> list[Path]:
    """The tars that a folder, a path, a glob or `shard-{000..003}.tar` names; none if it is a folder without tars."""
    path = Path(where)
    if path.is_dir() and not (tars := sorted(path.glob("*.tar"))):
        return []
    paths = tars if path.is_dir() else [path] if path.is_file() else expand(where)
    if not paths:
        raise DataError(f"{where}: no such folder or tar file; 'digits' is the built-in dataset")
    if strange := [p for p in paths if p.suffix != ".tar" or (p.exists() and not p.is_file() and not p.is_dir())]:
        raise DataError(f"{listed(strange)}: images must be in folders or uncompressed .tar files")
    return paths


def _in_folder(folder: Path) -> tuple[list[Picture], list[str]]:
    files = sorted(path for path in _walk(folder) if path.suffix.lower() in ENDINGS)
    if not files:
        raise DataError(f"{folder} has no images ({', '.join(ENDINGS)})")
    if all(path.parent == folder for path in files):
        return [Picture(path, None) for path in files], []
    if stray := [path for path in files if path.parent == folder]:
        raise DataError(
            f"{folder} has class folders, but also images outside of them, such as {stray[0].name}: "
            f"move them into class folders"
        )
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not is_hidden(path.name))
    label = {name: i for i, name in enumerate(names)}
    return [Picture(path, label[path.relative_to(folder).parts[0]]) for path in files], names


def _walk(folder: Path) -> Iterator[Path]:
    """All regular files in a folder and its subfolders, following links, except hidden ones.

    Broken links are listed too, so that a missing picture is an error; reading a pipe or a device could block.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    seen = set()
    for root, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:  # a link to a parent folder
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = [name for name in folders if not is_hidden(name)]
        paths = (Path(root) / name for name in files if not is_hidden(name))
        yield from (path for path in paths if path.is_file() or not path.exists())


def _in_tars(paths: Sequence[Path]) -> tuple[list[Picture], list[str]]:
    found: list[tuple[Picture, str]] = []
    labels: dict[str, int] = {}
    for path in paths:
        last = ""
        try:
            with tarfile.open(path, "r:") as tar:
                for member in tar:
                    last = member.name
                    if not member.isfile() or any(map(is_hidden, member.name.split("/"))):
                        continue
                    key = f"{path}/{sample_key(member.name)}"
                    if member.name.lower().endswith(ENDINGS):
                        found.append((Picture(path, None, member.offset_data, member.size, member.name), key))
                    elif member.name.endswith(LABEL_ENDINGS):
                        content = tar.extractfile(member).read()  # type: ignore[union-attr]
                        label = label_in(f"{path}:{member.name}", content)
                        if label is not None and (member.name.endswith(".cls") or key not in labels):
                            labels[key] = label
                check_end(path, tar.offset, last)
        except (tarfile.TarError, ValueError, OSError) as error:
            raise DataError(f"{path} is not a readable WebDataset tar: {error}") from error
    if not found:
        raise DataError(f"{listed(paths)} has no images ({', '.join(ENDINGS)})")
    if labels:
        if unlabelled := [picture.name for picture, key in found if key not in labels]:
            raise DataError(f"{listed(paths)}: no .cls label for {listed(unlabelled, 3)}; label all images or none")
        return [_labelled(picture, labels[key]) for picture, key in found], []
    folders = [PurePosixPath(picture.name).parent.name for picture, _ in found]
    names = sorted(set(folders))
    if names == [""]:
        return [picture for picture, _ in found], []
    if "" in names:
        stray = found[folders.index("")][0].name
        raise DataError(
            f"{listed(paths)} has class folders, but also images outside of them, such as {stray}: "
            f"move them into class folders"
        )
    index = {name: i for i, name in enumerate(names)}
    return [_labelled(picture, index[folder]) for (picture, _), folder in zip(found, folders, strict=True)], names


def sample_key(name: str) -> str:
    """What a WebDataset sample's files have in common: their name up to the first dot.

    >>> sample_key("dogs/0001.left.jpg")
    'dogs/0001'
    """
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"


def label_in(where: str, content: bytes) -> int | None:
    """The label in a .cls file, or the integer "label" in a .json file; None if a .json file has none.

    >>> label_in("x.tar:1.cls", b"7"), label_in("x.tar:1.json", b'{"label": 7}'), label_in("x.tar:1.json", b"{}")
    (7, 7, None)
    """
    if where.endswith(".cls"):
        try:
            return int(content)
        except ValueError as error:
            raise DataError(f"{where} must hold an integer label, got {content[:40]!r}") from error
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # .json files may hold anything
        return None
    label = found.get("label") if isinstance(found, dict) else None
    return label if type(label) is int else None  # not a bool


def check_end(path: Path, offset: int, last: str) -> None:
    """Raise if a tar is truncated between two files, which tarfile does not notice: a complete tar ends with zeros."""
    with path.open("rb") as file:
        file.seek(offset)
        if file.read(512).strip(b"\0") or path.stat().st_size < offset + 512:
            raise DataError(f"{path} is truncated or damaged after {last}: copy it again")


def _labelled(picture: Picture, label: int) -> Picture:
    return Picture(picture.path, label, picture.offset, picture.size, picture.name)


def expand(where: str) -> list[Path]:
    """Expand shell globs and WebDataset's {000..003}."""
    parts = re.split(r"\{(\d+)\.\.(\d+)\}", where)
    choices: list[list[str]] = [[parts[0]]]
    for low, high, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        choices.append([str(i).zfill(len(low)) for i in range(int(low), int(high) + 1)])
        choices.append([text])
    names = ["".join(combination) for combination in itertools.product(*choices)]
    if len(names) > 1 and (
        missing := [name for name in names if not glob.has_magic(name) and not Path(name).is_file()]
    ):
        raise DataError(f"{where}: no such folder or tar file: {listed(missing)}")
    return [Path(match) for name in names for match in sorted(glob.glob(name))]
