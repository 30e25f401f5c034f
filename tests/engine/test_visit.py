import threading

import torch
from torch import nn

from halve.engine.visit import visit
from tests.engine.nets import sparse_layer


def test_inputs_are_shown_before_layers_run_unless_they_are_empty():
    layers, seen = [sparse_layer("a"), sparse_layer("b")], []
    x = torch.randn(2, 8)
    outputs = visit(layers, lambda: (layers[0](x), layers[1](x[:0])), lambda layer, given: seen.append((layer, given)))
    assert torch.equal(outputs[0], layers[0](x))
    [(layer, [given])] = seen
    assert layer is layers[0]
    assert torch.equal(given, x)


def test_calls_of_other_threads_are_not_shown():
    layer, seen = sparse_layer(), []
    net = nn.Sequential(layer)

    def run():
        other = threading.Thread(target=net, args=(torch.ones(3, 8),))
        other.start()
        other.join()
        return net(torch.ones(2, 8))

    visit([layer], run, lambda layer, given: seen.append(len(given[0])))
    assert seen == [2]


def test_a_network_that_fails_is_not_watched_any_longer():
    layer, seen = sparse_layer(), []

    def fails():
        layer(torch.ones(2, 8))
        raise RuntimeError("no")

    try:
        visit([layer], fails, lambda layer, given: seen.append(layer))
    except RuntimeError:
        layer(torch.ones(2, 8))
    assert seen == [layer]
