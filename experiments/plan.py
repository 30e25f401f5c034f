"""Where masks pay: time every layer of the networks of accuracy.py with dense and with sparse kernels on this machine.

    PYTHONPATH=ASSETS python experiments/plan.py ASSETS --networks resnet50_v1 efficientnet_lite0 [--batch 256]

Nothing else must run on the device. Writes results/plan_NETWORK.json, which accuracy.py takes as --plan.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from accuracy import NETWORKS

import halve
from halve.bench import measure as measuring

RESULTS = Path(__file__).parent / "results"
PIXELS = 224


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--networks", nargs="+", default=["resnet50_v1", "efficientnet_lite0"], choices=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=PIXELS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dense", nargs="+", help="versions of the dense network to compare with (default: those of halve.measure)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.dense:
        measuring._DENSE[device.type] = tuple(options.dense)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.networks:
        model = NETWORKS[name].model(name, options.assets).to(device)
        images = torch.randn(options.batch, 3, options.size, options.size, device=device)
        started = time.perf_counter()
        plan = halve.measure(model, images, progress=False)
        plan.save(options.out / f"plan_{name}.json")
        paying = sum(math.prod(plan[layer].weight) for layer in plan.paying)
        share = paying / sum(math.prod(layer.weight) for layer in plan.values())
        took = f"measured in {time.perf_counter() - started:.0f} s"
        print(plan, f"{name}: masks pay in {100 * share:.0f} % of the weights; {took}", sep="\n", flush=True)


if __name__ == "__main__":
    main()
