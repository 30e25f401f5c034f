import pytest
import torch
from torch import nn

import halve
from halve.detectors import first_run, head_outputs, head_outputs_in, takes_lists
from halve.errors import ModelError
from halve.select.head import find_heads
from tests.detectors import DETECTORS, faster_rcnn, pictures, ssd
from tests.tiny import convnet, images
from tests.untouched import untouched


@pytest.mark.parametrize("name", DETECTORS)
@torch.no_grad()
def test_a_changed_detector_is_compared_in_the_regions_of_the_original(name):
    model, batch = DETECTORS[name](), pictures(2)
    sparse = halve.apply(model, halve.prune(model))
    for net in (model, sparse):
        net(batch)  # torchvision's pooling remembers the scales of its first images
    with untouched(model):
        result, dense = first_run(model, lambda: model(batch))
        same = head_outputs_in(dense, model, lambda: model(batch))
    assert [len(one["boxes"]) > 0 for one in result] == [True, True]
    assert dense.heads == find_heads(model)
    expected = dense.relative_to(dense)
    assert torch.equal(same.relative_to(dense), expected)
    with untouched(sparse):
        changed = head_outputs_in(dense, sparse, lambda: sparse(batch)).relative_to(dense)
    assert changed.shape == expected.shape
    assert 0.01 < (changed - expected).norm() / expected.norm() < 2


@torch.no_grad()
def test_every_head_counts_the_same():
    model = faster_rcnn()
    _, dense = first_run(model, lambda: model(pictures(2)))
    assert dense.relative_to(dense).square().sum().item() == pytest.approx(4)


@torch.no_grad()
def test_without_the_regions_of_the_original_other_ones_are_looked_at():
    model, batch = faster_rcnn(), pictures(2)
    sparse = halve.apply(model, halve.prune(model))
    _, dense = first_run(model, lambda: model(batch))
    own = head_outputs(sparse, lambda: sparse(batch), dense.heads)
    fixed = head_outputs_in(dense, sparse, lambda: sparse(batch))
    assert not torch.equal(own.regions[0][0][0], dense.regions[0][0][0])
    named = [dict(seen.calls)["roi_heads.box_predictor.cls_score"] for seen in (own, fixed)]
    assert named[0].shape != named[1].shape or not torch.allclose(*named)


def test_other_models_are_no_detectors():
    model = convnet()
    result, found = first_run(model, lambda: model(images(2)))
    assert found is None
    assert torch.equal(result, model(images(2)))
    assert (takes_lists(model), takes_lists(ssd())) == (False, True)


def test_a_detector_without_heads_asks_for_forward():
    class Blind(nn.Module):
        def forward(self, pictures):
            return [{"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)} for _ in pictures]

    with pytest.raises(ModelError, match=r"no layers were found.*forward="):
        first_run(Blind(), lambda: Blind()(pictures(2)))


def test_heads_that_run_less_often_cannot_be_compared():
    model = faster_rcnn()
    with torch.no_grad():
        _, dense = first_run(model, lambda: model(pictures(2)))
        with pytest.raises(ModelError, match="ran 0 times instead of 4"):
            head_outputs_in(dense, model, lambda: None)
