import pytest
import torch

import halve
from halve.certify.attack import attack_masks, margin_of
from halve.certify.changes import BlockChanges
from halve.certify.crown import Bounds
from halve.certify.network import network_of
from halve.certify.rounding import Interval
from halve.errors import OptionError
from halve.masks.mask import Mask
from tests.tiny import convnet, images


def other_masks(masks, count, generator):
    """The masks with random other choices in `count` blocks in all."""
    names = list(masks)
    found = {name: mask.codes for name, mask in masks.items()}
    for _ in range(count):
        name = names[int(torch.randint(len(names), (1,), generator=generator))]
        codes = found[name].view(-1)
        codes[int(torch.randint(len(codes), (1,), generator=generator))] = int(
            torch.randint(6, (1,), generator=generator)
        )
    return {name: Mask(mask.pattern, mask.layout, found[name]) for name, mask in masks.items()}


@pytest.fixture(scope="module")
def model():
    return convnet().double().requires_grad_(False)


@pytest.fixture(scope="module")
def masks(model):
    return halve.prune(model)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_no_change_of_a_few_blocks_has_a_smaller_margin_than_the_bound(model, masks, count):
    sparse = halve.apply(model, masks)
    captured = network_of(sparse, images(1))
    changes = {name: BlockChanges(model.get_submodule(name).weight, mask, count) for name, mask in masks.items()}
    generator = torch.Generator().manual_seed(count)
    for x in images(3, seed=count).double():
        label = int(sparse(x[None]).argmax())
        point = Interval(x[None], x[None])
        bounds = [Bounds(captured, point, changes, tighten).margins([label])[0] for tighten in (False, True)]
        for _ in range(40):
            weights = {
                f"{name}.weight": mask.apply_to(model.get_submodule(name).weight)
                for name, mask in other_masks(masks, count, generator).items()
            }
            margin = float(margin_of(torch.func.functional_call(sparse, weights, (x[None],))[0], label))
            assert max(bounds) <= margin


def test_an_attack_finds_blocks_that_change_the_class(model, masks):
    sparse, x = halve.apply(model, masks), images(1).double()[0]
    label = int(sparse(x[None]).argmax())
    count = attack_masks(sparse, model, masks, x, label)
    assert 1 < count < sum(mask.codes.numel() for mask in masks.values())
    changes = {name: BlockChanges(model.get_submodule(name).weight, mask, count) for name, mask in masks.items()}
    point = Interval(x[None], x[None])
    assert Bounds(network_of(sparse, x[None]), point, changes).margins([label])[0] <= 0


def test_a_certificate_says_what_is_proven_and_what_an_adversary_needs(model, masks):
    found = halve.certify(model, masks, images(2).double(), changed_blocks=1)
    assert found.statement == "worst mask"
    assert len(found.result["attack_blocks"]) == found.result["agree"]
    assert "an adversary that may choose changes it with" in str(found)
    with pytest.raises(OptionError, match="positive integer"):
        halve.certify(model, masks, images(2), changed_blocks=0.5)
