import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halve.engine.kernels.planes import empty_planes, is_planes, pitch_for, to_planes
from tests.random_masks import random

shapes = st.lists(st.integers(1, 6), min_size=2, max_size=4)


@given(shapes, st.sampled_from([1, -1]))
def test_tensors_are_stored_as_planes(shape, channel_dim):
    x = random(*shape)
    planes = to_planes(x, channel_dim)
    assert torch.equal(planes, x)
    assert is_planes(planes, channel_dim)
    assert to_planes(planes, channel_dim) is planes
    flat = planes.movedim(channel_dim, 0).flatten(1)
    assert flat.shape[1] == 1 or flat.stride(1) == 1


@given(st.integers(1, 100_000))
def test_planes_hold_whole_vectors_and_do_not_conflict(pixels):
    pitch = pitch_for(pixels)
    assert pixels <= pitch < pixels + 32
    assert pitch % 16 == 0
    assert pitch % 512 != 0


def test_the_last_plane_has_room_for_a_whole_vector():
    planes = empty_planes((1, 3, 7, 7), 1, torch.float32, torch.device("cpu"))
    assert planes.untyped_storage().nbytes() == 4 * 3 * 64


@pytest.mark.parametrize("broken", [torch.zeros(2, 3, 4, 5), torch.zeros(1, 3, 4, 6)[..., :5], torch.zeros(3, 4, 5).mT])
def test_other_strides_are_not_planes(broken):
    assert not is_planes(broken, 1)
