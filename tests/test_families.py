"""Every kind of network of torchvision is captured as one graph, which is fused and whose channels are moved."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from halve.batches import main_output
from halve.graph import Captured, capture
from tests.engine.fused import fused, layers_of, operations
from tests.families import FAMILIES, family, size
from tests.permute.orders import moved
from tests.untouched import untouched


@dataclass(frozen=True)
class Network:
    """A model in double precision, captured once for all tests of it."""

    name: str
    model: nn.Module
    images: Tensor
    captured: Captured


@pytest.fixture(scope="module", params=FAMILIES)
def network(request):
    model = family(request.param).double()
    pixels = size(request.param)
    images = torch.randn(2, 3, pixels, pixels, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        one, other = main_output(model(images))
    assert (one - other).abs().max() > 1e-3 * one.abs().max()  # it looks at its images: its signals do not die
    with untouched(model):
        captured = capture(model, images)
    return Network(request.param, model, images, captured)


def test_it_is_one_graph_with_a_free_batch(network):
    assert network.captured.complete, network.captured.reason
    [part] = network.captured.parts
    assert all(limits[0][1] is None for limits in part.sizes())
    assert network.captured.uncaptured == {}
    state = network.model.state_dict(keep_vars=True)
    assert set(part.tensors.values()) <= state.keys() | dict(network.model.named_buffers()).keys()
    assert not part.writes_buffers


# layers, BatchNorms that are left, layers with a residual, with an activation, with input channels that can move
EXPECTED = {
    "alexnet": (7, 0, 0, 6, 6),
    "convnext": (12, 0, 3, 3, 8),
    "deeplabv3": (21, 0, 1, 15, 17),
    "densenet": (13, 7, 0, 6, 12),
    "efficientnet": (31, 0, 4, 18, 24),
    "efficientnet_v2": (19, 0, 2, 12, 16),
    "googlenet": (40, 0, 0, 39, 39),
    "inception_v3": (49, 0, 0, 48, 48),
    "lraspp": (18, 0, 2, 10, 14),
    "maxvit": (32, 2, 10, 11, 25),
    "mobilenet_v2": (17, 0, 2, 0, 11),
    "mobilenet_v3": (16, 0, 1, 10, 12),
    "regnet_x": (13, 0, 3, 10, 9),
    "regnet_y": (19, 0, 3, 13, 15),
    "resnet_basic": (15, 0, 5, 11, 14),
    "resnet_bottleneck": (21, 0, 5, 16, 20),
    "resnext": (21, 0, 5, 16, 15),
    "shufflenet_v2": (27, 0, 0, 17, 9),
    "squeezenet": (26, 0, 0, 26, 25),
    "swin": (19, 0, 4, 4, 14),
    "swin_v2": (23, 0, 0, 8, 18),
    "vgg": (6, 0, 0, 5, 5),
    "vit": (10, 0, 2, 2, 5),
}


def test_fused_it_computes_the_same(network):
    module = fused(network.captured.parts[0], network.model, network.images)
    found = layers_of(module)
    norms = sum("batch_norm" in name for name in operations(module))
    activations = sum(layer.operation.activation != "none" for layer, _ in found)
    assert {layer.name for layer, _ in found} <= {name for name, _ in network.model.named_modules()}
    assert (len(found), norms, sum(residual for _, residual in found), activations) == EXPECTED[network.name][:4]


def test_channels_in_random_orders_keep_its_function(network):
    difference, free, _ = moved(network.model, network.captured, network.images)
    assert difference < 1e-9
    assert len(free) >= EXPECTED[network.name][4]
