"""Tiles that are chosen to be timed, compared with what was measured on an H200."""

import dataclasses
import json

import pytest
import torch

from benchmarks.fit_tiles import NETWORKS, RESULTS, layers_of_3x3, layers_of_networks, plans_of
from halve.engine.kernels.cuda import driver
from halve.engine.kernels.registry import FAMILIES
from halve.engine.kernels.wgmma_sp.promising import MARGIN, MAX_TILES, Costs, Problem, estimated_us, promising
from halve.engine.kernels.wgmma_sp.tiling import TILES
from halve.engine.operations import Convolution, JoinedConvolution, Linear

ON_3X3 = list(layers_of_3x3())
IN_NETWORKS = list(layers_of_networks())


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(driver, "processors", lambda device: 132)


def problem(rows, channels, size, kernel=3, residual=False, sparse=True):
    convolution = Convolution(rows, channels, (kernel, kernel), padding=(kernel // 2,) * 2)
    return Problem(convolution, size, sparse, residual, 132)


@pytest.mark.parametrize("layer", ON_3X3, ids=str)
def test_the_best_tile_that_is_kept_is_nearly_the_best_of_all(layer):
    assert set(layer.times) <= set(layer.plans)
    assert layer.loss(layer.kept()) < 0.03


def test_every_tile_was_timed_on_twelve_layers():
    complete = [layer for layer in ON_3X3 if layer.complete]
    assert len(complete) == 12
    assert all(set(layer.times) == set(layer.plans) for layer in complete)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("flipped", [False, True], ids=["", "residual flipped"])
def test_the_fastest_tile_of_each_layer_is_kept(network, flipped):
    """With and without a residual: records do not have it, so it is known from the names of layers."""
    layers = [layer for layer in IN_NETWORKS if layer.source == network]
    assert len(layers) >= 19
    assert all(layer.winner in layer.plans for layer in layers)
    if flipped:
        layers = [
            dataclasses.replace(layer, problem=other, plans=plans_of(other, halves=False))
            for layer in layers
            if layer.problem.shortcut is None
            for other in [layer.problem._replace(residual=not layer.problem.residual)]
        ]
    lost = [str(layer) for layer in layers if layer.winner in layer.plans and not layer.keeps_winner(layer.kept())]
    assert lost == []


def test_few_tiles_are_kept():
    layers = ON_3X3 + IN_NETWORKS
    kept = [layer.kept() for layer in layers]
    assert max(map(len, kept)) <= MAX_TILES == 9
    assert sum(map(len, kept)) < 0.4 * sum(len(layer.plans) for layer in layers)
    assert sum(len(layer.kept()) for layer in ON_3X3) < 0.22 * sum(len(layer.plans) for layer in ON_3X3)


def test_layers_that_constants_were_not_fitted_to_were_checked():
    found = json.loads((RESULTS / "tiles.json").read_text())
    assert found["costs"] == dataclasses.asdict(Costs())
    assert {*NETWORKS, "all networks", "3x3 at batch 8", "3x3 with 512 channels"} <= found["unseen"].keys()
    for checked in found["unseen"].values():
        assert checked["winners_lost"] == []
        assert (checked["worst_loss"] or 0) < 0.03


def test_the_estimate_is_about_right():
    errors = [
        estimated_us(layer.plans[name], layer.problem) / (1e3 * ms)
        for layer in ON_3X3
        for name, ms in layer.times.items()
    ]
    assert min(errors) > 0.6
    assert max(errors) < 1.5


def test_where_taps_are_unrolled_other_tiles_are_not_timed_twice():
    given = problem(256, 256, (32, 14, 14))
    kept = promising(plans_of(given), given)
    assert kept
    assert all(TILES[name].unrolled for name in kept)
    assert not any(name.removesuffix(" 3x3") in kept for name in kept)


def test_names_are_in_the_order_given_and_within_the_margin():
    given = problem(512, 128, (32, 28, 28), kernel=1, residual=True)
    plans = plans_of(given)
    kept = promising(plans, given)
    assert kept == [name for name in plans if name in kept]
    estimates = {name: estimated_us(plan, given) for name, plan in plans.items()}
    best = min(estimates.values())
    assert all(estimates[name] <= MARGIN * best for name in kept)
    assert promising({}, given) == []
    assert promising({"128x64": plans["128x64"]}, given) == ["128x64"]


def test_one_image_of_a_layer_with_many_channels_is_split():
    given = problem(512, 512, (1, 7, 7))
    kept = promising(plans_of(given), given)
    assert "128x128k8 3x3" in kept
    assert "128x256 3x3" not in kept


@pytest.mark.parametrize(
    ("name", "operation", "shapes"),
    [
        ("wgmma_sp", Convolution(128, 128, (3, 3), padding=(1, 1)), [(32, 128, 28, 28)]),
        ("wgmma", Linear(384, 96), [(8, 56, 56, 96), (8, 56, 56, 384)]),
        (
            "wgmma_sp_joined",
            JoinedConvolution(256, 256, (3, 3), (1, 1), (1, 1), "relu", 128, (2, 2)),
            [(32, 256, 14, 14), (32, 128, 28, 28)],
        ),
    ],
)
def test_families_ask_for_their_tiles(name, operation, shapes, h200):
    inputs = [torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes]
    family = FAMILIES[name]
    fitting = [tile for tile in TILES if family.fits(inputs, operation, tile)]
    kept = list(family.promising(inputs, operation, fitting))
    assert 0 < len(kept) <= MAX_TILES < len(fitting)
    assert set(kept) < set(fitting)


def test_other_families_are_timed_in_every_variant():
    variants = ["64x64", "32x32k8"]
    assert FAMILIES["mma_sp"].promising([torch.empty(1, 8)], Linear(8, 8), variants) == variants
