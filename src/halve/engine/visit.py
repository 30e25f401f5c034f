"""Show the inputs of layers while a network runs."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from halve.engine.layer import Layer


def visit(layers: Sequence[Layer], run: Callable[[], object], look: Callable[[Layer, list[Tensor]], object]) -> object:
    """Run the network, and show the inputs of each layer that are not empty before it runs. Returns the outputs.

    Calls of the network by other threads are not shown.
    """
    thread = threading.get_ident()

    def hook(layer: Layer, args: tuple[Any, ...]) -> None:
        if args[0].numel() and threading.get_ident() == thread:
            look(layer, [x.to(layer.dtype) if layer.has_weight else x for x in args if x is not None])

    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        return run()
    finally:
        for handle in handles:
            handle.remove()
