"""Images that are held back from learning, so that the masks can be judged by images they were not learned from."""

import copy
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from halve.batches import as_batches
from halve.learn.batch_parts import images_in, part_of
from halve.progress import known_length

SHARE = 0.05
LEAST, MOST = 8, 512
MOST_OF_STREAM = 256  # kept in memory
TOO_FEW = 64  # with fewer images none is held back: learning needs them, and fewer than 8 say little
_WHOLE_DATASET = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler)

Kind = Literal["list", "dataset", "stream", "iterator"]


@dataclass(frozen=True)
class Split:
    """Data, split into what is learned from and what is held back.

    Args:
        kind: "list" for a tensor or a list of batches, "dataset" for a map-style DataLoader, "stream" for anything else
            that can be iterated over again, "iterator" for what cannot.
        data: What to learn from.
        held_back: Batches of the images that are held back; read when they are needed.
        images: How many these are.
        source: Where they are from, for the recipe.
        reason: Why there are none.
        sample: Returns a few images, the same ones whenever the data is the same; None if there are no such images.
    """

    kind: Kind
    data: Any
    held_back: Iterable[Any] = ()
    images: int = 0
    source: str = ""
    reason: str = ""
    sample: Callable[[], Any] = lambda: None


@runtime_checkable
class WrappedLoader(Protocol):
    """Batches of a DataLoader that are processed further, such as those of the command line."""

    @property
    def loader(self) -> DataLoader[Any]:
        """The DataLoader."""

    def around(self, loader: DataLoader[Any]) -> Iterable[Any]:
        """The same processing for the batches of another DataLoader."""


def count(images: int) -> int:
    """How many of so many images are held back: 5 %, at least 8 and at most 512; none of fewer than 64.

    >>> [count(images) for images in (63, 64, 1000, 1_000_000)]
    [0, 8, 50, 512]
    """
    return 0 if images < TOO_FEW else min(max(round(SHARE * images), LEAST), MOST)


def hold_back(data: Any, seed: int = 0) -> Split:
    """Split data: of a tensor or a list the last images are held back, of a map-style DataLoader random ones by dataset
    index, of a stream the first ones, which may recur in later passes if it is shuffled.

    >>> split = hold_back(torch.zeros(1000, 3, 8, 8))
    >>> split.images, sum(map(len, split.data))
    (50, 950)
    """
    if isinstance(data, Tensor | list | tuple):
        return _split_list(data)
    indices = _indices(data)
    return _split_dataset(data, indices, seed) if indices is not None else _split_stream(data)


def hold_back_none(data: Any, seed: int = 0, reason: str = "validation=False") -> Split:
    """The data with nothing held back."""
    if isinstance(data, Tensor | list | tuple):
        batches = tuple(as_batches(data))
        return Split("list", batches, reason=reason, sample=lambda: _ends(batches))
    loader = _map_style_loader(data)
    if loader is not None:
        return Split("dataset", data, reason=reason, sample=lambda: _sample(data, seed))
    return Split("iterator" if isinstance(data, Iterator) else "stream", data, reason=reason)


def chosen_from(data: Any, seed: int = 0) -> Iterable[Any]:
    """Batches of images that a user gave to validate on: at most 512, chosen at random where that is possible."""
    if isinstance(data, Tensor):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        return as_batches(data[order[:MOST]])
    if isinstance(data, list | tuple):
        batches = list(as_batches(data))
        return random.Random(seed).sample(batches, len(batches))
    indices = _indices(data)
    return as_batches(data) if indices is None else _only(data, _picked(indices, MOST, seed))


def _too_few(images: int) -> str:
    return f"{images} images are too few to hold any back, at least {TOO_FEW} are needed"


def _split_list(data: Any) -> Split:
    batches = tuple(as_batches(data))
    sizes = [images_in(batch) for batch in batches]
    wanted = count(sum(sizes))
    if not wanted:
        return hold_back_none(batches, reason=_too_few(sum(sizes)))
    at, before = len(batches), sum(sizes)
    learned = before - wanted
    while before > learned:  # the batch in which the held-back images begin
        at -= 1
        before -= sizes[at]
    cut, size = learned - before, sizes[at]
    rest = (*batches[:at], *([part_of(batches[at], 0, cut)] if cut else []))
    held = (part_of(batches[at], cut, size), *batches[at + 1 :])
    return Split("list", rest, held, wanted, "the last images of the data", sample=lambda: _ends(batches))


def _ends(batches: Sequence[Any]) -> Any:
    return [batches[0], batches[-1]] if batches else None


def _split_stream(data: Any) -> Split:
    kind: Kind = "iterator" if isinstance(data, Iterator) else "stream"
    batches, taken, images = iter(as_batches(data)), list[Any](), 0
    head = next(batches, None)
    if head is None:
        return Split(kind, data, reason=_too_few(0))
    known = known_length(data)
    wanted = MOST_OF_STREAM if known is None else min(count(known * images_in(head)), MOST_OF_STREAM)
    for batch in itertools.chain([head], batches):
        taken.append(batch)
        images += images_in(batch)
        if images > wanted:  # not all of it, so that something is left
            break
    else:
        wanted = min(count(images), MOST_OF_STREAM)
    held = list(first(taken, wanted))
    whole = len(held) - (sum(map(images_in, taken[: len(held)])) > wanted)  # batches of which nothing is left
    opened = itertools.chain(taken, batches)
    rest = _skipped(opened, wanted) if kind == "iterator" else _Later(data, opened, wanted, whole)
    if not wanted:
        return Split(kind, rest, reason=_too_few(images))
    return Split(kind, rest, held, wanted, "the first images of the stream, which may recur")


def first(batches: Iterable[Any], images: int) -> Iterator[Any]:
    """The first so many images, in the batches that they come in."""
    if images <= 0:
        return
    for batch in batches:
        size = min(images_in(batch), images)
        yield part_of(batch, 0, size)
        images -= size
        if not images:
            return


def _skipped(batches: Iterator[Any], images: int) -> Iterator[Any]:
    """What follows the first images; the rest of the batch in which they end comes last, so that it starts with a full
    batch."""
    rest = []
    while images > 0:
        batch = next(batches, None)
        if batch is None:
            return
        size = images_in(batch)
        if size > images:
            rest = [part_of(batch, images, size)]
        images -= size
    yield from batches
    yield from rest


class _Later:
    """A stream without its first images, in every pass. The first pass goes on where it was opened: it may be the only
    one in which these batches come."""

    def __init__(self, data: Any, opened: Iterator[Any], images: int, batches: int) -> None:
        self._data, self._images, self._batches = data, images, batches
        self._opened: Iterator[Any] | None = opened

    def __iter__(self) -> Iterator[Any]:
        opened, self._opened = self._opened, None
        return _skipped(iter(as_batches(self._data)) if opened is None else opened, self._images)

    def __len__(self) -> int:
        return len(self._data) - self._batches  # a TypeError is what a stream without length raises


def _map_style_loader(data: Any) -> DataLoader[Any] | None:
    """The DataLoader whose dataset is read by indices; None for anything else."""
    loader = data.loader if isinstance(data, WrappedLoader) else data
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    # A subclass with its own __iter__ may use indices that were sampled before. Without a sampler of batches, an index
    # may stand for any number of images.
    known = type(loader).__iter__ is DataLoader.__iter__ and loader.batch_sampler is not None
    return loader if known and not isinstance(loader.batch_sampler, Iterator) else None


def _reads_whole_dataset(loader: DataLoader[Any]) -> bool:
    return type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in _WHOLE_DATASET


def _indices(data: Any) -> Sequence[Any] | None:
    """The dataset indices that a map-style DataLoader reads; None for anything else."""
    loader = _map_style_loader(data)
    if loader is None:
        return None
    assert loader.batch_sampler is not None
    try:
        size = len(loader.dataset)  # type: ignore[arg-type]
        if _reads_whole_dataset(loader):
            return range(size)
        sampled = itertools.chain.from_iterable(loader.batch_sampler)  # one pass, unless it has no end
        return sorted(set(itertools.islice(sampled, size)), key=repr)
    except TypeError:  # no length, or indices that cannot be collected
        return None


def _split_dataset(data: Any, indices: Sequence[Any], seed: int) -> Split:
    loader = _map_style_loader(data)
    assert loader is not None
    held = _picked(indices, count(len(indices)), seed)
    if not held:
        return hold_back_none(data, seed, _too_few(len(indices)))
    if loader.drop_last and len(indices) - len(held) < (loader.batch_size or 1):
        return hold_back_none(data, seed, "the images that remain would not fill a batch, and drop_last=True")
    parts: dict[str, Any]
    if type(loader.batch_sampler) is BatchSampler:
        sampler = _Without(loader.sampler, held, len(indices))
        batches = BatchSampler(sampler, loader.batch_sampler.batch_size, loader.drop_last)
        parts = {"sampler": sampler, "batch_sampler": batches}
    else:
        parts = {"batch_sampler": _BatchesWithout(loader.batch_sampler, held)}
    rest, source = _with(data, **parts), f"random images of the dataset, by seed {seed}"
    return Split("dataset", rest, _only(data, held), len(held), source, sample=lambda: _sample(data, seed))


def _picked(indices: Sequence[Any], number: int, seed: int) -> list[Any]:
    """Indices in random order, so that the first ones are a random choice as well."""
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed))
    return [indices[i] for i in order[:number].tolist()]


def _sample(data: Any, seed: int) -> Any:
    loader = _map_style_loader(data)
    assert loader is not None
    if not _reads_whole_dataset(loader):
        return None  # finding out its indices may change the order of what comes
    picked = _picked(range(len(loader.dataset)), LEAST, seed)  # type: ignore[arg-type]
    return next(iter(_only(data, picked, num_workers=0, prefetch_factor=None, timeout=0)), None)


def _only(data: Any, indices: Sequence[Any], **parts: Any) -> Iterable[Any]:
    """Batches of these images, in this order, read as the loader reads but without its random numbers."""
    loader = _map_style_loader(data)
    assert loader is not None
    batches = BatchSampler(indices, loader.batch_size or 64, False)
    generator = torch.Generator().manual_seed(0)
    parts |= {"sampler": indices, "batch_sampler": batches, "generator": generator, "persistent_workers": False}
    return _with(data, **parts)


def _with(data: Any, **parts: Any) -> Iterable[Any]:
    """The data with parts of its DataLoader replaced; a DataLoader refuses to change, but not to be copied."""
    loader = copy.copy(_map_style_loader(data))
    assert loader is not None
    vars(loader).update(parts, _iterator=None)
    return data.around(loader) if isinstance(data, WrappedLoader) else loader


class _Without:
    """A sampler without some indices."""

    def __init__(self, sampler: Iterable[Any], held: Collection[Any], size: int) -> None:
        self._sampler, self._held, self._size = sampler, frozenset(held), size

    def __iter__(self) -> Iterator[Any]:
        return (index for index in self._sampler if index not in self._held)

    def __len__(self) -> int:
        sampled = len(self._sampler)  # type: ignore[arg-type]  # a TypeError is what a sampler without length raises
        return sampled - round(sampled * len(self._held) / self._size)


class _BatchesWithout:
    """A sampler of batches, without some indices."""

    def __init__(self, sampler: Any, held: Collection[Any]) -> None:
        self._sampler, self._held = sampler, frozenset(held)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._sampler:
            if rest := [index for index in batch if index not in self._held]:
                yield rest

    def __len__(self) -> int:
        return len(self._sampler)
