"""Datasets by name: image folders, WebDataset tars, built-in digits and letters."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from halve.errors import DataError, OptionError, listed
from halve.sources.images import Pictures, different_sizes, find_pictures
from halve.sources.preprocessing import Preprocessing

Loader = Literal["pillow", "dali"]
Decode = Callable[[Iterable[Any]], Iterable[Any]]  # batches of encoded images to batches of tensors


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
    loader: Loader = "pillow",
    device: torch.device | str = "cpu",
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
        loader: What decodes the images of folders and tars: "pillow", or "dali" for NVIDIA DALI (`halve[dali]`), with
            as many threads as `workers`. Default: "pillow".
        device: Where DALI decodes JPEG and leaves the batches. Default: "cpu".
    """
    if loader not in get_args(Loader):
        raise OptionError(f"loader must be one of {listed(get_args(Loader))}, got {loader!r}")
    if batch_size < 1 or (limit is not None and limit < 1) or workers < 0:
        raise OptionError(
            f"batch size and limit must be at least 1 and workers at least 0; got {batch_size}, {limit} and {workers}"
        )
    if not where:
        raise DataError("no images given: name a folder, a .tar, 'digits' or 'letters'")
    dataset: Dataset[Any]
    decode: Decode | None = None
    if loader == "dali" and where.partition(":")[0] in ("digits", "letters"):
        raise OptionError(f"--loader dali reads image folders and tars; {where} has no files to decode")
    if where == "digits" or where.startswith("digits:"):
        from halve.sources.digits import digits

        dataset, names = digits(where.partition(":")[2] or "test"), tuple("0123456789")
    elif where == "letters" or where.startswith("letters:"):
        from halve.sources.letters import NAMES, letters

        dataset, names = letters(where.partition(":")[2] or "test"), NAMES
    else:
        pictures, found = find_pictures(where)
        names = tuple(found)
        if loader == "dali":
            from halve.sources.dali import Decoder, EncodedPictures, steps_of

            steps = steps_of(preprocess or Preprocessing())
            dataset = EncodedPictures(pictures, steps)
            decode = Decoder(steps, batch_size, workers, torch.device(device), lists)
        else:
            dataset = Pictures(pictures, found, preprocess or Preprocessing())
    generator = torch.Generator().manual_seed(seed)
    total = len(dataset)
    if limit is not None and limit < total:
        dataset = Subset(dataset, torch.randperm(total, generator=generator)[:limit].sort().values.tolist())
        total = limit
    batches = DataLoader(
        _Guarded(dataset),
        batch_size,
        shuffle=shuffle,
        generator=generator,
        num_workers=workers,
        collate_fn=_listed if lists or decode else _collate,
        persistent_workers=workers > 0,
    )
    classes = None if classes_file is None else _classes(names, Path(classes_file), where)
    return Data(Batches(batches, classes if relabel and not lists else None, decode), total, names, classes)


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
    """A DataLoader that raises a plain `DataError` for a broken image, not a traceback from a worker process.

    With `decode`, the DataLoader reads encoded images, and its batches are decoded here.
    """

    def __init__(
        self, loader: DataLoader[Any], outputs: Sequence[int] | None = None, decode: Decode | None = None
    ) -> None:
        self.loader, self._given, self._decode = loader, outputs, decode
        self._outputs = None if outputs is None else torch.tensor(outputs)

    def around(self, loader: DataLoader[Any]) -> "Batches":
        """The same for another DataLoader; `halve.learn` reads other images of the dataset by it."""
        return Batches(loader, self._given, self._decode)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        read = self._read()
        for batch in read if self._decode is None else self._decode(read):
            yield batch if self._outputs is None else (batch[0], self._outputs[batch[1]])

    def _read(self) -> Iterator[Any]:
        for batch in self.loader:
            if isinstance(batch, _Broken):
                raise DataError(batch.reason)
            yield batch


def _collate(items: Sequence[Any]) -> Any:
    broken = next((item for item in items if isinstance(item, _Broken)), None)
    if broken is not None:
        return broken
    shapes = {tuple((item[0] if isinstance(item, tuple) else item).shape) for item in items}
    if len(shapes) > 1:
        return _Broken(different_sizes(shapes))
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
