"""Images from WebDataset shards, read in one go from start to end: memory does not grow with the number of images."""

import itertools
import os
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from halve.errors import DataError
from halve.sources.images import (
    ENDINGS,
    LABEL_ENDINGS,
    Picture,
    check_end,
    is_hidden,
    label_in,
    prepared,
    sample_key,
)

# What is shuffled at a time in each process, still encoded: this many images, or fewer if they are large.
BUFFER_IMAGES, BUFFER_BYTES = 1000, 128 * 2**20
MOST_FILES = 100  # of a sample, which is held in memory until it is complete
_READ_BYTES = 2**20  # at once from a file

Sample = tuple[Picture, bytes]


class Shards(IterableDataset[Any]):
    """The images of tars, decoded and transformed, with their labels if they have any.

    Worker processes share the tars out among themselves. Each pass shuffles the order of the tars, and the images in a
    buffer of 1,000 (128 MB at most), by the seed and the number of the pass.

    Args:
        paths: The tars.
        transform: Turns an image into a tensor.
        shuffle: Whether to shuffle.
        seed: Seed of shuffling.
        limit: Read only this many images, the same ones in each pass: from the first tars of a random order.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        transform: Callable[[Any], Any],
        *,
        shuffle: bool = False,
        seed: int = 0,
        limit: int | None = None,
    ) -> None:
        self.paths, self.transform = list(paths), transform
        self.shuffle, self.seed, self.limit = shuffle, seed, limit
        if limit is not None:
            random.Random(seed).shuffle(self.paths)
        self.passes = 0
        first, _ = next(read_shard(self.paths[0]))
        self._labelled = first.label is not None

    def __iter__(self) -> Iterator[Any]:
        number, self.passes = self.passes, self.passes + 1
        process = get_worker_info()
        rank, count = (0, 1) if process is None else (process.id, process.num_workers)
        paths = list(self.paths)
        if self.shuffle and self.limit is None:
            random.Random(f"{self.seed} {number}").shuffle(paths)
        samples: Iterator[Sample] = itertools.chain.from_iterable(map(read_shard, paths[rank::count]))
        if self.limit is not None:
            samples = itertools.islice(samples, self.limit // count + (rank < self.limit % count))
        if self.shuffle:
            samples = shuffled(samples, random.Random(f"{self.seed} {number} {rank}"))
        return (self._item(picture, content) for picture, content in samples)

    def _item(self, picture: Picture, content: bytes) -> Any:
        if (picture.label is not None) != self._labelled:
            has, first = ("no label", "one") if self._labelled else ("a label", "none")
            raise DataError(
                f"{picture.where} has {has}, but the first image has {first}: label all images or none, and put each "
                f"label next to its image in the tar"
            )
        return prepared(picture, content, self.transform)


def read_shard(path: Path) -> Iterator[Sample]:
    """The images of a tar in their order, each with its content; the files of a sample must be neighbours."""
    images = 0
    for key, group in itertools.groupby(_files(path), key=lambda file: sample_key(file[0].name)):
        files = list(itertools.islice(group, MOST_FILES + 1))
        if len(files) > MOST_FILES:
            raise DataError(
                f"{path}: more than {MOST_FILES} files in a row belong to the sample {key}, as their names are the "
                f"same up to the first dot; read these shards without streaming"
            )
        labels = {
            file.name.rpartition(".")[2]: label_in(file.where, content)
            for file, content in files
            if file.name.endswith(LABEL_ENDINGS)
        }
        label = labels.get("cls", labels.get("json"))
        if "cls" in labels and len(labels) == len(files):
            raise DataError(
                f"{files[0][0].where} has no image next to it: a stream needs the files of a sample side by side "
                f"(tar --sort=name); without streaming, their order does not matter"
            )
        for file, content in files:
            if not file.name.endswith(LABEL_ENDINGS):
                images += 1
                yield replace(file, label=label), content
    if not images:
        raise DataError(f"{path} has no images ({', '.join(ENDINGS)})")


def _files(path: Path) -> Iterator[Sample]:
    """Images and labels of a tar, one after the other; memory holds one of them."""
    last = ""
    try:
        with path.open("rb", _READ_BYTES) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            size = os.fstat(file.fileno()).st_size
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps them all
                last = member.name
                if not member.isfile() or any(map(is_hidden, member.name.split("/"))):
                    continue
                if member.name.lower().endswith(ENDINGS) or member.name.endswith(LABEL_ENDINGS):
                    if not 0 <= member.size <= size - member.offset_data:
                        raise DataError(f"{path} is truncated or damaged at {last}: copy it again")
                    content = tar.extractfile(member).read()  # type: ignore[union-attr]
                    yield Picture(path, None, member.offset_data, member.size, member.name), content
            check_end(path, tar.offset, last)
    except (tarfile.TarError, OSError) as error:
        where = f"{path}, after {last}," if last else path
        raise DataError(f"{where} is not a readable WebDataset tar: {error}") from error


def shuffled(samples: Iterable[Sample], order: random.Random) -> Iterator[Sample]:
    """The samples in random order, as far as a buffer that is limited in images and bytes allows."""
    buffer: list[Sample] = []
    held = 0
    for sample in samples:
        buffer.append(sample)
        held += len(sample[1])
        while len(buffer) > BUFFER_IMAGES or held > BUFFER_BYTES:
            at = order.randrange(len(buffer))
            buffer[at], buffer[-1] = buffer[-1], buffer[at]
            held -= len(buffer[-1][1])
            yield buffer.pop()
    order.shuffle(buffer)
    while buffer:
        yield buffer.pop()
