"""Masks on layers whose weight is computed from other tensors."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halve
from halve.masks.apply import apply
from halve.modules import weight_of
from tests.masks.computed import wrapped
from tests.random_masks import masks_for, random
from tests.untouched import same_bits, untouched


def model_of(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Conv2d(4, 8, 3)), nn.Flatten(), wrap(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 2))
    model(random(2, 4, 3, 3))  # as after some training
    return model


@wrapped
@pytest.mark.parametrize("training", [True, False])
def test_a_computed_weight_becomes_a_plain_one_in_the_copy_alone(wrap, training):
    model = model_of(wrap).train(training)
    image = random(2, 4, 3, 3)
    dense = {name: weight_of(model.get_submodule(name)).clone() for name in ("0", "2")}
    masks = masks_for(model, "0", "2")
    with untouched(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = apply(model, masks, on_changed="error")
    for name in ("0", "2"):
        layer = copy.get_submodule(name)
        assert type(layer) in (nn.Conv2d, nn.Linear)
        assert isinstance(layer.weight, nn.Parameter)
        assert same_bits(layer.weight, masks[name].apply_to(dense[name]))
    assert set(copy.state_dict()) == {f"{n}.{key}" for n in (0, 2, 4) for key in ("weight", "bias")}
    hidden = F.conv2d(image, masks["0"].apply_to(dense["0"]), model[0].bias).flatten(1)
    hidden = F.linear(hidden, masks["2"].apply_to(dense["2"]), model[2].bias).relu()
    assert torch.allclose(copy(image), model[4](hidden), atol=1e-6)


@wrapped
def test_the_model_runs_trains_and_can_be_masked_again_afterwards(wrap):
    model = model_of(wrap).eval()
    image = random(2, 4, 3, 3)
    expected = model(image)
    masks = masks_for(model, "0", "2")
    one, two = apply(model, masks), apply(model, masks)
    assert same_bits(model(image), expected)
    assert same_bits(one(image), two(image))
    model.train()(image).sum().backward()
    one.train()(image).sum().backward()


@wrapped
def test_a_layer_that_is_not_masked_keeps_what_computes_its_weight(wrap):
    model = model_of(wrap).eval()
    with untouched(model):
        copy = apply(model, masks_for(model, "0"))
    assert {name for name in model.state_dict() if name.startswith("2.")} == {
        name for name in copy.state_dict() if name.startswith("2.")
    }
    assert same_bits(weight_of(copy[2]), weight_of(model[2]))


@wrapped
@pytest.mark.parametrize("training", [True, False])
def test_select_prune_and_apply_move_no_buffer(wrap, training):
    model = model_of(wrap).train(training)
    with untouched(model):
        masks = halve.prune(model)
    assert list(masks) == ["0", "2"]
    with untouched(model):
        halve.apply(model, masks)


@wrapped
def test_frozen_computed_weights_stay_frozen_in_the_copy(wrap):
    model = model_of(wrap).requires_grad_(False)
    copy = apply(model, masks_for(model, "0", "2"))
    parameters = dict(copy.named_parameters())
    assert {"0.weight", "2.weight"} <= set(parameters)
    assert not any(parameter.requires_grad for parameter in parameters.values())
