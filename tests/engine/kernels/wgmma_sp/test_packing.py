import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halve.engine.kernels.wgmma_sp.packing import pack, pack_dense, packed_shape, taps, unpack, unpack_dense
from halve.engine.operations import Convolution

layers = st.builds(
    lambda rows, channels, kernel, stride: Convolution(8 * rows, 8 * channels, kernel, (stride, stride)),
    st.integers(1, 18),
    st.integers(1, 18),
    st.sampled_from([(1, 1), (3, 3), (2, 2), (5, 3)]),
    st.sampled_from([1, 2]),
)


def two_of_four(convolution, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(convolution.weight_shape, generator=generator)
    blocks = weight.unflatten(1, (-1, 4))
    kept = torch.rand(blocks.shape, generator=generator).argsort(2) < torch.randint(0, 3, (1,), generator=generator)
    return (blocks * kept).flatten(1, 2).to(dtype)


@given(layers, st.integers(0, 99), st.sampled_from([torch.float16, torch.bfloat16]))
def test_packing_is_lossless(convolution, seed, dtype):
    weight = two_of_four(convolution, seed, dtype)
    packed, dense = pack(weight, convolution), pack_dense(weight, convolution)
    assert packed.shape == packed_shape(convolution, sparse=True)
    assert dense.shape == packed_shape(convolution, sparse=False)
    assert torch.equal(unpack(packed, convolution), weight)
    assert torch.equal(unpack_dense(dense, convolution), weight)


def test_values_and_metadata_are_where_the_tensor_core_reads_them():
    """Row 21, columns 37 and 38 of the block: step 1 of 2, thread 2 of group 5 in warp 1."""
    convolution, weight = Convolution(64, 64), torch.zeros(64, 64, 1, 1, dtype=torch.float16)
    weight[21, 37], weight[21, 38] = 1, 2
    packed = pack(weight, convolution)[0, 0, 0]
    kept = 2 * ((37 - 32) // 4)  # of the 16 values of the row in the second step
    at = 1024 + (21 // 8) * 128 + (kept // 8) * 64 + (21 % 8) * 8 + kept % 8
    assert packed[at : at + 2].tolist() == [1, 2]
    assert int((packed[:2048] != 0).sum()) == 2
    words = packed[2048:].view(torch.int32).reshape(4, 8, 4)  # warp, group, thread
    nibble = int(words[1, 21 % 8, 2]) >> 4 * (37 % 16 // 4) & 15
    assert nibble == 1 | 2 << 2


def test_metadata_is_never_all_ones():
    """The kernel relies on it."""
    for seed in range(20):
        convolution = Convolution(64, 64)
        words = (
            pack(two_of_four(convolution, seed, torch.float16), convolution)[..., 2048:].contiguous().view(torch.int32)
        )
        assert not bool((words == -1).any())


@pytest.mark.parametrize("stride", [1, 2])
def test_taps_of_a_box_follow_each_other(stride):
    order = taps(Convolution(8, 8, (5, 3), (stride, stride)))
    planes = [(row % stride, column % stride) for row, column in order]
    assert sorted(order) == [(row, column) for row in range(5) for column in range(3)]
    assert planes == sorted(planes)
