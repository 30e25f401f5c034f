"""Networks on a GPU: halve compared with eager, torch.compile, best dense, PyTorch's own 2:4, and our dense kernels.

    python benchmarks/bench_gpu.py [--networks resnet18 resnet50] [--batches 1 8 32 256] [--compile-batches 1 256]
                                   [--systems ...] [--size 224] [--dtype float16] [--seconds 0.3] [--processes 1]

Weights are random, masked by magnitude: speed does not depend on which weights are kept. Statistics of BatchNorm are
those of random images. Systems are timed in interleaved rounds. torch.compile is slow to compile and only measured at
--compile-batches. With --processes, so many pairs of a network and a batch size are prepared side by side, each in its
own process. When one is prepared, all others are stopped until it has been timed. Batch sizes of all processes together
are at most --images, for the GPU's memory. With --missing, what --out already has is not measured again. Writes
benchmarks/results/gpu.json (one record per measurement) and gpu_layers.json (one per layer of each plan). Records of
other networks, dtypes and batch sizes are kept. Does nothing without a GPU. With --merge FOLDER, nothing is measured,
and the gpu.json and gpu_layers.json of another run are merged in. Needs torch, torchvision, numpy and safetensors.
"""

import argparse
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import halve
from halve.bench.bench import Measurement
from halve.bench.records import layer_records, records
from halve.bench.systems import SYSTEMS
from halve.engine import turns
from halve.masks.storage import write_atomically

RESULTS = Path(__file__).parent / "results"
COMPILED = ("compile", "compile_freezing")


def measured(
    network: str, options: argparse.Namespace, while_timing: Callable[[], AbstractContextManager[None]]
) -> list[Measurement]:
    """Measure one network, first the batch sizes with torch.compile, then the others."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(network, weights=None).cuda()
    images = torch.randn(8, 3, options.size, options.size, device="cuda")
    normalise_(model, images)
    masks = halve.prune(model)
    with_compile = [batch for batch in options.batches if batch in options.compile_batches]
    without = [batch for batch in options.batches if batch not in options.compile_batches]
    others = [system for system in options.systems if system not in COMPILED]
    found: list[Measurement] = []
    for batches, systems in ((with_compile, options.systems), (without, others)):
        if batches and systems:
            found += halve.bench(
                model,
                masks,
                images,
                batch_sizes=batches,
                dtype=getattr(torch, options.dtype),
                systems=systems,
                seconds=options.seconds,
                while_timing=while_timing,
            )
    return sorted(found, key=lambda one: one.batch)


def normalise_(model: nn.Module, images: Tensor) -> None:
    """Set the statistics of BatchNorm to those of some images, and the model to evaluation.

    With those of an untrained network, activations of deep networks vanish: the outputs of EfficientNets are 1e-7 and
    1e-14, which is rounding error or nothing in float16.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches
    with torch.no_grad():
        model.train()(images)
    model.eval()


def show(network: str, found: list[Measurement], seconds: float) -> None:
    print(f"{network}: {seconds:.0f} s", flush=True)
    for one in found:
        if one.median_ms is None:
            print(f"  batch {one.batch:4} {one.system:22} {one.error}")
            continue
        energy = "" if one.energy_mj_per_image is None else f"{one.energy_mj_per_image:8.2f} mJ/image"
        memory = "" if one.memory_bytes is None else f"{one.memory_bytes / 1e6:8.0f} MB"
        spread = f"{one.p10_ms:.3f}-{one.p90_ms:.3f}"
        print(
            f"  batch {one.batch:4} {one.system:22} {one.median_ms:8.3f} ms ({spread}) {memory} {energy} "
            f"{one.note or ''}".rstrip()
        )


def read(path: Path) -> list[dict[str, object]]:
    """The records of earlier runs; empty if there is no file."""
    records: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    return records


def write(path: Path, found: list[dict[str, object]]) -> None:
    """Replace all records of these networks, dtypes and batch sizes: times of different runs are not comparable."""

    def key(record: dict[str, object]) -> tuple[str, str, int]:
        return str(record["network"]), str(record["dtype"]), int(str(record["batch"]))

    path.parent.mkdir(parents=True, exist_ok=True)
    measured = set(map(key, found))
    records = [record for record in read(path) if key(record) not in measured] + found
    for place, descending in ((2, False), (1, True), (0, False)):  # by network, float32 first, batch size
        records.sort(key=lambda record, place=place: key(record)[place], reverse=descending)
    lines = ",\n".join(map(json.dumps, records))  # one per record, so that changes can be read
    write_atomically(path, f"[\n{lines}\n]\n".encode())


@dataclass
class Worker:
    """A process that measures one network at one batch size. It is in a session with the processes that it starts."""

    pair: tuple[str, int]
    part: Path
    process: subprocess.Popen[bytes]
    asks: int  # pipe from the process: it is prepared
    answer: int  # pipe to the process: it may time
    timed: bool = False

    @classmethod
    def start(cls, pair: tuple[str, int], folder: Path, options: argparse.Namespace) -> "Worker":
        (network, batch), part = pair, folder / f"{pair[0]}-{pair[1]}"
        (asks, prepared), (allowed, answer) = os.pipe(), os.pipe()
        command = [sys.executable, __file__, "--networks", network, "--batches", str(batch)]
        command += ["--compile-batches", *([str(batch)] if batch in options.compile_batches else [])]
        command += ["--systems", *systems_for(network, options)]
        command += ["--size", str(options.size), "--dtype", options.dtype]
        command += ["--seconds", str(options.seconds), "--pipes", str(prepared), str(allowed)]
        command += ["--out", f"{part}.json", "--layers-out", f"{part}-layers.json"]
        # Each process that compiles for Inductor would start as many others as there are cores.
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            pass_fds=[prepared, allowed],
            start_new_session=True,
            env=environment,
            preexec_fn=partial(die_with_parent, ctypes.CDLL(None)),
        )
        os.close(prepared)
        os.close(allowed)
        return cls(pair, part, process, asks, answer)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def die_with_parent(libc: ctypes.CDLL) -> None:
    """Have Linux kill this process when its parent is killed: one that is stopped would stay, with its memory."""
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def systems_for(network: str, options: argparse.Namespace) -> list[str]:
    """The systems to measure: our kernels with all weights only for some networks, if they are named."""
    split = options.split_networks
    return [name for name in options.systems if name != "halve_dense" or split is None or network in split]


@contextlib.contextmanager
def stopped_others(pipes: Sequence[int], device: torch.device) -> Iterator[None]:
    """Stop the other processes, none of them in the middle of timing kernels."""
    with turns.turn(device):
        os.write(pipes[0], b"!")
        os.read(pipes[1], 1)
        yield
        os.write(pipes[0], b"!")


def side_by_side(options: argparse.Namespace) -> None:
    """Measure each network at each batch size in a separate process, `options.processes` at a time."""
    waiting = [(network, batch) for batch in options.batches for network in options.networks]
    if options.missing:
        known = {(r["network"], r["batch"]) for r in read(options.out) if r["dtype"] == options.dtype}
        waiting = [pair for pair in waiting if pair not in known]
    running: list[Worker] = []
    timing: Worker | None = None
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                images = sum(worker.pair[1] for worker in running)
                fitting = [pair for pair in waiting if not images or images + pair[1] <= options.images]
                if timing is None and fitting and len(running) < options.processes:
                    waiting.remove(fitting[0])
                    running.append(Worker.start(fitting[0], Path(folder), options))
                    continue
                asking = [worker.asks for worker in running if not worker.timed and timing in (None, worker)]
                ready, _, _ = select.select(asking, [], [], 0.05)
                for worker in [worker for worker in running if worker.asks in ready]:
                    if timing is None and os.read(worker.asks, 1):
                        timing = worker
                        for other in running:
                            if other is not timing:
                                other.signal(signal.SIGSTOP)
                        time.sleep(0.1)  # the GPU finishes what they have launched
                        with contextlib.suppress(BrokenPipeError):  # it has ended since
                            os.write(timing.answer, b"!")
                    elif worker is timing:
                        worker.timed = True
                ended = [worker for worker in running if worker.process.poll() is not None]
                if timing is not None and (timing.timed or timing in ended):
                    timing = None
                    for other in running:
                        other.signal(signal.SIGCONT)
                for worker in ended:
                    running.remove(worker)
                    os.close(worker.asks)
                    os.close(worker.answer)
                    finish(worker, time.perf_counter() - started, options)
        finally:
            for worker in running:
                worker.signal(signal.SIGKILL)


def finish(worker: Worker, seconds: float, options: argparse.Namespace) -> None:
    """Keep what a process has measured."""
    if worker.process.returncode:
        print(f"{worker.part.name}: failed with exit status {worker.process.returncode}", flush=True)
        return
    write(options.out, read(Path(f"{worker.part}.json")))
    write(options.layers_out, read(Path(f"{worker.part}-layers.json")))
    print(f"{worker.part.name}: done after {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 256])
    parser.add_argument("--compile-batches", nargs="*", type=int, default=[1, 256])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="float16")
    parser.add_argument("--seconds", type=float, default=0.3, help="per system and batch size")
    parser.add_argument("--processes", type=int, default=1, help="networks and batch sizes prepared side by side")
    parser.add_argument("--images", type=int, default=2048, help="batch sizes of all processes together, at most")
    parser.add_argument("--missing", action="store_true", help="with --processes: skip what --out already has")
    parser.add_argument(
        "--split-networks", nargs="*", help="with --processes: measure halve_dense for these. Default: all"
    )
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="merge the files of another run, measure nothing")
    parser.add_argument("--pipes", nargs=2, type=int, help=argparse.SUPPRESS)  # to and from `side_by_side`
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--layers-out", type=Path, default=RESULTS / "gpu_layers.json")
    options = parser.parse_args()
    if options.merge is not None:
        for path, name in ((options.out, "gpu.json"), (options.layers_out, "gpu_layers.json")):
            write(path, json.loads((options.merge / name).read_text()))
        return
    if not torch.cuda.is_available():
        print("bench_gpu: no GPU, nothing measured")
        return
    for path in (options.out, options.layers_out):
        read(path)  # fail now rather than after minutes
    if options.processes > 1:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a time limit: end the other processes, too
        side_by_side(options)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    alone = contextlib.nullcontext
    if options.pipes is not None:
        turns.LONGEST_WAIT = float("inf")  # also while this process is stopped
        alone = partial(stopped_others, options.pipes, device)
    for network in options.networks:
        started = time.perf_counter()
        found = measured(network, options, alone)
        show(network, found, time.perf_counter() - started)
        for path, kind in ((options.out, records), (options.layers_out, layer_records)):
            write(path, kind(found, network, getattr(torch, options.dtype), device))


if __name__ == "__main__":
    main()
