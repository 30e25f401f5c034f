"""Masked and dense network together: the same update of both."""

import json
import math
import re

import pytest
import torch
from torch import nn

import halve
from benchmarks.soundness import JOINT, joint_cases, started
from halve.certify.attack import attack_lead
from halve.certify.changes import WeightBox
from halve.certify.crown import Bounds
from halve.certify.digests import digest_of_bounds
from halve.certify.joint import JointBounds, SharedLoss, shared_updates, side_by_side
from halve.certify.network import network_of
from halve.certify.proofs import Proof
from halve.certify.reuse import weight_units
from halve.certify.rounding import Interval, Owners
from halve.errors import CertificateError, OptionError
from tests.tiny import convnet
from tests.untouched import untouched


def joined(dense, masks, x, size, names=None):
    """Bounds of a network in float64 and its masked form, for one image."""
    captured = [network_of(one, x[None]) for one in (dense, halve.apply(dense, masks))]
    units = {name: layers[0].weight.square().mean().sqrt() for name, layers in captured[0].layers.items()}
    radii = {name: torch.full_like(captured[0].layers[name][0].weight, float(unit)) for name, unit in units.items()}
    changes = shared_updates(captured[1], masks, radii, names or list(radii), size)
    return JointBounds(side_by_side(*captured), Interval(x[None], x[None]), changes)


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_no_update_breaks_the_bounds_of_both_networks(seed):
    """A long run of the same is benchmarks/soundness.py --joint."""
    for case in joint_cases(seed, 4):
        assert not case.broken, case


def test_a_wrong_bound_would_be_noticed(monkeypatch):
    """If only the layers of the masked network counted, the bounds would be wrong."""
    whole = SharedLoss.loss

    def only_masked(self, layer, rows, inputs, owners):
        found = whole(self, layer, rows, inputs, owners)
        return found if any(layer is one for one in self.update.masked) else torch.zeros_like(found)

    monkeypatch.setattr(SharedLoss, "loss", only_masked)
    assert any(case.broken for case in joint_cases(3, 8))


def test_one_layer_is_bounded_exactly():
    """A kept weight moves a combination of margins by the sum of both factors, a dropped one by the dense factor."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 3)).double().requires_grad_(False)
    x, size, masks = torch.randn(8).double(), 1e-2, halve.prune(dense, also="0")
    bounds, kept = joined(dense, masks, x, size), masks["0"].kept().double()
    masked = halve.apply(dense, masks)
    unit = float(dense[0].weight.square().mean().sqrt())
    for one, other in ((1.0, 0.0), (0.0, 1.0), (1.0, -1.0), (-1.0, 0.5), (2.0, 3.0)):
        row = torch.tensor([[one, -one, 0.0, other, -other, 0.0]], dtype=torch.float64)
        scores = torch.cat([dense(x[None])[0], masked(x[None])[0]])
        lost = size * unit * float(((one + other * kept[:2]).abs() * x.abs()).sum())
        assert float(bounds.lower(row)) == pytest.approx(float(row[0] @ scores) - lost, abs=1e-9)


def test_what_both_networks_share_cancels_in_their_difference():
    torch.manual_seed(0)
    convs = nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)
    dense = nn.Sequential(*convs, nn.Flatten(), nn.Linear(64, 3)).double().eval().requires_grad_(False)
    masks, x = halve.prune(dense, pattern="4:4"), torch.randn(4, 8, 8).double()
    bounds = joined(dense, masks, x, 1e-3)
    row = torch.tensor([[1.0, -1.0, 0.0, -1.0, 1.0, 0.0]], dtype=torch.float64)
    alone = torch.tensor([[1.0, -1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    with torch.no_grad():
        difference = float(bounds.lower(row))
        moves = float(-bounds.lower(alone) - bounds.lower(-alone)) / 2
    assert difference <= 0  # the networks are the same
    assert -difference < 0.05 * moves  # what is left is of second order


def test_a_layer_that_is_called_twice_has_one_update():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.shared(x) - 0.5 * self.shared(x))

    torch.manual_seed(0)
    dense = Twice().double().eval().requires_grad_(False)
    masks, x = halve.prune(dense), torch.randn(8).double()
    bounds = joined(dense, masks, x, 1e-3, ["shared"])
    once = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).double().eval().requires_grad_(False)
    once[0].weight, once[0].bias = nn.Parameter(dense.shared.weight / 2), nn.Parameter(dense.shared.bias / 2)
    once[1].load_state_dict(dense.head.state_dict())
    same = joined(once.requires_grad_(False), halve.prune(once), x, 1e-3, ["0"])
    row = torch.tensor([[1.0, -1.0, 0.0, 0.5, -0.5, 0.0]], dtype=torch.float64)
    assert float(bounds.lower(row)) == pytest.approx(float(same.lower(row)), abs=1e-9)


def test_rounding_is_assumed_in_each_network_from_its_own_module_on():
    """What the dense network assumes before the changed layer says nothing of the first layers of the masked one."""
    torch.manual_seed(0)
    dense = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)), nn.Linear(64, 3)).double().requires_grad_(False)
    masks, x = halve.prune(dense), torch.randn(64).double()
    bounds = joined(dense, masks, x, 1e-3, ["12"])
    captured = [network_of(one, x[None]) for one in (dense, halve.apply(dense, masks))]
    alone = [
        Bounds(one, Interval(x[None], x[None]), {"12": WeightBox(1e-3 * dense[12].weight.abs())}) for one in captured
    ]
    assert all(one.assumed[0] and "0" not in one.assumed[0] for one in alone)
    assert bounds.assumed[0] == alone[0].assumed[0] | alone[1].assumed[0]
    before = [*alone[0].values[:-1], *alone[1].values[1:-1]]
    count = len(captured[0].nodes)
    for one, same in zip([*bounds.values[: count - 1], *bounds.values[count:-2]], before, strict=True):
        assert torch.equal(one.low, same.low)
        assert torch.equal(one.high, same.high)


def test_several_images_have_the_bounds_of_each(model, masks, pictures):
    """Rows of several images, each with its own derivatives."""
    dense = convnet().double().requires_grad_(False)
    x = pictures[:2].double()
    alone = [joined(dense, masks, one, 1e-3) for one in x]
    both = JointBounds(alone[0].network, Interval(x, x), alone[0].changes)
    rows = torch.randn(3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = both.lower(rows[[0, 1, 2, 0]], -1, Owners.of(torch.tensor([0, 0, 1, 1]), 2))
        expected = torch.cat([alone[0].lower(rows[:2]), alone[1].lower(rows[[2, 0]])])
    assert torch.allclose(found, expected, atol=1e-9, rtol=0)


def test_agreement_is_certified_checked_and_said_in_a_sentence(model, masks, pictures):
    with untouched(model):
        found = halve.certify(model, masks, pictures, reuse=1e-3, agreement=True)
    assert (found.statement, found.result["certified"]) == ("agreement", len(pictures))
    assert str(found) == (
        "Proven for 4 of 4 images: after any update of the weights in all layers by up to 0.001 of the layer's root "
        "mean square, masked and dense network predict the same class."
    )
    assert found.result["largest_lead"] == 0
    assert halve.certify(model, masks, pictures, check=found).result == found.result
    both = halve.certify(model, masks, pictures, reuse=1e-3, also_dense=True).result
    assert [one["margin"] for one in both["per_image"]] == [one["margin"] for one in found.result["per_image"]]


@pytest.mark.parametrize(("size", "layers"), [(0.2, ["8", "10"]), (0.05, None), (0.3, ["10"])])
def test_where_the_networks_may_differ_no_update_has_a_larger_lead(model, masks, pictures, size, layers):
    found = halve.certify(model, masks, pictures, reuse=size, layers=layers, agreement=True)
    dense, masked = convnet().double().eval(), halve.apply(model, masks).double().eval()
    units = weight_units(model, masks, True)["dense"]
    radii = {name: size * unit for name, unit in units.items() if layers is None or name in layers}
    leads = [one["lead"] for one in found.result["per_image"]]
    assert found.result["largest_lead"] == max(leads)
    assert any(lead > 0 for lead in leads)
    [claimed] = re.findall(r"may differ only where the updated dense one leads by at most (\S+)\.$", found.sentence)
    assert max(leads) <= float(claimed) < 1.01 * max(leads)
    differ = 0
    for x, one in zip(pictures.double(), found.result["per_image"], strict=True):
        worst = attack_lead(masked, dense, x, radii, masks)
        assert one["certified"] == (one["lead"] == 0)
        assert worst is None or worst <= one["lead"]
        differ += worst is not None
    assert differ == (0 if layers is None else len(pictures))


def test_the_lead_is_bounded_better_together_than_apart(masks, pictures):
    """Apart, the dense margin may be the largest that an update gives, whatever the masked network predicts."""
    dense = convnet().double().requires_grad_(False)
    for x in pictures.double():
        bounds, label = joined(dense, masks, x, 0.3, ["10"]), int(dense(x[None]).argmax())
        with torch.no_grad():
            apart = -float(bounds.lower(bounds._rows([(label, k) for k in range(5) if k != label], -1.0, 0.0)).max())
        assert 0 < bounds.lead(label) < 0.6 * apart


def test_what_no_update_makes_differ_is_certified_without_a_class():
    assert Proof(0, -1.0, agree=True, lead=0.0).certified
    assert not Proof(0, -1.0, agree=True, lead=0.1).certified
    assert not Proof(0, None, agree=False).certified
    assert Proof(0, -1.0, agree=True, lead=math.inf).plain()["lead"] is None


def test_nothing_is_said_of_numbers_that_overflow():
    dense = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 3, bias=False)).double()
    with torch.no_grad():
        for layer in (dense[0], dense[2]):
            layer.weight.fill_(1e40)
    bounds = joined(dense.requires_grad_(False), halve.prune(dense), torch.ones(4).double(), 1e-3)
    assert bounds.lead(0) == math.inf


def test_the_radius_of_agreement_is_that_of_both_networks(model, masks, pictures):
    options = {"reuse": "radius", "layers": ["8", "10"]}
    one = halve.certify(model, masks, pictures[:1], agreement=True, **options)
    other = halve.certify(model, masks, pictures[:1], also_dense=True, **options)
    assert one.result["median_radius"] == other.result["median_radius"] > 0
    assert "masked and dense network predict the same class" in str(one)


def test_an_agreement_that_is_claimed_of_other_masks_does_not_hold(model, masks, pictures):
    made = halve.certify(model, masks, pictures[:1], reuse=1e-3, agreement=True)
    other = halve.prune(model, "random")
    with pytest.raises(CertificateError, match="other masks"):
        halve.certify(model, other, pictures[:1], check=made)
    with pytest.raises(OptionError, match="agreement= is for reuse="):
        halve.certify(model, masks, pictures[:1], region=0.1, agreement=True)


def test_a_record_of_joint_bounds_is_not_one_of_others(tmp_path):
    fresh = started(tmp_path / "none.json", joint=True)
    assert fresh["bounds"] != started(tmp_path / "none.json")["bounds"]
    record = json.loads(JOINT.read_text())
    assert record["bounds"] == digest_of_bounds("joint")
    assert record["cases"] > 0
    assert record["broken"] == []


def test_the_lead_is_not_bounded_with_many_classes_and_the_sentence_says_nothing_of_it(pictures):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(pictures[0].numel(), 16), nn.ReLU(), nn.Linear(16, 101)).eval()
    model = halve.apply(model, halve.prune(model, progress=False))  # dense and masked network are the same
    masks = halve.prune(model, progress=False)
    found = halve.certify(model, masks, pictures[:1], reuse=0.5, agreement=True, optimise=False)
    assert found.result["largest_lead"] is None
    assert "may differ" not in found.sentence
