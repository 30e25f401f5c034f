import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large, lraspp_mobilenet_v3_large

import halve
from halve.errors import DataError, ModelError, OptionError
from tests.families import lively
from tests.untouched import untouched

CLASSES = 5


class Net(nn.Module):
    """Class scores of pixels."""

    def __init__(self, wrap=lambda scores: scores, classes=CLASSES):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
            )
            self.head, self.wrap = nn.Conv2d(8, classes, 1), wrap
        self.eval()

    def forward(self, x):
        return self.wrap(self.head(self.body(x)))


def as_out(scores):
    return {"out": scores, "aux": 0 * scores}


def images(count=3, size=(6, 7)):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def labels(count=3, size=(6, 7)):
    found = torch.randint(0, CLASSES - 1, (count, *size), generator=torch.Generator().manual_seed(2))
    found[0, :2], found[1, 0] = 255, -1  # without a class
    return found


def predicted(model, x):
    with torch.no_grad():
        result = model(x)
    return (result["out"] if isinstance(result, dict) else result).argmax(1).numpy()


def mean_iou(ours, theirs):
    shares = []
    for label in range(CLASSES):
        either = ((ours == label) | (theirs == label)).sum()
        if either:
            shares.append(((ours == label) & (theirs == label)).sum() / either)
    return np.mean(shares)


@pytest.mark.parametrize("wrap", [as_out, lambda scores: scores], ids=["torchvision", "plain"])
def test_every_number_is_that_of_a_plain_computation(wrap):
    model, x, y = Net(wrap), images(), labels()
    masks = halve.prune(model, pattern="1:4")
    with untouched(model):
        result = halve.evaluate(model, masks, [(x[:2], y[:2]), (x[2:], y[2:])])
    dense, sparse, target = predicted(model, x), predicted(halve.apply(model, masks), x), y.numpy()
    known = (target >= 0) & (target != 255)
    assert (result.task, result.images, result.outputs) == ("segmentation", 3, CLASSES)
    assert result.agreement == pytest.approx((dense == sparse).mean())
    assert result.miou_to_dense == pytest.approx(mean_iou(sparse, dense))
    assert result.top1 == pytest.approx((sparse == target)[known].mean())
    assert result.dense_top1 == pytest.approx((dense == target)[known].mean())
    assert result.miou == pytest.approx(mean_iou(sparse[known], target[known]))
    assert result.dense_miou == pytest.approx(mean_iou(dense[known], target[known]))
    assert 0 < result.miou_to_dense < result.agreement < 1
    assert result.kl > 0


def test_the_divergence_is_that_of_pixels():
    model, x = Net(), images()
    masks = halve.prune(model, pattern="1:4")
    result = halve.evaluate(model, masks, [x], task="segmentation")
    with torch.no_grad():
        ours, theirs = (net(x).double().log_softmax(1) for net in (halve.apply(model, masks), model))
    assert result.kl == pytest.approx(float((theirs.exp() * (theirs - ours)).sum(1).mean()))


def test_without_labels_agreement_is_known_and_with_all_weights_it_is_perfect():
    model = Net(as_out)
    result = halve.evaluate(model, halve.prune(model, pattern="4:4"), [images()])
    assert (result.agreement, result.miou_to_dense, result.kl) == (1.0, 1.0, 0.0)
    assert (result.top1, result.miou, result.dense_miou) == (None,) * 3
    assert repr(result) == (
        "Evaluation(task='segmentation', images=3, outputs=5, agreement=1.0, miou_to_dense=1.0, kl=0.0)"
    )
    alone = halve.evaluate(model, None, [(images(), labels())])
    assert alone.miou is not None
    assert (alone.agreement, alone.miou_to_dense) == (None, None)


def test_maps_without_a_sign_that_they_are_class_scores_are_refused():
    model = Net()
    with pytest.raises(ModelError, match=r"\(3, 5, 6, 7\), which may not be class scores; pass task='segmentation'"):
        halve.evaluate(model, None, [images()])
    assert halve.evaluate(model, None, [(images(), labels())]).task == "segmentation"
    assert halve.evaluate(model, None, [images()], task="segmentation").images == 3


def test_labels_of_images_are_no_labels_of_pixels():
    model = Net(as_out)
    assert halve.evaluate(model, None, [(images(), torch.tensor([0, 1, 2]))], task="segmentation").top1 is None


def test_scores_are_resized_to_the_labels():
    model = Net(lambda scores: {"out": scores[:, :, ::2, ::2]})
    result = halve.evaluate(model, None, [(images(3, (8, 8)), labels(3, (8, 8)))])
    assert 0 < result.miou < 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.full((3, 6, 7), CLASSES), "batch 0 has labels up to 5, but the model scores 5 classes"),
        (labels(2), "2 label maps for 3 outputs"),
    ],
)
def test_labels_that_do_not_fit_are_refused(target, message):
    with pytest.raises(DataError, match=message):
        halve.evaluate(Net(as_out), None, [(images(), target)])


def test_labels_for_some_batches_only_are_refused():
    with pytest.raises(DataError, match="only 3 of 6 images have labels"):
        halve.evaluate(Net(as_out), None, [(images(), labels()), images()])


def test_one_channel_is_refused_with_what_to_do():
    model = Net(classes=1)
    with pytest.raises(ModelError, match="may not be class scores"):
        halve.evaluate(model, None, [images()])
    with pytest.raises(ModelError, match=r"two classes or more.*torch.cat\(\[-score, score\], 1\)"):
        halve.evaluate(model, None, [images()], task="segmentation")

    def both(net, x):
        score = net(x)
        return torch.cat([-score, score], 1)

    result = halve.evaluate(model, halve.prune(model), [images()], task="segmentation", forward=both)
    assert result.outputs == 2
    assert result.kl > 0


def test_classes_are_for_images():
    with pytest.raises(OptionError, match="classes= is for class scores of images"):
        halve.evaluate(Net(as_out), None, [images()], classes=[0, 1])


@pytest.mark.parametrize("build", [lraspp_mobilenet_v3_large, deeplabv3_mobilenet_v3_large])
def test_torchvisions_networks_are_evaluated(build):
    model = lively(build(weights=None, weights_backbone=None, num_classes=4))
    x = torch.randn(2, 3, 48, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense = model(x)["out"].argmax(1)
    assert len(dense.unique()) > 1
    result = halve.evaluate(model, halve.prune(model), [(x, dense)])
    assert result.dense_miou == result.dense_top1 == 1.0
    assert 0 < result.agreement == result.top1 < 1
    assert result.miou == result.miou_to_dense < 1
