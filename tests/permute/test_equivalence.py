"""A network whose channels were moved computes the same, or nothing is returned."""

import pytest
import torch
from torch import nn

import halve
from halve.errors import ModelError
from halve.permute import permute as permute_module
from halve.permute.equivalence import Equivalence
from tests import tiny


class TwoOutputs(nn.Module):
    def __init__(self, chance=False):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)
        self.chance = chance

    def forward(self, x):
        h = self.a(x)
        noise = torch.randn_like(h) if self.chance else 0
        return {"logits": self.b(h + noise), "w": self.b.weight[0], "none": h[:0]}


def test_every_output_counts():
    masks = halve.prune(TwoOutputs(), permute=True, example=torch.randn(2, 4), also="b")
    assert masks["b"].layout.channel_order is None
    assert masks.recipe["permute"]["fixed"]["b"] == "also read by select, outside of its layer"


def test_a_model_that_rolls_dice_cannot_be_checked():
    with pytest.raises(ModelError, match="TwoOutputs is not deterministic"):
        halve.prune(TwoOutputs(chance=True), permute=True, example=torch.randn(2, 4), also="b")


def test_an_order_that_would_change_the_outputs_is_never_returned(monkeypatch):
    """Were a rule wrong, the comparison at the end would catch it."""
    right = permute_module.moves_of

    def wrong(channels, orders):
        moves = dict(right(channels, orders))
        moves.pop("1.weight")
        return moves

    monkeypatch.setattr(permute_module, "moves_of", wrong)
    for example in (tiny.images(), torch.zeros(2, 4, 8, 8)):
        for model in (tiny.convnet(), tiny.convnet().bfloat16()):
            with pytest.raises(ModelError, match="moving channels changed the outputs"):
                halve.prune(model, permute=True, example=example)


def test_a_checkpoint_of_the_moved_model_is_complete():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 3, 1)
            self.register_buffer("scale", torch.linspace(0.1, 2, 16).reshape(1, 16, 1, 1), persistent=False)

        def forward(self, x):
            return self.c(self.b((self.a(x) * self.scale).relu()).relu())

    model, images = Scaled(), tiny.images()
    moved = halve.apply(model, halve.prune(model, permute=True, example=images), permute=True)
    again = Scaled()
    again.load_state_dict(moved.state_dict())
    assert torch.equal(again(images), moved(images))


def test_a_buffer_of_one_number_for_many_places_stays():
    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)
            self.register_buffer("same", torch.rand(1).expand(1, 8, 1, 1))

        def forward(self, x):
            return self.c(self.b(self.a(x) * self.same).relu())

    torch.manual_seed(0)
    masks = halve.prune(Expanded(), permute=True, example=tiny.images(), also="c")
    assert "same" not in masks.moves
    assert masks["b"].layout.channel_order is None
    assert masks["c"].layout.channel_order is not None


def test_outputs_in_an_object_of_the_models_own_are_compared_too():
    class Result:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = tiny.convnet()

        def forward(self, x):
            return Result(self.net(x))

    same = Equivalence(Wrapped(), tiny.images(2))
    same.check()
    with torch.no_grad():
        same.copy.net[0].weight[0] += 1
    with pytest.raises(ModelError, match="moving channels changed the outputs"):
        same.check()
    masks = halve.learn(Wrapped().eval(), tiny.loader(), steps=2, validation=False)
    assert masks.recipe["steps_done"] == 2
