"""Datasets by name: image folders, WebDataset tars, built-in digits and letters."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from halve.errors import DataError, OptionError, listed
from halve.sources.images import Pictures, different_sizes, find_pictures, find_tars
from halve.sources.preprocessing import Preprocessing
from halve.sources.shards import Shards

Loader = Literal["pillow", "dali"]
Decode = Callable[[Iterable[Any]], Iterable[Any]]  # batches of encoded images to batches of tensors


@dataclass(frozen=True)
class Data:
    """Batches that can be iterated over repeatedly; `classes[i]` is the model's output for label i, if known.

    `images` is how many there are, None if they are streamed.
    """

    loader: "Batches"
    images: int | None
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
    stream: bool = False,
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
        stream: Read tars from start to end instead of listing their images first, for data of any size: memory does not
            grow with the number of images, which stays unknown. Shuffles the order of the tars, and the images in a
            buffer of 1,000 per process; with `limit`, reads as few tars as that takes. Tars are shared out among the
            `workers`, and the order depends on their number. Labels are .cls files or the "label" in .json files next
            to the images; folders in tars are no classes. Default: False.

    >>> import io, tarfile, tempfile
    >>> from PIL import Image
    >>> folder = tempfile.TemporaryDirectory()
    >>> for shard in range(2):
    ...     with tarfile.open(f"{folder.name}/{shard:06}.tar", "w") as tar:
    ...         for name in (f"{shard}0.png", f"{shard}0.cls", f"{shard}1.png", f"{shard}1.cls"):
    ...             file = io.BytesIO(b"7")
    ...             if name.endswith(".png"):
    ...                 Image.new("RGB", (8, 8)).save(file, "PNG")
    ...             member = tarfile.TarInfo(name)
    ...             member.size = len(file.getvalue())
    ...             tar.addfile(member, io.BytesIO(file.getvalue()))
    >>> data = load_data(f"{folder.name}/{{000000..000001}}.tar", batch_size=3, stream=True)
    >>> [(list(images.shape), labels.tolist()) for images, labels in data.loader]
    [([3, 3, 8, 8], [7, 7, 7]), ([1, 3, 8, 8], [7])]
    >>> folder.cleanup()
    """
    if loader not in get_args(Loader):
        raise OptionError(f"loader must be one of {listed(get_args(Loader))}, got {loader!r}")
    if batch_size < 1 or (limit is not None and limit < 1) or workers < 0:
        raise OptionError(
            f"batch size and limit must be at least 1 and workers at least 0; got {batch_size}, {limit} and {workers}"
        )
    if not where:
        raise DataError("no images given: name a folder, a .tar, 'digits' or 'letters'")
    generator = torch.Generator().manual_seed(seed)
    if stream:
        paths = _tars(where, loader, classes_file)
        streamed = Shards(paths, preprocess or Preprocessing(), shuffle=shuffle, seed=seed, limit=limit)
        workers = min(workers, len(paths))
        return Data(Batches(_loader(_GuardedStream(streamed), batch_size, generator, workers, lists)), None)
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
    total = len(dataset)
    if limit is not None and limit < total:
        dataset = Subset(dataset, torch.randperm(total, generator=generator)[:limit].sort().values.tolist())
        total = limit
    batches = _loader(_Guarded(dataset), batch_size, generator, workers, bool(lists or decode), shuffle=shuffle)
    classes = None if classes_file is None else _classes(names, Path(classes_file), where)
    return Data(Batches(batches, classes if relabel and not lists else None, decode), total, names, classes)


def _tars(where: str, loader: Loader, classes_file: str | Path | None) -> list[Path]:
    """The tars to stream; raises if they cannot be streamed."""
    if loader == "dali":
        raise OptionError("--loader dali cannot be combined with --stream: use --loader pillow")
    if classes_file is not None:
        raise OptionError("--classes cannot be combined with --stream: its labels are numbers, not class folders")
    built_in = where.partition(":")[0] in ("digits", "letters")
    if built_in or not (paths := find_tars(where)):
        raise DataError(f"--stream reads tars, such as 'train-{{000000..000099}}.tar'; {where} has none")
    return paths


def _loader(
    dataset: Dataset[Any], batch_size: int, generator: torch.Generator, workers: int, lists: bool, **options: Any
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size,
        generator=generator,
        num_workers=workers,
        collate_fn=_listed if lists else _collate,
        persistent_workers=workers > 0,
        **options,
    )


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


class _GuardedStream(IterableDataset[Any]):
    """An iterable dataset that returns its first error as an item, and ends."""

    def __init__(self, dataset: Iterable[Any]) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return _guarded(iter(self._dataset))


def _guarded(items: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from items
    except DataError as error:
        yield _Broken(str(error))


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
