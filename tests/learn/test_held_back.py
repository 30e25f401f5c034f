import itertools

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from halve.learn.held_back import chosen_from, count, first, hold_back, hold_back_none
from halve.learn.stream import BatchStream
from halve.sources.data import Batches


def numbers(count):
    """Images that are told apart by their only value."""
    return torch.arange(float(count))[:, None]


def values(batches):
    """The values of all images, in their order."""
    return [
        value for batch in batches for value in (batch[0] if isinstance(batch, list | tuple) else batch)[:, 0].tolist()
    ]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def shuffled(count=200, batch=16, **options):
    return DataLoader(TensorDataset(numbers(count)), batch, shuffle=True, generator=generator(), **options)


def epochs(split, passes=3):
    """The values of several passes over what is learned from, as a run takes them."""
    stream = BatchStream(split.data)
    result = [[] for _ in range(passes)]
    for batch in iter(stream.next, None):
        if stream.epoch == passes:
            return result
        result[stream.epoch].extend(values([batch]))
    return result


def test_five_percent_are_held_back_from_8_to_512():
    assert [count(images) for images in (0, 63, 64, 160, 161, 400, 10_240, 20_000)] == [0, 0, 8, 8, 8, 20, 512, 512]


@pytest.mark.parametrize("images", [64, 100, 300, 641])
def test_of_a_tensor_the_last_images_are_held_back(images):
    split = hold_back(numbers(images))
    learned, held = values(split.data), values(split.held_back)
    assert learned + held == list(range(images))
    assert len(held) == split.images == count(images)
    assert {len(batch) for batch in split.data[:-1]} <= {64}


@pytest.mark.parametrize("sizes", [[64], [100], [30, 30, 30], [60, 4, 2], [1] * 80], ids=str)
def test_of_a_list_the_last_images_are_held_back_wherever_batches_end(sizes):
    batches = [(part, part[:, 0].long()) for part in numbers(sum(sizes)).split(sizes)]
    split = hold_back(batches)
    learned, held = values(split.data), values(split.held_back)
    assert learned + held == list(range(sum(sizes)))
    assert len(held) == split.images == count(sum(sizes))
    assert all(len(image) == len(label) for image, label in (*split.data, *split.held_back))
    assert split.source == "the last images of the data"


def test_batches_that_cannot_be_cut_are_held_back_whole():
    batches = [object() for _ in range(100)]
    split = hold_back(batches)
    assert [*split.data, *split.held_back] == batches
    assert len(split.held_back) == 8


LOADERS = {
    "shuffled": shuffled,
    "in order": lambda: DataLoader(TensorDataset(numbers(200)), 16),
    "workers": lambda: shuffled(num_workers=2),
    "persistent workers": lambda: shuffled(num_workers=1, persistent_workers=True),
    "drop_last": lambda: shuffled(drop_last=True),
    "subset": lambda: DataLoader(TensorDataset(numbers(400)), 16, sampler=SubsetRandomSampler(range(200), generator())),
    "distributed": lambda: DataLoader(
        TensorDataset(numbers(200)), 16, sampler=DistributedSampler(range(200), 1, 0, seed=3)
    ),
    "batch sampler": lambda: DataLoader(
        TensorDataset(numbers(200)),
        batch_sampler=BatchSampler(RandomSampler(range(200), generator=generator()), 16, False),
    ),
    "own batch sampler": lambda: DataLoader(
        TensorDataset(numbers(200)), batch_sampler=[list(range(i, i + 20)) for i in range(0, 200, 20)]
    ),
    "wrapped": lambda: Batches(shuffled()),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_of_a_loader_images_are_held_back_by_their_index_and_never_learned_from(make):
    split, again = hold_back(make(), seed=5), hold_back(make(), seed=5)
    held = set(values(split.held_back))
    assert split.kind == "dataset"
    assert len(held) == split.images == 10
    assert set(values(again.held_back)) == held
    learned = epochs(split)
    assert all(not held & set(epoch) for epoch in learned)
    assert set().union(*learned) | held == set(range(200))
    assert values(split.held_back) == values(again.held_back)  # as often as they are read
    assert held != set(values(hold_back(make(), seed=6).held_back))


def test_a_batch_is_as_large_as_before_and_an_epoch_a_little_shorter():
    split = hold_back(shuffled(200, 16))
    assert [len(batch[0]) for batch in split.data] == [16] * 11 + [14]
    assert BatchStream(split.data).length == 12


def test_the_order_of_what_is_learned_is_that_of_the_loader():
    held = set(values(hold_back(shuffled()).held_back))
    expected = [value for value in values(shuffled()) if value not in held]
    assert values(hold_back(shuffled()).data) == expected


def test_of_a_sampler_with_replacement_no_held_back_image_is_learned_from():
    data = TensorDataset(numbers(100))
    sampler = WeightedRandomSampler(torch.ones(100), 500, generator=generator())
    split = hold_back(DataLoader(data, 50, sampler=sampler))
    learned = values(split.data)
    assert not set(learned) & set(values(split.held_back))
    assert len(learned) == pytest.approx(460, abs=30)
    assert BatchStream(split.data).length == 10


def test_images_that_a_sampler_never_reads_are_not_read_either():
    read = []

    class Watched(Dataset):
        def __len__(self):
            return 300

        def __getitem__(self, index):
            read.append(index)
            return numbers(300)[index]

    split = hold_back(DataLoader(Watched(), 10, sampler=range(100)))
    list(split.data)
    list(split.held_back)
    assert sorted(set(read)) == list(range(100))
    assert split.images == 8


def test_an_endless_sampler_is_not_read_to_its_end():
    class Endless:
        def __iter__(self):
            return itertools.cycle(range(100))

    split = hold_back(DataLoader(TensorDataset(numbers(100)), 10, sampler=Endless()))
    held = set(values(split.held_back))
    assert len(held) == 8
    assert not held & set(values(itertools.islice(split.data, 40)))
    assert BatchStream(split.data).length is None


def test_the_loaders_own_random_numbers_are_not_used_to_read_what_was_held_back():
    loader = shuffled()
    split = hold_back(loader)
    before = loader.generator.get_state()
    list(split.held_back)
    assert torch.equal(loader.generator.get_state(), before)


class Stream(IterableDataset):
    """So many images in batches of 20; `reshuffled` gives them in another order in each pass."""

    def __init__(self, images, reshuffled=False):
        self.images, self.reshuffled, self.passes = images, reshuffled, 0

    def __iter__(self):
        self.passes += 1
        order = torch.randperm(self.images, generator=generator(self.passes)) if self.reshuffled else slice(None)
        return iter(numbers(self.images)[order].split(20))


@pytest.mark.parametrize("make", [Stream, lambda images: DataLoader(Stream(images), None)], ids=["stream", "loader"])
@pytest.mark.parametrize(("images", "held"), [(1000, 256), (270, 256), (256, 13), (100, 8)])
def test_of_a_stream_the_first_images_are_held_back(make, images, held):
    split = hold_back(make(images))
    assert split.kind == "stream"
    assert values(split.held_back) == list(range(held))
    assert split.images == held
    assert "may recur" in split.source
    for epoch in epochs(split):
        assert sorted(epoch) == list(range(held, images))


def test_a_stream_starts_with_a_full_batch_since_a_step_may_be_recorded_for_its_shape():
    split = hold_back(Stream(1000))
    sizes = [len(batch) for batch in split.data]
    assert sizes == [20] * 37 + [4]


def test_a_stream_that_says_how_long_it_is_gives_no_more_than_five_percent():
    class Sized(Stream):
        def __len__(self):
            return 50

    split = hold_back(Sized(1000))
    assert split.images == 50
    assert BatchStream(split.data).length == 48
    assert len(list(split.data)) == 48


def test_a_stream_that_is_shuffled_gives_other_images_in_later_passes():
    split = hold_back(Stream(1000, reshuffled=True))
    first_pass, second, _ = epochs(split)
    held = set(values(split.held_back))
    assert not held & set(first_pass)
    assert held & set(second)  # "which may recur"


@pytest.mark.parametrize(("images", "held"), [(1000, 256), (200, 10), (40, 0)])
def test_of_an_iterator_nothing_is_lost_and_nothing_comes_twice(images, held):
    split = hold_back(iter(numbers(images).split(20)))
    assert split.kind == "iterator"
    assert not BatchStream(split.data).repeats
    assert values(split.held_back) == list(range(held))
    assert sorted(values(split.data)) == list(range(held, images))


def test_a_loader_that_iterates_in_its_own_way_is_a_stream():
    class Own(DataLoader):
        def __iter__(self):
            return iter(numbers(1000).split(20))

    split = hold_back(Own(TensorDataset(numbers(1000))))
    assert split.kind == "stream"
    assert not set(values(split.held_back)) & set(values(split.data))


@pytest.mark.parametrize(
    "data",
    [
        numbers(63),
        [numbers(63)],
        DataLoader(TensorDataset(numbers(63)), 10),
        Stream(63),
        iter([numbers(63)]),
        [],
        iter(()),
    ],
    ids=["tensor", "list", "loader", "stream", "iterator", "empty", "ended"],
)
def test_of_fewer_than_64_images_none_is_held_back(data):
    split = hold_back(data)
    assert (split.images, list(split.held_back), split.source) == (0, [], "")
    assert "images are too few to hold any back, at least 64 are needed" in split.reason
    assert len(values(split.data)) in (63, 0)


def test_none_is_held_back_if_no_batch_would_be_left():
    split = hold_back(DataLoader(TensorDataset(numbers(64)), 60, drop_last=True))
    assert "drop_last=True" in split.reason
    assert len(values(split.data)) == 60


@pytest.mark.parametrize(
    "make", [lambda: numbers(200), shuffled, lambda: Stream(200)], ids=["tensor", "loader", "stream"]
)
def test_without_validation_the_batches_are_those_of_the_data(make):
    split, stream = hold_back_none(make()), BatchStream(make())
    taken = BatchStream(split.data)
    assert all(torch.equal(*(s.next()[0] for s in (taken, stream))) for _ in range(30))
    assert split.reason == "validation=False"


@pytest.mark.parametrize(
    "make",
    [
        lambda: numbers(1000),
        lambda: DataLoader(TensorDataset(numbers(1000)), 50),
        lambda: list(numbers(1000).split(50)),
    ],
    ids=["tensor", "loader", "list"],
)
def test_validation_images_of_a_user_are_chosen_all_over_them(make):
    chosen = values(first(chosen_from(make()), 512))
    assert len(chosen) == len(set(chosen)) == 512
    assert chosen == values(first(chosen_from(make()), 512))
    assert min(chosen) < 200
    assert max(chosen) >= 800
