import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halve.errors import MaskError
from halve.masks.layout import Layout
from tests.random_masks import layouts, random

any_layout = st.integers(1, 8).flatmap(layouts)


def place(layout, row, block, place):
    """By hand: the index of the weight at a place of a block, None for a virtual column."""
    per_group = layout.rows // layout.groups
    group, column = row // per_group, block * layout.block + place
    kernel = list(itertools.product(*map(range, layout.shape[2:])))
    if layout.order == "channels":
        wide = -(-layout.channels // layout.block) * layout.block
        position, channel = divmod(column, wide)
        if channel >= layout.channels:
            return None
        if layout.channel_order is not None:
            channel = layout.channel_order[group * layout.channels + channel]
    else:
        channel, position = divmod(column, len(kernel))
        if channel >= layout.channels:
            return None
    if layout.kind == "conv_transpose":
        return (group * layout.channels + channel, row % per_group, *kernel[position])
    return (row, channel, *kernel[position])


@given(any_layout)
def test_blocks_hold_the_weights_that_a_loop_by_hand_finds(layout):
    weight = torch.arange(1.0, layout.weights + 1).reshape(layout.shape)
    blocks = layout.to_blocks(weight, fill=-1.0)
    assert blocks.shape == (layout.rows, layout.blocks, layout.block)
    for where in itertools.product(*map(range, blocks.shape)):
        index = place(layout, *where)
        assert blocks[where] == (-1.0 if index is None else weight[index])
        assert bool(layout.real()[where[1:]]) == (index is not None)


@given(any_layout)
def test_from_blocks_is_the_inverse_of_to_blocks(layout):
    weight = random(*layout.shape)
    assert torch.equal(layout.from_blocks(layout.to_blocks(weight)), weight)
    assert torch.equal(layout.from_blocks(layout.to_blocks(weight, fill=float("-inf"))), weight)


@given(any_layout)
def test_flat_indices_are_those_of_the_blocks(layout):
    weight = torch.arange(layout.weights).reshape(layout.shape)
    rows, blocks, places = torch.meshgrid(*map(torch.arange, (layout.rows, layout.blocks, layout.block)), indexing="ij")
    order = None if layout.channel_order is None else torch.tensor(layout.channel_order)
    assert torch.equal(layout.flat_index(rows, blocks, places, order), layout.to_blocks(weight, fill=-1))


@given(any_layout)
def test_every_weight_is_in_exactly_one_block(layout):
    counted = layout.to_blocks(torch.arange(1.0, layout.weights + 1).reshape(layout.shape))
    assert counted[counted > 0].sort().values.tolist() == list(range(1, layout.weights + 1))
    assert int(layout.real().sum()) * layout.rows == layout.weights


@given(any_layout)
def test_gradients_pass_both_ways(layout):
    weight = random(*layout.shape).requires_grad_()
    factors = random(*layout.shape, seed=1)
    there_and_back = layout.from_blocks(layout.to_blocks(weight) * 2)
    (there_and_back * factors).sum().backward()
    assert torch.allclose(weight.grad, 2 * factors)


CASES = [
    ("linear", (6, 8), 1),
    ("conv", (6, 8, 3), 1),
    ("conv", (6, 8, 3, 2), 2),
    ("conv", (4, 4, 2, 3, 2), 2),
    ("conv_transpose", (8, 6, 3), 1),
    ("conv_transpose", (8, 3, 3, 2), 2),
    ("conv_transpose", (16, 2, 2, 3, 2), 4),
]


@pytest.mark.parametrize(("kind", "shape", "groups"), CASES)
@pytest.mark.parametrize("order", ["channels", "flat"])
def test_every_kind_of_layer_goes_there_and_back(kind, shape, groups, order):
    layout = Layout(kind, shape, 4, groups, order)
    weight = random(*shape)
    blocks = layout.to_blocks(weight)
    assert blocks.numel() == weight.numel()
    assert torch.equal(layout.from_blocks(blocks), weight)


MODULES = [
    (torch.nn.Linear(8, 6), "linear", 1),
    (torch.nn.Conv1d(8, 6, 3), "conv", 1),
    (torch.nn.Conv2d(16, 6, 3, groups=2), "conv", 2),
    (torch.nn.Conv3d(8, 6, (1, 2, 3)), "conv", 1),
    (torch.nn.ConvTranspose1d(8, 6, 3), "conv_transpose", 1),
    (torch.nn.ConvTranspose2d(16, 6, 3, groups=2), "conv_transpose", 2),
    (torch.nn.ConvTranspose3d(8, 6, (1, 2, 3)), "conv_transpose", 1),
]


@pytest.mark.parametrize(("module", "kind", "groups"), MODULES)
def test_a_row_is_what_one_output_channel_multiplies_with(module, kind, groups):
    """Clearing one row of blocks silences one output channel and no other."""
    weight = random(*module.weight.shape)
    layout = Layout(kind, tuple(weight.shape), 4, groups)
    blocks = layout.to_blocks(weight)
    blocks[3] = 0
    channels = 16 if groups == 2 else 8
    image = random(1, channels, *[4] * (weight.dim() - 2))
    state = {"weight": layout.from_blocks(blocks), "bias": torch.zeros(6)}
    out = torch.func.functional_call(module, state, (image,)).transpose(0, 1).flatten(1)
    assert (out.abs().sum(1) == 0).tolist() == [False, False, False, True, False, False]


def test_a_block_of_a_linear_layer_is_four_neighbours_in_a_row():
    weight = random(3, 8)
    assert torch.equal(Layout("linear", (3, 8), 4).to_blocks(weight)[2, 1], weight[2, 4:8])


def test_a_block_of_a_convolution_is_four_input_channels_at_one_kernel_position():
    weight = random(6, 8, 3, 3)
    blocks = Layout("conv", (6, 8, 3, 3), 4).to_blocks(weight)
    assert torch.equal(blocks[5, 2 * 7 + 1], weight[5, 4:8, 2, 1])


def test_a_block_of_a_transposed_convolution_runs_along_its_first_axis():
    weight = random(8, 6, 3, 3)
    blocks = Layout("conv_transpose", (8, 6, 3, 3), 4).to_blocks(weight)
    assert torch.equal(blocks[5, 2 * 7 + 1], weight[4:8, 5, 2, 1])


def test_a_block_of_a_grouped_convolution_stays_in_its_group():
    weight = random(6, 4, 1, 1)  # 2 groups of 4 input channels
    blocks = Layout("conv", (6, 4, 1, 1), 4, groups=2).to_blocks(weight)
    assert blocks.shape == (6, 1, 4)
    assert torch.equal(blocks[4, 0], weight[4, :, 0, 0])
    transposed = random(8, 3, 1, 1)  # 2 groups of 4 input channels, 3 output channels each
    blocks = Layout("conv_transpose", (8, 3, 1, 1), 4, groups=2).to_blocks(transposed)
    assert torch.equal(blocks[4, 0], transposed[4:8, 1, 0, 0])


def test_a_flat_block_runs_over_kernel_positions_first():
    weight = random(6, 4, 3, 3)
    blocks = Layout("conv", (6, 4, 3, 3), 4, order="flat").to_blocks(weight)
    assert torch.equal(blocks[2].flatten(), weight[2].flatten())
    assert blocks[2, 2].tolist() == [*weight[2, 0, 2, 2:].tolist(), *weight[2, 1, 0].tolist()]


def test_flat_and_channel_order_are_the_same_for_1x1_kernels():
    weight = random(6, 8, 1, 1)
    orders = [Layout("conv", (6, 8, 1, 1), 4, order=order).to_blocks(weight) for order in ("channels", "flat")]
    assert torch.equal(*orders)


def test_a_channel_order_says_which_channels_meet_in_a_block():
    weight = random(2, 8, 3)
    order = (7, 0, 5, 2, 1, 3, 4, 6)
    blocks = Layout("conv", (2, 8, 3), 4, channel_order=order).to_blocks(weight)
    assert torch.equal(blocks[1, 2 * 2], weight[1, [7, 0, 5, 2], 2])


def test_each_group_has_a_channel_order_of_its_own():
    weight = random(4, 4, 1)
    layout = Layout("conv", (4, 4, 1), 4, groups=2, channel_order=(3, 2, 1, 0, 0, 2, 1, 3))
    blocks = layout.to_blocks(weight)
    assert torch.equal(blocks[0, 0], weight[0, [3, 2, 1, 0], 0])
    assert torch.equal(blocks[2, 0], weight[2, [0, 2, 1, 3], 0])


def test_padding_comes_at_the_end_of_each_kernel_position():
    layout = Layout("conv", (2, 3, 1, 2), 4, pad=True)
    blocks = layout.to_blocks(torch.ones(2, 3, 1, 2), fill=9.0)
    assert blocks[0].tolist() == [[1, 1, 1, 9], [1, 1, 1, 9]]
    assert (layout.virtual, layout.columns, layout.segments, layout.blocks) == (1, 3, 2, 2)


def test_padding_of_the_flat_order_comes_once_per_row():
    layout = Layout("conv", (2, 3, 1, 3), 4, order="flat", pad=True)
    assert layout.real().int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_padding_that_is_not_needed_changes_nothing():
    weight = random(2, 8)
    plain, padded = Layout("linear", (2, 8), 4), Layout("linear", (2, 8), 4, pad=True)
    assert torch.equal(plain.to_blocks(weight), padded.to_blocks(weight))
    assert padded.virtual == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.int32, torch.float64])
def test_any_dtype_goes_there_and_back(dtype):
    layout = Layout("conv", (2, 3, 2, 2), 4, pad=True, channel_order=(2, 0, 1))
    weight = (random(2, 3, 2, 2) * 3).to(dtype)
    back = layout.from_blocks(layout.to_blocks(weight))
    assert back.dtype == dtype
    assert torch.equal(back, weight)


def test_a_channels_last_weight_gives_the_same_blocks():
    weight = random(4, 8, 3, 3)
    layout = Layout("conv", (4, 8, 3, 3), 4)
    assert torch.equal(layout.to_blocks(weight.to(memory_format=torch.channels_last)), layout.to_blocks(weight))


def test_to_blocks_does_not_write_to_the_weight():
    weight = random(2, 8)
    before = weight.clone()
    Layout("linear", (2, 8), 4).to_blocks(weight).clone().zero_()
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "pool", "shape": (4, 4)},
        {"kind": "linear", "shape": (4, 4), "order": "rows"},
        {"kind": "linear", "shape": (4,)},
        {"kind": "linear", "shape": (4, 4, 1)},
        {"kind": "conv", "shape": (4,)},
        {"kind": "conv", "shape": ()},
        {"kind": "conv", "shape": (4, 0, 3)},
        {"kind": "conv", "shape": (4, -4, 3)},
        {"kind": "conv", "shape": (4, 4, 3), "groups": 0},
        {"kind": "conv", "shape": (4, 4, 3), "groups": 3},
        {"kind": "conv", "shape": (4, 4, 3), "groups": -1},
        {"kind": "linear", "shape": (4, 4), "groups": 2},
        {"kind": "conv_transpose", "shape": (5, 4, 3), "groups": 2},
        {"kind": "linear", "shape": (4, 4), "block": 0},
        {"kind": "linear", "shape": (4, 6)},
        {"kind": "conv", "shape": (4, 3, 3, 3), "order": "flat"},
        {"kind": "conv_transpose", "shape": (6, 4, 3), "groups": 2},
        {"kind": "linear", "shape": (4, 4), "channel_order": (0, 1, 2)},
        {"kind": "linear", "shape": (4, 4), "channel_order": (0, 1, 2, 2)},
        {"kind": "linear", "shape": (4, 4), "channel_order": (1, 2, 3, 4)},
        {"kind": "linear", "shape": (4, 4), "channel_order": (0, 1, 2, 3, 0, 1, 2, 3)},
        {"kind": "linear", "shape": (4, 4), "channel_order": ()},
        {"kind": "linear", "shape": (4, 4), "channel_order": (-1, 0, 1, 2)},
        {"kind": "conv", "shape": (4, 4, 1), "groups": 2, "channel_order": tuple(range(8))},
        {"kind": "linear", "shape": (4, 4), "order": "flat", "channel_order": (0, 1, 2, 3)},
    ],
)
def test_impossible_layouts_are_refused(arguments):
    with pytest.raises(MaskError):
        Layout(**{"block": 4, **arguments})


def test_the_refusal_of_a_remainder_names_numbers_and_a_way_out():
    with pytest.raises(MaskError, match=r"6 input channels.*4.*pad"):
        Layout("linear", (4, 6), 4)
    with pytest.raises(MaskError, match=r"27 weights per row.*4.*pad"):
        Layout("conv", (4, 3, 3, 3), 4, order="flat")


def test_weights_and_blocks_of_another_shape_are_refused():
    layout = Layout("linear", (4, 8), 4)
    with pytest.raises(MaskError, match=r"\(4, 8\).*\(8, 4\)"):
        layout.to_blocks(torch.zeros(8, 4))
    with pytest.raises(MaskError, match=r"\(4, 2, 4\).*\(4, 8\)"):
        layout.from_blocks(torch.zeros(4, 8))
