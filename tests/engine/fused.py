"""A captured network fused, and what its fused module consists of."""

import torch

from halve.batches import main_output
from halve.engine.fuse import fuse
from halve.engine.layer import Layer


def fused(part, model, x):
    """The fused module, after checking that it computes what the model does, at another batch size too."""
    module = fuse(part)
    for images in (x, torch.cat([x, x.flip(0), x])):
        with torch.no_grad():
            expected, got = main_output(model(images)), main_output(module(images))
        precise = 1e-12 if x.dtype == torch.float64 else 1e-5
        assert float((expected - got).abs().max()) <= precise * float(expected.abs().max())
    return module


def layers_of(module):
    """The fused layers in the order in which they run, with what they got: (layer, has a residual)."""
    calls = [node for node in module.graph.nodes if node.op == "call_module"]
    found = [(module.get_submodule(node.target), len(node.args) > 1) for node in calls]
    assert all(isinstance(layer, Layer) for layer, _ in found)
    return [(layer, residual) for layer, residual in found if layer.has_weight]


def operations(module):
    """The operations that are left beside the layers."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
