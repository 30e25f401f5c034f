"""What the layers of a compiled network cost together, beyond what each costs alone.

    python benchmarks/bench_gaps.py [--network resnet34] [--batch 8] [--device cuda] [--out FILE]

A plan times each layer in a recording of nothing else. In a network, other kernels come before and after it, with
weights, code and inputs of their own. Timed are each layer alone, each two neighbours in turns, all layers in turns on
inputs that were computed beforehand, and the network, in which each reads what the one before has just written. Layers
that the plan joins run apart. Random weights, masked by magnitude. Prints the neighbours that lose most, and writes
everything to --out, if given. On a CPU it only shows that it works.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor

import halve
from halve.engine.compiled import Compiled
from halve.engine.layer import Layer
from halve.engine.timing import measure
from halve.engine.visit import visit

Calls = dict[str, Callable[[], object]]


def calls_of(fast: Compiled, x: Tensor) -> list[tuple[str, Callable[[], object]]]:
    """The name of each layer and what runs it on the inputs that it has in the network, in the order of the network."""
    found: list[tuple[str, Callable[[], object]]] = []

    def note(layer: Layer, inputs: list[Tensor]) -> None:
        kernel = layer.kernel_for(layer.operation.size(inputs[0]))
        given = [value.clone() for value in inputs]  # `clone` keeps strides; the network reuses its memory
        found.append((f"{layer.name}: {kernel}", partial(layer.run, given, kernel)))

    visit(fast.layers, partial(fast.body, x), note)
    return found


def in_turns(calls: list[Callable[[], object]]) -> Callable[[], object]:
    return lambda: [call() for call in calls]


def gaps(fast: Compiled, x: Tensor, rounds: int) -> dict[str, Any]:
    """Milliseconds of each layer, of each two neighbours, of all in turns and of the network."""
    layers = calls_of(fast, x)
    together: Calls = {
        f"{first} | {second}": in_turns([one, other]) for (first, one), (second, other) in itertools.pairwise(layers)
    }
    all_layers = in_turns([call for _, call in layers])
    everything: Calls = {"all layers in turns": all_layers, "network": partial(fast.body, x)}
    alone = measure(dict(layers), fast.device, rounds)
    pairs = measure(together, fast.device, rounds)
    lost = {pair: ms - sum(alone[name] for name in pair.split(" | ")) for pair, ms in pairs.items()}
    return {
        "sum of all layers alone": sum(alone[name] for name, _ in layers),
        **measure(everything, fast.device, rounds),
        "alone": alone,
        "lost between neighbours": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet34")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench_gaps: no GPU, nothing measured")
        return
    torch.manual_seed(0)
    dtype = torch.float16 if options.device == "cuda" else torch.float32
    model = torchvision.models.get_model(options.network, weights=None).eval()
    images = torch.randn(options.batch, 3, options.size, options.size, device=options.device).to(dtype)
    fast = halve.compile(model, halve.prune(model), images, inductor=False)
    with torch.no_grad():
        found = gaps(fast, fast.cast_input(images), options.rounds)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{options.network}, batch {options.batch}, microseconds:")
    for name in ("sum of all layers alone", "all layers in turns", "network"):
        print(f"{1e3 * found[name]:9.1f}  {name}")
    worst = sorted(found["lost between neighbours"].items(), key=lambda item: -item[1])
    for pair, ms in worst[:12]:
        print(f"{1e3 * ms:9.2f}  lost: {pair}")
    print(f"{1e3 * sum(ms for _, ms in worst) / 2:9.1f}  lost in all: each layer is in two pairs")


if __name__ == "__main__":
    main()
