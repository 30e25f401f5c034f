import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halve
from halve.engine.fuse import fuse
from halve.engine.operations import Convolution, MaxPool
from halve.graph import capture
from halve.process_state import preserved_process_state
from tests.engine.fused import fused, layers_of, operations
from tests.engine.nets import compiled
from tests.families import family, lively
from tests.untouched import untouched


def fused_like(model, x):
    """The fused module, after checking that it computes what the model does."""
    with untouched(model), preserved_process_state():  # some models draw random numbers
        return fused(capture(model, x).parts[0], model, x)


def test_nothing_but_layers_and_pooling_is_left_of_a_residual_network():
    module = fused_like(family("resnet_basic"), torch.randn(2, 3, 64, 64))
    assert operations(module) == ["aten.sym_size.int", "aten.adaptive_avg_pool2d.default", "aten.reshape.default"]


def test_zeros_stay_zero_and_nothing_else_is_held():
    model = family("resnet_basic")
    masks = halve.prune(model)
    module = fused_like(halve.apply(model, masks), torch.randn(2, 3, 64, 64))
    for layer, _ in layers_of(module):
        if layer.name in masks:
            zero = ~masks[layer.name].kept() | (model.get_submodule(layer.name).weight == 0)
            assert torch.equal(layer.tensors()["weight"] == 0, zero)
    assert not [name for name, _ in module.named_parameters()]
    assert all("layer" in name for name, _ in module.named_buffers())


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.bn, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.same = nn.Conv2d(4, 4, 3, padding="same", dilation=2)
        self.uneven = nn.Conv2d(4, 4, 2, padding="same")
        self.l = nn.Linear(4, 4)
        self.how = how

    def forward(self, x):
        return self.how(self, x)


HOW = {  # BatchNorms that are left; what each layer took in: residual, activation
    "a value that two read": (lambda n, x: (y := n.a(x)).relu() + y, 0, [(False, "none")]),
    "both sides are layers": (
        lambda n, x: F.relu(n.bn(n.a(x)) + n.other(n.b(x))),
        0,
        [(False, "none"), (True, "relu")],
    ),
    "a layer twice": (lambda n, x: n.a(n.a(x).relu()).relu(), 0, [(False, "relu")] * 2),
    "a sum with itself": (lambda n, x: (y := n.a(x)) + y, 0, [(False, "none")]),
    "a sum that is broadcast": (lambda n, x: n.a(x) + x.mean((2, 3), keepdim=True), 0, [(False, "none")]),
    "a sum that broadcasts the layer": (lambda n, x: n.a(x[:1]) + x, 0, [(False, "none")]),
    "a scaled sum": (lambda n, x: torch.add(n.a(x), x, alpha=2), 0, [(False, "none")]),
    "a sum with a number": (lambda n, x: n.a(x) + 1, 0, [(False, "none")]),
    "in place into what others read": (lambda n, x: (lambda y: y.add_(n.a(x)) + y)(x * 2), 0, [(True, "none")]),
    "in place into a view": (lambda n, x: (lambda y: (y[:, :4].add_(n.a(x)), y)[1])(x * 2), 0, [(True, "none")]),
    "what the layer read is written to": (
        lambda n, x: (lambda y: (z := n.a(y), y.flatten(1).mul_(2), z.relu() + y)[2])(x * 2),
        0,
        [(False, "relu")],
    ),
    "what was added is written to": (
        lambda n, x: (lambda y: (z := n.a(x) + y, y.mul_(2), z.relu() + y)[2])(x * 2),
        0,
        [(True, "relu")],
    ),
    "dropout that is told to train": (lambda n, x: F.dropout(n.a(x), 1.0).relu(), 0, [(False, "none")]),
    "dropout": (lambda n, x: F.dropout(n.a(x), 0.5, training=False).relu(), 0, [(False, "relu")]),
    "alpha dropout": (lambda n, x: F.alpha_dropout(n.a(x), 0.5).relu(), 0, [(False, "relu")]),
    "a norm whose gain is computed": (
        lambda n, x: F.batch_norm(n.a(x), n.bn.running_mean, n.bn.running_var, n.bn.weight.abs() * 2, n.bn.bias),
        1,
        [(False, "none")],
    ),
    "a bias that is computed": (lambda n, x: n.bn(F.conv2d(x, n.a.weight, n.a.bias * 2, padding=1)), 1, []),
    "a computed weight": (lambda n, x: F.conv2d(x, n.a.weight * 2).relu(), 0, []),
    "a functional weight": (lambda n, x: F.conv2d(x, n.a.weight, n.b.bias, padding=1).relu(), 0, [(False, "relu")]),
    "GELU by tanh": (lambda n, x: F.gelu(n.a(x), approximate="tanh"), 0, [(False, "none")]),
    "GELU": (lambda n, x: F.gelu(n.a(x)), 0, [(False, "gelu")]),
    "SiLU in place": (lambda n, x: F.silu(n.a(x), inplace=True), 0, [(False, "silu")]),
    "activation before the norm": (lambda n, x: n.bn(n.a(x).relu()), 1, [(False, "relu")]),
    "two norms": (lambda n, x: n.other(n.bn(n.a(x))), 1, [(False, "none")]),
    "norm after the sum": (lambda n, x: n.bn(n.a(x) + x), 1, [(True, "none")]),
    "padding that is the same on both sides": (lambda n, x: n.same(x).relu(), 0, [(False, "relu")]),
    "padding that is not": (lambda n, x: n.uneven(x).relu(), 0, []),
    "Linear on the last": (
        lambda n, x: n.l(x.permute(0, 2, 3, 1)).relu().permute(0, 3, 1, 2),
        0,
        [(False, "relu")],
    ),
}


@pytest.mark.parametrize("name", HOW)
def test_what_a_layer_takes_in(name):
    how, norms, expected = HOW[name]
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    module = fused_like(lively(Net(how)), x)
    assert [(residual, layer.operation.activation) for layer, residual in layers_of(module)] == expected
    assert sum("batch_norm" in name for name in operations(module)) == norms


def test_norms_without_weights_or_with_batch_statistics():
    without, of_the_batch = nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False)
    for norm, left in ((without, 0), (of_the_batch, 1)):
        net = nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), norm).eval()
        module = fused_like(net, torch.randn(2, 4, 5, 5))
        assert [layer.name for layer, _ in layers_of(module)] == ["0"]
        assert sum("batch_norm" in name for name in operations(module)) == left


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.MaxPool2d((3, 1), (1, 2), (1, 0), (2, 1)),
    ],
    ids=str,
)
def test_pooling_is_a_layer(pool):
    module = fused_like(nn.Sequential(nn.Conv2d(3, 8, 3), pool).eval(), torch.randn(2, 3, 12, 13))
    assert operations(module) == []
    assert {Convolution, MaxPool} == {type(layer.operation) for layer in module.children()}


def test_pooling_that_returns_indices_stays_pytorchs():
    class Net(nn.Module):
        def forward(self, x):
            values, places = F.max_pool2d(x, 2, return_indices=True)
            return values + places

    module = fused_like(Net().eval(), torch.randn(2, 3, 12, 12))
    assert not list(module.children())


def test_layers_are_named_by_their_weights():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 8)).eval()
    fast = compiled(model, halve.prune(model), torch.randn(2, 5, 16))
    assert "0.self_attn.out_proj" in {layer.name for layer in fast.layers}
    assert "0.self_attn.out_proj" not in fast.plan.uncompiled


class ScaledBlock(nn.Module):
    """The second half of a ConvNeXt block."""

    def __init__(self, scale_shape=(8, 1, 1)):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 8), nn.Parameter(torch.randn(scale_shape))

    def forward(self, x, added):
        return self.scale * self.linear(x).permute(0, 3, 1, 2) + added


@pytest.mark.parametrize(
    ("shape", "scaled"), [((8, 1, 1), True), ((1, 8, 1, 1), True), ((1,), False), ((8, 3, 1), False)]
)
def test_a_scale_and_residual_behind_a_permutation_are_fused(shape, scaled):
    torch.manual_seed(0)
    net, inputs = ScaledBlock(shape).eval(), (torch.randn(2, 3, 5, 16), torch.randn(2, 8, 3, 5))
    module = fuse(capture(net, inputs).parts[0])
    [(layer, residual)] = layers_of(module)
    assert layer.operation.scaled == residual == scaled
    with torch.no_grad():
        assert torch.allclose(module(*inputs), net(*inputs), atol=1e-6)
