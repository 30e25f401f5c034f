import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halve
from halve.engine.capture.equivalence import agree, tried
from halve.engine.capture.guards import Guards, set_apart
from halve.errors import EngineError
from tests.engine.nets import Net, compiled, same
from tests.tiny import images

BRANCHES = {
    "one image": (lambda n, x: n.a(x) * 2 if x.shape[0] == 1 else n.a(x), (1, 4, 8, 8)),
    "one row": (lambda n, x: n.a(x) * 2 if x.shape[2] == 1 else n.a(x), (2, 4, 1, 1)),
    "one after a division": (lambda n, x: n.a(x) * 2 if x.shape[2] // 4 == 1 else n.a(x), (2, 4, 6, 6)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_where_a_models_code_asks_for_one_the_graph_is_not_taken(name):
    how, shape = BRANCHES[name]
    model = Net(how).eval()
    fast = compiled(model, halve.MaskSet({}))
    torch.testing.assert_close(fast(images(3)), model(images(3)))
    with pytest.raises(EngineError, match="compile it again with an example of that shape"):
        fast(torch.randn(shape))


@pytest.mark.parametrize("name", BRANCHES)
def test_what_is_traced_again_is_checked_as_well(name):
    how, shape = BRANCHES[name]
    fast = compiled(Net(how).eval(), halve.MaskSet({}))
    assert torch.export.export(fast, (images(2),), strict=False)
    traced = torch.compile(fast, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(images(3)), fast(images(3)))
    with pytest.raises(Exception, match=r"compile it again with an example of that shape|captured for"):
        torch.compile(fast, backend="eager")(torch.randn(shape))
    with pytest.raises(EngineError, match="compile it again with an example of that shape"):
        torch.export.export(fast, (torch.randn(shape),), strict=False)


def test_sizes_that_torch_sets_apart_for_its_own_sake_are_free():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    fast = compiled(model.eval(), halve.MaskSet({}))
    for shape in ((1, 4, 8, 8), (2, 4, 4, 4), (2, 4, 1, 1), (1, 4, 3, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), model(x))


def test_parts_are_tried_too():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.conv(x) * 2 if x.shape[0] == 1 else self.conv(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x) + float(x.sum())  # which cannot be captured

    model = Outer().eval()
    fast = compiled(model, halve.MaskSet({}))
    for count in (1, 2, 3):
        torch.testing.assert_close(fast(images(count)), model(images(count)))


def test_a_model_that_is_random_is_compared_by_shape():
    class Random(nn.Module):
        def forward(self, x):
            return torch.rand_like(x)

    assert agree(Random(), Random(), (torch.ones(2, 3),), {})
    assert not agree(nn.Flatten(0), Random(), (torch.ones(2, 3),), {})


def test_a_model_that_does_not_run_agrees_with_nothing():
    assert not agree(nn.Identity(), nn.Linear(3, 3), (torch.ones(2, 4),), {})


def test_outputs_are_compared_with_all_that_they_hold():
    class Two(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.second = second

        def forward(self, x):
            return {"a": x, "b": [self.second, torch.full((2,), float("nan"))]}

    one = (torch.ones(2),)
    assert agree(Two(5), Two(5), one, {})
    assert not agree(Two(4), Two(5), one, {})
    assert not agree(Two(torch.zeros(2)), Two(torch.ones(2)), one, {})


def test_conditions_that_say_something_else_stay():
    conditions = ("L['x'].size()[2] % 2 == 0", "L['x'].size()[2] // 4 != 1", "f(L['x']) != 1")
    limits = ((0, None), (4, 4), (0, None), (0, None))
    sizes, guards = tried(nn.Identity(), nn.Identity(), (limits,), Guards(("input",), conditions), (images(2),), {})
    assert sizes == (limits,)
    assert guards.conditions == conditions  # of an argument that the model does not have: nothing can be tried
    assert set_apart(conditions[0]) is None
    assert set_apart(conditions[2]) is None
    assert set_apart("no condition at all") is None
    assert set_apart("L['x'].size()[2] % 4 != 1") is None


def test_images_that_are_not_square_are_tried_too():
    def padded(net, x):
        return net.a(F.pad(x, (0, 0, 1, 0)) if x.shape[2] % 2 == 1 and x.shape[3] % 2 == 0 else x)

    def wide(net, x):
        return net.a(x) * (2 if x.shape[2] // 4 == 1 and x.shape[3] // 4 > 1 else 1)

    for how, shape in ((padded, (2, 4, 7, 8)), (wide, (2, 4, 5, 8))):
        with pytest.raises(EngineError, match="compile it again with an example of that shape"):
            same(Net(how), images(2))(torch.randn(shape))
