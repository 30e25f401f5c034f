"""Every layer of whole networks against float64: all kernels that a plan may choose, on the inputs of the network.

    python benchmarks/check_layers.py [--networks resnet18 ...] [--batches 1 8] [--size 224] [--dtype float16]
                                      [--device cuda] [--out results/layers_float64.json]

Networks are torchvision's, with random weights, normalised and masked by magnitude. Each layer gets the input that it
has in the network, each kernel that planning would time is run on it, and so are joined layers of the plan. An error is
relative to what rounding can do: the largest of |got - exact| / (eps (|weight| * |input| + |bias| + |residual|)), where
eps is half the distance from 1 to the next number of the dtype. Rounding the result once gives at most 1. More than
--limit is wrong: by default 4 in half precision, where sums are in float32, and 32 in float32. Prints a line for each
network, and writes the largest error of each kernel family.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from bench_gpu import normalise_
from run_gpu import NETWORKS
from torch import Tensor

import halve
from halve.engine.compiled import Compiled
from halve.engine.kernels.registry import family_of
from halve.engine.layer import Layer
from halve.engine.layer_times import candidate_kernels
from halve.engine.operations import Operation
from halve.engine.visit import visit
from halve.errors import EngineError
from halve.machine import device_name
from halve.version import VERSION

RESULT = Path(__file__).parent / "results" / "layers_float64.json"
LIMITS = {"float16": 4.0, "bfloat16": 4.0, "float32": 32.0}


def plain(operation: Operation) -> Operation:
    """The operation without its activations."""
    names = [field.name for field in dataclasses.fields(operation) if field.name.endswith("activation")]  # type: ignore[arg-type]
    return dataclasses.replace(operation, **dict.fromkeys(names, "none"))  # type: ignore[type-var]


def errors(layer: Layer, inputs: list[Tensor], sparse: bool) -> dict[str, float]:
    """The error of each kernel of a layer, relative to what rounding can do; infinite for one that fails."""
    eps = torch.finfo(inputs[0].dtype).eps / 2
    tensors = {name: tensor.double() for name, tensor in layer.tensors().items()}
    wide = [x.double() for x in inputs]
    exact = layer.operation.reference(wide, tensors)
    sizes = plain(layer.operation).reference(
        [x.abs() for x in wide], {name: tensor.abs() for name, tensor in tensors.items()}
    )
    found = {}
    kernels = candidate_kernels(layer, inputs[0].device, sparse, inputs)
    before = list(layer.kernels.values())
    layer.hold([*kernels, *before])
    for kernel in kernels:
        try:
            got = layer.run(family_of(kernel).laid_out(inputs, layer.operation), kernel)
        except EngineError:
            found[str(kernel)] = float("inf")
            continue
        off = (got.double() - exact).abs() / (eps * sizes)
        right = (sizes == 0) & (got.double() == exact)  # 0 divided by 0
        found[str(kernel)] = float(off.masked_fill(right, 0.0).nan_to_num(float("inf")).max())
    layer.hold(before)
    return found


def checked(fast: Compiled, x: Tensor) -> list[tuple[str, str, float]]:
    """The name of each layer, its kernels and their errors: also of layers that the plan joins."""
    found: list[tuple[str, str, float]] = []

    def look(layer: Layer, inputs: list[Tensor]) -> None:
        given = [value.clone() for value in inputs]
        found.extend((layer.name, kernel, error) for kernel, error in errors(layer, given, fast.reason is None).items())

    images = fast.cast_input(x)
    bodies = [fast.body, *(body for body in fast._bodies.values() if isinstance(body, torch.fx.GraphModule))]
    for body in bodies:
        layers = [module for module in body.modules() if isinstance(module, Layer)]
        visit(layers, partial(body, images), look)
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS.split())
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("check_layers: no GPU, nothing checked")
        return
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    limit = options.limit or LIMITS[options.dtype]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    records: list[dict[str, Any]] = []
    wrong = 0
    for network in options.networks:
        torch.manual_seed(0)
        started = time.monotonic()
        model = torchvision.models.get_model(network, weights=None).to(device)
        normalise_(model, torch.randn(8, 3, options.size, options.size, device=device))
        masks = halve.prune(model)
        for batch in options.batches:
            x = torch.randn(batch, 3, options.size, options.size, device=device).to(dtype)
            fast = halve.compile(model, masks, x, batch_sizes=(batch,), inductor=False, progress=False)
            with torch.no_grad():
                found = checked(fast, x)
            worst: dict[str, float] = defaultdict(float)
            for layer, kernel, error in found:
                family = kernel.split()[0]
                worst[family] = max(worst[family], error)
                if not error <= limit:
                    wrong += 1
                    print(f"wrong: {network}, batch {batch}, {layer}, {kernel}: {error:.3g}", flush=True)
            records.append(
                {
                    "network": network,
                    "batch": batch,
                    "dtype": options.dtype,
                    "layers": len({layer for layer, _, _ in found}),
                    "runs": dict(Counter(kernel.split()[0] for _, kernel, _ in found)),
                    "largest_error": {family: round(error, 3) for family, error in worst.items()},
                    "hardware": device_name(device),
                    "versions": {"halve": VERSION, "torch": torch.__version__},
                    "date": datetime.date.today().isoformat(),
                }
            )
            options.out.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
            took = time.monotonic() - started
            print(
                f"{network}, batch {batch}: {len(found)} runs, at most {max(worst.values()):.2f}; {took:.0f} s",
                flush=True,
            )
            del fast
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
