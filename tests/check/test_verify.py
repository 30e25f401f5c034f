import copy
import math

import pytest
import torch
from torch import nn
from torchvision import models

import halve
from halve.errors import MaskError, OptionError
from halve.masks.mask import Mask, MaskSet
from tests.untouched import untouched


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 1), nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 4)
    )


def by_name(verification):
    return {layer.name: layer for layer in verification.layers}


def test_a_dense_model_with_its_masks_is_fine_and_dense():
    model = network()
    masks = halve.prune(model)
    with untouched(model):
        result = halve.verify(model, masks)
    assert result.ok
    assert result.failures == {}
    assert [layer.name for layer in result.layers] == ["0", "2", "4"]
    for layer in result.layers:
        assert layer.legal
        assert layer.state == "dense"
        assert layer.unchanged
        assert layer.update is None
        assert layer.failure is None


def test_a_model_with_the_masks_on_is_fine_and_masked():
    model = network()
    masks = halve.prune(model)
    result = halve.verify(halve.apply(model, masks), masks)
    assert result.ok
    assert {layer.state for layer in result.layers} == {"masked"}
    assert all(layer.unchanged for layer in result.layers)


def test_a_changed_weight_fails_with_the_size_of_the_change():
    model = network()
    masks = halve.prune(model)
    with torch.no_grad():
        model[2].weight *= 1.1
    result = halve.verify(model, masks)
    assert not result.ok
    assert list(result.failures) == ["2"]
    layer = by_name(result)["2"]
    assert layer.state == "changed"
    assert layer.unchanged is False
    assert layer.update == pytest.approx(0.1, rel=1e-3)
    assert layer.failure == "its weight changed by about 10 % since the mask was made"
    assert by_name(result)["0"].state == "dense"


def test_one_changed_bit_is_a_change():
    model = network()
    masks = halve.prune(model)
    with torch.no_grad():
        weight = model[0].weight.view(-1)
        weight[5] = torch.nextafter(weight[5], torch.tensor(9.0))
    result = halve.verify(model, masks)
    assert list(result.failures) == ["0"]
    assert 0 <= by_name(result)["0"].update < 1e-5


def test_a_cast_counts_as_a_small_change():
    model = network()
    result = halve.verify(copy.deepcopy(model).half(), halve.prune(model))
    assert all(layer.state == "changed" for layer in result.layers)
    assert all(layer.update < 1e-3 for layer in result.layers)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_fail_with_masks_and_without(bad):
    model = network()
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    with torch.no_grad():
        sparse[0].weight[masks["0"].kept()] = bad
    for result in (halve.verify(sparse, masks), halve.verify(sparse)):
        assert result.failures == {"0": "its weight contains NaN or infinity"}
        assert not result.ok


def test_masks_without_fingerprints_know_nothing_of_changes():
    model = network()
    masks = MaskSet({name: Mask(m.pattern, m.layout, m.codes) for name, m in halve.prune(model).items()})
    result = halve.verify(model, masks)
    assert result.ok
    assert {(layer.state, layer.unchanged, layer.update) for layer in result.layers} == {("unknown", None, None)}


def test_without_masks_a_dense_model_fails_in_every_layer():
    model = network()
    with untouched(model):
        result = halve.verify(model)
    assert not result.ok
    assert result.failures == dict.fromkeys(("0", "2", "4"), "100 % of its blocks keep more than 2:4")
    assert not any(layer.legal for layer in result.layers)


def test_without_masks_only_the_layers_that_are_not_sparse_fail():
    model = network()
    sparse = halve.apply(model, halve.prune(model, exclude="2"))
    assert list(halve.verify(sparse).failures) == ["2"]
    assert halve.verify(sparse, exclude="2").ok


def test_without_masks_a_sparse_model_is_fine_under_the_same_options_only():
    model = network()
    flat = halve.apply(model, halve.prune(model, order="flat", pattern="1:4"))
    assert halve.verify(flat, order="flat", pattern="1:4").ok
    assert list(halve.verify(flat, pattern="1:4").failures) == ["0"]
    assert halve.verify(flat, order="flat").ok


def test_one_weight_too_many_is_seen():
    model = network()
    sparse = halve.apply(model, halve.prune(model))
    with torch.no_grad():
        sparse[4].weight[3, 4:8] = 1
    assert halve.verify(sparse).failures == {"4": "4.17 % of its blocks keep more than 2:4"}


def test_eligibility_is_told_for_each_layer():
    layers = by_name(halve.verify(network(), halve.prune(network())))
    assert (layers["0"].not_tensorrt, layers["0"].not_tensor_cores) == (None, None)
    assert layers["2"].not_tensor_cores == "12 output channels, not divisible by 8"
    assert layers["4"].not_tensor_cores == "12 input channels, not divisible by 16"
    flat = by_name(halve.verify(network(), halve.prune(network(), order="flat")))
    assert "more than 2 nonzero weights" in flat["0"].not_tensorrt
    assert flat["0"].failure is None


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 16, 3, groups=2), nn.ConvTranspose2d(16, 16, 3), nn.Conv2d(6, 8, 3)])
def test_grouped_transposed_and_padded_layers_are_legal_but_not_eligible(layer):
    model = nn.Sequential(layer, nn.ReLU())
    result = halve.verify(model, halve.prune(model, also="0", remainder="pad"))
    assert result.ok
    assert result.layers[0].not_tensorrt is not None
    assert result.layers[0].not_tensor_cores is not None


def test_masks_and_options_together_are_refused():
    model = network()
    with pytest.raises(OptionError, match="not both; got masks and pattern, also"):
        halve.verify(model, halve.prune(model), pattern="2:4", also="5")


def test_masks_of_another_model_are_refused():
    model = network()
    other = nn.Sequential(*[nn.ReLU()] * 7, nn.Linear(8, 8), nn.LayerNorm(8))
    with untouched(model), pytest.raises(MaskError, match="another model: Sequential has no layer 7"):
        halve.verify(model, halve.prune(other))
    with pytest.raises(MaskError, match=r"layer 0 has a weight of shape \(16, 16, 3, 3\).*\(16, 8, 3, 3\)"):
        halve.verify(model, halve.prune(nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU())))
    with pytest.raises(MaskError, match="layer 0 is a Conv2d, but its mask is for a linear layer"):
        halve.verify(model, halve.prune(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))))


def test_nothing_checked_is_not_ok():
    assert not halve.verify(nn.Sequential(nn.Linear(8, 2))).ok
    assert not halve.verify(network(), MaskSet({})).ok
    assert halve.verify(network(), MaskSet({})).failures == {}


def test_a_wrong_option_is_an_error():
    with pytest.raises(OptionError, match="matches no layer"):
        halve.verify(network(), include="nothing")


@pytest.mark.parametrize("training", [True, False])
def test_verify_leaves_a_model_with_spectral_norm_as_it_is(training):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(8, 8, 3)), nn.BatchNorm2d(8)).train(training)
    masks = halve.prune(model)
    with untouched(model):
        assert halve.verify(model, masks).layers[0].state == "dense"
        assert not halve.verify(model).ok


def resnext():
    return models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], groups=8, width_per_group=4, num_classes=10)


def densenet():
    return models.DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=10)


def swin():
    return models.SwinTransformer([4, 4], 24, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4], num_classes=10)


@pytest.mark.parametrize(
    "build",
    [
        *(resnext, densenet, swin, models.mobilenet_v3_small),
        *(models.shufflenet_v2_x0_5, models.squeezenet1_1),
    ],
    ids=lambda build: build.__name__,
)
def test_torchvision_models_are_selected_pruned_applied_and_verified(build):
    torch.manual_seed(0)
    model = build().eval()
    names = [choice.name for choice in halve.select(model).masked]
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    assert list(masks) == names
    assert masks.density == 0.5
    assert halve.verify(model, masks).ok
    assert halve.verify(sparse, masks).ok
    assert halve.verify(sparse).ok
    assert not halve.verify(model).ok
    assert list(sparse.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert sparse(torch.zeros(1, 3, 64, 64)).isfinite().all()
