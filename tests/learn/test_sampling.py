import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import halve
from halve.learn.sampling import _RANK, _STEP, FORBIDDEN, Sampler, _HardSample, exponential, glorot, relative
from halve.masks.layout import Layout
from halve.masks.mask import Mask
from halve.masks.pattern import Pattern
from halve.modules import weight_of
from halve.select.select import Choice, select
from tests.random_masks import layouts, random
from tests.tiny import convnet

PATTERNS = ("1:1", "1:2", "2:3", "2:4", "1:4", "3:4", "4:4", "3:8")


def choice(name, pattern, layout):
    return Choice(name, "Linear", layout.shape, Pattern(pattern), layout, "")


def sampler_of(*layers, alpha=8.0):
    """A sampler for (pattern, layout) pairs with random weights, none of them zero, started by their magnitudes."""
    choices = [choice(f"layer{i}", pattern, layout) for i, (pattern, layout) in enumerate(layers)]
    weights = {c.name: random(*c.shape, seed=i).add(10) for i, c in enumerate(choices)}
    scores = {c.name: random(*c.shape, seed=50 + i).abs() for i, c in enumerate(choices)}
    return Sampler(choices, weights, scores, alpha), choices, weights, scores


def started(model, alpha=8.0, **options):
    choices = select(model, **options).masked
    weights = {c.name: weight_of(model.get_submodule(c.name)) for c in choices}
    return Sampler(choices, weights, {name: w.abs() for name, w in weights.items()}, alpha)


def with_logits(pattern, layout, logits):
    """A sampler for one layer with the same logits in every block."""
    sampler, *_ = sampler_of((pattern, layout))
    with torch.no_grad():
        sampler.split(sampler.logits)[0].copy_(logits.expand(layout.rows * layout.blocks, -1))
    return sampler


def models():
    layer = st.sampled_from(PATTERNS).flatmap(lambda p: layouts(Pattern(p).size).map(lambda layout: (p, layout)))
    return st.lists(layer, min_size=1, max_size=3)


@given(models(), st.integers(0, 1000), st.sampled_from([0.0, 8.0]))
def test_hard_samples_and_final_masks_are_legal_in_every_layout_and_mix_of_patterns(layers, seed, alpha):
    sampler, choices, weights, _ = sampler_of(*layers, alpha=alpha)
    sampled = sampler.sample(temperature=1.0, seed=seed, step=0)
    assert set(sampled) == {c.name for c in choices}
    for c in choices:
        kept = sampled[c.name] != 0
        assert torch.equal(Mask.from_kept(c.pattern, c.layout, kept).kept(), kept)
        assert torch.equal(sampled[c.name][kept], weights[c.name][kept])
    for final in ("argmax", "sample"):
        masks = sampler.masks(final, seed)
        assert {name: (m.pattern, m.layout) for name, m in masks.items()} == {
            c.name: (c.pattern, c.layout) for c in choices
        }


@given(models())
def test_the_start_is_the_mask_that_the_scores_choose(layers):
    sampler, choices, _, scores = sampler_of(*layers)
    masks = sampler.masks()
    for c in choices:
        assert torch.equal(masks[c.name].kept(), Mask.from_scores(c.pattern, c.layout, scores[c.name]).kept())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pattern": "1:4"},
        {"order": "flat"},
        {"remainder": "pad", "also": "10", "pattern": {"3": "3:7", "*": "2:4"}},
    ],
)
def test_the_start_by_magnitude_is_the_mask_of_prune(options):
    model = convnet()
    masks = halve.prune(model, **options)
    assert {name: m.kept().tolist() for name, m in started(model, **options).masks().items()} == {
        name: m.kept().tolist() for name, m in masks.items()
    }


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:8"])
def test_the_gradient_is_that_of_the_straight_through_formula(pattern, temperature):
    table = Pattern(pattern).table().double()
    logits = random(7, len(table), dtype=torch.float64).requires_grad_()
    noise = random(7, len(table), seed=1, dtype=torch.float64)
    pull = random(7, table.shape[1], seed=2, dtype=torch.float64)
    kept = _HardSample.apply(logits, noise.clone(), table, temperature)
    (ours,) = torch.autograd.grad((kept * pull).sum(), logits)
    soft = ((logits + noise) / temperature).softmax(1)
    one_hot = nn.functional.one_hot(soft.argmax(1), len(table))
    plain = (one_hot - soft.detach() + soft) @ table
    (theirs,) = torch.autograd.grad((plain * pull).sum(), logits)
    assert torch.allclose(kept, plain)
    assert torch.allclose(ours, theirs, atol=1e-14)


def test_the_gradient_of_a_sampled_model_is_that_of_the_straight_through_formula():
    layers = [("2:4", Layout("conv", (3, 6, 2, 2), 4, pad=True)), ("1:2", Layout("conv_transpose", (4, 3, 2), 2, 2))]
    sampler, choices, weights, _ = sampler_of(*layers, alpha=2.0)
    sampled = sampler.sample(temperature=0.7, seed=5, step=3, rank=2)
    pulls = {c.name: random(*c.shape, seed=9) for c in choices}
    (ours,) = torch.autograd.grad(sum((sampled[n] * pulls[n]).sum() for n in pulls), sampler.logits)
    generator = torch.Generator().manual_seed(5 + 4 * _STEP + 2 * _RANK)
    loss = torch.zeros(())
    for c, logits in zip(choices, sampler.legal_logits(), strict=True):
        noise = -exponential(logits, generator).log()
        soft = ((logits + noise) / 0.7).softmax(1)
        one_hot = nn.functional.one_hot(soft.argmax(1), soft.shape[1])
        kept = (one_hot - soft.detach() + soft) @ c.pattern.table().float()
        kept = c.layout.from_blocks(kept.reshape(c.layout.rows, c.layout.blocks, c.layout.block))
        assert torch.allclose(sampled[c.name], kept * weights[c.name], atol=1e-4)
        loss = loss + (kept * weights[c.name] * pulls[c.name]).sum()
    (theirs,) = torch.autograd.grad(loss, sampler.logits)
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_noise_is_that_of_an_exponential_distribution_and_never_zero():
    """With this seed one uniform number is zero, whose noise would be infinite."""
    uniform = torch.empty(1 << 20).uniform_(generator=torch.Generator().manual_seed(12))
    assert uniform.min() == 0
    noise = exponential(uniform, torch.Generator().manual_seed(12))
    assert 0 < noise.min() < 2**-24
    assert noise.mean() == pytest.approx(1, abs=5e-3)
    assert (noise > 1).double().mean() == pytest.approx(math.exp(-1), abs=2e-3)


def test_soft_samples_keep_n_in_sum_and_become_hard_as_the_temperature_falls():
    layout = Layout("linear", (6, 8), 4)
    sampler, _, weights, _ = sampler_of(("2:4", layout), alpha=1.0)
    warm, cold, hard = (
        sampler.sample(temperature=t, seed=1, step=0, hard=h)["layer0"] / weights["layer0"]
        for t, h in ((1.0, False), (1e-4, False), (1.0, True))
    )
    assert torch.allclose(layout.to_blocks(warm).sum(2), torch.full((6, 2), 2.0))
    assert ((warm > 0) & (warm < 1)).any()
    assert torch.allclose(cold, hard, atol=1e-3)
    assert torch.autograd.grad(warm.square().sum(), sampler.logits)[0].abs().sum() > 0


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
def test_codes_come_as_often_as_the_softmax_of_the_logits_says(pattern, final):
    p, rows = Pattern(pattern), 20_000
    layout = Layout("linear", (rows, p.size), p.size)
    logits = random(p.count)
    sampler = with_logits(pattern, layout, logits)
    if final:
        codes = sampler.masks("sample", seed=4)["layer0"].codes
    else:
        codes = p.encode(layout.to_blocks(sampler.sample(temperature=0.3, seed=4, step=0)["layer0"] != 0))
    expected = rows * logits.double().softmax(0)
    counts = torch.bincount(codes.flatten().long(), minlength=p.count)
    assert float(((counts - expected).square() / expected).sum()) < 25  # 5 degrees of freedom: beyond 20.5 once in 1000


def test_a_sample_depends_on_seed_step_and_rank_alone():
    sampler, *_ = sampler_of(("2:4", Layout("linear", (16, 32), 4)), alpha=1.0)
    state = torch.get_rng_state()

    def sample(seed=3, step=5, rank=1):
        return sampler.sample(temperature=1.0, seed=seed, step=step, rank=rank)["layer0"]

    first = sample()
    torch.manual_seed(123)
    assert torch.equal(first, sample())
    torch.set_rng_state(state)
    others = [sample(seed=4), sample(step=6), sample(step=-1), sample(rank=0), sample(rank=1001)]
    assert all(not torch.equal(first, other) for other in others)
    sampler.masks("sample", 1)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_virtual_column_never_takes_a_real_weights_place():
    layout = Layout("linear", (5000, 3), 4, pad=True)
    table = Pattern("2:4").table()
    sampler, *_ = sampler_of(("2:4", layout), alpha=0.0)
    for seed in range(3):
        assert (sampler.sample(temperature=5.0, seed=seed, step=0)["layer0"] != 0).sum(1).eq(2).all()
        assert not table[sampler.masks("sample", seed)["layer0"].codes.long(), ..., 3].any()
    logits = sampler.legal_logits()[0]
    assert torch.equal(logits[0] <= FORBIDDEN / 2, table[:, 3])
    loss = sampler.sample(temperature=5.0, seed=0, step=0)["layer0"].square().sum()
    (grad,) = torch.autograd.grad(loss, sampler.logits)
    assert sampler.split(grad)[0][:, table[:, 3]].eq(0).all()
    assert grad.isfinite().all()


def test_a_row_with_fewer_weights_than_places_keeps_them_all():
    sampler, *_ = sampler_of(("3:4", Layout("linear", (50, 5), 4, pad=True)), alpha=0.0)
    assert (sampler.sample(temperature=1.0, seed=0, step=0)["layer0"][:, 4] != 0).all()
    assert sampler.masks("sample")["layer0"].kept()[:, 4].all()


def test_the_last_sample_depends_on_its_seed_and_differs_from_the_likeliest():
    sampler, *_ = sampler_of(("2:4", Layout("linear", (16, 32), 4)), alpha=1.0)
    first, again, other, best = (
        sampler.masks(final, seed)["layer0"]
        for final, seed in (("sample", 0), ("sample", 0), ("sample", 1), ("argmax", 0))
    )
    assert first == again
    assert first.difference(other) > 0.1
    assert first.difference(best) > 0.1


def test_codes_are_those_of_the_masks_one_layer_after_another():
    sampler, choices, *_ = sampler_of(("2:4", Layout("linear", (3, 8), 4)), ("2:4", Layout("conv", (2, 4, 3), 4)))
    masks = sampler.masks()
    assert torch.equal(sampler.codes(), torch.cat([masks[c.name].codes.flatten().long() for c in choices]))


def test_entropy_is_one_when_undecided_and_zero_when_decided():
    layout = Layout("linear", (4, 8), 4)
    assert with_logits("2:4", layout, torch.zeros(6)).entropy() == pytest.approx(1.0)
    assert with_logits("2:4", layout, torch.tensor([99.0, 0, 0, 0, 0, 0])).entropy() == pytest.approx(0.0, abs=1e-6)
    two = with_logits("2:4", layout, torch.tensor([0.0, 0, -99, -99, -99, -99])).entropy()
    assert two == pytest.approx(math.log(2) / math.log(6))
    assert sampler_of(("4:4", layout))[0].entropy() == 0.0
    mixed, *_ = sampler_of(("2:4", layout), ("1:4", layout), ("4:4", layout), alpha=0.0)
    assert mixed.entropy() == pytest.approx(2 / 3)
    padded, *_ = sampler_of(("2:4", Layout("linear", (4, 3), 4, pad=True)), alpha=0.0)
    assert padded.entropy() == pytest.approx(math.log(3) / math.log(6))


def test_the_logits_are_one_flat_parameter_and_all_that_is_saved():
    sampler = started(convnet(), pattern={"3": "1:4", "*": "2:4"})
    blocks = {"0": 8 * 9, "3": 8 * 2 * 9, "8": 16 * 8}
    assert [name for name, _ in sampler.named_parameters()] == ["logits"]
    assert list(sampler.state_dict()) == ["logits"]
    assert sampler.logits.dim() == 1
    assert sampler.logits.numel() == 6 * (blocks["0"] + blocks["8"]) + 4 * blocks["3"]


def test_what_split_gives_are_views_of_the_flat_tensor():
    sampler, *_ = sampler_of(("2:4", Layout("linear", (3, 8), 4)), ("1:2", Layout("linear", (5, 4), 2)))
    parts = sampler.split(sampler.logits.detach())
    assert [tuple(part.shape) for part in parts] == [(6, 6), (10, 2)]
    assert torch.equal(torch.cat([part.flatten() for part in parts]), sampler.logits.detach())
    assert all(part.untyped_storage().data_ptr() == sampler.logits.untyped_storage().data_ptr() for part in parts)


def test_blocks_of_zeros_start_undecided_and_stay_finite():
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    nn.init.zeros_(model[0].weight)
    sampler = started(model)
    assert sampler.logits.eq(0).all()
    sampled = sampler.sample(temperature=1.0, seed=0, step=0)["0"]
    (grad,) = torch.autograd.grad(sampled.sum(), sampler.logits)
    assert sampled.eq(0).all()
    assert grad.eq(0).all()
    assert torch.equal(sampler.masks()["0"].kept(), halve.prune(model)["0"].kept())


def test_relative_scores_have_a_mean_of_one_or_zero():
    scores = torch.tensor([[1.0, 2, 3, 2], [0, 0, 0, 0], [1e-30, 0, 0, 3e-30], [1e30, 1e30, 1e30, 1e30]])
    assert torch.allclose(relative(scores).mean(1), torch.tensor([1.0, 0, 1, 1]))


def test_tiny_and_huge_weights_start_by_magnitude_too():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.LayerNorm(3))
    row = torch.tensor([1.0, 4, 3, 2])
    with torch.no_grad():
        model[0].weight.copy_(torch.stack([row * 1e-37, row, row * 1e37]))
    assert torch.equal(started(model).masks()["0"].kept(), halve.prune(model)["0"].kept())


def test_glorot_numbers_have_the_deviation_of_glorots_rule():
    numbers = glorot((3000, 6), torch.Generator().manual_seed(0))
    assert float(numbers.std()) == pytest.approx(math.sqrt(2 / 3006), rel=0.05)
    assert torch.equal(numbers, glorot((3000, 6), torch.Generator().manual_seed(0)))


def test_sampling_leaves_weights_and_scores_alone():
    sampler, _, weights, scores = sampler_of(("2:4", Layout("linear", (4, 8), 4)))
    before = copy.deepcopy((weights, scores))
    sampler.sample(temperature=1.0, seed=0, step=0)["layer0"].sum().backward()
    assert torch.equal(weights["layer0"], before[0]["layer0"])
    assert torch.equal(scores["layer0"], before[1]["layer0"])
    assert not weights["layer0"].requires_grad


@pytest.mark.parametrize("hard", [True, False])
def test_without_noise_the_likeliest_codes_are_taken(hard):
    sampler, _, weights, _ = sampler_of(("2:4", Layout("linear", (3, 8), 4)), ("1:4", Layout("conv", (2, 4, 3), 4)))
    found = sampler.sample(temperature=1.0 if hard else 1e-4, seed=0, step=0, hard=hard, noise=0.0)
    for name, mask in sampler.masks().items():
        assert torch.allclose(found[name], mask.apply_to(weights[name]), atol=1e-4)


def test_noise_may_be_a_tensor_as_well():
    sampler, *_ = sampler_of(("2:4", Layout("linear", (3, 8), 4)), ("1:4", Layout("conv", (2, 4, 3), 4)))
    drawn = sampler.draw(3, 4)
    for noise in (0.0, 0.5):
        plain = sampler.masked(drawn, 0.7, noise)
        tensors = sampler.masked(drawn, torch.tensor(0.7), torch.tensor(noise))
        assert all(torch.equal(plain[name], tensors[name]) for name in plain)
