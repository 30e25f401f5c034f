import pytest
import torch
from torch import nn

import halve
from halve.engine.capture.equivalence import agree, checked
from halve.engine.capture.guards import Guards
from halve.errors import EngineError
from tests.engine.nets import Net, compiled
from tests.tiny import images

BRANCHES = {
    "one image": (lambda n, x: n.a(x) * 2 if x.shape[0] == 1 else n.a(x), (1, 4, 8, 8)),
    "one row": (lambda n, x: n.a(x) * 2 if x.shape[2] == 1 else n.a(x), (2, 4, 1, 8)),
    "one after a division": (lambda n, x: n.a(x) * 2 if x.shape[2] // 4 == 1 else n.a(x), (2, 4, 6, 8)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_the_graph_does_not_run_on_inputs_where_the_model_branches(name):
    how, shape = BRANCHES[name]
    model = Net(how).eval()
    fast = compiled(model, halve.MaskSet({}), any_size=True)
    torch.testing.assert_close(fast(images(3)), model(images(3)))
    with pytest.raises(EngineError, match="with an example of that shape"):
        fast(torch.randn(shape))
    assert torch.export.export(fast, (images(2),), strict=False)
    traced = torch.compile(fast, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(images(3)), fast(images(3)))
    with pytest.raises(EngineError, match="with an example of that shape"):
        torch.export.export(fast, (torch.randn(shape),), strict=False)


def test_single_images_run_if_only_torch_export_excludes_them():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    fast = compiled(model.eval(), halve.MaskSet({}), any_size=True)
    for shape in ((1, 4, 8, 8), (2, 4, 16, 8), (1, 4, 12, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), model(x))


def test_a_random_model_is_compared_by_shapes():
    class Random(nn.Module):
        def forward(self, x):
            return torch.rand_like(x)

    assert agree(Random(), Random(), (torch.ones(2, 3),), {})
    assert not agree(nn.Flatten(0), Random(), (torch.ones(2, 3),), {})


def test_a_model_that_does_not_run_agrees_with_nothing():
    assert not agree(nn.Identity(), nn.Linear(3, 3), (torch.ones(2, 4),), {})


FREE = Guards((((0, None), (3, 3)),), ("x",), ())


def test_a_graph_that_is_not_equivalent_is_refused():
    x = (torch.ones(4, 3),)
    assert checked(nn.Identity(), nn.Identity(), FREE, x) == FREE
    assert "does not compute what the model computes" in checked(nn.Identity(), nn.ReLU(), FREE, (-x[0],))
    assert "only valid for inputs with (N, 3)" in checked(nn.Identity(), nn.Identity(), FREE, (torch.ones(4, 5),))


def test_code_that_treats_single_images_differently_needs_a_larger_example():
    class Net(nn.Module):
        def forward(self, x):
            return 2 * x if x.shape[0] == 1 else x

    assert "single images differently" in checked(nn.Identity(), Net(), FREE, (torch.ones(1, 3),))
