"""An endless stream of batches that counts epochs and can skip what a resumed run has seen."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from halve.batches import as_batches, iterate
from halve.learn.batch_parts import images_in
from halve.progress import known_length


class BatchStream:
    """The batches of one process, pass after pass over the data.

    The data is not iterated over before the first batch is asked for: a DataLoader with persistent workers has a single
    iterator, and whoever reads the loader in between would reset it.

    >>> import torch
    >>> stream = BatchStream(torch.zeros(100, 3, 8, 8))
    >>> [len(stream.next()) for _ in range(3)], stream.epoch
    ([64, 36, 64], 1)
    """

    def __init__(self, data: Any, rank: int = 0, processes: int = 1) -> None:
        self._data, self._rank, self._processes = as_batches(data), rank, processes
        self._iterator: Iterator[Any] | None = None
        self.epoch = self.taken = 0
        self._gave = False  # whether this pass gave any batch

    @property
    def repeats(self) -> bool:
        """Whether the data can be iterated over again; an iterator cannot."""
        return not isinstance(self._data, Iterator)

    @property
    def length(self) -> int | None:
        """Batches per epoch and process; None if the data does not say."""
        batches = known_length(self._data)
        return None if batches is None else batches // self._processes

    def peek(self) -> Any:
        """The next batch, without taking it; the same on all processes. Raises `DataError` if there is none."""
        batches = self._opened()
        batch = next(iterate(batches))
        self._iterator = chain([batch], batches)
        return batch

    def peek_images(self, images: int) -> list[Any]:
        """The next batches, of all processes, without taking them: so many images, or the rest of this pass."""
        batches, found = self._opened(), list[Any]()
        while images > 0:
            batch = next(batches, None)
            if batch is None:
                break
            found.append(batch)
            images -= images_in(batch)
        self._iterator = chain(found, batches)
        return found

    def next(self) -> Any:
        """The next batch of this process. Raises `StopIteration` when the data is exhausted."""
        group = [self._next() for _ in range(self._processes)]  # the processes take turns
        self.taken += 1
        return group[self._rank]

    def skip(self, batches: int) -> None:
        """Pass over batches that were seen before."""
        for _ in range(batches):
            self.next()

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._data)
        return self._iterator

    def _next(self) -> Any:
        for batch in self._opened():
            self._gave = True
            return batch
        if not self.repeats or not self._gave:
            raise StopIteration
        self.epoch += 1
        self._iterator, self._gave = iter(self._data), False
        return self._next()
