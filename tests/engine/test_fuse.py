import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import halve
from halve.batches import main_output
from halve.engine.fuse import Fused, fuse
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
    """The fused module, after checking that it computes what the model does, at another batch size too."""
    with untouched(model):
        module, layers = fuse(capture(model, x).parts[0])
    for images in (x, torch.cat([x, x.flip(0), x])):
        with torch.no_grad():
            expected, got = main_output(model(images)), main_output(module(images))
        assert float((expected - got).abs().max()) <= 1e-5 * float(expected.abs().max())
    return module, layers


def operations(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


# layers, with BatchNorm folded, with a residual, with an activation
NETWORKS = {
    "resnet18": (21, 20, 8, 17),
    "resnet50": (54, 53, 16, 49),
    "mobilenet_v3_small": (54, 34, 6, 33),
    "efficientnet_b0": (82, 49, 9, 49),
    "densenet121": (121, 59, 0, 59),
    "googlenet": (58, 57, 0, 57),
    "convnext_tiny": (59, 0, 0, 18),
    "shufflenet_v2_x0_5": (57, 56, 0, 37),
    "regnet_y_400mf": (86, 53, 16, 65),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_torchvision_compute_the_same(name):
    torch.manual_seed(0)
    extra = {"init_weights": False} if name == "googlenet" else {}
    model = lively(torchvision.models.get_model(name, weights=None, num_classes=10, **extra))
    _, layers = fused_like(model, torch.randn(2, 3, 64, 64))
    norms, residuals = sum(layer.norm for layer in layers), sum(layer.residual for layer in layers)
    activations = sum(layer.activation != "none" for layer in layers)
    assert (len(layers), norms, residuals, activations) == NETWORKS[name]
    assert {layer.layer for layer in layers} <= {name for name, _ in model.named_modules()}


def test_nothing_but_layers_and_pooling_is_left_of_a_residual_network():
    module, _ = fused_like(lively(torchvision.models.resnet18()), torch.randn(2, 3, 64, 64))
    left = [name for name in operations(module) if "halve" not in name]
    assert left == ["aten.adaptive_avg_pool2d.default", "aten.flatten.using_ints"]


def test_zeros_stay_zero():
    model = lively(torchvision.models.resnet18())
    masks = halve.prune(model)
    module, layers = fused_like(halve.apply(model, masks), torch.randn(2, 3, 64, 64))
    for number, layer in enumerate(layers):
        if layer.layer in masks:
            weight = module.get_buffer(f"layer{number}_weight")
            assert torch.equal(weight == 0, ~masks[layer.layer].kept() | (model.get_submodule(layer.layer).weight == 0))


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


HOW = {  # what each layer took in: norm, residual, activation
    "a value that two read": (lambda n, x: (y := n.a(x)).relu() + y, [(False, False, "none")]),
    "both sides are layers": (
        lambda n, x: F.relu(n.bn(n.a(x)) + n.other(n.b(x))),
        [(True, True, "relu"), (True, False, "none")],
    ),
    "a layer twice": (lambda n, x: n.a(n.a(x).relu()).relu(), [(False, False, "relu")] * 2),
    "a sum with itself": (lambda n, x: (y := n.a(x)) + y, [(False, False, "none")]),
    "a sum that is broadcast": (lambda n, x: n.a(x) + x.mean((2, 3), keepdim=True), [(False, False, "none")]),
    "a scaled sum": (lambda n, x: torch.add(n.a(x), x, alpha=2), [(False, False, "none")]),
    "a sum with a number": (lambda n, x: n.a(x) + 1, [(False, False, "none")]),
    "in place into what others read": (
        lambda n, x: (lambda y: y.add_(n.a(x)) + y)(x * 2),
        [(False, True, "none")],  # the exporter lets them read the sum
    ),
    "in place into a view of what is read": (
        lambda n, x: (lambda y: (y[:, :4].add_(n.a(x)), y)[1])(x * 2),
        [(False, False, "none")],
    ),
    "what the layer read is written to before the sum": (
        lambda n, x: (lambda y: (z := n.a(y), z + F.relu_(y))[1])(x * 2),
        [(False, False, "none")],
    ),
    "a view of what the layer read is written to": (
        lambda n, x: (lambda y: (z := n.a(y), y.flatten(1).mul_(2), z.relu())[2])(x * 2),
        [(False, False, "none")],
    ),
    "what was added is written to before the activation": (
        lambda n, x: (lambda y: (z := n.a(x) + y, y.mul_(2), z.relu() + y)[2])(x * 2),
        [(False, True, "none")],
    ),
    "something else is written to": (
        lambda n, x: (lambda y: (z := n.a(x), y.mul_(2), z.relu() + y)[2])(x * 2),
        [(False, False, "relu")],
    ),
    "dropout that is told to train": (lambda n, x: F.dropout(n.a(x), 1.0).relu(), [(False, False, "none")]),
    "alpha dropout": (lambda n, x: F.alpha_dropout(n.a(x), 0.5).relu(), [(False, False, "relu")]),
    "a norm whose gain is computed": (
        lambda n, x: F.batch_norm(n.a(x), n.bn.running_mean, n.bn.running_var, n.bn.weight.abs() * 2, n.bn.bias),
        [(False, False, "none")],
    ),
    "a bias that is computed": (
        lambda n, x: F.relu(n.bn(F.conv2d(x, n.a.weight, n.a.bias * 2, padding=1))),
        [(False, False, "none")],
    ),
    "GELU by tanh": (lambda n, x: F.gelu(n.a(x), approximate="tanh"), [(False, False, "none")]),
    "GELU": (lambda n, x: F.gelu(n.a(x)), [(False, False, "gelu")]),
    "SiLU": (lambda n, x: F.silu(n.a(x), inplace=True), [(False, False, "silu")]),
    "activation before the norm": (lambda n, x: n.bn(n.a(x).relu()), [(False, False, "relu")]),
    "two norms": (lambda n, x: n.other(n.bn(n.a(x))), [(True, False, "none")]),
    "norm after the sum": (lambda n, x: n.bn(n.a(x) + x), [(False, True, "none")]),
    "the same on both sides": (lambda n, x: n.same(x).relu(), [(False, False, "relu")]),
    "more on one side": (lambda n, x: n.uneven(x).relu(), []),
    "Linear on the last": (
        lambda n, x: n.l(x.permute(0, 2, 3, 1)).relu().permute(0, 3, 1, 2),
        [(False, False, "relu")],
    ),
    "dropout": (lambda n, x: F.dropout(n.a(x), 0.5, training=False).relu(), [(False, False, "relu")]),
    "a computed weight": (lambda n, x: F.conv2d(x, n.a.weight * 2).relu(), []),
    "a functional weight": (lambda n, x: F.conv2d(x, n.a.weight, n.b.bias, padding=1).relu(), [(False, False, "relu")]),
}


@pytest.mark.parametrize("name", HOW)
def test_what_a_layer_takes_in(name):
    how, expected = HOW[name]
    _, layers = fused_like(lively(Net(how)), torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1)))
    assert [(layer.norm, layer.residual, layer.activation) for layer in layers] == expected


def test_a_layer_whose_weight_the_network_changes_stays_as_it_was():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randn(4, 4, 1, 1))

        def forward(self, x):
            self.weight.mul_(2)
            return F.conv2d(x, self.weight).relu()

    net, x = Growing().eval(), torch.randn(2, 4, 5, 5)
    module, layers = fuse(capture(net, x).parts[0])
    assert layers == []
    for _ in range(3):
        torch.testing.assert_close(module(x), net(x))


def test_norms_without_weights_or_with_batch_statistics():
    without, of_the_batch = nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False)
    for norm, folded in ((without, True), (of_the_batch, False)):
        net = nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), norm).eval()
        x = torch.randn(2, 4, 5, 5)
        module, layers = fuse(capture(net, x).parts[0])
        assert layers == [Fused("0", folded, False, "none")]
        torch.testing.assert_close(module(x), net(x))


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
def test_pooling_is_the_engines_own(pool):
    module, _ = fused_like(nn.Sequential(nn.Conv2d(3, 8, 3), pool).eval(), torch.randn(2, 3, 12, 13))
    assert operations(module) == ["halve.conv2d.default", "halve.max_pool2d.default"]


def test_pooling_that_says_where_is_left_as_it_is():
    class Net(nn.Module):
        def forward(self, x):
            values, places = F.max_pool2d(x, 2, return_indices=True)
            return values + places

    module, _ = fused_like(Net().eval(), torch.randn(2, 3, 12, 12))
    assert not any("halve" in operation for operation in operations(module))


def test_layers_are_named_by_their_weights():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 8)).eval()
    fast = compiled(model, halve.prune(model), torch.randn(2, 5, 16))
    assert "0.self_attn.out_proj" in {layer.name for layer in fast.layers}
    assert "0.self_attn.out_proj" not in fast.plan.left
