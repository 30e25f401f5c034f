import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halve
from halve.certify.attack import attack_agreement, attack_input, attack_weights
from halve.certify.region import box
from halve.certify.reuse import largest, weight_units
from halve.errors import CertificateError, DataError, ModelError, OptionError
from halve.progress import known_length
from tests.tiny import convnet, images
from tests.untouched import untouched


def masked_double(model, masks):
    return halve.apply(model, masks).double().eval()


def test_a_region_is_certified_for_both_networks_and_attacks_do_not_break_it(model, masks, pictures):
    pixels = {"mean": [0.0] * 4, "std": [1.0] * 4}
    with untouched(model):
        found = halve.certify(model, masks, pictures, region=1 / 255, **pixels)
    result = found.result
    assert result["certified"] == len(pictures)
    assert "every change of at most 1/255 per pixel" in str(found)
    for x, one in zip(pictures.double(), result["per_image"], strict=True):
        near = box(x[None], 1 / 255, **pixels)
        worst = min(attack_input(net, near, one["class"]) for net in (masked_double(model, masks), convnet().double()))
        assert 0 < one["margin"] <= worst
    assert halve.certify(model, masks, pictures, check=found).result == result


def test_a_region_in_which_an_attack_succeeds_is_not_certified_and_reported_as_vacuous(model, masks, pictures):
    found = halve.certify(model, masks, pictures, region=2.0)
    assert found.result["certified"] == 0
    assert found.result["vacuous"]
    assert found.result["median_margin"] < 0
    assert str(found).startswith("Nothing is proven: for none of 4 images")
    assert attack_input(masked_double(model, masks), box(pictures[:1].double(), 2.0, None, None), 0) < 0


def test_updates_are_certified_and_attacks_do_not_break_it(model, masks, pictures):
    found = halve.certify(model, masks, pictures, reuse=1e-3, also_dense=True)
    assert found.result["certified"] == len(pictures)
    radii = {name: 1e-3 * unit for name, unit in weight_units(model, masks, True)["masked"].items()}
    for x, one in zip(pictures.double(), found.result["per_image"], strict=True):
        assert one["margin"] <= attack_weights(masked_double(model, masks), x, one["class"], radii)
    assert any("biases" in text for text in found.assumptions)
    assert halve.certify(model, masks, pictures, check=found).sentence == found.sentence


def test_a_radius_is_verified_and_close_to_where_the_proof_ends(model, masks, pictures):
    found = halve.certify(model, masks, pictures[:2], reuse="radius", layers=["8", "10"])
    [one, two] = (image["radius"] for image in found.result["per_image"])
    at = {"layers": ["8", "10"], "progress": False}
    assert halve.certify(model, masks, pictures[:1], reuse=one, **at).result["certified"] == 1
    assert halve.certify(model, masks, pictures[:2], reuse=1.1 * max(one, two), **at).result["certified"] == 0
    assert "their radius (median" in str(found)
    absolute = halve.certify(model, masks, pictures[:1], reuse="radius", layers="10", relative=False).result
    relative = halve.certify(model, masks, pictures[:1], reuse="radius", layers="10").result
    scale = float(model[10].weight.detach().square().mean().sqrt())
    assert absolute["median_radius"] == pytest.approx(scale * relative["median_radius"], rel=0.1)


def test_an_update_within_the_radius_keeps_the_prediction(model, masks, pictures):
    radius = halve.certify(model, masks, pictures[:1], reuse="radius").result["per_image"][0]["radius"]
    updated = convnet()
    with torch.no_grad():
        for name, unit in weight_units(model, masks, True)["dense"].items():
            updated.get_submodule(name).weight.add_(0.99 * radius * unit * torch.randn(unit.shape).sign())
        before = model(pictures[:1]).argmax(1)
        assert torch.equal(halve.apply(updated, masks, on_changed="ignore")(pictures[:1]).argmax(1), before)
    plain = halve.certify(updated, masks, pictures[:1], reference=model, on_changed="ignore")
    assert plain.result["same"] == 1


def test_bisection_returns_an_end_that_was_verified():
    limits = [1e-7, 3e-4, 0.0, 1e-3, 0.7, 50.0]
    asked = {}

    def hold(which, sizes):
        good = [u <= limits[i] for i, u in zip(which, sizes, strict=True)]
        asked.update(zip(zip(which, sizes, strict=True), good, strict=True))
        return good

    for i, found in enumerate(largest(hold, [1e-3] * len(limits))):
        assert found == 0 if not limits[i] else asked[i, found]
        assert limits[i] / 1.06 <= found <= limits[i]


def test_images_on_which_the_networks_disagree_are_not_certified():
    model, x = convnet(), images(1)
    masks = halve.prune(model)
    with torch.no_grad():
        dense, masked = model(x)[0], halve.apply(model, masks)(x)[0]
        order = (dense - masked).argsort()
        last, first = int(order[0]), int(order[-1])  # which loses least by the masks, and which most
        target = torch.full_like(dense, -100.0)
        target[last], target[first] = 0.0, float((dense - masked)[first] - (dense - masked)[last]) / 2
        model[10].bias.add_(target - dense)
    result = halve.certify(model, masks, x, reuse=1e-9, on_changed="ignore").result
    assert (result["agree"], result["certified"], result["per_image"][0]["margin"]) == (0, 0, None)


def test_interrupting_keeps_what_is_finished(model, masks, pictures):
    def stopping(items, what):
        for index, item in enumerate(items):
            if index == 2:
                raise KeyboardInterrupt
            yield item

    found = halve.certify(model, masks, pictures, reuse=1e-6, progress=stopping)
    assert found.result["images"] == 2
    assert "finished when interrupted" in str(found)
    with pytest.raises(OptionError, match="interrupted"):
        halve.certify(model, masks, pictures, check=found)


def test_a_forged_proof_does_not_hold(model, masks, pictures):
    made = halve.certify(model, masks, pictures[:1], region=0.5)
    content = made.as_json()
    forged = content["result"] | {"certified": 1}
    names = ("statement", "sentence", "settings", "assumptions", "digests")
    other = halve.Certificate(
        result=forged, **{name: content[name] for name in names} | {"assumptions": made.assumptions}
    )
    with pytest.raises(CertificateError, match="does not hold"):
        halve.certify(model, masks, pictures[:1], check=other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "exact"}, "other settings .* method"),
        ({"extra": 1}, "other settings .* extra"),
    ],
)
def test_other_settings_than_those_of_the_proof_do_not_hold(model, masks, pictures, settings, message):
    made = halve.certify(model, masks, pictures[:1], reuse="radius", layers=["8"])
    halve.certify(model, masks, pictures[:1], check=made)
    with pytest.raises(CertificateError, match=message):
        halve.certify(model, masks, pictures[:1], check=replace(made, settings=made.settings | settings))


def test_a_radius_that_is_slightly_larger_does_not_hold(model, masks, pictures):
    made = halve.certify(model, masks, pictures[:1], reuse="radius")
    result = copy.deepcopy(made.result)
    for one in (result, *result["per_image"]):
        one |= {name: value * 1.001 for name, value in one.items() if "radius" in name}
    with pytest.raises(CertificateError, match="does not hold"):
        halve.certify(model, masks, pictures[:1], check=replace(made, result=result))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"region": 0}, "positive number"),
        ({"reuse": "much"}, "positive number"),
        ({"reuse": 1e-3, "region": 0.1}, "cannot be combined with another statement"),
        ({"reuse": 1e-3, "share": 0.9}, "cannot be combined with another statement"),
        ({"region": 0.1, "mean": [0.5]}, "belong together"),
        ({"reuse": 1e-3, "layers": "nothing"}, "matches no layer"),
        ({"reuse": 1e-3, "layers": []}, "must name a layer"),
        ({"reuse": 1e-3, "layers": 3}, "layers must be a list, got 3"),
        ({"reuse": True}, "reuse must be a positive number, got True"),
        ({"changed_blocks": True}, "changed_blocks must be a positive integer, got True"),
        ({"layers": ["0"]}, "layers= is for reuse="),
        ({"also_dense": True}, "also_dense= is for reuse="),
        ({"relative": False}, "relative=False is for reuse="),
        ({"region": 0.1, "mean": 0.5, "std": 0.5}, "mean must be a list of numbers"),
        ({"region": 0.1, "mean": [0.0] * 4, "std": [0.0] * 4}, "std= positive"),
        ({"by": 3}, "by must be 'class', 'label' or a function"),
        ({"reuse": 1e-3, "device": "tpu"}, "device must be 'cpu' or 'cuda', got 'tpu'"),
        pytest.param(
            {"reuse": 1e-3, "device": "cuda"},
            "needs a CUDA GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_wrong_options(model, masks, pictures, options, message):
    with pytest.raises(OptionError, match=message):
        halve.certify(model, masks, pictures, **options)


def test_clear_errors(model, masks, pictures):
    with pytest.raises(DataError, match="NaN"):
        halve.certify(model, masks, pictures * float("nan"), reuse=1e-3)
    with pytest.raises(DataError, match=r"outside of 0\.\.1"):
        halve.certify(model, masks, pictures * 3, region=0.1, mean=[0.0] * 4, std=[1.0] * 4)
    with pytest.raises(DataError, match="one number for each of 4 channels"):
        halve.certify(model, masks, pictures, region=0.1, mean=[0.0], std=[1.0])
    with pytest.raises(DataError, match=r"failed on images of shape \(1, 3, 8, 8\)"):
        halve.certify(model, masks, torch.rand(2, 3, 8, 8), reuse=1e-3)
    unknown = nn.Sequential(nn.Linear(8, 8), nn.Hardswish(), nn.Linear(8, 2)).eval()
    with pytest.raises(ModelError, match="no bounds for hardswish in module 1"):
        halve.certify(unknown, halve.prune(unknown), torch.randn(2, 8), reuse=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_updated_networks_agree_exactly_as_long_as_both_keep_the_class(seed):
    """The network that an update flips first is flipped while the other one is not: no weaker statement is true.

    For one layer the smallest margin of each network is known exactly: the bounds reach it, and beyond it there is an
    update after which the two networks differ.
    """
    torch.manual_seed(seed)
    model, x, label = nn.Sequential(nn.Linear(8, 3)).double().requires_grad_(False), torch.randn(1, 8).double(), 0
    dense, row = model[0], x[0]
    dense.bias[label] += 3.0  # so that both networks predict it
    masks = halve.prune(model, also="0")
    kept, unit = masks["0"].kept(), float(dense.weight.square().mean().sqrt())

    def first(which):
        """The smallest update that flips a network, and its direction."""
        found = []
        for other in {0, 1, 2} - {label}:
            gap = (dense.weight[label] * which[label] - dense.weight[other] * which[other]) @ row
            gap = gap + dense.bias[label] - dense.bias[other]
            slope = unit * ((row * which[label]).abs().sum() + (row * which[other]).abs().sum())
            found.append((float(gap / slope), other))
        return min(found)

    ones = torch.ones_like(kept)
    (masked_radius, masked_other), (dense_radius, dense_other) = first(kept), first(ones)
    radius, other, which = min(
        (masked_radius, masked_other, kept), (dense_radius, dense_other, ones), key=lambda o: o[0]
    )
    assert halve.certify(model, masks, x, reuse=0.999 * radius, also_dense=True).result["certified"] == 1
    direction = torch.zeros_like(dense.weight)
    direction[label], direction[other] = -(row * which[label]).sign(), (row * which[other]).sign()
    updated = dense.weight + 1.001 * radius * unit * direction
    classes = [int((row @ (updated * mask).T + dense.bias).argmax()) for mask in (kept, ones)]
    assert sorted(classes) != [label, label]
    assert label in classes


def test_an_attack_makes_networks_differ_just_above_what_flips_neither(model, masks, pictures):
    networks, x = (masked_double(model, masks), convnet().double().eval()), pictures[0].double()
    units = weight_units(model, masks, True)["dense"]

    def attacked(u):
        return attack_agreement(*networks, x, {name: u * unit for name, unit in units.items()}, masks)

    [radius] = largest(lambda which, sizes: [not attacked(u)[0] for u in sizes], [1e-2])
    assert attacked(radius) == (False, False)
    assert attacked(1.05 * radius) == (True, True)
    proven = halve.certify(model, masks, pictures[:1], reuse="radius", also_dense=True).result["median_radius"]
    assert 0 < proven <= radius


def test_a_network_that_is_one_layer_is_certified():
    torch.manual_seed(0)
    model, x = nn.Linear(8, 3), torch.randn(6, 8)
    masks, dense = halve.prune(model, also="*"), copy.deepcopy(model).double()
    radii = {"": 1e-3 * weight_units(model, masks, True)["dense"][""]}
    found = halve.certify(model, masks, x, reuse=1e-3, also_dense=True, progress=False).result
    assert found["certified"] == found["agree"] > 0
    for image, one in zip(x.double(), found["per_image"], strict=True):
        if one["agree"]:
            assert 0 < one["margin"] <= attack_weights(dense, image, one["class"], radii)
    radius = halve.certify(model, masks, x, reuse="radius", progress=False).result["smallest_radius"]
    assert radius > 0
    blocks = halve.certify(model, masks, x, changed_blocks=1, progress=False).result
    agreeing = [one for one in blocks["per_image"] if one["agree"]]
    for one, needed in zip(agreeing, blocks["attack_blocks"], strict=True):
        assert not one["certified"] or needed is None or needed > 1


class Raw(nn.Module):
    """A layer, and a parameter that is used as a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return nn.functional.linear(self.first(x).relu(), self.w)


def test_a_weight_of_no_layer_is_an_error_that_names_it_unless_it_stays():
    torch.manual_seed(0)
    model, x = Raw().eval(), torch.randn(2, 8)
    masks = halve.prune(model)
    with pytest.raises(ModelError, match=r"but w belongs to none: pass layers= .* of first; or make"):
        halve.certify(model, masks, x, reuse=1e-3, progress=False)
    assert halve.certify(model, masks, x, reuse=1e-9, layers="first", progress=False).result["images"] == 2


class Standardised(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)


class Transposed(nn.Linear):
    """Uses its weight a second time, transposed."""

    def forward(self, x):
        return nn.functional.linear(super().forward(x).relu(), self.weight.t())


@pytest.mark.parametrize("kind", [Standardised, Transposed])
def test_updates_of_weights_from_which_something_else_is_computed_are_refused(kind):
    """Bounds take what is computed from weights alone as constant."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), kind(8, 8), nn.Linear(8, 3)).eval(), torch.randn(2, 8)
    masks = halve.prune(model, include=["0"])
    with pytest.raises(ModelError, match=r"also computes something else from 2\.weight: leave these layers out"):
        halve.certify(model, masks, x, reuse=1e-3, progress=False)
    assert halve.certify(model, masks, x, reuse=1e-9, layers=["0", "3"], progress=False).result["images"] == 2


def test_updates_of_effective_weights_are_certified():
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model, x = nn.Sequential(normed, nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(2, 8)
    found = halve.certify(model, halve.prune(model), x, reuse=1e-9, also_dense=True, progress=False).result
    assert found["certified"] == found["agree"]


class Gated(nn.Module):
    """A layer whose weight is a factor, and two that share their weight."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Conv2d(4, 8, 3), nn.Linear(1, 8)
        self.one, self.other = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
        self.other.weight, self.head = self.one.weight, nn.Linear(32, 3)

    def forward(self, x):
        y = self.first(x).relu() * self.gate.weight.view(1, 8, 1, 1)
        return self.head(self.other(self.one(y).relu()).relu().flatten(1))


@pytest.mark.parametrize("layers", [None, ["*e*"]])
def test_updates_of_layers_that_the_graph_does_not_know_as_layers_are_refused(layers):
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.rand(2, 4, 8, 8)
    masks = halve.prune(model)
    with pytest.raises(ModelError, match=r"gate\.weight"):
        halve.certify(model, masks, x, reuse=1e-3, layers=layers, progress=False)


def test_a_tied_weight_is_updated_under_all_of_its_names_or_none():
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.rand(2, 4, 8, 8)
    masks = halve.prune(model)
    with pytest.raises(OptionError, match=r"layers= names other but not the layer that has the same weight"):
        halve.certify(model, masks, x, reuse=1e-3, layers=["*h*"], progress=False)
    halve.certify(model, masks, x, reuse=1e-3, layers=["o*", "head"], progress=False)


class Otherwise(nn.Module):
    """Computes something else for one image than for two, or each time."""

    def __init__(self, how):
        super().__init__()
        self.first, self.head, self.how = nn.Conv2d(4, 8, 3), nn.Linear(288, 3), how

    def forward(self, x):
        y = self.first(x).relu()
        if self.how == "random":
            y = y + torch.randn(8, 1, 1, dtype=y.dtype)
        if self.how == "batch":
            y = y if len(y) == 1 else 2 * y
        return self.head(y.flatten(1))


@pytest.mark.parametrize("how", ["random", "batch"])
def test_models_that_compute_something_else_for_one_image_are_refused(how):
    torch.manual_seed(0)
    model, x = Otherwise(how).eval(), torch.rand(2, 4, 8, 8)
    with pytest.raises(ModelError, match=r"something else for one image|cannot be captured|no bounds for"):
        halve.certify(model, halve.prune(model), x, region=1e-3, progress=False)


@pytest.mark.parametrize(
    ("eps", "shown"), [(0.00012345678, "0.00012345678 per input value"), (1.23456e-9, "1.23456e-09 per")]
)
def test_a_sentence_says_no_more_than_was_proven(model, masks, pictures, eps, shown):
    assert shown in str(halve.certify(model, masks, pictures[:1], region=eps, progress=False))


@pytest.mark.parametrize(
    ("data", "total"),
    [
        (lambda x: x, 3),
        (lambda x: [x[:2], (x[2:], torch.zeros(1))], 3),
        (lambda x: DataLoader(TensorDataset(x), batch_size=2), 3),
        (lambda x: iter([x]), None),
    ],
    ids=["tensor", "list", "loader", "iterator"],
)
def test_progress_knows_how_many_images_there_are(model, masks, pictures, data, total):
    seen = []

    def progress(items, what):
        seen.append((what, known_length(items)))
        return items

    found = halve.certify(model, masks, data(pictures[:3]), reuse=1e-6, layers=["8"], progress=progress)
    assert found.result["images"] == 3
    assert seen == [("images", total)]
