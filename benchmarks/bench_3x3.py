"""The `wgmma` kernels compared with cuDNN on the 3x3 layers of ResNets, in every tile.

    python benchmarks/bench_3x3.py [--batches 8 32 256] [--out FILE]

Float16, channels last, with bias and ReLU, random 2:4 weights. cuDNN in benchmark mode runs the convolution alone, and
with bias and ReLU fused. All run as CUDA graphs in interleaved rounds: first every tile with 2:4 weights, then the
fastest of them, with all weights as well, beside cuDNN, in more rounds. Every kernel is compared with float64, and with
itself. Layers that fit into the L2 cache are read from there. Writes benchmarks/results/conv3x3.json. Does nothing
without a GPU of compute capability 9.0.
"""

import argparse
import datetime
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.bench.records import versions
from halve.engine.kernels.cuda.convolution import ConvolutionFamily
from halve.engine.kernels.wgmma_sp.family import WgmmaDense, WgmmaSparse
from halve.engine.kernels.wgmma_sp.tiling import TILES
from halve.engine.layer_times import Jobs, compile_all
from halve.engine.operations import Convolution
from halve.engine.timing import measure
from halve.machine import device_name

RESULTS = Path(__file__).parent / "results" / "conv3x3.json"
LAYERS = ((64, 56), (128, 28), (256, 14), (512, 7))  # channels; height and width
FINALISTS, ROUNDS = 4, 25
_TOLERANCE = 2e-3  # of the largest error, relative to the sum of what was added


class Problem(NamedTuple):
    """A layer with random weights, and its result in float64."""

    convolution: Convolution
    x: Tensor
    tensors: dict[str, Tensor]
    expected: Tensor
    size: Tensor  # the sum of the absolute values that make up each result

    @classmethod
    def random(cls, channels: int, side: int, batch: int, device: torch.device) -> "Problem":
        convolution = Convolution(channels, channels, (3, 3), padding=(1, 1), activation="relu")
        generator = torch.Generator(device).manual_seed(channels + batch)
        randn = functools.partial(torch.randn, generator=generator, device=device)
        fours = randn(channels, channels // 4, 4, 3, 3) / (4.5 * channels) ** 0.5
        kept = torch.rand(fours.shape, generator=generator, device=device).argsort(2) < 2
        weight, bias = (fours * kept).flatten(1, 2).half(), randn(channels)
        x = randn(batch, channels, side, side).half().contiguous(memory_format=torch.channels_last)
        expected = F.conv2d(x.double(), weight.double(), bias.double(), padding=1).relu()
        size = F.conv2d(x.double().abs(), weight.double().abs(), bias.double().abs(), padding=1)
        return cls(convolution, x, {"weight": weight, "bias": bias}, expected, size)

    def calls(self, family: ConvolutionFamily, tiles: list[str]) -> dict[str, Callable[[], Tensor]]:
        """What runs the layer in each tile that it fits into, compared with float64."""
        packed = family.pack(self.convolution, self.tensors)
        found: dict[str, Callable[[], Tensor]] = {}
        for tile in tiles:
            if not family.fits([self.x], self.convolution, tile):
                continue
            run = functools.partial(family.run, [self.x], packed, self.convolution, tile)
            got = run()
            worst = float(((got.double() - self.expected).abs() / self.size).nan_to_num(1e9).max())
            if not worst < _TOLERANCE or not all(torch.equal(run(), got) for _ in range(3)):
                raise SystemExit(
                    f"bench_3x3: {family.name} {tile} is wrong: error {worst:.1e}, or differs from run to run"
                )
            found[f"{family.name} {tile}"] = run
        return found

    def cudnn(self) -> dict[str, Callable[[], Tensor]]:
        weight = self.tensors["weight"].contiguous(memory_format=torch.channels_last)
        bias = self.tensors["bias"].half()
        return {
            "cudnn": lambda: F.conv2d(self.x, weight, None, padding=1),
            "cudnn fused": lambda: torch.cudnn_convolution_relu(self.x, weight, bias, (1, 1), (1, 1), (1, 1), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32, 256])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    if not torch.cuda.is_available() or WgmmaSparse().unavailable(device, torch.float16) is not None:
        print("bench_3x3: no GPU of compute capability 9.0, nothing measured")
        return
    torch.backends.cudnn.benchmark = True
    started = time.perf_counter()
    _compile(options.batches, device)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    found, table = [], []
    for batch in options.batches:
        for channels, side in LAYERS:
            problem = Problem.random(channels, side, batch, device)
            every = problem.calls(WgmmaSparse(), list(TILES))
            first = measure(every, device)
            best = [name.removeprefix("wgmma_sp ") for name in sorted(first, key=lambda name: first[name])]
            best = best[:FINALISTS] + [tile for tile in best[FINALISTS:] if not TILES[tile].unrolled][:1]
            finalists = {name: every[name] for name in (f"wgmma_sp {tile}" for tile in best)}
            finalists |= problem.calls(WgmmaDense(), best) | problem.cudnn()
            times = measure(finalists, device, ROUNDS)
            record = {
                "layer": f"{channels} 3x3 at {side}",
                "batch": batch,
                "dtype": "float16",
                "median_ms": {name: round(ms, 5) for name, ms in times.items()},
                "first_round_ms": {name: round(ms, 5) for name, ms in first.items()},
                "hardware": device_name(device),
                "versions": versions(),
                "date": datetime.date.today().isoformat(),
            }
            found.append(record)
            table.append(_row(str(record["layer"]), batch, times))
            print(
                json.dumps({"layer": record["layer"], "batch": batch, "us": _microseconds(first | times)}), flush=True
            )
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s. Microseconds:")
    print("\n".join(table))


def _row(layer: str, batch: int, times: dict[str, float]) -> str:
    def fastest(start: str, unrolled: bool | None = None) -> tuple[float, str]:
        names = [name for name in times if name.startswith(start)]
        if unrolled is not None:
            names = [name for name in names if name.endswith(" 3x3") == unrolled]
        return min(((1e3 * times[name], name.removeprefix(start)) for name in names), default=(float("nan"), "-"))

    ours, rolled = fastest("wgmma_sp ", True), fastest("wgmma_sp ", False)
    dense, cudnn = fastest("wgmma "), fastest("cudnn")
    best = min(ours[0], rolled[0])
    words = [f"{layer:12} batch {batch:3}: unrolled {ours[0]:6.2f} ({ours[1]}), not {rolled[0]:6.2f} ({rolled[1]})"]
    words += [f"all weights {dense[0]:6.2f} = {dense[0] / best:.2f}x"]
    words += [f"cudnn {1e3 * times['cudnn']:.2f}, fused {1e3 * times['cudnn fused']:.2f} = {cudnn[0] / best:.2f}x"]
    return "  ".join(words)


def _microseconds(times: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * ms, 2) for name, ms in sorted(times.items(), key=lambda item: item[1])}


def _compile(batches: list[int], device: torch.device) -> None:
    """Compile all kernels in several threads."""
    jobs: Jobs = {}
    for batch in batches:
        for channels, side in LAYERS:
            convolution = Convolution(channels, channels, (3, 3), padding=(1, 1), activation="relu")
            x = torch.empty(batch, channels, side, side, device=device, dtype=torch.float16)
            for family in (WgmmaSparse(), WgmmaDense()):
                for tile in TILES:
                    if (job := family.compilation([x], convolution, tile)) is not None:
                        jobs[job.func, job.args] = job
    compile_all(jobs)


if __name__ == "__main__":
    main()
