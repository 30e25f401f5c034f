"""Batches by name: an image folder, WebDataset tars, or the built-in digits; and how pictures become tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torchvision.transforms import functional as TF

from halve.errors import DataError, listed
from halve.sources.images import Pictures, find_pictures

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Picture -> tensor: shorter side to `resize` and the middle `size` square (if given), 0..1, normalised."""

    size: int | None = None
    resize: int | None = None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __call__(self, image: Image.Image) -> Tensor:
        if self.size is not None:
            image = TF.center_crop(TF.resize(image, self.resize or self.size), [self.size, self.size])
        tensor: Tensor = TF.normalize(TF.to_tensor(image), self.mean, self.std)
        return tensor


@dataclass(frozen=True)
class Data:
    """Batches to iterate over, again and again; `classes[i]` is the classifier's output for label i, if known."""

    loader: DataLoader[Any]
    images: int
    class_names: tuple[str, ...] = ()
    classes: tuple[int, ...] | None = None


def load_data(
    where: str,
    preprocess: Callable[[Any], Any] | None = None,
    *,
    batch_size: int = 64,
    limit: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    workers: int = 0,
    classes_file: str | Path | None = None,
) -> Data:
    """Open the images at `where`: a folder, a .tar, `shard-{000..003}.tar`, `digits`, `digits:train`, `digits:test`.

    `limit` takes that many at random (by `seed`), so that sorted classes mix; `classes_file` has one line per output of
    the classifier, with the name of its class folder.
    """
    if batch_size < 1 or (limit is not None and limit < 1):
        raise DataError(f"batch size {batch_size} and limit {limit}: both must be at least 1")
    dataset: Dataset[Any]
    if where == "digits" or where.startswith("digits:"):
        from halve.sources.digits import digits

        dataset, names = digits(where.partition(":")[2] or "test"), tuple("0123456789")
    else:
        pictures, found = find_pictures(where)
        dataset, names = Pictures(pictures, found, preprocess or Preprocessing()), tuple(found)
    generator = torch.Generator().manual_seed(seed)
    total = len(dataset)
    if limit is not None and limit < total:
        dataset = Subset(dataset, torch.randperm(total, generator=generator)[:limit].sort().values.tolist())
        total = limit
    loader = DataLoader(
        dataset,
        batch_size,
        shuffle=shuffle,
        generator=generator,
        num_workers=workers,
        collate_fn=_collate,
        persistent_workers=workers > 0,
    )
    classes = None if classes_file is None else _classes(names, Path(classes_file), where)
    return Data(loader, total, names, classes)


def _collate(items: Sequence[Any]) -> Any:
    shapes = {tuple((item[0] if isinstance(item, tuple) else item).shape) for item in items}
    if len(shapes) > 1:
        raise DataError(
            f"images of different sizes in one batch: {listed(sorted(shapes), 4)}; --size N crops them alike"
        )
    return default_collate(list(items))


def _classes(names: Sequence[str], file: Path, where: str) -> tuple[int, ...]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the class list {file}: {error}") from error
    if not names:
        raise DataError(f"{where} has no class folders, so the class list {file} cannot be matched to it")
    index = {line.strip(): i for i, line in enumerate(lines)}
    if unknown := [name for name in names if name not in index]:
        raise DataError(f"{where} has classes that {file} does not list: {listed(unknown)}")
    return tuple(index[name] for name in names)
