import math

import pytest
import torch

from halve.agreement import Agreement, compare, correct, kl_divergence
from tests.random_masks import random


def test_a_model_agrees_with_itself():
    scores = random(7, 5)
    assert compare(scores, scores) == Agreement(7, 7, 0.0)


def test_agreement_counts_top_1_classes_and_adds_up_over_batches():
    reference, scores = random(9, 4), random(9, 4, seed=1)
    same = int((reference.argmax(1) == scores.argmax(1)).sum())
    whole = compare(scores, reference)
    assert (whole.images, whole.same) == (9, same)
    assert 0 < whole.share == same / 9 < 1
    parts = compare(scores[:4], reference[:4]) + compare(scores[4:], reference[4:])
    assert (parts.images, parts.same) == (9, same)
    assert parts.kl == pytest.approx(whole.kl)


def test_the_kl_divergence_is_from_the_reference_per_image():
    scores = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])  # probabilities 1/4, 3/4 and 1/2, 1/2
    reference = torch.zeros(2, 2)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl_divergence(scores, reference).tolist() == pytest.approx([expected, 0.0])
    assert compare(scores, reference).kl == pytest.approx(expected / 2)
    reversed_ = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert kl_divergence(reference, scores)[0].item() == pytest.approx(reversed_)


def test_rounding_never_makes_the_divergence_negative():
    assert Agreement(10, 10, -1e-12).kl == 0.0


def test_scores_in_half_precision_are_compared_in_double():
    scores = random(5, 3).half()
    assert kl_divergence(scores, scores + 1).abs().max() < 1e-3
    assert kl_divergence(scores, scores).dtype == torch.float64


def test_correct_counts_labels():
    assert correct(torch.eye(3), torch.tensor([0, 1, 0])) == 2


def test_nan_agrees_with_nothing():
    scores = random(3, 4)
    broken = scores.clone()
    broken[1, scores[1].argmax()] = float("nan")
    found = compare(broken, scores)
    assert found.same == 2
    assert math.isnan(found.kl)
    assert correct(broken, broken.argmax(1)) == 2
