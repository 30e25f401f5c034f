import pytest
import torch
from torch import nn

import halve
from halve.errors import OptionError
from tests.tiny import convnet, images, labels
from tests.untouched import untouched


def losses(model, masks, data, **options):
    return halve.evaluate(model, masks, data, per_layer=True, progress=False, **options).layers


def test_each_loss_is_that_of_the_model_with_only_this_mask():
    model, data = convnet(), [(images(), labels())]
    masks = halve.prune(model)
    found = losses(model, masks, data)
    assert list(found) == list(masks)
    for name, loss in found.items():
        alone = halve.evaluate(model, masks.without(set(masks) - {name}), data, progress=False)
        assert (loss.agreement, loss.kl) == (alone.agreement, pytest.approx(alone.kl, rel=1e-6))


def test_the_feature_error_is_that_of_the_layers_own_outputs():
    model, x = convnet(), images()
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    with torch.no_grad():
        features = model[:3](x)
        dense, masked = model[3](features), sparse[3](features)
    expected = float((masked - dense).norm() / dense.norm())
    assert losses(model, masks, x)["3"].feature_error == pytest.approx(expected, rel=1e-5)


def test_batches_add_up():
    model = convnet()
    masks = halve.prune(model)
    whole, parts = losses(model, masks, [images()]), losses(model, masks, images().split(5))
    for name, loss in whole.items():
        assert parts[name].agreement == loss.agreement
        assert parts[name].feature_error == pytest.approx(loss.feature_error, rel=1e-5)


def test_a_tied_weight_is_masked_wherever_it_is_used():
    one = nn.Linear(8, 8)
    model = nn.Sequential(one, nn.ReLU(), one, nn.ReLU(), nn.Linear(8, 4)).eval()
    masks, data = halve.prune(model), [torch.randn(64, 8)]
    [loss] = losses(model, masks, data).values()
    assert loss.agreement == halve.evaluate(model, masks, data, progress=False).agreement


def test_a_computed_weight_is_masked():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)).eval()
    [loss] = losses(model, halve.prune(model), [torch.randn(64, 8)]).values()
    assert loss.feature_error > 0


def test_outputs_that_are_no_classes_have_an_error():
    model = convnet()
    found = losses(model, halve.prune(model), images(), task="regression")
    assert all(loss.agreement is None and loss.output_error > 0 for loss in found.values())


def test_the_model_is_not_changed():
    model = convnet()
    with untouched(model):
        losses(model, halve.prune(model), images())


def test_it_needs_masks():
    with pytest.raises(OptionError, match="per_layer=True needs masks"):
        halve.evaluate(convnet(), None, images(), per_layer=True)


def test_the_json_has_the_layers_and_the_repr_has_not():
    model = convnet()
    found = halve.evaluate(model, halve.prune(model), images(), per_layer=True, progress=False)
    assert found.as_json()["layers"]["3"]["kl"] == found.layers["3"].kl
    assert "layers" not in repr(found)
    assert "layers" not in halve.evaluate(model, halve.prune(model), images(), progress=False).as_json()
