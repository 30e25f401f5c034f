import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import halve
from halve.batches import main_output
from halve.engine.fuse import fuse
from halve.engine.layer import Layer
from halve.engine.operations import Convolution, MaxPool
from halve.graph import capture
from tests.engine.nets import compiled
from tests.untouched import untouched


def lively(model):
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.named_buffers():
        if "running" in name:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data = torch.rand(module.weight.shape, generator=generator) + 0.5
            module.bias.data = torch.rand(module.bias.shape, generator=generator) - 0.5
    return model.eval()


def fused_like(model, x):
    """The fused module, checked against the model at two batch sizes."""
    with untouched(model):
        module = fuse(capture(model, x).parts[0])
    for images in (x, torch.cat([x, x.flip(0), x])):
        with torch.no_grad():
            expected, got = main_output(model(images)), main_output(module(images))
        assert float((expected - got).abs().max()) <= 1e-5 * float(expected.abs().max())
    return module


def layers_of(module):
    """The fused layers in execution order, as (layer, has a residual)."""
    calls = [node for node in module.graph.nodes if node.op == "call_module"]
    found = [(module.get_submodule(node.target), len(node.args) > 1) for node in calls]
    assert all(isinstance(layer, Layer) for layer, _ in found)
    return [(layer, residual) for layer, residual in found if layer.has_weight]


def operations(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


# layers, BatchNorms left, layers with a residual, layers with an activation
NETWORKS = {
    "resnet18": (21, 0, 8, 17),
    "resnet50": (54, 0, 16, 49),
    "mobilenet_v3_small": (54, 0, 6, 33),
    "efficientnet_b0": (82, 0, 9, 49),
    "densenet121": (121, 62, 0, 59),
    "googlenet": (58, 0, 0, 57),
    "convnext_tiny": (59, 0, 0, 18),
    "shufflenet_v2_x0_5": (57, 0, 0, 37),
    "regnet_y_400mf": (86, 0, 16, 65),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_torchvision_networks_compute_the_same(name):
    torch.manual_seed(0)
    extra = {"init_weights": False} if name == "googlenet" else {}
    model = lively(torchvision.models.get_model(name, weights=None, num_classes=10, **extra))
    module = fused_like(model, torch.randn(2, 3, 64, 64))
    found = layers_of(module)
    norms = sum("batch_norm" in name for name in operations(module))
    activations = sum(layer.operation.activation != "none" for layer, _ in found)
    assert (len(found), norms, sum(residual for _, residual in found), activations) == NETWORKS[name]
    assert {layer.name for layer, _ in found} <= {name for name, _ in model.named_modules()}


def test_a_residual_network_is_fused_into_layers_and_pooling():
    module = fused_like(lively(torchvision.models.resnet18()), torch.randn(2, 3, 64, 64))
    assert operations(module) == ["aten.sym_size.int", "aten.adaptive_avg_pool2d.default", "aten.reshape.default"]


def test_zeros_stay_zero_and_unused_tensors_are_dropped():
    model = lively(torchvision.models.resnet18())
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


HOW = {  # BatchNorms left; what each layer fused: residual, activation
    "a value that two read": (lambda n, x: (y := n.a(x)).relu() + y, 0, [(False, "none")]),
    "both sides are layers": (
        lambda n, x: F.relu(n.bn(n.a(x)) + n.other(n.b(x))),
        0,
        [(False, "none"), (True, "relu")],
    ),
    "a layer twice": (lambda n, x: n.a(n.a(x).relu()).relu(), 0, [(False, "relu")] * 2),
    "a sum with itself": (lambda n, x: (y := n.a(x)) + y, 0, [(False, "none")]),
    "a sum that is broadcast": (lambda n, x: n.a(x) + x.mean((2, 3), keepdim=True), 0, [(False, "none")]),
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
def test_what_is_fused_into_a_layer(name):
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


def test_pooling_that_returns_indices_is_not_replaced():
    class Net(nn.Module):
        def forward(self, x):
            values, places = F.max_pool2d(x, 2, return_indices=True)
            return values + places

    module = fused_like(Net().eval(), torch.randn(2, 3, 12, 12))
    assert not list(module.children())


def test_layers_are_named_after_the_owner_of_their_weight():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 8)).eval()
    fast = compiled(model, halve.prune(model), torch.randn(2, 5, 16))
    assert "0.self_attn.out_proj" in {layer.name for layer in fast.layers}
    assert "0.self_attn.out_proj" not in fast.plan.uncompiled
