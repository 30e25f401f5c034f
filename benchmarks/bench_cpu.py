"""Networks on a CPU: halve compared with eager, channels last, torch.compile, ONNX Runtime and OpenVINO.

    python benchmarks/bench_cpu.py [--networks resnet18 resnet50] [--batches 1 8] [--dtypes float32 bfloat16]
                                   [--systems ...] [--size 224] [--threads 2] [--seconds 5]

Weights are random, masked by magnitude: the speed does not depend on which weights are kept. Systems are timed in
interleaved rounds. Writes benchmarks/results/cpu.json (one record per measurement) and cpu_layers.json (one per layer
of each plan). Records of other networks, dtypes and batch sizes are kept. ONNX Runtime and OpenVINO are measured if
they are installed, with onnxscript. Needs torch, torchvision, numpy and safetensors.
"""

import argparse
import time
from pathlib import Path

import torch
import torchvision
from bench_gpu import read, show, write

import halve
from halve.bench.bench import Measurement
from halve.bench.records import layer_records, records
from halve.bench.systems import SYSTEMS, systems_for

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")


def measured(network: str, dtype: torch.dtype, options: argparse.Namespace) -> list[Measurement]:
    """Measure one network in one dtype."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(network, weights=None).eval()
    return halve.bench(
        model,
        halve.prune(model),
        torch.randn(max(options.batches), 3, options.size, options.size),
        batch_sizes=options.batches,
        dtype=dtype,
        systems=options.systems,
        seconds=options.seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=systems_for(CPU))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5, help="per system and batch size")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json")
    parser.add_argument("--layers-out", type=Path, default=RESULTS / "cpu_layers.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for path in (options.out, options.layers_out):
        read(path)  # fail now rather than after minutes
    for network in options.networks:
        for name in options.dtypes:
            started, dtype = time.perf_counter(), getattr(torch, name)
            found = measured(network, dtype, options)
            show(f"{network}, {name}", found, time.perf_counter() - started)
            for path, kind in ((options.out, records), (options.layers_out, layer_records)):
                write(path, kind(found, network, dtype, CPU))


if __name__ == "__main__":
    main()
