import pickle

import pytest
import torch
from torch import nn

import halve
from halve.engine.capture import guards as of_guards
from halve.engine.capture.guards import Guards
from halve.errors import EngineError
from tests.engine.nets import compiled
from tests.tiny import images


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("L['x'].size()[0] == 5 or L['x'].size()[1] == 4", True),
        ("L['x'].size()[0] == 5 or L['x'].size()[1] == 3", False),
        ("not L['x'].size()[0] == 2", False),
        ("L['x'].size()[0] != 1", True),
        ("L['x'].size()[0] == 3 and L['x'].size()[1] != 1", False),
        ("__import__('os').getpid() > 0", False),
        ("L['x'].size()[1] * 2 + 1 == 9", True),
        ("'a' * 2000000000 != 'b'", False),
        ("L['x'].size() * 50000000 != 3", False),
        ("'%1500000000d' % 1 != 'b'", False),
        ("L['x'] * 2 != 3", False),
    ],
)
def test_conditions_are_parsed_and_never_executed(condition, holds):
    assert (Guards((), ("x",), (condition,)).broken((images(2),)) is None) == holds


def test_variadic_inputs_are_bound_to_the_starred_name():
    guards = Guards((), ("x", "*rest"), ("L['x'].size()[0] == L['rest'][1].size()[0]",))
    assert guards.broken((torch.zeros(2), torch.zeros(5), torch.zeros(2))) is None
    assert guards.broken((torch.zeros(2), torch.zeros(2), torch.zeros(5))) is not None


LIMITS = Guards((((2, None), (4, 4)),), ("x",), ())


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((3, 4), True), ((2, 4), True), ((1, 4), False), ((3, 5), False), ((3, 4, 1), False), ((3,), False)],
)
def test_sizes_must_be_within_limits(shape, fits):
    assert LIMITS.broken((torch.zeros(shape),)) == (None if fits else "(2 or more, 4)")


def test_single_images_can_be_excluded():
    guards = Guards((((0, None), (3, 3)), ((7, 7),)), ("x", "y"), ())
    assert guards.without_single_images().sizes == (((2, None), (3, 3)), ((7, 7),))


def test_guards_can_be_copied():
    assert pickle.loads(pickle.dumps(LIMITS)) == LIMITS


@pytest.mark.parametrize("condition", ["f(L['x']) == 1", "no condition at all", "L['x'].size()[9] == 1"])
def test_a_condition_that_cannot_be_parsed_never_holds(condition):
    assert Guards((), ("x",), (condition,)).broken((images(2),)) is not None


def test_guards_that_cannot_be_parsed_fix_the_size(monkeypatch):
    known = of_guards._expression

    def forgetful(node):
        if isinstance(node, of_guards.ast.BinOp):
            raise ValueError("unknown expression")
        return known(node)

    monkeypatch.setattr(of_guards, "_expression", forgetful)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.PixelUnshuffle(2), nn.Conv2d(16, 4, 1)).eval()
    fast = compiled(model, halve.MaskSet({}), any_size=True)
    assert fast(images(3)).shape == (3, 4, 4, 4)
    with pytest.raises(EngineError, match=r"inputs with \(N, 4, 8, 8\)"):
        fast(torch.randn(2, 4, 6, 6))
