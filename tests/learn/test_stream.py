import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from halve.errors import DataError
from halve.learn.stream import BatchStream
from tests.tiny import loader


def taken(stream, count):
    return [stream.next() for _ in range(count)]


def test_batches_come_again_and_epochs_are_counted():
    stream = BatchStream([1, 2, 3])
    assert stream.length == 3
    assert taken(stream, 3) == [1, 2, 3]
    assert stream.epoch == 0
    assert taken(stream, 4) == [1, 2, 3, 1]
    assert (stream.epoch, stream.taken) == (2, 7)


def test_the_data_is_not_iterated_over_before_a_batch_is_asked_for():
    opened = []

    class Data(list):
        def __iter__(self):
            opened.append(1)
            return super().__iter__()

    stream = BatchStream(Data([1, 2]))
    assert (stream.length, stream.repeats, opened) == (2, True, [])
    assert stream.peek() == stream.peek() == stream.next() == 1
    assert (stream.next(), opened) == (2, [1])


def test_skipping_goes_where_taking_would():
    one, other = BatchStream([1, 2, 3]), BatchStream([1, 2, 3])
    one.skip(5)
    taken(other, 5)
    assert (one.next(), one.epoch, one.taken) == (other.next(), other.epoch, other.taken) == (3, 1, 6)


def test_skipping_in_a_shuffled_loader_that_is_made_anew_finds_the_same_batches():
    one, other = BatchStream(loader()), BatchStream(loader())
    expected = taken(one, 12)[9:]
    other.skip(9)
    found = taken(other, 3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(expected, found, strict=True))
    assert other.epoch == 2


@pytest.mark.parametrize("count", [6, 7])
def test_ranks_share_the_batches_and_none_gets_anothers(count):
    streams = [BatchStream(list(range(count)), rank, 3) for rank in range(3)]
    rounds = [[stream.next() for stream in streams] for _ in range(count)]
    assert [batch for group in rounds for batch in group] == [i % count for i in range(3 * count)]
    assert {stream.length for stream in streams} == {2}
    assert {stream.taken for stream in streams} == {count}
    assert {stream.epoch for stream in streams} == {2}


def test_fewer_batches_than_ranks_are_given_out_again():
    assert [BatchStream(["only"], rank, 3).next() for rank in range(3)] == ["only"] * 3


def test_an_iterator_ends():
    stream = BatchStream(iter([1, 2]))
    assert not stream.repeats
    assert stream.length is None
    assert taken(stream, 2) == [1, 2]
    with pytest.raises(StopIteration):
        stream.next()
    assert stream.taken == 2


def test_a_generator_is_an_iterator_and_what_makes_one_is_not():
    class Again:
        def __iter__(self):
            yield from (1, 2)

    assert not BatchStream(x for x in (1, 2)).repeats
    stream = BatchStream(Again())
    assert stream.repeats
    assert stream.length is None
    assert taken(stream, 5) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("data", [[], iter(()), DataLoader([])], ids=["list", "iterator", "loader"])
def test_empty_data_ends_at_once(data, processes):
    with pytest.raises(StopIteration):
        BatchStream(data, processes=processes).next()


@pytest.mark.parametrize("data", [None, 7, torch.nn.ReLU()])
def test_what_cannot_be_iterated_over_is_a_data_error_with_its_type(data):
    with pytest.raises(DataError, match=f"such as a DataLoader; got {type(data).__name__}"):
        BatchStream(data)


def test_a_tensor_is_cut_into_batches():
    stream = BatchStream(torch.arange(150.0)[:, None])
    assert stream.length == 3
    assert [len(batch) for batch in taken(stream, 4)] == [64, 64, 22, 64]
    assert stream.repeats


def test_a_loader_over_a_stream_has_no_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.zeros(5, 2))

    stream = BatchStream(DataLoader(Stream(), batch_size=2))
    assert stream.length is None
    assert [len(batch) for batch in taken(stream, 4)] == [2, 2, 1, 2]


def test_a_loader_says_how_long_it_is():
    data = DataLoader(TensorDataset(torch.zeros(10, 2)), batch_size=3)
    assert BatchStream(data).length == 4
    assert BatchStream(data, 0, 2).length == 2
