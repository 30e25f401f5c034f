import itertools
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halve.masks.pattern import Pattern
from halve.permute.search import _Search, best_order


def kept(scores, order, pattern):
    blocks = scores[:, order].reshape(len(scores), -1, pattern.size)
    return float(blocks.topk(pattern.kept, dim=2).values.sum()) / float(scores.sum())


def random_scores(rows, channels, seed=0):
    return torch.rand(rows, channels, generator=torch.Generator().manual_seed(seed)) ** 3


@given(st.sampled_from(["2:4", "1:4", "3:4", "1:2", "4:8"]), st.integers(1, 5), st.integers(0, 99))
@settings(max_examples=30)
def test_an_order_is_a_permutation_that_keeps_what_it_says(rule, blocks, seed):
    pattern = Pattern(rule)
    scores = random_scores(7, blocks * pattern.size, seed)
    found = best_order(scores, pattern)
    assert sorted(found.order.tolist()) == list(range(scores.shape[1]))
    assert found.kept_after == pytest.approx(kept(scores, found.order, pattern), rel=1e-5)
    assert found.kept_before == pytest.approx(kept(scores, torch.arange(scores.shape[1]), pattern), rel=1e-5)
    assert found.kept_after >= found.kept_before
    assert found.finished


def test_what_is_kept_with_is_what_a_block_keeps_with_another_channel():
    pattern, scores = Pattern("2:4"), random_scores(5, 12)
    columns, order = scores.T.contiguous(), torch.randperm(12, generator=torch.Generator().manual_seed(3))
    search = _Search(columns, order, pattern)
    search.evaluate(torch.arange(3))
    weighed = search._kept_with
    for slot, channel in itertools.product(range(12), range(12)):
        members = order.reshape(3, 4)[slot // 4].clone()
        members[slot % 4] = channel
        expected = scores[:, members].topk(2, dim=1).values.sum()
        assert float(weighed[slot, channel]) == pytest.approx(float(expected), rel=1e-5)


def test_no_exchange_of_two_channels_helps_any_more():
    pattern, scores = Pattern("2:4"), random_scores(9, 16)
    search = _Search(scores.T.contiguous(), torch.arange(16), pattern)
    search.evaluate(torch.arange(4))
    assert search.climb(time.monotonic() + 60)
    order, best = search.order, kept(scores, search.order, pattern)
    for a, b in itertools.combinations(range(16), 2):
        other = order.clone()
        other[a], other[b] = order[b], order[a]
        assert kept(scores, other, pattern) <= best + 1e-4


def test_the_best_of_all_orders_is_found_where_all_can_be_tried():
    pattern = Pattern("2:4")
    for seed in range(5):
        scores = random_scores(6, 8, seed)
        firsts = [torch.tensor((0, *rest)) for rest in itertools.combinations(range(1, 8), 3)]
        orders = [torch.cat([f, torch.tensor([c for c in range(8) if c not in f.tolist()])]) for f in firsts]
        assert best_order(scores, pattern).kept_after == pytest.approx(max(kept(scores, o, pattern) for o in orders))


def test_escapes_never_make_it_worse_and_the_seed_decides():
    scores, pattern = random_scores(20, 64), Pattern("2:4")
    plain = best_order(scores, pattern, escapes=0)
    more = best_order(scores, pattern, escapes=10)
    assert more.kept_after >= plain.kept_after
    assert torch.equal(more.order, best_order(scores, pattern, escapes=10).order)


def test_without_time_the_order_stays_legal_and_says_so():
    found = best_order(random_scores(20, 64), Pattern("2:4"), seconds=0)
    assert sorted(found.order.tolist()) == list(range(64))
    assert found.kept_after >= found.kept_before
    assert not found.finished


@pytest.mark.parametrize(("rule", "channels"), [("4:4", 8), ("2:4", 4)])
def test_where_nothing_can_be_gained_nothing_moves(rule, channels):
    found = best_order(random_scores(3, channels), Pattern(rule))
    assert found.order.tolist() == list(range(channels))
    assert found.kept_before == found.kept_after


def test_scores_of_zero_move_nothing():
    found = best_order(torch.zeros(3, 8), Pattern("2:4"))
    assert found.order.tolist() == list(range(8))


def test_scores_of_any_size_and_precision():
    for scale, dtype in ((1e-30, torch.float32), (1e30, torch.float32), (1.0, torch.float16), (1.0, torch.float64)):
        scores = (random_scores(9, 16) * scale).to(dtype)
        assert best_order(scores, Pattern("2:4")).kept_after > 0.6
