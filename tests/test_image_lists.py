"""Lists of images of different sizes, as detectors take them, in every public function but compile."""

import pytest
import torch
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

import halve
from halve.errors import DataError
from tests.detectors import DETECTORS, faster_rcnn, lively, pictures, ssd, targets
from tests.tiny import learn
from tests.untouched import untouched

BATCHES = {
    "lists": [pictures(2), pictures(3, seed=1)],
    "torchvision": [(pictures(2), targets(2)), (tuple(pictures(3, seed=1)), tuple(targets(3)))],
    "dicts": [{"images": pictures(2), "targets": targets(2)}, {"images": pictures(3, seed=1)}],
}


@pytest.mark.parametrize("score", ["wanda", "reconstruct"])
def test_scores_are_measured_on_batches_of_every_kind(score):
    model = ssd()
    with torch.no_grad():
        model(pictures(1))
    expected = halve.prune(model, score, BATCHES["lists"])
    with untouched(model):
        for batches in BATCHES.values():
            masks = halve.prune(model, score, batches)
            assert masks == expected
    assert expected.recipe["images"] == 5
    assert expected != halve.prune(model, score, [pictures(2, seed=2)])
    assert expected != halve.prune(model)


@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_is_scored_and_its_heads_stay_dense(name):
    model = DETECTORS[name]()
    masks = halve.prune(model, "reconstruct", [pictures(2)])
    assert halve.verify(halve.apply(model, masks), masks).ok
    assert not any("did not run" in reason for reason in masks.recipe["not_masked"].values())
    assert sum("output head" in reason for reason in masks.recipe["not_masked"].values()) >= 2


def test_statistics_are_recalibrated_on_lists():
    model = ssd()
    masks = halve.recalibrate(model, halve.prune(model), BATCHES["torchvision"])
    assert len(masks.statistics) == 6
    assert masks.recipe["recalibrated_on_images"] == 5


def test_channel_orders_are_found_and_checked_on_a_list():
    model = ssd()
    masks = halve.prune(model, "wanda", [pictures(1)], permute=True, permute_seconds=1)
    assert masks.recipe["permute"]["layers"] == 2
    sparse, plain = halve.apply(model, masks), halve.restore_order(halve.apply(model, masks), masks)
    assert not torch.equal(sparse.backbone.body[0].weight, plain.backbone.body[0].weight)
    assert halve.evaluate(sparse, None, [pictures(2, seed=5)], dense=plain).agreement > 0.98
    assert halve.evaluate(sparse, None, [pictures(2, seed=5)], dense=model).agreement < 0.95


@pytest.mark.parametrize("name", DETECTORS)
def test_detectors_learn_from_lists(name):
    model, reports = DETECTORS[name](), []
    masks = learn(model, BATCHES["torchvision"], steps=20, report=reports.append)
    losses = [report.loss for report in reports[1:]]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    assert masks.recipe["steps_done"] == 20
    start = halve.prune(model)
    assert all(masks[layer].difference(start[layer]) > 0 for layer in masks)  # a gradient reaches every layer


def test_all_kinds_of_batches_are_learned_from_alike():
    expected = learn(ssd(), BATCHES["lists"], steps=3)
    for batches in BATCHES.values():
        assert learn(ssd(), batches, steps=3) == expected


def test_a_forward_may_read_lists_beside_targets():
    def forward(model, batch):
        images, found = batch
        assert len(images) == len(found) == 2
        return model(images)

    model, batches = ssd(), [BATCHES["torchvision"][0]]
    options = {"permute": True, "permute_seconds": 1}
    masks = halve.prune(model, "wanda", batches, forward=forward, **options)
    assert masks.recipe["permute"]["layers"] == 2
    assert masks.recipe["images"] == 2
    assert learn(model, batches, steps=2, forward=forward).recipe["steps_done"] == 2
    assert halve.evaluate(model, masks, batches, forward=forward) == halve.evaluate(model, masks, batches)


def test_images_that_are_no_batch_get_advice():
    with pytest.raises(DataError, match="if this is one image, pass batches of images"):
        halve.prune(ssd(), "wanda", pictures(2))


def test_boxes_agree_less_the_more_is_left_out():
    model = faster_rcnn()
    results = {
        pattern: halve.evaluate(model, halve.prune(model, pattern=pattern), BATCHES["torchvision"])
        for pattern in ("4:4", "3:4", "1:4")
    }
    assert results["4:4"].agreement == results["4:4"].precision == results["4:4"].recall == 1.0
    assert 1 > results["3:4"].agreement > results["1:4"].agreement > 0
    assert results["3:4"].task == "detection"
    assert results["3:4"].images == 5
    assert results["3:4"].boxes > 0


def test_a_classifier_refuses_a_list_and_names_the_shapes():
    with pytest.raises(DataError, match=r"Conv2d failed on a list of images of shapes \(3, 40, 32\), \(3, 32, 36\)"):
        halve.evaluate(torch.nn.Conv2d(3, 4, 1), None, [pictures(2)])


@pytest.fixture(scope="module")
def ssdlite():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return lively(ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5))


def test_torchvisions_ssdlite_is_pruned_and_evaluated(ssdlite):
    batch = (pictures(2), targets(2))
    masks = halve.prune(ssdlite, "wanda", [batch])
    assert len(masks) == 54
    result = halve.evaluate(ssdlite, masks, [batch], min_score=0.3)
    assert result.boxes > 0
    assert result.dense_boxes > 0
    assert 0 < result.agreement < 1
