import math

import pytest
import torch
from torch import nn

import halve
from halve.check.detection import intersection_over_union, partners
from halve.errors import DataError, ModelError, OptionError

BOX = torch.tensor([0.0, 0.0, 10.0, 10.0])


def found(*boxes):
    """Boxes given as (offset to the right, label, score)."""
    return {
        "boxes": torch.stack([BOX + torch.tensor([right, 0.0, right, 0.0]) for right, _, _ in boxes] or [BOX])[
            : len(boxes)
        ],
        "labels": torch.tensor([label for _, label, _ in boxes], dtype=torch.long),
        "scores": torch.tensor([score for _, _, score in boxes]),
    }


class Fixed(nn.Module):
    """Returns the same boxes for every batch."""

    def __init__(self, *results):
        super().__init__()
        self.results = results

    def forward(self, images):
        return list(self.results)


def compared(ours, theirs, **options):
    """Our boxes in one image, compared with those of the dense model."""
    return halve.evaluate(Fixed(ours), None, [[torch.zeros(3, 4, 4)]], dense=Fixed(theirs), **options)


def test_overlap_is_that_of_areas():
    one = torch.tensor([[0.0, 0.0, 4.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    other = torch.tensor([[2.0, 1.0, 6.0, 3.0], [0.0, 0.0, 4.0, 2.0], [5.0, 5.0, 6.0, 6.0]])
    expected = torch.tensor([[2 / 14, 1.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(intersection_over_union(one, other), expected)


@pytest.mark.parametrize(
    ("right", "label", "partner"),
    [(0, 1, 1), (3.3, 1, 1), (3.4, 1, 0), (0, 2, 0)],  # moved by d, two boxes of width 10 overlap by (10-d)/(10+d)
)
def test_partners_have_the_same_label_and_half_of_the_area(right, label, partner):
    assert partners(found((0, 1, 0.9)), found((right, label, 0.1))) == partner


def test_every_box_has_one_partner_at_most_and_high_scores_choose_first():
    assert partners(found((0, 1, 0.9), (1, 1, 0.8)), found((0, 1, 0.9))) == 1
    # The first takes the closer of the two, so that the second finds the other one.
    assert partners(found((0, 1, 0.8), (2, 1, 0.9)), found((2, 1, 0.5), (-1, 1, 0.5))) == 2


def test_only_boxes_with_the_score_count_but_partners_may_have_any():
    ours, theirs = found((0, 1, 0.9), (50, 1, 0.2)), found((0, 1, 0.3), (90, 1, 0.9))
    assert partners(ours, theirs, 0.5) == 1
    assert partners(theirs, ours, 0.5) == 0


def test_boxes_are_compared_in_both_directions():
    result = compared(found((0, 1, 0.9), (50, 1, 0.8), (90, 2, 0.7)), found((0, 1, 0.9)))
    assert (result.task, result.images, result.boxes, result.dense_boxes) == ("detection", 1, 3, 1)
    assert (result.precision, result.recall) == (pytest.approx(1 / 3), 1.0)
    assert result.agreement == pytest.approx((1 + 1) / (3 + 1))
    assert compared(found((0, 1, 0.9)), found((0, 1, 0.9), (50, 1, 0.8))).recall == 0.5
    high = compared(found((0, 1, 0.9), (50, 1, 0.8)), found((0, 1, 0.3), (70, 1, 0.9)), min_score=0.85)
    assert (high.boxes, high.dense_boxes, high.precision, high.recall) == (1, 1, 1.0, 0.0)


def test_without_any_box_there_is_no_agreement():
    result = compared(found(), found())
    assert (result.boxes, result.dense_boxes) == (0, 0)
    assert (result.agreement, result.precision, result.recall) == (None, None, None)
    assert compared(found(), found((0, 1, 0.9))).agreement == 0.0
    assert compared(found((0, 1, 0.9)), found()).precision == 0.0


def test_a_detector_alone_has_boxes_only():
    result = halve.evaluate(Fixed(found((0, 1, 0.9))), None, [[torch.zeros(3, 4, 4)]])
    assert repr(result) == "Evaluation(task='detection', images=1, boxes=1)"


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (found((0, 1, 0.9)) | {"labels": torch.zeros(2)}, ModelError, r"boxes \(1, 4\), labels \(2,\), scores \(1,\)"),
        (found((math.nan, 1, 0.9)), DataError, "the model returned NaN or infinity for batch 0"),
        (found((0, 1, math.inf)), DataError, "the model returned NaN or infinity for batch 0"),
    ],
)
def test_boxes_that_cannot_be_compared_are_refused(result, error, message):
    with pytest.raises(error, match=message):
        compared(result, found())


def test_other_outputs_are_no_boxes():
    model = nn.Linear(4, 2)
    with pytest.raises(ModelError, match=r"task='detection' needs a list of dicts.*returned a Tensor.*forward="):
        halve.evaluate(model, None, [torch.zeros(2, 4)], task="detection")
    with pytest.raises(ModelError, match=r"shape \(1,\), but the dense model \(2,\)"):
        halve.evaluate(Fixed(found()), None, [[torch.zeros(3, 4, 4)]], dense=Fixed(found(), found()))


@pytest.mark.parametrize("score", [-0.1, 1.1, "high", None])
def test_a_score_outside_of_0_and_1_is_refused(score):
    with pytest.raises(OptionError, match="min_score must be between 0 and 1"):
        compared(found(), found(), min_score=score)
