import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halve.errors import FileError
from halve.masks.bits import pack_bits, unpack_bits


@given(st.integers(1, 16), st.lists(st.integers(0, 2**16 - 1), max_size=50))
def test_packed_bits_come_back(bits, values):
    values = torch.tensor([value % 2**bits for value in values], dtype=torch.int64)
    stream = pack_bits(values, bits)
    assert stream.dtype == torch.uint8
    assert stream.numel() == -(-len(values) * bits // 8)
    assert torch.equal(unpack_bits(stream, len(values), bits, torch.int64), values)


def test_bits_lie_lowest_first_as_specified():
    assert pack_bits(torch.tensor([5, 0, 3]), 3).tolist() == [0b11_000_101, 0b0]
    assert pack_bits(torch.tensor([1, 2, 7]), 3).tolist() == [0b11_010_001, 0b1]
    assert pack_bits(torch.tensor([0x1234]), 16).tolist() == [0x34, 0x12]


@pytest.mark.parametrize(
    ("stream", "count", "bits"),
    [
        (torch.zeros(2, dtype=torch.uint8), 2, 3),
        (torch.zeros(0, dtype=torch.uint8), 2, 3),
        (torch.zeros(1, dtype=torch.int8), 2, 3),
        (torch.zeros(1), 2, 3),
        (torch.zeros(1, 1, dtype=torch.uint8), 2, 3),
        (torch.tensor(0, dtype=torch.uint8), 2, 3),
        (torch.zeros(1, dtype=torch.uint8), 2**40, 3),
        (torch.tensor([0b01_000_000], dtype=torch.uint8), 2, 3),
        (torch.tensor([0b10_000_000], dtype=torch.uint8), 2, 3),
    ],
)
def test_streams_of_another_length_type_or_with_stray_bits_are_refused(stream, count, bits):
    with pytest.raises(FileError):
        unpack_bits(stream, count, bits)
