import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from halve.errors import DataError
from halve.learn.stream import Feed
from tests.tiny import loader


def taken(feed, count):
    return [feed.next() for _ in range(count)]


def test_batches_come_again_and_epochs_are_counted():
    feed = Feed([1, 2, 3])
    assert feed.length == 3
    assert taken(feed, 3) == [1, 2, 3]
    assert feed.epoch == 0
    assert taken(feed, 4) == [1, 2, 3, 1]
    assert (feed.epoch, feed.taken) == (2, 7)


def test_skipping_goes_where_taking_would():
    one, other = Feed([1, 2, 3]), Feed([1, 2, 3])
    one.skip(5)
    taken(other, 5)
    assert (one.next(), one.epoch, one.taken) == (other.next(), other.epoch, other.taken) == (3, 1, 6)


def test_skipping_in_a_shuffled_loader_that_is_made_anew_finds_the_same_batches():
    one, other = Feed(loader()), Feed(loader())
    expected = taken(one, 12)[9:]
    other.skip(9)
    found = taken(other, 3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(expected, found, strict=True))
    assert other.epoch == 2


@pytest.mark.parametrize("count", [6, 7])
def test_ranks_share_the_batches_and_none_gets_anothers(count):
    feeds = [Feed(list(range(count)), rank, 3) for rank in range(3)]
    rounds = [[feed.next() for feed in feeds] for _ in range(count)]
    assert [batch for group in rounds for batch in group] == [i % count for i in range(3 * count)]
    assert {feed.length for feed in feeds} == {2}
    assert {feed.taken for feed in feeds} == {count}
    assert {feed.epoch for feed in feeds} == {2}


def test_fewer_batches_than_ranks_are_given_out_again():
    assert [Feed(["only"], rank, 3).next() for rank in range(3)] == ["only"] * 3


def test_an_iterator_ends():
    feed = Feed(iter([1, 2]))
    assert not feed.again
    assert feed.length is None
    assert taken(feed, 2) == [1, 2]
    with pytest.raises(StopIteration):
        feed.next()
    assert feed.taken == 2


def test_a_generator_is_an_iterator_and_what_makes_one_is_not():
    class Again:
        def __iter__(self):
            yield from (1, 2)

    assert not Feed(x for x in (1, 2)).again
    feed = Feed(Again())
    assert feed.again
    assert feed.length is None
    assert taken(feed, 5) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("data", [[], iter(()), DataLoader([])], ids=["list", "iterator", "loader"])
def test_empty_data_ends_at_once(data, ranks):
    with pytest.raises(StopIteration):
        Feed(data, ranks=ranks).next()


@pytest.mark.parametrize("data", [None, 7, torch.nn.ReLU()])
def test_what_cannot_be_iterated_over_is_a_data_error_with_its_type(data):
    with pytest.raises(DataError, match=f"such as a DataLoader; got {type(data).__name__}"):
        Feed(data)


def test_a_tensor_is_cut_into_batches():
    feed = Feed(torch.arange(150.0)[:, None])
    assert feed.length == 3
    assert [len(batch) for batch in taken(feed, 4)] == [64, 64, 22, 64]
    assert feed.again


def test_a_loader_over_a_stream_has_no_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.zeros(5, 2))

    feed = Feed(DataLoader(Stream(), batch_size=2))
    assert feed.length is None
    assert [len(batch) for batch in taken(feed, 4)] == [2, 2, 1, 2]


def test_a_loader_says_how_long_it_is():
    data = DataLoader(TensorDataset(torch.zeros(10, 2)), batch_size=3)
    assert Feed(data).length == 4
    assert Feed(data, 0, 2).length == 2
