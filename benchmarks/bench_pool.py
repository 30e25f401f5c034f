"""The max pooling kernel compared with PyTorch's on a GPU: ResNet's 3x3 window, stride 2, 112 pixels, 64 channels.

    python benchmarks/bench_pool.py [--batches 1 32 256] [--out FILE]

Both run as CUDA graphs, in interleaved rounds. Writes benchmarks/results/pool.json. Does nothing without a GPU.
"""

import argparse
import datetime
import json
from pathlib import Path

import torch

from halve.bench.records import versions
from halve.engine.kernels.kernel import Layout
from halve.engine.kernels.pool.family import Pool
from halve.engine.operations import MaxPool
from halve.engine.timing import measure
from halve.machine import device_name

RESULTS = Path(__file__).parent / "results" / "pool.json"
WINDOW = MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_pool: no GPU, nothing measured")
        return
    found = []
    for batch in options.batches:
        x = torch.randn(batch, 64, 112, 112, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
        systems = {
            "torch": lambda x=x: WINDOW.reference([x], {}),
            "halve": lambda x=x: Pool().run([Layout.NHWC.of(x)], {}, WINDOW, "nhwc"),
        }
        assert torch.equal(systems["torch"](), systems["halve"]())
        for system, ms in measure(systems, x.device).items():
            found.append(
                {"batch": batch, "dtype": "float16", "system": system, "median_ms": round(ms, 5)}
                | {"hardware": device_name(x.device), "versions": versions(), "date": datetime.date.today().isoformat()}
            )
            print(f"batch {batch:4} {system:6} {ms:.4f} ms", flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
