import threading

import pytest
import torch
from torch import nn

import halve
from halve.errors import ChangedWeightsWarning, MaskError, ModelError, OptionError
from halve.masks.apply import apply, check_fit, is_unchanged, updates_of
from halve.masks.layout import Layout
from halve.masks.mask import Mask, MaskSet
from halve.masks.pattern import Pattern
from halve.modules import weight_of
from tests.random_masks import a_mask, masks_for, random
from tests.tiny import convnet
from tests.untouched import same_bits, untouched


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.head = nn.Linear(8, 6)
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.head(self.up(self.grouped(self.bn(self.conv(x)).relu())).mean((2, 3)))


LAYERS = ("conv", "grouped", "up", "head")


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize("rule", ["2:4", "1:4", "4:4"])
def test_the_copy_has_zeros_exactly_where_nothing_is_kept(net, rule):
    masks = masks_for(net, *LAYERS, pattern=rule)
    with untouched(net):
        copy = apply(net, masks)
    for name in LAYERS:
        weight, dense = copy.get_submodule(name).weight, net.get_submodule(name).weight
        assert torch.equal(weight != 0, masks[name].kept())
        assert same_bits(weight[masks[name].kept()], dense[masks[name].kept()])
        assert same_bits(copy.get_submodule(name).bias, net.get_submodule(name).bias)


def test_the_copy_is_a_plain_model_of_the_same_class(net):
    copy = apply(net, masks_for(net, *LAYERS))
    assert type(copy) is Net
    assert list(copy.state_dict()) == list(net.state_dict())
    assert [type(module) for module in copy.modules()] == [type(module) for module in net.modules()]
    theirs = {t.data_ptr() for t in (*net.parameters(), *net.buffers())}
    assert not theirs & {t.data_ptr() for t in (*copy.parameters(), *copy.buffers())}


def test_the_copy_computes_what_masked_weights_compute(net):
    masks, image = masks_for(net, *LAYERS), random(2, 4, 8, 8)
    state = {f"{name}.weight": masks[name].apply_to(weight_of(net.get_submodule(name))) for name in LAYERS}
    expected = torch.func.functional_call(net, state, (image,))
    assert torch.allclose(apply(net, masks)(image), expected, atol=1e-6)


def test_writing_to_the_copy_does_not_reach_the_model(net):
    masks = masks_for(net, *LAYERS)
    with untouched(net):
        copy = apply(net, masks)
        for tensor in (*copy.parameters(), *copy.buffers()):
            tensor.data.zero_()
        copy.train()


def test_the_model_stays_as_it_is_when_apply_refuses(net):
    masks = masks_for(net, *LAYERS).with_statistics({"bn.running_mean": torch.zeros(3)})
    with untouched(net), pytest.raises(MaskError, match=r"bn\.running_mean.*\(3,\)"):
        apply(net, masks)


def test_modes_and_requires_grad_are_kept(net):
    net.bn.train()
    net.conv.requires_grad_(False)
    net.head.bias.requires_grad_(False)
    masks = masks_for(net, *LAYERS)
    with untouched(net):
        copy = apply(net, masks)
    assert [module.training for module in copy.modules()] == [module.training for module in net.modules()]
    assert {name: p.requires_grad for name, p in copy.named_parameters()} == {
        name: p.requires_grad for name, p in net.named_parameters()
    }


def test_the_copy_can_be_made_where_gradients_are_off(net):
    masks = masks_for(net, *LAYERS)
    with torch.no_grad():
        copy = apply(net, masks)
    assert all(parameter.requires_grad for parameter in copy.parameters())


def test_gradients_and_hooks_of_the_model_stay(net):
    calls = []
    net.conv.register_forward_hook(lambda *arguments: calls.append("forward"))
    net.head.weight.register_hook(lambda gradient: calls.append("backward"))
    net(random(2, 4, 8, 8)).sum().backward()
    masks = masks_for(net, *LAYERS)
    calls.clear()
    with untouched(net):
        apply(net, masks)
    assert calls == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_any_precision(net, dtype):
    net = net.to(dtype)
    masks = masks_for(net, *LAYERS)
    with untouched(net):
        copy = apply(net, masks, on_changed="error")
    assert copy.conv.weight.dtype == dtype
    assert same_bits(copy.conv.weight, masks["conv"].apply_to(net.conv.weight.detach()))


def test_channels_last_models_stay_so(net):
    net = net.to(memory_format=torch.channels_last)
    masks = masks_for(net, "conv")
    with untouched(net):
        copy = apply(net, masks, on_changed="error")
    assert copy.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(copy.conv.weight != 0, masks["conv"].kept())


def test_prune_and_apply_leave_the_model_and_its_random_numbers_alone(net):
    net.train()
    before = torch.get_rng_state()
    with untouched(net):
        copy = halve.apply(net, halve.prune(net, also="*"))
    assert copy.training
    assert torch.equal(torch.get_rng_state(), before)


# --- ties ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.again = self.first
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.again(self.second(self.first(x))))


def test_tied_weights_stay_tied_and_are_masked_together():
    torch.manual_seed(0)
    model = Tied()
    with untouched(model):
        masks = halve.prune(model)
        copy = apply(model, masks)
    assert list(masks) == ["first"]
    assert set(masks["first"].shared_with) == {"second", "again"}
    assert copy.first.weight is copy.second.weight
    assert copy.again is copy.first
    assert torch.equal(copy.second.weight != 0, masks["first"].kept())


# --- other weights ---------------------------------------------------------------------------------------------------


def test_unchanged_weights_pass_in_silence(net):
    masks = masks_for(net, *LAYERS)
    for changed in ("warn", "error", "ignore"):
        apply(net, masks, on_changed=changed)
    apply(apply(net, masks), masks, on_changed="error")  # weights that have the masks on already


def test_changed_weights_warn_with_layer_and_size(net):
    masks = masks_for(net, *LAYERS)
    net.head.weight.data *= 1.1
    net.up.weight.data *= 1.01
    message = r"2 masked layer.*head by about (9\.\d|10|11) %, up by about (0\.9\d?|1|1\.\d) %"
    with untouched(net), pytest.warns(ChangedWeightsWarning, match=message) as caught:
        copy = apply(net, masks)
    assert caught[0].filename == __file__
    assert same_bits(copy.head.weight, masks["head"].apply_to(net.head.weight.detach()))


def test_changed_weights_are_refused_on_demand(net):
    masks = masks_for(net, *LAYERS)
    net.head.weight.data[0, 0] += 1e-3
    with untouched(net), pytest.raises(MaskError, match=r"1 masked layer.*head by about.*on_changed='warn'"):
        apply(net, masks, on_changed="error")


def test_changed_weights_can_be_ignored(net):
    masks = masks_for(net, *LAYERS)
    net.head.weight.data *= 2
    assert torch.equal(apply(net, masks, on_changed="ignore").head.weight != 0, masks["head"].kept())


def test_a_cast_to_half_precision_is_a_small_change(net):
    masks = masks_for(net, *LAYERS)
    with pytest.warns(ChangedWeightsWarning, match=r"by about 0\.0\d+ %"):
        apply(net.half(), masks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_a_cast_that_digests_prove_is_no_change(dtype):
    model = convnet()
    masks = halve.prune(model)
    half = apply(model.to(dtype), masks)
    assert halve.verify(half, masks).ok


def test_a_layer_of_zeros_that_is_cast_has_not_changed_by_infinity(net):
    nn.init.zeros_(net.head.weight)
    masks = masks_for(net, "head")
    with pytest.warns(ChangedWeightsWarning, match="head") as caught:
        apply(net.half(), masks)
    assert "inf" not in str(caught[0].message)


def test_masks_without_a_fingerprint_fit_any_weight(net):
    mask = masks_for(net, "head")["head"]
    bare = MaskSet({"head": Mask(mask.pattern, mask.layout, mask.codes)})
    apply(net, bare, on_changed="error")
    assert updates_of({"head": net.head.weight}, bare) == {}
    assert not is_unchanged(net.head.weight, bare["head"])


def test_updates_name_changed_layers_alone(net):
    masks = masks_for(net, *LAYERS)
    net.conv.weight.data *= 1.5
    updates = updates_of(check_fit(net, masks), masks)
    assert list(updates) == ["conv"]
    assert updates["conv"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("changed", ["never", None, True])
def test_an_unknown_choice_is_refused(net, changed):
    with pytest.raises(OptionError, match="'warn', 'error' or 'ignore'"):
        apply(net, masks_for(net, "head"), on_changed=changed)


# --- other models ----------------------------------------------------------------------------------------------------


def mask_of(kind, shape, groups=1):
    return a_mask("2:4", Layout(kind, shape, 4, groups))


@pytest.mark.parametrize(
    ("name", "mask", "message"),
    [
        ("heed", mask_of("linear", (6, 8)), r"another model.*Net has no layer heed.*did you mean head"),
        ("xyzzy", mask_of("linear", (6, 8)), r"Net has no layer xyzzy$"),
        ("head.weight", mask_of("linear", (6, 8)), r"no layer head\.weight"),
        ("bn", mask_of("linear", (6, 8)), r"layer bn is a BatchNorm2d.*linear"),
        ("", mask_of("linear", (6, 8)), r"is a Net.*linear"),
        ("head", mask_of("conv", (6, 8, 1, 1)), r"layer head is a Linear.*conv"),
        ("conv", mask_of("conv_transpose", (8, 4, 3, 3)), r"layer conv is a Conv2d.*conv_transpose"),
        ("head", mask_of("linear", (8, 8)), r"layer head.*\(6, 8\).*\(8, 8\)"),
        ("conv", mask_of("conv", (8, 4, 3)), r"layer conv.*\(8, 4, 3, 3\).*\(8, 4, 3\)"),
        ("grouped", mask_of("conv", (8, 4, 3, 3)), r"layer grouped.*2 group.*in 1"),
        ("conv", mask_of("conv", (8, 4, 3, 3), 2), r"layer conv.*1 group.*in 2"),
    ],
)
def test_masks_of_another_model_are_refused_by_name(net, name, mask, message):
    fitting = masks_for(net, *{"head", "conv"} - {name})
    with untouched(net), pytest.raises(MaskError, match=message):
        apply(net, MaskSet({**fitting, name: mask}))


def test_many_missing_layers_are_counted(net):
    masks = MaskSet({f"block{n}.conv": mask_of("linear", (4, 4)) for n in range(20)})
    with pytest.raises(MaskError, match=r"block0\.conv, .* and 12 more"):
        apply(net, masks)


def test_a_model_that_cannot_be_copied_is_refused(net):
    net.lock = threading.Lock()
    masks = masks_for(net, "head")
    with untouched(net), pytest.raises(ModelError, match="Net cannot be copied"):
        apply(net, masks)


def test_an_empty_set_gives_a_plain_copy(net):
    copy = apply(net, MaskSet({}))
    assert copy is not net
    assert all(same_bits(a, b) for a, b in zip(copy.parameters(), net.parameters(), strict=True))


def test_a_model_that_is_one_layer_can_be_masked():
    layer = nn.Linear(8, 8)
    masks = masks_for(layer, "")
    with untouched(layer):
        copy = apply(layer, masks)
    assert torch.equal(copy.weight != 0, masks[""].kept())


# --- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_are_put_on_the_copy_alone(net):
    statistics = {"bn.running_mean": random(8), "bn.running_var": random(8).abs()}
    masks = masks_for(net, *LAYERS).with_statistics(statistics)
    with untouched(net):
        copy = apply(net, masks)
    assert torch.equal(copy.bn.running_mean, statistics["bn.running_mean"])
    assert torch.equal(copy.bn.running_var, statistics["bn.running_var"])
    copy.bn.running_mean.zero_()
    assert torch.equal(masks.statistics["bn.running_mean"], statistics["bn.running_mean"])


@pytest.mark.parametrize("name", ["bn.running_median", "other.running_mean", "conv.weight", ""])
def test_statistics_of_no_buffer_are_refused(net, name):
    masks = masks_for(net, "conv").with_statistics({name: torch.zeros(8)})
    with untouched(net), pytest.raises(MaskError, match="no BatchNorm buffer"):
        apply(net, masks)


def test_statistics_of_a_norm_that_stands_twice_in_the_model_fit_both_names():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model.append(model[1])
    masks = masks_for(model, "0").with_statistics({"3.running_mean": torch.ones(8)})
    assert apply(model, masks)[1].running_mean.tolist() == [1] * 8


def test_patterns_may_differ_from_layer_to_layer(net):
    masks = {**masks_for(net, "conv"), **masks_for(net, "head", pattern="4:8"), **masks_for(net, "up", pattern="1:4")}
    copy = apply(net, MaskSet(masks))
    assert [mask.pattern for mask in masks.values()] == [Pattern("2:4"), Pattern("4:8"), Pattern("1:4")]
    for name, mask in masks.items():
        assert torch.equal(copy.get_submodule(name).weight != 0, mask.kept())
