import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import halve
from halve.errors import MaskError
from halve.masks.layout import Layout
from halve.masks.mask import Mask, MaskSet
from halve.masks.pattern import Pattern
from tests.random_masks import PATTERNS, a_mask, layouts, masks, masks_for, random
from tests.untouched import same_bits, untouched

LAYOUT = Layout("linear", (3, 8), 4)
pattern_and_layout = st.sampled_from(PATTERNS).flatmap(
    lambda rule: st.tuples(st.just(Pattern(rule)), layouts(Pattern(rule).size))
)


def codes(*values, layout=LAYOUT):
    return torch.tensor(values).reshape(layout.rows, layout.blocks)


@given(pattern_and_layout, st.integers(0, 99))
def test_every_block_keeps_the_n_highest_of_its_real_weights(both, seed):
    pattern, layout = both
    scores = random(*layout.shape, seed=seed)
    mask = Mask.from_scores(pattern, layout, scores)
    kept, blocks = layout.to_blocks(mask.kept()), layout.to_blocks(scores)
    for row in range(layout.rows):
        for block, real in enumerate(layout.real()):
            best = sorted(blocks[row, block][real].tolist(), reverse=True)[: pattern.kept]
            assert sorted(blocks[row, block][kept[row, block] & real].tolist(), reverse=True) == best


@given(masks())
def test_counts_and_density_are_those_of_the_kept_weights(mask):
    assert mask.kept().shape == mask.layout.shape
    assert mask.kept_weights == int(mask.kept().sum())
    assert mask.density == int(mask.kept().sum()) / mask.layout.weights


@given(masks())
def test_from_kept_gives_the_same_mask(mask):
    again = Mask.from_kept(mask.pattern, mask.layout, mask.kept())
    assert torch.equal(again.kept(), mask.kept())
    if not mask.layout.virtual:
        assert torch.equal(again.codes, mask.codes)


@given(masks())
def test_a_mask_on_its_own_result_changes_nothing(mask):
    weight = random(*mask.layout.shape, seed=5)
    once = mask.apply_to(weight)
    assert same_bits(mask.apply_to(once), once)
    assert bool((once[~mask.kept()] == 0).all())
    assert same_bits(once[mask.kept()], weight[mask.kept()])


@pytest.mark.parametrize("channels", range(1, 9))
@pytest.mark.parametrize("rule", ["1:4", "2:4", "3:4", "4:4", "4:8"])
def test_a_virtual_column_never_takes_a_place_that_a_real_weight_could_have(rule, channels):
    pattern = Pattern(rule)
    layout = Layout("conv", (2, channels, 2, 1), pattern.size, pad=True)
    lowest = torch.full(layout.shape, torch.finfo(torch.float32).min)
    mask = Mask.from_scores(pattern, layout, lowest)
    whole, rest = divmod(channels, pattern.size)
    expected = whole * pattern.kept + min(rest, pattern.kept)
    assert mask.kept().sum(1).unique().tolist() == [expected]
    assert mask.density == expected / channels


def test_the_density_of_a_padded_layer_counts_real_weights_alone():
    layout = Layout("linear", (5, 6), 4, pad=True)
    assert a_mask("2:4", layout).density == 4 / 6
    assert a_mask("1:4", layout).density == 2 / 6
    assert a_mask("2:4", Layout("linear", (5, 1), 4, pad=True)).density == 1.0


def test_codes_that_waste_a_place_on_a_virtual_column_are_refused():
    layout = Layout("linear", (1, 3), 4, pad=True)
    for code in (0, 1, 3):  # 0,1  0,2  1,2
        Mask(Pattern("2:4"), layout, torch.tensor([[code]]))
    for code in (2, 4, 5):  # column 3 is virtual
        with pytest.raises(MaskError, match="virtual"):
            Mask(Pattern("2:4"), layout, torch.tensor([[code]]))


def test_with_fewer_real_weights_than_kept_places_all_real_ones_must_be_kept():
    layout = Layout("linear", (1, 1), 4, pad=True)
    for code in (0, 1, 2):
        assert Mask(Pattern("2:4"), layout, torch.tensor([[code]])).kept().tolist() == [[True]]
    with pytest.raises(MaskError, match="virtual"):
        Mask(Pattern("2:4"), layout, torch.tensor([[5]]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_codes_of_any_integer_type_are_taken(dtype):
    mask = Mask(Pattern("2:4"), LAYOUT, codes(0, 1, 2, 3, 4, 5).to(dtype))
    assert mask.codes.dtype == torch.uint8
    assert mask.codes.flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        codes(0, 1, 2, 3, 4, 6),
        codes(0, 1, 2, 3, 4, -1),
        codes(0, 1, 2, 3, 4, 256),
        codes(0, 1, 2, 3, 4, 5).float(),
        codes(0, 1, 1, 1, 1, 0).bool(),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int64),
        torch.zeros(3, 2, 4, dtype=torch.int64),
    ],
)
def test_illegal_codes_are_refused(wrong):
    with pytest.raises(MaskError):
        Mask(Pattern("2:4"), LAYOUT, wrong)


def test_a_pattern_that_does_not_fit_the_blocks_is_refused():
    with pytest.raises(MaskError, match=r"4:8.*4"):
        Mask(Pattern("4:8"), LAYOUT, codes(0, 0, 0, 0, 0, 0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_scores_must_be_finite(bad):
    scores = random(3, 8)
    scores[1, 2] = bad
    with pytest.raises(MaskError, match="finite"):
        Mask.from_scores(Pattern("2:4"), LAYOUT, scores)


def test_scores_are_compared_in_their_own_precision():
    layout = Layout("linear", (1, 2), 2)
    close = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert Mask.from_scores(Pattern("1:2"), layout, close).kept().tolist() == [[False, True]]
    large = torch.tensor([[1e300, 2e300]], dtype=torch.float64)
    assert Mask.from_scores(Pattern("1:2"), layout, large).kept().tolist() == [[False, True]]
    counted = torch.tensor([[2**24, 2**24 + 1]])
    assert Mask.from_scores(Pattern("1:2"), layout, counted).kept().tolist() == [[False, True]]


@pytest.mark.parametrize("row", [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_from_kept_refuses_blocks_that_keep_another_number(row):
    with pytest.raises(MaskError, match="exactly 2"):
        Mask.from_kept(Pattern("2:4"), Layout("linear", (1, 4), 4), torch.tensor([row], dtype=torch.bool))


def test_a_mask_does_not_change_with_the_tensor_that_it_was_made_of():
    given_codes = codes(0, 1, 2, 3, 4, 5).to(torch.uint8)
    mask = Mask(Pattern("2:4"), LAYOUT, given_codes)
    given_codes.zero_()
    mask.codes.zero_()
    mask.kept().zero_()
    assert mask.codes.flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_the_fields_of_a_mask_cannot_be_set():
    mask = a_mask("2:4", LAYOUT)
    with pytest.raises(AttributeError):
        mask.pattern = Pattern("1:4")
    with pytest.raises(TypeError):
        hash(mask)


def test_put_on_neither_writes_to_the_weight_nor_shares_memory_with_it():
    weight = random(3, 8)
    before = weight.clone()
    a_mask("4:4", LAYOUT).apply_to(weight).zero_()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_put_on_keeps_the_dtype(dtype):
    mask, weight = a_mask("2:4", LAYOUT), random(3, 8, dtype=dtype)
    assert mask.apply_to(weight).dtype == dtype
    assert same_bits(mask.apply_to(weight)[mask.kept()], weight[mask.kept()])


def test_put_on_gives_positive_zeros_even_for_nan_and_negative_weights():
    mask = Mask(Pattern("2:4"), Layout("linear", (1, 4), 4), torch.tensor([[0]]))
    result = mask.apply_to(torch.tensor([[-1.0, 2.0, -3.0, float("nan")]]))
    assert same_bits(result, torch.tensor([[-1.0, 2.0, 0.0, 0.0]]))


def test_difference_is_the_share_of_blocks_with_another_choice():
    one = Mask(Pattern("2:4"), LAYOUT, codes(0, 1, 2, 3, 4, 5))
    other = Mask(Pattern("2:4"), LAYOUT, codes(0, 1, 2, 0, 0, 5))
    assert one.difference(other) == pytest.approx(2 / 6)
    assert one.difference(one) == 0.0


def test_masks_of_other_patterns_or_layouts_cannot_be_compared():
    one = a_mask("2:4", LAYOUT)
    with pytest.raises(MaskError, match="compared"):
        one.difference(a_mask("1:4", LAYOUT))
    with pytest.raises(MaskError, match="compared"):
        one.difference(a_mask("2:4", Layout("linear", (3, 8), 4, channel_order=(1, 0, 2, 3, 4, 5, 6, 7))))


def test_masks_are_equal_when_everything_is():
    one = a_mask("2:4", LAYOUT)
    assert one == Mask(one.pattern, one.layout, one.codes, one.fingerprint)
    assert one != Mask(one.pattern, one.layout, (one.codes + 1) % 6, one.fingerprint)
    assert one != Mask(one.pattern, one.layout, one.codes)
    assert one != Mask(one.pattern, one.layout, one.codes, one.fingerprint, ("other",))
    assert one != Mask(one.pattern, Layout("linear", (3, 8), 4, pad=True), one.codes, one.fingerprint)
    assert one != "2:4"


def two_masks():
    return {"b": a_mask("2:4", LAYOUT), "a": a_mask("1:4", Layout("conv", (2, 4, 1, 1), 4), seed=1)}


def test_a_mask_set_is_a_read_only_mapping():
    given_masks = two_masks()
    masks = MaskSet(given_masks)
    given_masks.clear()
    assert list(masks) == ["b", "a"]
    assert len(masks) == 2
    assert "b" in masks
    assert "c" not in masks
    assert masks["a"].pattern == Pattern("1:4")
    with pytest.raises(KeyError):
        masks["c"]
    with pytest.raises(TypeError):
        masks["c"] = masks["a"]
    with pytest.raises(TypeError):
        hash(masks)
    masks.recipe["method"] = "another"  # a copy
    assert "method" not in masks.recipe
    assert copy.deepcopy(masks) == pickle.loads(pickle.dumps(masks)) == masks


def test_the_counts_of_a_mask_set_are_sums():
    masks = MaskSet(two_masks())
    assert masks.weights == 24 + 8
    assert masks.density == (12 + 2) / 32
    assert repr(masks) == "MaskSet(2 layers, 32 weights, 43.8 % kept)"


def test_repr_counts_one_layer_and_large_numbers():
    masks = MaskSet({"only": a_mask("2:4", Layout("linear", (64, 64), 4))})
    assert repr(masks) == "MaskSet(1 layer, 4,096 weights, 50.0 % kept)"
    assert repr(MaskSet({})) == "MaskSet(0 layers, 0 weights, 100.0 % kept)"


def test_differences_of_sets_weigh_layers_by_their_blocks():
    one = MaskSet(two_masks())
    changed = Mask(one["a"].pattern, one["a"].layout, (one["a"].codes + 1) % 4)
    other = MaskSet({"a": changed, "b": one["b"]})
    assert one.differences(other) == {"b": 0.0, "a": 1.0}
    assert one.difference(other) == pytest.approx(2 / 8)
    assert MaskSet({}).difference(MaskSet({})) == 0.0


def test_sets_of_other_layers_cannot_be_compared():
    one = MaskSet(two_masks())
    with pytest.raises(MaskError, match="b"):
        one.difference(MaskSet({"a": one["a"]}))


def test_sets_are_equal_by_masks_and_statistics():
    one, other = MaskSet(two_masks()), MaskSet(dict(reversed(two_masks().items())))
    assert one == other
    assert one != MaskSet({"a": one["a"]})
    assert one != one.with_statistics({"bn.running_mean": torch.zeros(3)})
    statistics = {"bn.running_mean": torch.ones(3)}
    assert one.with_statistics(statistics) == other.with_statistics(statistics)
    assert one.with_statistics(statistics) != other.with_statistics({"bn.running_mean": torch.zeros(3)})
    assert one != dict(one)


def test_with_statistics_and_with_recipe_give_new_sets():
    one = MaskSet(two_masks(), recipe={"method": "prune", "seed": 1})
    value = torch.ones(3)
    two = one.with_statistics({"bn.running_mean": value}).with_recipe(seed=2)
    value.zero_()
    two.statistics["bn.running_mean"].zero_()
    two.statistics.clear()
    assert two.statistics["bn.running_mean"].tolist() == [1, 1, 1]
    assert dict(two.recipe) == {"method": "prune", "seed": 2}
    assert (one.statistics, dict(one.recipe)) == ({}, {"method": "prune", "seed": 1})
    assert dict(two) == dict(one)


@pytest.mark.parametrize("rule", ["1:1", "4:4"])
def test_masks_that_keep_everything_leave_predictions_bit_equal(rule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3), nn.Flatten(), nn.Linear(256, 8))
    image = random(2, 4, 8, 8)
    masks = masks_for(model, "0", "2", "4", pattern=rule)
    assert masks.density == 1.0
    with untouched(model):
        assert same_bits(halve.apply(model, masks)(image), model(image))
