"""Tilings, by doing in PyTorch what the kernel does with them."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from halve.engine.kernels.wgmma_sp.packing import taps
from halve.engine.kernels.wgmma_sp.tiling import SHARED_BYTES, TILES, Shortcut, Tile, supported, tiling
from halve.engine.operations import Convolution
from tests.random_masks import random


def conv(kernel=3, stride=1, padding=None, dilation=1, rows=8, channels=8):
    padding = (kernel - 1) // 2 * dilation if padding is None else padding
    return Convolution(rows, channels, (kernel,) * 2, (stride,) * 2, (padding,) * 2, (dilation,) * 2)


def boxed(x, plan, start, stride):
    """A box of pixels as the copy engine loads it: pixels outside of the images are zero."""
    images, _, height, width = x.shape
    columns, together, rows = plan.box
    box = torch.zeros(plan.slot_bytes // 128, x.shape[1])
    for i, (row, n, column) in enumerate(itertools.product(range(rows), range(together), range(columns))):
        place = start[2] + n, start[1] + row * stride, start[0] + column * stride
        if all(0 <= at < size for at, size in zip(place, (images, height, width), strict=True)):
            box[i] = x[place[0], :, place[1], place[2]]
    return box


def emulated(x, weight, convolution, plan):
    """The convolution, tile by tile. Pixels that no tile stores stay NaN."""
    if plan.flat:
        size = x.shape
        x = x.permute(1, 0, 2, 3).reshape(1, size[1], 1, -1)
    images, stride = x.shape[0], convolution.stride[0]
    out = torch.full(convolution.out_shape(x.shape), float("nan"))
    order = taps(convolution)
    for tile in range(plan.pixel_tiles):
        if plan.flat:
            place = (tile * plan.pixels, 0, 0)
        elif plan.tile_images > 1:
            place = (0, 0, tile * plan.tile_images)
        else:
            place = (0, tile % plan.tiles_per_image * plan.tile_rows, tile // plan.tiles_per_image)
        sums, box, plane = torch.zeros(plan.pixels, convolution.rows), None, -1
        for i, (row, column) in enumerate(order):
            if plan.begins >> i & 1:
                plane += 1
                across, down = (plane & 1, plane >> 1) if plan.planes == 4 else (0, 0)
                x0, y0 = place[0] * stride - convolution.padding[1], place[1] * stride - convolution.padding[0]
                box = boxed(x, plan, (x0 + across, y0 + down, place[2]), stride)
            sums += box[plan.shifts[i] : plan.shifts[i] + plan.pixels] @ weight[:, :, row, column].T
        columns, together, rows = (plan.pixels, 1, 1) if plan.flat else plan.stored
        for i, (row, n, column) in enumerate(itertools.product(range(rows), range(together), range(columns))):
            at = place[2] + n, place[1] + row, place[0] + column
            if at[0] < images and at[1] < out.shape[2] and at[2] < out.shape[3]:
                assert out[at[0], :, at[1], at[2]].isnan().all(), "stored twice"
                out[at[0], :, at[1], at[2]] = sums[i]
    return out.reshape(out.shape[1], size[0], *size[2:]).permute(1, 0, 2, 3) if plan.flat else out


CASES = [
    (conv(), (3, 7, 7)),
    (conv(), (2, 9, 30)),
    (conv(), (1, 1, 1)),
    (conv(padding=0), (2, 8, 9)),
    (conv(kernel=5), (3, 6, 11)),
    (conv(kernel=5, padding=1), (2, 9, 9)),
    (conv(dilation=2), (2, 9, 10)),
    (conv(stride=2), (3, 8, 8)),
    (conv(stride=2, padding=0), (2, 11, 13)),
    (conv(kernel=5, stride=2, padding=1), (2, 13, 9)),
    (conv(kernel=2, stride=2), (3, 8, 10)),
    (conv(kernel=1, stride=2), (5, 9, 7)),
    (conv(kernel=1), (3, 5, 19)),
    (replace(conv(), kernel=(1, 3), padding=(0, 1)), (2, 5, 8)),
]


@pytest.mark.parametrize(("convolution", "size"), CASES, ids=str)
def test_tiles_compute_the_convolution(convolution, size):
    x, weight = random(size[0], 8, *size[1:], seed=0), random(*convolution.weight_shape, seed=1)
    expected = F.conv2d(x, weight, None, convolution.stride, convolution.padding, convolution.dilation)
    found = 0
    for tile in (*TILES.values(), Tile(1, 48), Tile(1, 48, own=True)):
        plan = tiling(convolution, size, tile, sparse=True, residual=False, processors=132)
        if plan is not None:
            found += 1
            assert torch.allclose(emulated(x, weight, convolution, plan), expected, atol=1e-4)
    assert found >= 2


@pytest.mark.parametrize("convolution", [case[0] for case in CASES], ids=str)
@pytest.mark.parametrize("size", [(1, 7, 7), (8, 14, 14), (256, 28, 28), (256, 56, 56), (3, 100, 77)])
def test_tiles_fit_into_shared_memory_and_never_wait_for_ever(convolution, size):
    for channels, tile, sparse, residual in itertools.product((8, 64, 1024), TILES.values(), (0, 1), (0, 1)):
        layer = replace(convolution, rows=channels, channels=channels)
        plan = tiling(layer, size, tile, sparse=bool(sparse), residual=bool(residual), processors=132)
        if plan is None:
            continue
        assert plan.shared_bytes <= SHARED_BYTES
        assert plan.pixels % 8 == 0
        assert plan.pixels <= tile.pixels <= 256
        assert plan.pixels + max(plan.shifts) <= plan.slot_bytes // 128
        assert max(plan.box[0] * layer.stride[0], plan.box[1], plan.box[2] * layer.stride[0]) <= 256
        assert plan.pixel_slots >= 2
        assert plan.weight_slots >= 2 or plan.resident
        steps = len(plan.shifts) * -(-channels // 64)
        begun = sum(plan.begins >> step % len(plan.shifts) & 1 for step in range(plan.lag))
        assert plan.lag <= steps  # the second warpgroup waits for so many steps of the first in its first tile,
        assert begun <= plan.pixel_slots  # which must not need boxes that only the second could free


def test_layers_of_common_networks_are_supported():
    assert supported(conv(rows=64, channels=64))
    assert supported(conv(kernel=7, stride=2, channels=16))
    assert not supported(conv(channels=12))
    assert not supported(conv(rows=1001))
    assert not supported(conv(kernel=9))
    assert not supported(conv(stride=3))
    assert not supported(replace(conv(), stride=(1, 2)))
    assert not supported(replace(conv(), groups=2))
    assert not supported(replace(conv(stride=2), kernel=(1, 3)))


def test_images_that_are_too_wide_do_not_fit():
    plan = tiling(conv(), (1, 8, 400), Tile(1, 256), sparse=True, residual=False, processors=132)
    assert plan is None


def test_shortcuts_that_are_too_wide_do_not_fit():
    options = {"sparse": True, "residual": False, "processors": 132}
    for stride, fits in ((1, True), (2, False)):  # the copy engine steps over at most 256 columns
        found = tiling(conv(), (1, 28, 160), Tile(1, 256), **options, shortcut=Shortcut(8, stride))
        assert (found is not None) == fits


def test_weights_that_fit_stay_in_shared_memory():
    fits = tiling(
        conv(rows=64, channels=64), (8, 56, 56), TILES["64x256 own"], sparse=True, residual=False, processors=9
    )
    large = tiling(
        conv(rows=64, channels=512), (8, 7, 7), TILES["64x256 own"], sparse=True, residual=False, processors=9
    )
    assert fits.resident
    assert not large.resident


def test_halves_need_channels_to_split_and_share_what_they_store():
    options = {"sparse": True, "residual": True, "processors": 132}
    halves, own = TILES["64x128 halves 3x3"], TILES["64x128 own 3x3"]
    assert tiling(conv(channels=64, rows=64), (8, 14, 14), halves, **options) is None
    plan = tiling(conv(channels=128, rows=64), (8, 14, 14), halves, **options)
    assert not plan.resident
    assert plan.exchange - plan.staging == plan.stage_bytes  # of one tile, not of one for each warpgroup
    assert plan.weights - plan.exchange == -(-plan.pixels // 16) * 16 * 64 * 4  # half of the sums from each
    assert plan.row_tiles == tiling(conv(channels=128, rows=64), (8, 14, 14), own, **options).row_tiles
    assert tiling(conv(channels=64), (8, 14, 14), halves, **options, shortcut=Shortcut(64, 1)) is None  # unrolled
    rolled = TILES["64x128 halves"]
    assert tiling(conv(channels=64), (8, 14, 14), rolled, **options | {"residual": False}, shortcut=Shortcut(64, 1))


def test_residuals_are_loaded_ahead_unless_that_takes_the_buffer_of_the_next_tile():
    layer, tile = conv(rows=64, channels=64), TILES["64x256 own 3x3"]
    few, many = ((images, 56, 56) for images in (8, 256))
    options = {"sparse": True, "processors": 132}
    assert tiling(layer, few, tile, residual=True, **options).ahead
    plan = tiling(layer, many, tile, residual=True, **options)
    assert plan.pixel_slots == 2
    assert not plan.ahead
    assert tiling(conv(1, rows=256, channels=64), many, TILES["64x128 own"], residual=True, **options).ahead
    assert not tiling(layer, few, tile, residual=False, **options).ahead
    assert not tiling(layer, few, TILES["128x128 3x3"], residual=True, **options).ahead
