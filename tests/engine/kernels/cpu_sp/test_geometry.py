import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from halve.engine.kernels.cpu_sp.geometry import copied_planes, geometry
from halve.engine.kernels.planes import to_planes
from halve.engine.operations import Convolution, MaxPool
from tests.random_masks import random

small = st.tuples(st.integers(1, 4), st.integers(1, 4))


@given(
    st.integers(1, 2),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    small,
    small,
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    small,
)
def test_every_tap_reads_the_right_pixel_of_the_right_plane(images, size, kernel, stride, padding, dilation):
    window = Convolution(1, 1, kernel, stride, padding, dilation)
    out = window.out_size(*size)
    assume(min(out) > 0)
    shape = geometry(window, images, *size)
    assert shape.out == out
    places = torch.arange(images * size[0] * size[1]).reshape(images, 1, *size).float()
    planes = places if shape.direct else copied_planes(places, shape)
    bits = np.unpackbits(shape.masks.view(np.uint8).reshape(len(shape.masks), -1, 2), axis=-1, bitorder="little")
    for tap, (i, j) in enumerate(itertools.product(*map(range, kernel))):
        for n, y, x in itertools.product(range(images), *map(range, out)):
            flat = (n * out[0] + y) * out[1] + x
            row, column = (
                at * s + k * d - p for at, s, k, d, p in zip((y, x), stride, (i, j), dilation, padding, strict=True)
            )
            inside = 0 <= row < size[0] and 0 <= column < size[1]
            assert bits[flat // 16, 1 + tap, flat % 16] == inside
            if inside:
                plane = planes[:, shape.plane_of[tap]].reshape(-1)
                assert plane[flat + shape.shifts[tap]] == places[n, 0, row, column]
    assert bits[:, 0].sum() == images * out[0] * out[1]


def test_layers_of_equal_size_read_the_input_itself():
    assert geometry(Convolution(8, 8, (3, 3), padding=(1, 1)), 1, 56, 56).direct
    assert geometry(Convolution(8, 8, (5, 5), padding=(4, 4), dilation=(2, 2)), 1, 9, 9).direct
    strided = geometry(Convolution(8, 8, (3, 3), (2, 2), (1, 1)), 1, 56, 56)
    assert not strided.direct
    assert strided.planes == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert geometry(Convolution(8, 8, (1, 1), (2, 2)), 1, 56, 56).planes == ((0, 0),)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    st.integers(1, 3), st.integers(1, 3), st.tuples(st.integers(1, 5), st.integers(1, 140)), st.sampled_from([1, 2, 3])
)
def test_even_and_odd_pixels_are_split_off(dtype, images, channels, size, kernel):
    window = MaxPool((kernel, kernel), (2, 2), (kernel // 2, kernel // 2), (1, 1), True)
    shape = geometry(window, images, *size)
    x = random(images, channels, *size).to(dtype)
    got = copied_planes(to_planes(x, 1), shape)
    for plane, (row, column) in enumerate(shape.planes):
        if min(row, column) < 0:
            continue
        expected = x[:, :, row::2, column::2][:, :, : shape.out[0], : shape.out[1]]
        mine = got[:, plane * channels : (plane + 1) * channels, : expected.shape[2], : expected.shape[3]]
        assert torch.equal(mine, expected)
