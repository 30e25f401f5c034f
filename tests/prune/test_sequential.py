import pytest
import torch
from torch import nn

import halve
from halve.prune.sequential import SAMPLE, pick_sequentially, sample_of
from halve.prune.statistics import column_means, spread
from halve.select.select import select
from tests.random_masks import random
from tests.untouched import untouched


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=2),
        nn.Flatten(),
        nn.Linear(256, 12),
        nn.Linear(12, 4),
    ).eval()


def test_each_layer_is_told_what_the_masked_layers_before_it_change():
    model, x, met = net(), random(20, 8, 6, 6), {}
    choices = select(model, also="*").masked
    kept = {c.name: random(*c.shape, seed=i) > 0 for i, c in enumerate(choices)}
    known = {"5": kept["5"]}

    def pick(choice, drift):
        met[choice.name] = drift
        return kept[choice.name]

    with untouched(model):
        pick_sequentially(model, choices, known, pick, x)
    assert list(met) == ["0", "3", "6"]
    torch.testing.assert_close(met["0"].missing, torch.zeros(16))
    torch.testing.assert_close(met["0"].strength, torch.ones(16))
    for at, name in ((3, "3"), (6, "6")):
        before = nn.Sequential(*net()[:at])
        with torch.no_grad():
            whole = model[at](before(x))
            for other in (n for n in kept if int(n) < at):
                before[int(other)].weight *= kept[other]
            inputs = before.eval()(x)
            now, then = spread(model[at], model[at](inputs)), spread(model[at], whole)
        torch.testing.assert_close(met[name].inputs, column_means(model[at], inputs, model[at](inputs)))
        torch.testing.assert_close(met[name].missing, then.mean - now.mean)
        torch.testing.assert_close(met[name].strength, now.variance / then.variance)
        assert met[name].strength.max() < 1


def test_a_layer_that_runs_twice_or_shares_its_weight_is_chosen_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.never = nn.Linear(8, 8)

        def forward(self, x):
            return self.second(self.first(self.first(input=x)).relu())

    model, calls = Twice().eval(), []
    choices = select(model, also="*").masked
    pick_sequentially(
        model, choices, {}, lambda c, _: (calls.append(c.name), torch.ones(c.shape, dtype=torch.bool))[1], random(9, 8)
    )
    assert calls == ["first"]
    masks = halve.prune(model, "reconstruct", [random(9, 8)], also="*")
    assert halve.verify(halve.apply(model, masks), masks).ok
    assert masks["never"].difference(halve.prune(model, also="*")["never"]) == 0


def test_a_channel_that_never_moves_asks_for_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].bias.fill_(-1e4)
    drifts = {}
    choices = select(model, also="*").masked
    pick_sequentially(
        model, choices, {}, lambda c, d: drifts.setdefault(c.name, d) and torch.zeros(c.shape) > 0, random(9, 8)
    )
    assert torch.equal(drifts["2"].strength, torch.ones(8))


@pytest.mark.parametrize("size", [1, 24, 100])
def test_the_sample_is_put_together_of_the_first_batches(size):
    images = random(200, 3, 2, 2)
    batches = [(part, torch.zeros(len(part))) for part in images.split(size)]
    assert torch.equal(sample_of(batches), images[:SAMPLE])
    assert torch.equal(sample_of(images[:5]), images[:5])


def test_images_of_another_size_are_left_out_and_an_unusual_batch_is_taken_as_it_is():
    batches = [random(4, 3, 2, 2), random(4, 3, 5, 5), random(4, 3, 2, 2, seed=1)]
    assert torch.equal(sample_of(batches), torch.cat([batches[0], batches[2]]))
    assert sample_of(["first", "second"], forward=lambda model, batch: None) == "first"
