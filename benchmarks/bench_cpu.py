"""Networks on a CPU: halve compared with eager, channels last, torch.compile, ONNX Runtime and OpenVINO.

    python benchmarks/bench_cpu.py [--networks resnet18 resnet50] [--batches 1 8] [--dtypes float32 bfloat16]
                                   [--systems ...] [--size 224] [--threads 2] [--seconds 5] [--skip-measured]

Weights are random, masked by magnitude: the speed does not depend on which weights are kept. Systems are timed in
interleaved rounds. Writes benchmarks/results/cpu.json (one record per measurement) and cpu_layers.json (one per layer
of each plan), network by network. Records of other networks, dtypes and batch sizes are kept; with --skip-measured also
those of the same ones, which are not measured again: a run that was stopped goes on. ONNX Runtime and OpenVINO are
measured if they are installed, with onnxscript. Needs torch, torchvision, numpy and safetensors.

Most of the time goes into planning and compiling, which does not depend on --seconds. All other networks of the GPU
list at one batch size, some minutes each on two idle cores:

    python benchmarks/bench_cpu.py --networks others --batches 8 --dtypes float32 --systems compile_freezing halve
                                   --threads 2 --seconds 3 --skip-measured
"""

import argparse
import itertools
import time
from pathlib import Path

import torch
import torchvision
from bench_gpu import read, show, write

import halve
from halve.bench.bench import Measurement
from halve.bench.records import layer_records, records
from halve.bench.systems import SYSTEMS, systems_for

OTHERS = (
    *("mobilenet_v3_large", "efficientnet_b0", "googlenet", "resnext50_32x4d", "vgg16_bn", "densenet121"),
    *("swin_t", "vit_b_16", "efficientnet_v2_s", "regnet_y_8gf"),
)  # all networks of the GPU list but ResNets and ConvNeXt, those that take long last
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


def is_measured(network: str, dtype: str, options: argparse.Namespace) -> bool:
    """Whether there are records of all batch sizes and systems that are asked for."""
    keys = ("network", "dtype", "batch", "system")
    known = {tuple(record[key] for key in keys) for record in read(options.out)}
    wanted = itertools.product([network], [dtype], options.batches, options.systems)
    return known.issuperset(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet50"], help="names, or others: ten others")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=systems_for(CPU))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5, help="per system and batch size")
    parser.add_argument("--skip-measured", action="store_true", help="keep the records that --out has")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json")
    parser.add_argument("--layers-out", type=Path, default=RESULTS / "cpu_layers.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for path in (options.out, options.layers_out):
        read(path)  # fail now rather than after minutes
    networks = [name for given in options.networks for name in (OTHERS if given == "others" else [given])]
    runs = list(itertools.product(networks, options.dtypes))
    if options.skip_measured:
        runs = [run for run in runs if not is_measured(*run, options)]
    started = time.perf_counter()
    for done, (network, name) in enumerate(runs):
        minutes = (time.perf_counter() - started) / 60
        left = f"{minutes:.0f} min so far, about {minutes / done * (len(runs) - done):.0f} left" if done else "starting"
        print(f"[{done + 1}/{len(runs)}] {network}, {name}: {left}", flush=True)
        begun, dtype = time.perf_counter(), getattr(torch, name)
        found = measured(network, dtype, options)
        show(f"{network}, {name}", found, time.perf_counter() - begun)
        for path, kind in ((options.out, records), (options.layers_out, layer_records)):
            write(path, kind(found, network, dtype, CPU))


if __name__ == "__main__":
    main()
