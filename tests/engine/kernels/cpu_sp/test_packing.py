import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halve.engine.kernels.cpu_sp.packing import group_width, pack, pack_dense, packed_shapes, places_of, unpack
from halve.errors import EngineError
from tests.engine.kernels.cpu_sp.layers import two_of_four
from tests.random_masks import random
from tests.untouched import same_bits

kernels = st.sampled_from([(), (1, 1), (3, 3), (2, 5)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@given(st.integers(1, 40), st.integers(1, 20), kernels, dtypes, st.integers(0, 99))
def test_packing_is_lossless(rows, groups, kernel, dtype, seed):
    weight = two_of_four(rows, 4 * groups, *kernel, seed=seed).to(dtype)
    packed = pack(weight)
    assert same_bits(unpack(packed, weight.shape), weight)
    assert (packed.values.shape, packed.codes.shape) == packed_shapes(weight.shape, sparse=True)


@given(st.integers(1, 40), st.integers(1, 20), kernels, dtypes)
def test_dense_packing_is_lossless(rows, channels, kernel, dtype):
    weight = random(rows, channels, *kernel).to(dtype)
    packed = pack_dense(weight)
    assert same_bits(unpack(packed, weight.shape), weight)
    assert (packed.values.shape, None) == packed_shapes(weight.shape, sparse=False)
    assert packed.values.shape[-1] == group_width(channels)


def test_blocks_with_fewer_weights_are_filled_up():
    weight = torch.tensor([[0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    packed = pack(weight)
    assert packed.codes.tolist() == [[[2, 0]]]
    assert torch.equal(unpack(packed, weight.shape), weight)


def test_codes_that_mean_nothing_are_refused():
    assert places_of(np.array([0, 5], np.uint8)).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(EngineError, match="below 6, got 6"):
        places_of(np.array([1, 6], np.uint8))
