"""Small images in folders and tars."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def noise(seed: int = 0, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> Image.Image:
    """An image of random pixels, determined by the seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(seed: int = 0, size: tuple[int, int] = (8, 8), mode: str = "RGB", kind: str = "PNG") -> bytes:
    """Such an image, encoded."""
    file = io.BytesIO()
    noise(seed, size, mode).save(file, kind)
    return file.getvalue()


def class_folders(root: Path, names: Sequence[str] = ("cat", "dog"), each: int = 3) -> Path:
    """A folder for each class with `each` images, all different."""
    for label, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for i in range(each):
            (root / name / f"{i}.png").write_bytes(encoded(label * each + i))
    return root


def tar_of(path: Path, members: Mapping[str, bytes]) -> Path:
    """Write an uncompressed tar with these members."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path
