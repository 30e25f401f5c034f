"""Batches without end from data that can be iterated over again; counts epochs, skips what a resumed run has seen."""

from collections.abc import Iterator, Sized
from itertools import chain
from typing import Any

from halve.batches import as_batches, iterate


class Feed:
    """`next()` gives the next batch of this rank; raises `StopIteration` when the data runs dry.

    >>> import torch
    >>> feed = Feed(torch.zeros(100, 3, 8, 8))
    >>> [len(feed.next()) for _ in range(3)], feed.epoch
    ([64, 36, 64], 1)
    """

    def __init__(self, data: Any, rank: int = 0, ranks: int = 1) -> None:
        self._data, self._rank, self._ranks = as_batches(data), rank, ranks
        self._batches: Iterator[Any] = iter(self._data)
        self.again = self._batches is not self._data  # whether a second pass gives batches again
        self.epoch = self.taken = 0
        self._gave = False  # whether this pass over the data gave anything

    @property
    def length(self) -> int | None:
        """Batches of this rank in an epoch, None where the data does not say."""
        if not isinstance(self._data, Sized):
            return None
        try:
            return len(self._data) // self._ranks
        except TypeError:  # a DataLoader over a stream has a __len__ that raises
            return None

    def peek(self) -> Any:
        """The batch that comes next, which still comes; the same on all ranks. Raises `DataError` where none does."""
        batch = next(iterate(self._batches))
        self._batches = chain([batch], self._batches)
        return batch

    def next(self) -> Any:
        """The next batch of this rank: every rank takes each `ranks`-th."""
        group = [self._one() for _ in range(self._ranks)]
        self.taken += 1
        return group[self._rank]

    def skip(self, batches: int) -> None:
        """Pass over batches that were seen before."""
        for _ in range(batches):
            self.next()

    def _one(self) -> Any:
        for batch in self._batches:
            self._gave = True
            return batch
        if not self.again or not self._gave:
            raise StopIteration
        self.epoch += 1
        self._batches, self._gave = iter(self._data), False
        return self._one()
