import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halve.errors import PatternError
from halve.masks import pattern as module
from halve.masks.pattern import MAX_CODES, MAX_SIZE, Pattern
from tests.random_masks import random

RULES = [
    "1:1",
    "1:2",
    "2:4",
    "1:4",
    "3:4",
    "4:4",
    "4:8",
    "8:16",
    "1:32",
    "31:32",
    "2:256",
    "254:256",
    "255:256",
    "256:256",
]
BRUTE = ["1:2", "2:3", "2:4", "1:4", "3:4", "4:4", "3:6", "4:8", "1:32"]


@pytest.mark.parametrize("rule", RULES)
def test_counts_follow_the_rule(rule):
    pattern = Pattern(rule)
    kept, size = map(int, rule.split(":"))
    assert (pattern.kept, pattern.size, str(pattern)) == (kept, size, rule)
    assert pattern.count == math.comb(size, kept)
    assert 2**pattern.bits >= pattern.count > (2 ** (pattern.bits - 1) if pattern.bits > 1 else 0)
    assert torch.iinfo(pattern.dtype).max >= pattern.count - 1


def test_4_of_8_has_70_codes_in_7_bits():
    assert (Pattern("4:8").count, Pattern("4:8").bits, Pattern("4:8").table().shape) == (70, 7, (70, 8))


def test_the_codes_of_2_4_are_the_documented_ones():
    kept = [row.nonzero().flatten().tolist() for row in Pattern("2:4").table()]
    assert kept == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]


@pytest.mark.parametrize("rule", RULES)
def test_codes_follow_the_lexicographic_order_of_kept_positions(rule):
    pattern = Pattern(rule)
    table = pattern.table()
    expected = torch.tensor(list(itertools.combinations(range(pattern.size), pattern.kept)))
    assert torch.equal(table.nonzero()[:, 1].reshape(-1, pattern.kept), expected)
    assert bool((table.sum(1) == pattern.kept).all())


@pytest.mark.parametrize("rule", RULES)
def test_encode_and_decode_are_inverse_for_every_code(rule):
    pattern = Pattern(rule)
    codes = torch.arange(pattern.count).to(pattern.dtype)
    assert torch.equal(pattern.encode(pattern.decode(codes)), codes)
    assert torch.equal(pattern.encode(pattern.table()), codes)
    assert pattern.encode(pattern.table()).dtype == pattern.dtype


@given(st.sampled_from(RULES[:9]), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 999))
def test_encode_and_decode_are_inverse_in_every_shape(rule, shape, seed):
    pattern = Pattern(rule)
    codes = torch.randint(pattern.count, shape, generator=torch.Generator().manual_seed(seed)).to(pattern.dtype)
    kept = pattern.decode(codes)
    assert kept.shape == (*shape, pattern.size)
    assert torch.equal(pattern.encode(kept), codes)


@given(st.sampled_from(BRUTE), st.integers(0, 10_000), st.booleans())
def test_choose_keeps_the_highest_sum_of_all_codes(rule, seed, ties):
    pattern = Pattern(rule)
    scores = random(3, 5, pattern.size, seed=seed)
    if ties:
        scores = scores.round()  # many equal scores
    sums = scores.double() @ pattern.table().double().T
    # Where sums are equal the lower code keeps the lower positions, since codes are in lexicographic order.
    best = (sums - torch.linspace(0, 1e-9, pattern.count, dtype=torch.float64)).argmax(-1)
    assert torch.equal(pattern.choose(scores).long(), best)


@given(st.sampled_from(RULES[:9]), st.integers(0, 10_000))
def test_every_kept_score_is_at_least_every_dropped_one(rule, seed):
    pattern = Pattern(rule)
    scores = random(7, pattern.size, seed=seed)
    kept = pattern.decode(pattern.choose(scores))
    lowest = scores.masked_fill(~kept, float("inf")).amin(-1)
    highest = scores.masked_fill(kept, float("-inf")).amax(-1)
    assert bool((lowest >= highest).all())


@pytest.mark.parametrize("rule", RULES)
def test_ties_go_to_the_lower_position(rule):
    pattern = Pattern(rule)
    for value in (0.0, -3.0, float("-inf")):
        kept = pattern.decode(pattern.choose(torch.full((2, pattern.size), value)))
        assert bool(kept[:, : pattern.kept].all())


def test_negative_zero_ties_with_zero():
    assert Pattern("1:2").choose(torch.tensor([-0.0, 0.0])).item() == 0


def test_choose_works_in_parts_as_in_one(monkeypatch):
    scores = random(50, 4)
    whole = Pattern("2:4").choose(scores)
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert torch.equal(Pattern("2:4").choose(scores), whole)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (4,), (1, 2, 3, 4)])
def test_choose_gives_one_code_per_block(shape):
    codes = Pattern("2:4").choose(torch.zeros(shape))
    assert codes.shape == shape[:-1]
    assert codes.dtype == torch.uint8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_choose_takes_any_number_type(dtype):
    assert Pattern("2:4").choose(torch.tensor([1, 4, 2, 3], dtype=dtype)).item() == 4


@pytest.mark.parametrize(
    "kept",
    [[[True, False, False, False]], [[True, True, True, False]], [[True, True, False]], [[True, True] * 4], [True]],
)
def test_encode_refuses_what_breaks_the_rule(kept):
    with pytest.raises(PatternError, match="exactly 2 of 4"):
        Pattern("2:4").encode(torch.tensor(kept))


@pytest.mark.parametrize("rule", ["0:4", "5:4", "1:257", "257:257", "0:0", "1:9999"])
def test_impossible_rules_are_refused_with_their_numbers(rule):
    with pytest.raises(PatternError, match=rule):
        Pattern(rule)


@pytest.mark.parametrize("rule", ["16:32", "128:256", "3:256", "10:20"])
def test_rules_with_too_many_choices_are_refused_with_the_number(rule):
    kept, size = map(int, rule.split(":"))
    assert math.comb(size, kept) > MAX_CODES
    with pytest.raises(PatternError, match=f"{math.comb(size, kept):,}"):
        Pattern(rule)


@pytest.mark.parametrize(
    "rule",
    [
        *("2-4", "", "2:4:8", "2:", ":4", " 2:4", "2:4\n", "-2:4", "+2:4", "2.0:4", "a:b", "99999:99999"),
        *("02:4", "2:04", "00:4", "٢:٤", "\uff12:\uff14", "2 :4", "2:4 ", "2\u200b:4", "\u202e2:4", "2_0:4"),
        *("1:" + "9" * 9999, None, 2, 0.5, (2, 4), b"2:4", ["2:4"]),
    ],
)
def test_what_is_no_rule_is_refused_and_repeated(rule):
    with pytest.raises(PatternError, match="N:M"):
        Pattern(rule)


def test_the_largest_size_can_be_used():
    assert Pattern(f"1:{MAX_SIZE}").count == MAX_SIZE


def test_a_pattern_is_a_value():
    pattern = Pattern("2:4")
    assert pattern == Pattern("2:4") == Pattern(pattern)
    assert len({pattern, Pattern("2:4"), Pattern("1:4")}) == 2
    assert pattern != Pattern("1:4")
    assert repr(pattern) == "Pattern('2:4')"
    assert pickle.loads(pickle.dumps(pattern)) == copy.deepcopy(pattern) == pattern
    with pytest.raises(AttributeError):
        pattern.kept = 3


def test_changing_a_table_changes_no_other():
    Pattern("2:4").table().zero_()
    assert Pattern("2:4").table().sum() == 12
    assert Pattern("2:4").decode(torch.tensor([0])).tolist() == [[True, True, False, False]]
