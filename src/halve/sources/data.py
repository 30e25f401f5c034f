"""Datasets by name: image folders, WebDataset tars, built-in digits and letters; and how images become tensors."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from halve.errors import DataError, OptionError, listed
from halve.sources.images import Pictures, find_pictures

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Turn an image into a normalised tensor, optionally resized and centre-cropped.

    Args:
        size: Crop the centre square of this many pixels (default: no crop).
        resize: First resize the shorter side to this many pixels (default: `size`).
        mean: Mean of each channel, after scaling to 0..1. Default: ImageNet's.
        std: Standard deviation of each channel. Default: ImageNet's.
    """

    size: int | None = None
    resize: int | None = None
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.resize is not None and self.size is None:
            raise OptionError("--resize needs --size, the square that is cropped from the resized image")
        if any(value is not None and value < 1 for value in (self.size, self.resize)):
            raise OptionError(f"--size and --resize must be at least 1 pixel, got {self.size} and {self.resize}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise OptionError(
                f"mean and std must be three numbers each, and std positive; got {self.mean} and {self.std}"
            )

    def __call__(self, image: Image.Image) -> Tensor:
        from torchvision.transforms import functional as TF

        if self.size is not None:
            image = TF.center_crop(TF.resize(image, self.resize or self.size), [self.size, self.size])
        tensor: Tensor = TF.normalize(TF.to_tensor(image), self.mean, self.std)
        return tensor


@dataclass(frozen=True)
class Data:
    """Batches that can be iterated over repeatedly; `classes[i]` is the model's output for label i, if known."""

    loader: "Batches"
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
    relabel: bool = False,
    lists: bool = False,
) -> Data:
    """Load images from a folder, from tars, or the built-in digits and letters.

    Args:
        where: A folder, a .tar, "shard-{000..003}.tar", "digits" or "letters", also with ":train" or ":test" (default).
        preprocess: Turns an image into a tensor. Default: `Preprocessing()`.
        batch_size: Images per batch. Default: 64.
        limit: Use only this many images, sampled at random (default: all).
        shuffle: Whether to shuffle the images. Default: False.
        seed: Seed of sampling and shuffling. Default: 0.
        workers: Processes that decode images. Default: 0.
        classes_file: A text file that names the class folder of each of the model's outputs, one per line.
        relabel: Use these outputs as labels. Default: False.
        lists: Batches are lists of images of any sizes, without labels, as detectors take them. Default: False.
    """
    if batch_size < 1 or (limit is not None and limit < 1) or workers < 0:
        raise OptionError(
            f"batch size and limit must be at least 1 and workers at least 0; got {batch_size}, {limit} and {workers}"
        )
    if not where:
        raise DataError("no images given: name a folder, a .tar, 'digits' or 'letters'")
    dataset: Dataset[Any]
    if where == "digits" or where.startswith("digits:"):
        from halve.sources.digits import digits

        dataset, names = digits(where.partition(":")[2] or "test"), tuple("0123456789")
    elif where == "letters" or where.startswith("letters:"):
        from halve.sources.letters import NAMES, letters

        dataset, names = letters(where.partition(":")[2] or "test"), NAMES
    else:
        pictures, found = find_pictures(where)
        dataset, names = Pictures(pictures, found, preprocess or Preprocessing()), tuple(found)
    generator = torch.Generator().manual_seed(seed)
    total = len(dataset)
    if limit is not None and limit < total:
        dataset = Subset(dataset, torch.randperm(total, generator=generator)[:limit].sort().values.tolist())
        total = limit
    loader = DataLoader(
        _Guarded(dataset),
        batch_size,
        shuffle=shuffle,
        generator=generator,
        num_workers=workers,
        collate_fn=_listed if lists else _collate,
        persistent_workers=workers > 0,
    )
    classes = None if classes_file is None else _classes(names, Path(classes_file), where)
    return Data(Batches(loader, classes if relabel and not lists else None), total, names, classes)


@dataclass(frozen=True)
class _Broken:
    """Why an item cannot be used. Not an exception: one from a worker process arrives as a traceback."""

    reason: str


class _Guarded(Dataset[Any]):
    """A dataset that returns its errors as items."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except DataError as error:
            return _Broken(str(error))


class Batches:
    """A DataLoader that raises a plain `DataError` for a broken image, not a traceback from a worker process."""

    def __init__(self, loader: DataLoader[Any], outputs: Sequence[int] | None = None) -> None:
        self.loader, self._given = loader, outputs
        self._outputs = None if outputs is None else torch.tensor(outputs)

    def around(self, loader: DataLoader[Any]) -> "Batches":
        """The same for another DataLoader; `halve.learn` reads other images of the dataset by it."""
        return Batches(loader, self._given)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if isinstance(batch, _Broken):
                raise DataError(batch.reason)
            yield batch if self._outputs is None else (batch[0], self._outputs[batch[1]])


def _collate(items: Sequence[Any]) -> Any:
    broken = next((item for item in items if isinstance(item, _Broken)), None)
    if broken is not None:
        return broken
    shapes = {tuple((item[0] if isinstance(item, tuple) else item).shape) for item in items}
    if len(shapes) > 1:
        return _Broken(
            f"a batch has images of different sizes: {listed(sorted(shapes), 4)}; --size N crops all to one size"
        )
    return default_collate(list(items))


def _listed(items: Sequence[Any]) -> Any:
    broken = next((item for item in items if isinstance(item, _Broken)), None)
    return broken or [item[0] if isinstance(item, tuple) else item for item in items]


def _classes(names: Sequence[str], file: Path, where: str) -> tuple[int, ...]:
    try:
        lines = file.read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the class list {file}: {error}") from error
    if not names:
        raise DataError(f"{where} has no class folders that the class list {file} could refer to")
    index = {line.strip(): i for i, line in enumerate(lines)}
    if len(index) != len(lines):
        twice = [line for line, count in Counter(line.strip() for line in lines).items() if count > 1]
        raise DataError(f"the class list {file} has duplicate lines: {listed(repr(line) for line in twice)}")
    if unknown := [name for name in names if name not in index]:
        raise DataError(f"{where} has classes that {file} does not list: {listed(unknown)}")
    return tuple(index[name] for name in names)
