import pytest
import torch

from halve.check.hardware import eligibility
from halve.masks.layout import Layout
from halve.masks.mask import Mask
from halve.masks.pattern import Pattern


def kept(pattern, kind, shape, groups=1, order="channels"):
    rule = Pattern(pattern)
    layout = Layout(kind, shape, rule.size, groups, order, pad=True)
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return Mask.from_scores(rule, layout, scores).kept()


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "1:2", "1:8"])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("linear", (8, 16)),
        ("linear", (24, 48)),
        ("conv", (8, 16, 1, 1)),
        ("conv", (16, 32, 3, 3)),
        ("conv", (8, 16, 5)),
    ],
)
def test_two_of_four_or_fewer_along_channels_run_everywhere(pattern, kind, shape):
    assert eligibility(kind, 1, kept(pattern, kind, shape)) == (None, None)


def test_zeros_are_always_eligible_and_dense_never():
    shape = (16, 16, 3, 3)
    assert eligibility("conv", 1, torch.zeros(shape, dtype=torch.bool)) == (None, None)
    reason = "576 of 576 blocks of 4 input channels have more than 2 nonzero weights"
    assert eligibility("conv", 1, torch.ones(shape, dtype=torch.bool)) == (reason, reason)


@pytest.mark.parametrize("pattern", ["4:8", "3:4"])
def test_a_looser_rule_crowds_some_blocks(pattern):
    result = eligibility("linear", 1, kept(pattern, "linear", (16, 32)))
    assert "more than 2 nonzero weights" in result.tensorrt
    assert result.tensor_cores == result.tensorrt


def test_four_of_eight_is_eligible_where_it_happens_to_be_two_of_four():
    lucky = torch.tensor([1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.bool).repeat(16, 2)
    assert eligibility("linear", 1, lucky) == (None, None)


def test_one_crowded_block_is_enough_and_the_number_is_told():
    mask = kept("2:4", "linear", (16, 32))
    mask[3, 8:12] = torch.tensor([True, True, True, False])
    assert eligibility("linear", 1, mask).tensorrt.startswith("1 of 128 blocks")


def test_flat_masks_of_large_kernels_are_not_eligible_and_of_small_ones_are():
    reason = eligibility("conv", 1, kept("2:4", "conv", (16, 16, 3, 3), order="flat")).tensorrt
    assert "blocks of 4 input channels have more than 2" in reason
    assert eligibility("conv", 1, kept("2:4", "conv", (16, 16, 1, 1), order="flat")) == (None, None)


def test_grouped_and_transposed_convolutions_are_not_eligible():
    grouped = eligibility("conv", 2, kept("2:4", "conv", (16, 16, 3, 3), groups=2))
    assert grouped == ("grouped convolution (2 groups)",) * 2
    transposed = eligibility("conv_transpose", 1, kept("2:4", "conv_transpose", (16, 16, 3, 3)))
    assert transposed == ("transposed convolution",) * 2


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_padded_channels_are_not_eligible(kind):
    shape = (16, 18) if kind == "linear" else (16, 18, 3, 3)
    assert eligibility(kind, 1, kept("2:4", kind, shape)) == ("18 input channels, not divisible by 4",) * 2


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((16, 20), "20 input channels, not divisible by 16"),
        ((16, 8), "8 input channels, not divisible by 16"),
        ((12, 16), "12 output channels, not divisible by 8"),
        ((10, 20), "20 input channels, not divisible by 16"),
    ],
)
def test_tensor_cores_need_whole_tiles_and_tensorrt_does_not(shape, reason):
    result = eligibility("linear", 1, kept("2:4", "linear", shape))
    assert result.tensorrt is None
    assert result.tensor_cores == reason
