import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import halve
from halve.errors import ChangedWeightsWarning, DataError, MaskError, ModelError, OptionError
from tests.untouched import untouched


def network(classes=10):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.Dropout(), nn.Linear(16, classes)
    ).eval()


def images(count=90):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(1))


def labels(count=90, classes=10):
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(2))


def batches(x, y, size=40):
    return list(zip(x.split(size), y.split(size), strict=True))


def outputs_of(model, x):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x).double().numpy()


def top(outputs, targets, k):
    best = np.argsort(-outputs, axis=1)[:, :k]
    return np.mean([target in row for row, target in zip(best, targets, strict=True)])


def divergence(dense, sparse):
    def log_softmax(rows):
        shifted = rows - rows.max(1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))

    p, q = log_softmax(dense), log_softmax(sparse)
    return float(np.mean((np.exp(p) * (p - q)).sum(1)))


def test_every_number_is_that_of_a_plain_computation():
    model, x, y = network(), images(), labels()
    masks = halve.prune(model, pattern="1:4")
    with untouched(model):
        result = halve.evaluate(model, masks, batches(x, y))
    dense, sparse = outputs_of(model, x), outputs_of(halve.apply(model, masks), x)
    assert result.images == 90
    assert result.top1 == pytest.approx(top(sparse, y, 1))
    assert result.top5 == pytest.approx(top(sparse, y, 5))
    assert result.dense_top1 == pytest.approx(top(dense, y, 1))
    assert result.dense_top5 == pytest.approx(top(dense, y, 5))
    assert result.agreement == pytest.approx(np.mean(dense.argmax(1) == sparse.argmax(1)))
    assert result.kl == pytest.approx(divergence(dense, sparse), rel=1e-5)
    assert 0 < result.agreement < 1


def test_without_masks_the_model_alone_is_counted():
    model, x, y = network(), images(), labels()
    result = halve.evaluate(model, None, batches(x, y))
    assert result.top1 == pytest.approx(top(outputs_of(model, x), y, 1))
    assert (result.agreement, result.kl, result.dense_top1, result.dense_top5) == (None,) * 4


def test_dense_is_compared_with_instead_of_masks():
    model, x, y = network(), images(), labels()
    masks = halve.prune(model)
    with untouched(model):
        assert halve.evaluate(halve.apply(model, masks), None, batches(x, y), dense=model) == halve.evaluate(
            model, masks, batches(x, y)
        )
    with pytest.raises(OptionError, match="not both"):
        halve.evaluate(model, masks, batches(x, y), dense=model)


def test_two_models_with_different_outputs_cannot_be_compared():
    with pytest.raises(ModelError, match=r"10.*7|7.*10"):
        halve.evaluate(network(), None, images(), dense=network(7))


def test_without_labels_agreement_is_still_known():
    model = network()
    masks = halve.prune(model)
    result = halve.evaluate(model, masks, images())
    with_labels = halve.evaluate(model, masks, batches(images(), labels()))
    assert result.images == 90
    assert (result.top1, result.top5, result.dense_top1, result.dense_top5) == (None,) * 4
    assert result.agreement == with_labels.agreement
    assert result.kl == pytest.approx(with_labels.kl)


def test_a_mask_that_keeps_everything_changes_nothing():
    model = network()
    result = halve.evaluate(model, halve.prune(model, pattern="4:4"), batches(images(), labels()))
    assert result.agreement == 1.0
    assert result.kl == 0.0
    assert (result.top1, result.top5) == (result.dense_top1, result.dense_top5)


def test_classes_map_the_datas_labels_to_the_classifiers_outputs():
    model, x, y = network(), images(), labels(classes=3)
    classes = [7, 2, 5]
    mapped = torch.tensor(classes)[y]
    assert halve.evaluate(model, None, batches(x, y), classes=classes) == halve.evaluate(
        model, None, batches(x, mapped)
    )
    assert halve.evaluate(model, None, batches(x, y), classes=range(3)) == halve.evaluate(model, None, batches(x, y))


@pytest.mark.parametrize("bad", [-1, 10])
def test_labels_outside_the_classifier_are_refused(bad):
    y = labels()
    y[50] = bad
    low, high = int(y[40:80].min()), int(y[40:80].max())
    with pytest.raises(DataError, match=f"batch 1 has labels from {low} to {high}.*10 outputs.*classes="):
        halve.evaluate(network(), None, batches(images(), y))


def test_labels_outside_classes_and_classes_outside_the_classifier_are_refused():
    data = batches(images(), labels(classes=3))
    with pytest.raises(DataError, match="classes= lists 2"):
        halve.evaluate(network(), None, data, classes=[0, 1])
    for classes in ([0, 1, 10], [-1, 0, 1]):
        with pytest.raises(OptionError, match="outputs from 0 to 9"):
            halve.evaluate(network(), None, data, classes=classes)


def test_a_class_that_is_no_integer_is_refused():
    with pytest.raises(OptionError, match="classes="):
        halve.evaluate(network(), None, batches(images(), labels(classes=3)), classes=[0.5, 1.5, 2.5])


def test_labels_for_some_batches_only_are_refused():
    data = [(images(40), labels(40)), images(50)]
    with pytest.raises(DataError, match="only 40 of 90 images have labels"):
        halve.evaluate(network(), None, data)


def test_as_many_labels_as_outputs_are_needed():
    with pytest.raises(DataError, match="batch 0 has 3 labels for 5 outputs"):
        halve.evaluate(network(), None, [(images(5), labels(3))])


@pytest.mark.parametrize("classes", [2, 4])
def test_under_five_classes_there_is_no_top5(classes):
    model = network(classes)
    result = halve.evaluate(model, halve.prune(model), batches(images(), labels(classes=classes)))
    assert result.top5 is None
    assert result.dense_top5 is None
    assert result.top1 is not None
    assert result.dense_top1 is not None


def test_with_five_classes_top5_is_everything():
    assert halve.evaluate(network(5), None, batches(images(), labels(classes=5))).top5 == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_outputs_that_are_not_finite_are_refused_with_the_batch(bad):
    model, x = network(), images()
    x[45] = bad
    with untouched(model), pytest.raises(DataError, match="the masked model returned NaN or infinity for batch 1"):
        halve.evaluate(model, halve.prune(model), x.split(40))
    broken = network()
    with torch.no_grad():
        broken[5].bias[0] = bad
    with pytest.raises(DataError, match="the dense model returned NaN or infinity for batch 0"):
        halve.evaluate(model, None, images(), dense=broken)


def test_outputs_in_a_dict_or_tuple_are_found():
    class Wrapped(nn.Module):
        def __init__(self, inner, kind):
            super().__init__()
            self.inner, self.kind = inner, kind

        def forward(self, x):
            return {"logits": self.inner(x), "aux": x} if self.kind is dict else (self.inner(x), x)

    data = batches(images(), labels())
    expected = halve.evaluate(network(), None, data)
    for kind in (dict, tuple):
        assert halve.evaluate(Wrapped(network(), kind), None, data) == expected


def test_outputs_that_are_no_rows_of_scores_are_refused_and_forward_can_reduce_them():
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
    x = torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ModelError, match=r"\(3, 8, 5, 5\).*task='segmentation'.*forward="):
        halve.evaluate(model, None, [x])
    result = halve.evaluate(model, halve.prune(model, pattern="4:4"), [x], forward=lambda m, b: m(b).mean((2, 3)))
    assert (result.images, result.agreement) == (3, 1.0)


def test_forward_takes_batches_whose_second_tensor_is_no_label():
    model = network()
    pairs = [(images(), images())]
    result = halve.evaluate(model, halve.prune(model), pairs, forward=lambda m, b: m((b[0] + b[1]) / 2))
    assert result == halve.evaluate(model, halve.prune(model), [images()])


@pytest.mark.parametrize("training", [True, False])
def test_the_model_runs_in_eval_mode_and_comes_back_as_it_was(training):
    model, data = network().train(training), batches(images(), labels())
    model[1].train(not training)
    masks = halve.prune(model)
    with untouched(model):
        result = halve.evaluate(model, masks, data)
        alone = halve.evaluate(model, None, data)
        with pytest.raises(DataError):
            halve.evaluate(model, masks, [torch.zeros(2, 3)])
        with pytest.raises(DataError):
            halve.evaluate(model, masks, [])
    assert result == halve.evaluate(network(), masks, data)
    assert alone == halve.evaluate(network(), None, data)


def test_no_gradients_are_left_behind():
    model = network()
    model(images()).sum().backward()
    with untouched(model):
        halve.evaluate(model, halve.prune(model), images())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_counted_too(dtype):
    model = network()
    cast = copy.deepcopy(model).to(dtype)
    data = batches(images(), labels())
    assert halve.evaluate(cast, None, data).top1 == pytest.approx(halve.evaluate(model, None, data).top1, abs=0.05)
    assert halve.evaluate(cast, halve.prune(cast, pattern="4:4"), data).kl == 0.0


def test_progress_sees_every_batch():
    seen = []

    def progress(items, description):
        for item in items:
            seen.append(description)
            yield item

    halve.evaluate(network(), None, batches(images(), labels()), progress=progress)
    assert seen == ["images"] * 3


def test_changed_weights_warn_raise_or_pass_as_asked():
    model = network()
    masks = halve.prune(model)
    with torch.no_grad():
        model[0].weight += 0.1
    with pytest.warns(ChangedWeightsWarning, match="0 by about"):
        result = halve.evaluate(model, masks, images())
    with pytest.raises(MaskError, match="changed"):
        halve.evaluate(model, masks, images(), on_changed="error")
    assert halve.evaluate(model, masks, images(), on_changed="ignore") == result


def test_recalibrated_statistics_count():
    model = network()
    masks = halve.recalibrate(model, halve.prune(model), images() * 5)
    assert halve.evaluate(model, masks, images()) == halve.evaluate(
        halve.apply(model, masks), None, images(), dense=model
    )
    assert halve.evaluate(model, masks, images()) != halve.evaluate(model, halve.prune(model), images())
