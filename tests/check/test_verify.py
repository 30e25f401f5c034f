import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torchvision import models

import halve
from halve.errors import MaskError, ModelError, OptionError
from halve.masks.mask import Mask, MaskSet
from tests import tiny
from tests.untouched import untouched


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 1), nn.Flatten(), nn.Linear(12, 8), nn.Linear(8, 4)
    )


def by_name(verification):
    return {layer.name: layer for layer in verification.layers}


def residual(seed=0):
    """A stem ("0"), two masked convolutions ("3", "6"), norms ("1", "4") and a head ("10"), without round numbers."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )
    for norm in (model[1], model[4]):
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            nn.init.uniform_(tensor, 0.1, 1)
    return model.eval()


@pytest.fixture(scope="module")
def full():
    """A network, masks of it with channel orders and recalibrated statistics, and the network with them applied."""
    model, images = residual(), torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    masks = halve.prune(model, permute=True, example=images)
    masks = halve.recalibrate(model, masks, images)
    assert list(masks) == ["3", "6"]
    assert all(mask.layout.channel_order for mask in masks.values())
    return model, masks, halve.apply(model, masks)


def flip_bit_(tensor, index=0, bit=0):
    """Flip a bit of a tensor in place; bit 0 is the lowest of the mantissa."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    flat = tensor.detach().reshape(-1).view(kind)
    flat[index] ^= 1 << bit
    assert flat.data_ptr() == tensor.data_ptr()  # not a copy


def without_digests(masks):
    return MaskSet(dict(masks), masks.statistics, masks.recipe, masks.moves)


def without_fingerprints(masks):
    return MaskSet({name: Mask(m.pattern, m.layout, m.codes) for name, m in masks.items()}, moves=masks.moves)


# What is ok


def test_what_apply_returns_is_ok():
    model = network()
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    with untouched(sparse):
        result = halve.verify(sparse, masks)
    assert result.ok
    assert result.status == "ok"
    assert result.failures == result.casts == result.unchecked == result.accepted == {}
    assert [layer.name for layer in result.layers] == ["0", "2", "4"]
    assert {(layer.state, layer.in_place, layer.applied, layer.update) for layer in result.layers} == {
        ("masked", True, True, None)
    }
    assert [(tensor.name, tensor.state) for tensor in result.tensors] == [
        (name, "unchanged") for name in ("0.bias", "2.bias", "4.bias", "5.weight", "5.bias")
    ]


def test_moved_channels_and_recalibrated_statistics_are_ok(full):
    _, masks, sparse = full
    result = halve.verify(sparse, masks)
    assert result.ok
    assert result.moved
    recalibrated = [tensor.name for tensor in result.tensors if tensor.state == "recalibrated"]
    assert recalibrated == ["1.running_mean", "1.running_var", "4.running_mean", "4.running_var"]


def test_it_holds_for_a_file_and_a_packed_checkpoint(full, tmp_path):
    model, masks, sparse = full
    read = halve.load(masks.save(tmp_path / "net.masks.safetensors"))
    assert halve.verify(sparse, read).ok
    state, unpacked = halve.unpack(halve.pack(model, masks, tmp_path / "net.packed.safetensors"))
    again = residual(seed=1)
    again.load_state_dict(state)
    assert halve.verify(again, unpacked).ok


def test_counters_of_batches_are_ignored(full):
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    sparse[1].num_batches_tracked += 5
    assert halve.verify(sparse, masks).ok


def test_a_tensor_that_is_only_called_like_a_counter_is_compared():
    model = tiny.convnet()
    model[2].register_buffer("num_batches_tracked", torch.tensor(3.0))
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    assert halve.verify(sparse, masks).ok
    sparse[2].num_batches_tracked += 1
    assert list(halve.verify(sparse, masks).failures) == ["2.num_batches_tracked"]


def test_negative_zeros_where_nothing_is_kept_are_zeros():
    """What multiplying a weight by its mask gives."""
    model = network()
    masks = halve.prune(model)
    for name, mask in masks.items():
        model.get_submodule(name).weight.data *= mask.kept()
    assert any(bool((torch.signbit(p) & (p == 0)).any()) for p in model.parameters())
    assert halve.verify(model, masks).ok


def test_masks_that_drop_only_zeros_are_applied_or_not_as_the_others_are():
    sparse_in_part, model = network(), network()
    sparse_in_part[2].weight.data = halve.apply(model, halve.prune(model))[2].weight.data
    for dense, masks in (
        (sparse_in_part, halve.prune(sparse_in_part)),
        (model, halve.prune(model, pattern={"2": "4:4", "*": "2:4"})),
    ):
        assert halve.verify(dense, masks).status == "not applied"
        assert halve.verify(halve.apply(dense, masks), masks).ok
        assert halve.verify(halve.apply(dense, masks), without_digests(masks)).status == "unknown"


def test_a_dense_model_with_many_zeros_is_not_applied():
    model = network()
    masks = halve.prune(model)
    for name, mask in masks.items():
        dropped = (~mask.kept()).nonzero()
        model.get_submodule(name).weight.data[tuple(dropped[3:].T)] = 0
    masks = halve.prune(model)
    assert halve.verify(model, masks).status == "not applied"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_are_compared_bit_for_bit_and_reported(full, dtype):
    _, masks, sparse = full
    cast = copy.deepcopy(sparse).to(dtype)
    result = halve.verify(cast, masks)
    assert result.ok
    narrower = dtype.itemsize < 4
    assert set(result.casts.values()) == ({str(dtype).removeprefix("torch.")} if narrower else set())
    assert len(result.casts) == narrower * (len(result.layers) + len(result.tensors))
    assert halve.verify(cast.float(), masks).casts == result.casts  # as a float32 model loads such a checkpoint
    for name, parameter in cast.named_parameters():
        flip_bit_(parameter)
        assert name.removesuffix(".weight") in {n.removesuffix(".weight") for n in halve.verify(cast, masks).failures}
        flip_bit_(parameter)


def test_a_checkpoint_in_half_precision_is_the_same_in_single():
    model = network().half()
    masks = halve.prune(model)
    sparse = halve.apply(model, masks).float()
    assert halve.verify(sparse, masks).ok
    assert halve.verify(sparse, masks).casts == {}


def test_a_cast_that_overflows_fails():
    model = tiny.convnet()
    model[1].running_var[3] = 8e4
    masks = halve.prune(model)
    half = halve.apply(model, masks).half()
    assert halve.verify(half, masks).failures == {"1.running_var": "it contains NaN or infinity"}
    assert not halve.verify(half, masks, on_changed="accept").ok


# One bit is enough


@pytest.mark.parametrize(
    "name",
    [
        *("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "3.bias", "4.running_mean"),
        *("6.bias", "10.weight", "10.bias"),
    ],
)
def test_one_bit_in_any_other_tensor_is_named(full, name):
    """The stem is 0, the head is 10; 1 and 4 are norms."""
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    flip_bit_({**dict(sparse.named_parameters()), **dict(sparse.named_buffers())}[name], index=1)
    result = halve.verify(sparse, masks)
    assert result.status == "changed"
    assert result.failures == {name: "it changed since the masks were made"}
    assert halve.verify(sparse, masks, on_changed="accept").accepted == {name: None}


@pytest.mark.parametrize("layer", ["3", "6"])
def test_one_bit_in_a_kept_weight_is_named(full, layer):
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    weight = sparse.get_submodule(layer).weight
    flip_bit_(weight, index=int(weight.reshape(-1).nonzero()[5]))
    result = halve.verify(sparse, masks)
    assert result.status == "changed"
    assert list(result.failures) == [layer]
    assert by_name(result)[layer].state == "changed"
    assert 0 <= by_name(result)[layer].update < 1e-5


@pytest.mark.parametrize("on_changed", ["fail", "accept"])
def test_a_zero_that_is_filled_again_is_broken(full, on_changed):
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    weight = sparse[3].weight.detach().view(-1)
    weight[int((weight == 0).nonzero()[7])] = 1e-30
    result = halve.verify(sparse, masks, on_changed=on_changed)
    assert result.status == "failed"
    assert result.failures["3"] == "1 of the 1,152 weights that its mask drops are not zero"


def test_a_zero_that_is_filled_where_a_kept_weight_is_zero_is_broken_although_in_place():
    model = network()
    model[0].weight.data[0, 0:4, 0, 0] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    dropped = (~masks["0"].kept()[0, 0:4, 0, 0]).nonzero()[0]
    sparse[0].weight.data[0, int(dropped), 0, 0] = 0.5
    result = halve.verify(sparse, masks)
    assert by_name(result)["0"].in_place
    assert result.failures == {"0": "1 of the 1,152 weights that its mask drops are not zero"}


def test_a_buffer_outside_of_the_state_dict_is_compared():
    model = tiny.convnet()
    model.register_buffer("scale", torch.ones(3), persistent=False)
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    assert halve.verify(sparse, masks).ok
    sparse.scale[1] = 2
    assert list(halve.verify(sparse, masks).failures) == ["scale"]


def test_tensors_that_are_added_or_missing_are_named():
    model = tiny.convnet()
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    sparse[0].bias = nn.Parameter(torch.zeros(8))
    sparse[3].register_parameter("bias", None)
    for on_changed in ("fail", "accept"):
        result = halve.verify(sparse, masks, on_changed=on_changed)
        assert result.status == "failed"
        assert result.failures == {
            "3.bias": "the model does not have it",
            "0.bias": "the model that the masks were made for does not have it",
        }


def test_statistics_that_are_not_the_recalibrated_ones_are_named(full):
    model, masks, _ = full
    result = halve.verify(halve.apply(model, masks.with_statistics({})), masks)
    assert result.status == "changed"
    assert set(result.failures) == {"4.running_mean", "4.running_var"}  # the masks do not change what the stem computes
    assert set(result.failures.values()) == {"it is the checkpoint's, not the recalibrated one that the masks hold"}
    mixed = halve.restore_order(halve.apply(model, masks), masks)
    mixed[4].running_mean = model[4].running_mean
    assert "4.running_mean" in halve.verify(mixed, masks).failures


def test_a_dense_model_with_recalibrated_statistics_is_changed(full):
    model, masks, _ = full
    mixed = copy.deepcopy(model)
    mixed.load_state_dict(masks.statistics, strict=False)
    assert halve.verify(mixed, masks).status == "changed"


def test_tied_tensors_must_stay_equal():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    masks = halve.prune(model)
    assert masks["0"].shared_with == ("2",)
    sparse = halve.apply(model, masks)
    assert halve.verify(sparse, masks).ok
    equal = copy.deepcopy(sparse)
    equal[2].weight = nn.Parameter(sparse[0].weight.detach().clone())
    assert halve.verify(equal, masks).ok
    dense = copy.deepcopy(sparse)
    dense[2].weight = nn.Parameter(model[0].weight.detach().clone())
    result = halve.verify(dense, masks)
    assert result.failures == {"2.weight": "it does not equal 0.weight, which it was tied to"}
    assert result.status == "failed"
    assert halve.verify(model, masks).status == "not applied"


# Moves


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.running_var", "3.bias", "4.bias"])
def test_one_tensor_whose_channels_are_not_moved_with_the_others_is_named(full, name):
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    unmoved = halve.restore_order(sparse, masks).state_dict()[name]
    assert name in masks.moves
    assert not torch.equal(unmoved, sparse.state_dict()[name])
    sparse.state_dict()[name].copy_(unmoved)
    result = halve.verify(sparse, masks)
    assert not result.ok
    assert list(result.failures) == [name]


def test_masks_in_the_checkpoints_order_are_not_in_place(full):
    _, masks, sparse = full
    result = halve.verify(halve.restore_order(sparse, masks), masks)
    assert result.status == "failed"
    assert not any(layer.in_place for layer in result.layers)
    assert {layer.state for layer in result.layers} == {"masked"}
    assert "blocks keep more; its channels were not moved" in result.failures["3"]


class Sort(nn.Module):
    def forward(self, x):
        return x.sort(1).values


def test_moves_of_layers_that_stay_dense_are_recognised(full):
    """The masked layer has no moves then: nothing moves through the sort."""
    model = nn.Sequential(*full[0][:10], Sort(), full[0][10]).eval()
    masks = halve.prune(model, permute=True, example=torch.randn(2, 3, 8, 8), also="11").without(["3", "6"])
    assert masks.moves.keys() >= {"3.weight", "6.weight"}
    assert "11.weight" not in masks.moves
    sparse = halve.apply(model, masks)
    assert not torch.equal(sparse[3].weight, model[3].weight)
    result = halve.verify(sparse, masks)
    assert result.ok
    assert result.moved
    twice = halve.apply(sparse, masks)
    assert all(torch.equal(a, b) for a, b in zip(twice.parameters(), sparse.parameters(), strict=True))


# Not applied, unknown, updated


def test_a_dense_model_fits_but_is_not_applied(full):
    model, masks, _ = full
    with untouched(model):
        result = halve.verify(model, masks)
    assert not result.ok
    assert result.status == "not applied"
    assert result.failures == dict.fromkeys(masks, "its mask is not applied")
    assert {(layer.state, layer.applied, layer.in_place) for layer in result.layers} == {("dense", False, False)}
    assert {tensor.state for tensor in result.tensors} == {"unchanged"}
    assert "next: halve.apply(model, masks)" in str(result)
    assert halve.verify(copy.deepcopy(model).half(), masks).status == "not applied"


def test_a_model_with_some_masks_applied_fails(full):
    model, masks, sparse = full
    mixed = halve.restore_order(sparse, masks)
    mixed[6].weight.data = model[6].weight.data
    result = halve.verify(mixed, masks)
    assert result.status == "failed"
    assert result.failures["6"] == "its mask is not applied"


def test_masks_without_digests_are_unknown(full):
    model, masks, sparse = full
    result = halve.verify(sparse, without_digests(masks))
    assert result.status == "unknown"
    assert not result.ok
    assert {layer.state for layer in result.layers} == {"masked"}
    assert {tensor.state for tensor in result.tensors} == {"unknown"}
    assert halve.verify(sparse, without_digests(masks), on_changed="accept").status == "unknown"
    assert halve.verify(model, without_digests(masks)).status == "not applied"


def test_masks_without_fingerprints_are_unknown():
    model = network()
    masks = without_fingerprints(halve.prune(model))
    result = halve.verify(halve.apply(model, masks), masks)
    assert result.status == "unknown"
    assert {layer.state for layer in result.layers} == {"unknown"}
    assert halve.verify(model, masks).status == "not applied"


def test_recalibrating_old_masks_gives_them_digests(full):
    model, masks, _ = full
    old = without_digests(masks)
    images = torch.randn(8, 3, 8, 8)
    assert halve.recalibrate(model, old, images).digests == masks.digests
    assert halve.recalibrate(residual(seed=1), old, images, on_changed="ignore").digests is None


def test_an_update_can_be_accepted_and_its_size_is_told(full):
    model, masks, _ = full
    tuned = copy.deepcopy(model)
    for parameter in tuned.parameters():
        parameter.data *= 1.02
    sparse = halve.apply(tuned, masks, on_changed="ignore")
    result = halve.verify(sparse, masks)
    assert result.status == "changed"
    assert result.failures["6"] == "its weight changed by about 2 % since the mask was made"
    assert {"6.bias", "10.weight", "3"} <= set(result.failures)
    accepted = halve.verify(sparse, masks, on_changed="accept")
    assert accepted.ok
    assert accepted.failures == {}
    assert accepted.accepted.keys() == result.failures.keys()
    assert accepted.accepted["6"] == pytest.approx(0.02, rel=0.01)
    assert accepted.accepted["6.bias"] is None
    assert "accepted: 2 masked weight(s) changed, by up to about 2 % (" in str(accepted)
    assert "; 9 other tensor(s) changed (" in str(accepted)
    dense = halve.verify(tuned, masks)
    assert dense.status == "changed"
    assert dense.failures["6"] == "its mask is not applied, and its weight changed by about 2 %"
    assert halve.verify(tuned, masks, on_changed="accept").status == "not applied"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_fail_with_masks_and_without(bad):
    model = network()
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    with torch.no_grad():
        sparse[0].weight[masks["0"].kept()] = bad
        sparse[2].bias[0] = bad
    for result in (halve.verify(sparse, masks), halve.verify(sparse, masks, on_changed="accept")):
        assert result.failures == {"0": "its weight contains NaN or infinity", "2.bias": "it contains NaN or infinity"}
        assert result.status == "failed"
        assert str(result)
    assert halve.verify(sparse).failures == {"0": "its weight contains NaN or infinity"}


# Masks of something else


def test_masks_of_another_training_run_fail(full):
    _, masks, _ = full
    other = residual(seed=1)
    sparse = halve.apply(other, masks, on_changed="ignore")
    result = halve.verify(sparse, masks)
    assert result.status == "changed"
    assert result.moved
    assert {"3", "6", "10.weight", "0.weight"} <= set(result.failures)
    assert all(layer.update > 0.5 for layer in result.layers)
    twice = halve.apply(sparse, masks, on_changed="ignore")  # its zeros say that it is moved
    assert all(torch.equal(a, b) for a, b in zip(twice.parameters(), sparse.parameters(), strict=True))


def test_masks_of_another_model_are_refused():
    model = network()
    other = nn.Sequential(*[nn.ReLU()] * 7, nn.Linear(8, 8), nn.LayerNorm(8))
    with untouched(model), pytest.raises(MaskError, match="another model: Sequential has no layer 7"):
        halve.verify(model, halve.prune(other))
    with pytest.raises(MaskError, match=r"layer 0 has a weight of shape \(16, 16, 3, 3\).*\(16, 8, 3, 3\)"):
        halve.verify(model, halve.prune(nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU())))
    with pytest.raises(MaskError, match="layer 0 is a Conv2d, but its mask is for a linear layer"):
        halve.verify(model, halve.prune(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))))


# Code


def test_forward_hooks_are_unchecked(full):
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    sparse[3].register_forward_hook(lambda module, inputs, output: output + 1)
    sparse[10].register_forward_pre_hook(lambda module, inputs: None)
    result = halve.verify(sparse, masks)
    assert result.ok
    assert result.unchecked == {"3": "forward hook", "10": "forward hook"}
    assert "unchecked: 3: forward hook" in str(result)


class Refill(nn.Module):
    def forward(self, weight):
        return torch.where(weight == 0, 1.0, weight) if self.training else weight


def test_a_parametrization_that_could_fill_zeros_again_is_unchecked(full):
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    parametrize.register_parametrization(sparse[3], "weight", Refill())
    with untouched(sparse):
        result = halve.verify(sparse, masks)
    assert result.unchecked == {"3": "weight is computed by Refill"}
    sparse = halve.apply(residual(), masks, on_changed="error")
    parametrizations.weight_norm(sparse[10], "weight")
    sparse[10].parametrizations.weight.original0.data *= 2
    result = halve.verify(sparse, masks)
    assert result.failures == {"10.weight": "it changed since the masks were made"}
    assert result.unchecked == {"10": "weight is computed by _WeightNorm"}


@pytest.mark.parametrize("training", [True, False])
def test_weights_that_are_computed_are_compared_as_they_are_multiplied(training):
    for normed in (nn.utils.spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm):
        model = nn.Sequential(normed(nn.Conv2d(8, 8, 3)), nn.BatchNorm2d(8)).train(training)
        masks = halve.prune(model)
        with untouched(model):
            result = halve.verify(model, masks)
            assert not halve.verify(model).ok
        assert result.status == "not applied"
        assert result.layers[0].state == "dense"
        assert list(result.unchecked) == ["0"]
        sparse = halve.apply(model, masks)
        assert halve.verify(sparse, masks).ok
        assert halve.verify(sparse, masks).unchecked == {}


def test_computed_weights_of_layers_that_stay_dense_are_compared():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    masks = halve.prune(model).without(["0"])
    sparse = halve.apply(model, masks)
    assert halve.verify(sparse, masks).ok
    sparse[0].parametrizations.weight.original0.data *= 2
    assert halve.verify(sparse, masks).failures == {"0.weight": "it changed since the masks were made"}


def test_what_else_could_change_the_outputs_is_unchecked(full):
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    sparse[3].forward = lambda x: x
    sparse[5].scale = torch.ones(1)
    sparse[7].steps = [torch.ones(1)]
    sparse[4].bias = type("Tagged", (nn.Parameter,), {})(sparse[4].bias.detach())
    sparse[6].__class__ = type("Own", (nn.Conv2d,), {"forward": lambda self, x: x})
    assert halve.verify(sparse, masks).unchecked == {
        "3": "its forward was replaced",
        "4": "bias is a Tagged",
        "5": "scale: tensor outside of parameters and buffers",
        "6": "Own overrides forward",
        "7": "steps: tensor outside of parameters and buffers",
    }


@pytest.mark.parametrize(("layer", "name"), [(10, "weight"), (3, "weight"), (3, "bias"), (1, "running_mean")])
def test_a_tensor_that_hides_a_parameter_or_buffer_is_the_one_that_is_compared(full, layer, name):
    _, masks, sparse = full
    sparse = copy.deepcopy(sparse)
    vars(sparse[layer])[name] = getattr(sparse[layer], name).detach() * 2
    result = halve.verify(sparse, masks)
    assert result.status == "changed"
    assert list(result.failures) == ["3" if (layer, name) == (3, "weight") else f"{layer}.{name}"]


def test_the_weights_that_an_lstm_runs_with_are_unchecked_if_they_are_not_its_parameters():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "lstm": nn.LSTM(8, 8), "b": nn.Linear(8, 8)})
    masks = halve.prune(model, include="a")
    sparse = halve.apply(model, masks)
    assert halve.verify(sparse, masks).unchecked == {}
    sparse["lstm"]._flat_weights = [weight.detach() * 2 for weight in sparse["lstm"]._flat_weights]
    assert list(halve.verify(sparse, masks).unchecked) == ["lstm"]


@pytest.mark.parametrize("change", [lambda weight: weight.to("meta"), torch.Tensor.to_sparse], ids=["meta", "sparse"])
def test_weights_without_dense_data_are_one_clear_error(change):
    model = network()
    masks = halve.prune(model)
    model[2].weight = nn.Parameter(change(model[2].weight.detach()), requires_grad=False)
    with pytest.raises(ModelError, match="layer 2 cannot be verified: it must be dense and have data"):
        halve.verify(model, masks)


def test_tensors_without_digests_are_unknown():
    model = tiny.convnet()
    model.register_buffer("table", torch.eye(3).to_sparse())
    masks = halve.prune(model)
    result = halve.verify(halve.apply(model, masks), masks)
    assert result.status == "unknown"
    assert [tensor.name for tensor in result.tensors if tensor.state == "unknown"] == ["table"]
    assert str(result).endswith("unknown: tensors that cannot be compared: table")
    sparse = halve.apply(tiny.convnet(), halve.prune(tiny.convnet()))
    sparse[10].weight = nn.Parameter(sparse[10].weight.detach().to_sparse())
    for on_changed in ("fail", "accept"):
        result = halve.verify(sparse, halve.prune(tiny.convnet()), on_changed=on_changed)
        assert result.status == "failed"
        assert "it is a Parameter (torch.sparse_coo" in result.failures["10.weight"]


def test_masks_without_digests_cannot_know_that_tensors_are_missing():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    masks = without_digests(halve.prune(model, also="0"))
    sparse = halve.apply(model, masks)
    sparse[0].bias = None
    result = halve.verify(sparse, masks)
    assert not result.tensors
    assert result.status == "unknown"


# Without masks


def test_without_masks_a_dense_model_fails_in_every_layer():
    model = network()
    with untouched(model):
        result = halve.verify(model)
    assert result.status == "failed"
    assert result.failures == dict.fromkeys(("0", "2", "4"), "100 % of its blocks keep more than 2:4")
    assert not any(layer.in_place for layer in result.layers)


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
    assert halve.verify(sparse).failures == {"4": "4.2 % of its blocks keep more than 2:4"}


# Hardware


def test_hardware_is_judged_by_the_tensors_as_they_stand():
    model = network()
    masks = halve.prune(model)
    sparse = halve.verify(halve.apply(model, masks), masks)
    layers = by_name(sparse)
    assert (layers["0"].not_tensorrt, layers["0"].not_tensor_cores) == (None, None)
    assert layers["2"].not_tensor_cores == "12 output channels, not divisible by 8"
    assert layers["4"].not_tensor_cores == "12 input channels, not divisible by 16"
    assert sparse.accelerated == ("0",)
    assert set(sparse.not_accelerated) == {"2", "4"}
    assert halve.verify(model, masks).accelerated == ()
    masks = halve.prune(model, order="flat")
    flat = by_name(halve.verify(halve.apply(model, masks), masks))
    assert "more than 2 nonzero weights" in flat["0"].not_tensorrt
    assert flat["0"].failure is None


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 16, 3, groups=2), nn.ConvTranspose2d(16, 16, 3), nn.Conv2d(6, 8, 3)])
def test_grouped_transposed_and_padded_layers_are_ok_but_not_eligible(layer):
    model = nn.Sequential(layer, nn.ReLU())
    masks = halve.prune(model, also="0", remainder="pad")
    result = halve.verify(halve.apply(model, masks), masks)
    assert result.ok
    assert result.layers[0].not_tensorrt is not None
    assert result.layers[0].not_tensor_cores is not None


# The rest


def test_the_report_is_a_table_with_the_next_step(full):
    _, masks, sparse = full
    lines = str(halve.verify(sparse, masks)).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")] == [
        *("layer", "pattern", "in place", "weight", "hardware that can use it"),
    ]
    assert lines[-2:] == [
        "ok: 2 layers N:M in place, all tensors unchanged",
        "next: halve.compile(model, masks, images)",
    ]
    assert len({line.index("|") for line in lines[:3]}) == 1


def test_names_in_a_report_cannot_control_a_terminal(full):
    _, masks, sparse = full
    known = masks.digests
    hostile = type(known)({**known.dense, "a\x1b[2J\u202e": known.dense["0.weight"]}, known.masked, known.tied)
    report = str(halve.verify(sparse, masks.with_digests(hostile)))
    assert "\x1b" not in report
    assert "\u202e" not in report
    assert r"a\x1b[2J\u202e: the model does not have it" in report


def test_masks_and_options_together_are_refused():
    model = network()
    with pytest.raises(OptionError, match="not both; got masks and pattern, also"):
        halve.verify(model, halve.prune(model), pattern="2:4", also="5")
    with pytest.raises(OptionError, match="on_changed='accept' needs masks"):
        halve.verify(model, on_changed="accept")
    with pytest.raises(OptionError, match="on_changed must be one of fail, accept, got 'warn'"):
        halve.verify(model, halve.prune(model), on_changed="warn")


def test_nothing_checked_is_not_ok():
    assert halve.verify(nn.Sequential(nn.Linear(8, 2))).status == "failed"
    assert halve.verify(network(), MaskSet({})).status == "failed"
    assert halve.verify(network(), MaskSet({})).failures == {}
    assert "no layer was checked" in str(halve.verify(network(), MaskSet({})))


def test_a_wrong_option_is_an_error():
    with pytest.raises(OptionError, match="matches no layer"):
        halve.verify(network(), include="nothing")


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
    assert halve.verify(model, masks).status == "not applied"
    assert halve.verify(sparse, masks).ok
    assert halve.verify(sparse, masks).unchecked == {}
    assert halve.verify(sparse).ok
    assert not halve.verify(model).ok
    assert list(sparse.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert sparse(torch.zeros(1, 3, 64, 64)).isfinite().all()
