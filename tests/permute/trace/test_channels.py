"""Randomly permuted channels must not change what a network computes, in float64: this checks every rule."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from halve.batches import main_output
from halve.graph import capture
from halve.masks.moves import move_
from halve.modules import clone, kind_of
from halve.permute.permute import moves_of
from halve.permute.trace.channels import Channels


def lively(model):
    """Randomize norms and other small parameters, so that a misplaced channel changes the output."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1 or "scale" in name or "token" in name:
            tensor.data = torch.rand(tensor.shape, generator=generator) + 0.5
    for name, tensor in model.named_buffers():
        if "running" in name:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.double().eval()


def shuffled(model, example):
    """(largest relative difference after a random order of every free axis, layers whose input moves, channels)."""
    channels = Channels(capture(model, example))
    axes = {id(s.axis): s.axis for _, spans in channels.items() for s in spans if s.axis.pinned is None}
    generator = torch.Generator().manual_seed(1)
    orders = {key: tuple(torch.randperm(axis.size, generator=generator).tolist()) for key, axis in axes.items()}
    copy = clone(model)
    move_(copy, moves_of(channels, orders))
    with torch.no_grad():
        dense, moved = main_output(model(example)), main_output(copy(example))
    assert float(dense.abs().max()) > 0
    layers = [name for name, module in model.named_modules() if kind_of(module)]
    free = {n for n in layers if any(s.axis.pinned is None for s in channels.along(f"{n}.weight", 1) or ())}
    return float((dense - moved).abs().max() / dense.abs().max()), free, channels


def images(size, channels=3):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


# Masked layers of each network that must be free to move, and its image size
TORCHVISION = {
    "alexnet": (7, 64),
    "convnext_tiny": (40, 64),
    "densenet121": (120, 64),
    "efficientnet_b0": (65, 64),
    "googlenet": (57, 64),
    "inception_v3": (94, 96),
    "mnasnet0_5": (35, 64),
    "mobilenet_v2": (35, 64),
    "mobilenet_v3_small": (42, 64),
    "regnet_y_400mf": (69, 64),
    "resnet18": (20, 64),
    "resnet50": (53, 64),
    "resnext50_32x4d": (37, 64),
    "shufflenet_v2_x0_5": (19, 64),
    "squeezenet1_1": (25, 64),
    "swin_t": (17, 64),
    "vit_b_32": (24, 224),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_models_keep_their_function(name):
    free_layers, size = TORCHVISION[name]
    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, **extra)
    if name == "vit_b_32":
        nn.init.normal_(model.heads.head.weight)
    difference, free, _ = shuffled(lively(model), images(size))
    assert difference < 1e-9
    assert len(free) >= free_layers


@pytest.mark.parametrize("name", ["deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"])
def test_segmentation_models_keep_their_function(name):
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None)
    difference, free, _ = shuffled(lively(model), images(64))
    assert difference < 1e-9
    assert len(free) >= 50


class Odd(nn.Module):
    """A network of one operation between two convolutions of 8 channels."""

    def __init__(self, middle, made=8, **parts):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(made, 4, 1)
        self.parts = nn.ModuleDict(parts)
        self.gain = nn.Parameter(torch.rand(8, 1, 1))
        self.table = nn.Parameter(torch.rand(1, 8, 6, 1))
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)))


MOVE = {
    "nothing": (lambda net, x: x, {}),
    "a gain for each channel": (lambda net, x: x * net.gain, {}),
    "a table over channels and rows": (lambda net, x: x + net.table, {}),
    "a gate": (lambda net, x: x * net.parts["gate"](x).sigmoid(), {"gate": nn.Conv2d(8, 8, 1)}),
    "one gate for all channels": (lambda net, x: x * net.parts["gate"](x), {"gate": nn.Conv2d(8, 1, 1)}),
    "depthwise": (lambda net, x: net.parts["d"](x), {"d": nn.Conv2d(8, 8, 3, groups=8)}),
    "PReLU": (lambda net, x: net.parts["p"](x), {"p": nn.PReLU(8)}),
    "InstanceNorm": (lambda net, x: net.parts["n"](x), {"n": nn.InstanceNorm2d(8, affine=True)}),
    "GroupNorm": (lambda net, x: net.parts["n"](x), {"n": nn.GroupNorm(2, 8)}),
    "LayerNorm, channels last": (
        lambda net, x: net.parts["n"](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        {"n": nn.LayerNorm(8)},
    ),
    "a transposed convolution": (lambda net, x: net.parts["t"](x), {"t": nn.ConvTranspose2d(8, 8, 2)}),
    "a layer called twice": (lambda net, x: net.parts["c"](net.parts["c"](x)), {"c": nn.Conv2d(8, 8, 1)}),
    "softmax over channels": (lambda net, x: x.softmax(1), {}),
    "divided by the norm over channels": (lambda net, x: x / x.norm(dim=1, keepdim=True), {}),
    "minus the mean over channels": (lambda net, x: x - x.mean((1, 2, 3), keepdim=True), {}),
    "halves swapped": (lambda net, x: torch.cat(x.chunk(2, 1)[::-1], 1), {}),
    "halves added": (lambda net, x: torch.cat([x[:, :4] + x[:, 4:], x[:, :4]], 1), {}),
    "channels cut and padded": (lambda net, x: F.pad(x[:, 2:6], (0, 0, 0, 0, 1, 3)), {}),
    "reflected pixels": (lambda net, x: F.pad(x, (1, 1, 1, 1), mode="reflect"), {}),
    "resized": (lambda net, x: F.interpolate(x, scale_factor=2, mode="bilinear"), {}),
    "transposed pixels": (lambda net, x: x.transpose(2, 3), {}),
    "pixels in a row and back": (lambda net, x: x.flatten(2).unflatten(2, (6, 6)), {}),
    "in place": (lambda net, x: x.mul_(2).relu_().add_(1), {}),
}


@pytest.mark.parametrize("name", MOVE)
def test_operations_that_channels_can_move_through(name):
    assert "last" in free_layers(*MOVE[name])


def free_layers(middle, parts):
    """The layers whose input channels moved, after checking that the network computes the same."""
    torch.manual_seed(0)
    difference, free, _ = shuffled(lively(Odd(middle, **parts)), images(6, 4))
    assert difference < 1e-12
    return free


STAY = {
    "channels rolled": (lambda net, x: x.roll(1, 1), {}),
    "channels flipped": (lambda net, x: x.flip(1), {}),
    "channels shuffled": (lambda net, x: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2), {}),
    "every other channel": (lambda net, x: torch.cat([x[:, ::2], x[:, 1::2]], 1), {}),
    "cumulative sum over channels": (lambda net, x: x.cumsum(1), {}),
    "reflected channels": (lambda net, x: F.pad(x, (0, 0, 0, 0, 1, 1), mode="reflect")[:, 1:9], {}),
    "pooled channels": (lambda net, x: F.avg_pool2d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2), {}),
    "a channel selected": (lambda net, x: x + x[:, 3].unsqueeze(1), {}),
    "pixels as channels": (
        lambda net, x: x + x.mean((2, 3)).unsqueeze(1).unsqueeze(1).expand(-1, 8, 6, 8)[..., :6],
        {},
    ),
    "a constant for each channel": (lambda net, x: x * torch.arange(8.0, dtype=x.dtype).reshape(1, 8, 1, 1), {}),
    "an index": (lambda net, x: x[:, [7, 6, 5, 4, 3, 2, 1, 0]], {}),
}


@pytest.mark.parametrize("name", STAY)
def test_operations_that_depend_on_the_order_of_channels_pin_them(name):
    assert "last" not in free_layers(*STAY[name])


def test_a_channel_used_by_itself_stays_and_the_others_may_move():
    net = lively(Odd(lambda net, x: x * x[:, 2:3]))
    difference, _, channels = shuffled(net, images(6, 4))
    assert difference < 1e-12
    assert [span.axis.size for span in channels.along("last.weight", 1)] == [2, 1, 5]


def test_output_channels_of_a_grouped_convolution_may_move_within_their_group():
    net = lively(Odd(lambda net, x: net.parts["g"](x), g=nn.Conv2d(8, 8, 1, groups=2)))
    difference, _, channels = shuffled(net, images(6, 4))
    assert difference < 1e-12
    assert channels.along("first.weight", 0)[0].axis.pinned == "read by a grouped convolution"
    assert [(span.axis.size, span.axis.pinned) for span in channels.along("last.weight", 1)] == [(4, None), (4, None)]


class Tied(nn.Module):
    """Weights that are also read outside of their layer."""

    def __init__(self, how):
        super().__init__()
        self.a, self.e, self.z = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1)
        self.w = nn.Parameter(torch.rand(8, 4, 1, 1))
        self.table = nn.Parameter(torch.rand(1, 8, 6, 1))
        self.attention = nn.Conv2d(4, 1, 1)
        self.wide = nn.Conv2d(12, 8, 1)
        self.register_buffer("fixed", torch.linspace(0.1, 2, 8).reshape(1, 8, 1, 1), persistent=False)
        self.how = how

    def forward(self, x):
        return self.z(self.how(self, x))


TIED = {
    "a weight transposed": lambda net, x: F.conv2d(net.e(net.a(x)), net.e.weight.transpose(0, 1)),
    "an entry of a table": lambda net, x: net.a(x) + net.table + net.table[0, 2, 0, 0],
    "the same weight grouped": lambda net, x: F.conv2d(x, net.w) + F.conv2d(net.a(x), net.w, groups=2),
    "the same weight grouped, the other way round": lambda net, x: (
        F.conv2d(net.a(x), net.w, groups=2) + F.conv2d(x, net.w)
    ),
    "attention on the input": lambda net, x: net.wide(torch.cat([net.a(x), x * net.attention(x).sigmoid()], 1)).relu(),
    "attention first, cut": lambda net, x: torch.cat([x * net.attention(x).sigmoid(), net.a(x)], 1)[:, :8],
    "a buffer that no checkpoint holds": lambda net, x: net.e(net.a(x) * net.fixed),
    "concatenated with nothing": lambda net, x: torch.cat([torch.empty(0, dtype=x.dtype), net.a(x)], 1),
    "divided by its standard deviation": lambda net, x: net.a(x) / net.a(x).std(False),
}


@pytest.mark.parametrize("name", TIED)
def test_weights_that_are_also_read_outside_of_their_layer(name):
    torch.manual_seed(0)
    net = lively(Tied(TIED[name]))
    difference, _, channels = shuffled(net, images(6, 4))
    assert difference < 1e-12
    assert channels.along("fixed", 1) is None


def test_prelu_slopes_are_along_dimension_one():
    net = nn.Sequential(nn.Linear(4, 8), nn.PReLU(8), nn.Linear(8, 4))
    difference, free, _ = shuffled(lively(net), torch.randn(2, 8, 4, dtype=torch.float64))
    assert difference < 1e-12
    assert "2" in free


def test_a_depthwise_convolution_with_several_outputs_for_each_channel():
    net = lively(Odd(lambda net, x: net.parts["d"](x), made=16, d=nn.Conv2d(8, 16, 3, groups=8)))
    difference, free, channels = shuffled(net, images(6, 4))
    assert difference < 1e-12
    assert "last" in free
    assert [(span.axis.size, span.repeat) for span in channels.along("last.weight", 1)] == [(8, 2)]


def test_a_flattened_image_moves_pixels_with_their_channel():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 12), nn.Linear(12, 3))
    difference, free, channels = shuffled(lively(net), images(6, 4))
    assert difference < 1e-12
    assert free == {"3", "4"}
    assert [(span.axis.size, span.repeat) for span in channels.along("3.weight", 1)] == [(8, 16)]


def test_a_computed_weight_is_pinned():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 4, 1)))
    difference, _, channels = shuffled(net.double().eval(), images(6, 4))
    assert difference == 0
    assert channels.along("0.weight", 0)[0].axis.pinned == "read by a layer whose weight is computed"


def test_weights_that_are_tied_move_together():
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1))
    net[3].weight = net[1].weight
    difference, free, channels = shuffled(lively(net), images(6, 4))
    assert difference < 1e-12
    assert {"1", "4"} <= free
    assert channels.along("3.weight", 1) is None  # tied tensors are listed under their first name


def test_inputs_and_outputs_are_pinned():
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1))
    channels = Channels(capture(net, images(6, 4).float()))
    assert "input of the model" in channels.along("0.weight", 1)[0].axis.pinned
    assert channels.along("1.weight", 0)[0].axis.pinned == "output of the model"
