"""The depthwise kernels compared with cuDNN on a GPU, on the layers of ConvNeXt-T, MobileNetV3-L and EfficientNet-B0.

    python benchmarks/bench_depthwise.py [--batches 1 32 256] [--networks convnext_tiny ...] [--out FILE]

Float16, channels last, with bias, without activation. All run as CUDA graphs, in interleaved rounds; layers that fit
into the L2 cache are read from there. The bandwidth counts input and result once; the share of peak is that of
multiplications in single precision at the highest clock rate. Writes benchmarks/results/depthwise.json. Does nothing
without a GPU.
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halve.bench.records import versions
from halve.engine.kernels.depthwise.family import Depthwise
from halve.engine.kernels.kernel import Piece
from halve.engine.layer_times import Jobs, compile_all
from halve.engine.operations import Convolution
from halve.engine.timing import measure
from halve.machine import device_name

RESULTS = Path(__file__).parent / "results" / "depthwise.json"
_LANES = 128  # multiplications of a multiprocessor per clock


class Shape(NamedTuple):
    """A layer, and how often a network has it."""

    channels: int
    size: int  # height and width of the input
    kernel: int
    stride: int
    count: int = 1

    @property
    def convolution(self) -> Convolution:
        kernel, stride, pad = self.kernel, self.stride, self.kernel // 2
        return Convolution(
            self.channels, 1, (kernel, kernel), (stride, stride), (pad, pad), groups=self.channels, activation="none"
        )

    def __str__(self) -> str:
        return f"{self.channels} {self.kernel}x{self.kernel}/{self.stride} at {self.size}"


NETWORKS = {
    "convnext_tiny": [
        *(Shape(96, 56, 7, 1, 3), Shape(192, 28, 7, 1, 3), Shape(384, 14, 7, 1, 9), Shape(768, 7, 7, 1, 3)),
    ],
    "mobilenet_v3_large": [
        *(Shape(16, 112, 3, 1), Shape(64, 112, 3, 2), Shape(72, 56, 3, 1), Shape(72, 56, 5, 2)),
        *(Shape(120, 28, 5, 1, 2), Shape(240, 28, 3, 2), Shape(200, 14, 3, 1), Shape(184, 14, 3, 1, 2)),
        *(Shape(480, 14, 3, 1), Shape(672, 14, 3, 1), Shape(672, 14, 5, 2), Shape(960, 7, 5, 1, 2)),
    ],
    "efficientnet_b0": [
        *(Shape(32, 112, 3, 1), Shape(96, 112, 3, 2), Shape(144, 56, 3, 1), Shape(144, 56, 5, 2)),
        *(Shape(240, 28, 5, 1), Shape(240, 28, 3, 2), Shape(480, 14, 3, 1, 2), Shape(480, 14, 5, 1)),
        *(Shape(672, 14, 5, 1, 2), Shape(672, 14, 5, 2), Shape(1152, 7, 5, 1, 3), Shape(1152, 7, 3, 1)),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_depthwise: no GPU, nothing measured")
        return
    torch.backends.cudnn.benchmark = True
    device, family = torch.device("cuda", 0), Depthwise()
    peak = _peak(device)
    shapes = list(dict.fromkeys(shape._replace(count=1) for name in options.networks for shape in NETWORKS[name]))
    _compile(shapes, device)
    found, times = [], {}
    for shape in shapes:
        convolution = shape.convolution
        for batch in options.batches:
            x, tensors = _problem(shape, batch, device)
            packed, bias = family.pack(convolution, tensors), tensors["bias"].to(x.dtype)
            weight = tensors["weight"].contiguous(memory_format=torch.channels_last)
            geometry = (convolution.stride, convolution.padding, 1, convolution.groups)
            calls = {"cudnn": lambda x=x, w=weight, b=bias, g=geometry: F.conv2d(x, w, b, *g)}
            for variant in _variants(convolution, device):
                calls[variant] = lambda x=x, p=packed, c=convolution, v=variant: family.run([x], p, c, v)
                _check(calls[variant](), calls["cudnn"](), f"{shape} {variant}")
            measured = measure(calls, device)
            best = min((ms, name) for name, ms in measured.items() if name != "cudnn")
            times[shape, batch] = measured["cudnn"], best[0]
            outputs = batch * convolution.rows * convolution.out_size(shape.size, shape.size)[0] ** 2
            rate = 2 * (x.numel() + outputs) / best[0] / 1e6
            share = outputs * shape.kernel**2 / best[0] * 1e3 / peak if peak else None
            found.append(
                {"layer": str(shape), "batch": batch, "dtype": "float16", "best": best[1]}
                | {"median_ms": {name: round(ms, 5) for name, ms in measured.items()}}
                | {"gb_per_s": round(rate), "share_of_peak": share and round(share, 3)}
                | {"hardware": device_name(device), "versions": versions(), "date": datetime.date.today().isoformat()}
            )
            words = [f"{shape!s:20} batch {batch:3}", f"{measured['cudnn'] / best[0]:5.2f}x", f"{rate:5.0f} GB/s"]
            words += [f"{share:4.0%}" if share else "", *(f"{name} {ms:.4f}" for name, ms in measured.items())]
            print("  ".join(words), flush=True)
    for network in options.networks:
        for batch in options.batches:
            pairs = [(s.count, times[s._replace(count=1), batch]) for s in NETWORKS[network]]
            cudnn, ours = (sum(count * pair[i] for count, pair in pairs) for i in range(2))
            print(f"{network:20} batch {batch:3}: cuDNN {cudnn:.3f} ms, ours {ours:.3f} ms, {cudnn / ours:.2f}x")
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def _variants(convolution: Convolution, device: torch.device) -> list[str]:
    return list(Depthwise().variants(Piece(convolution, torch.float16), device))


def _compile(shapes: list[Shape], device: torch.device) -> None:
    """Compile all kernels in several threads."""
    jobs: Jobs = {}
    for shape in shapes:
        x, _ = _problem(shape, 1, device)
        for variant in _variants(shape.convolution, device):
            job = Depthwise().compilation([x], shape.convolution, variant)
            assert job is not None
            jobs[job.func, job.args] = job
    compile_all(jobs)


def _problem(shape: Shape, batch: int, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(batch, shape.channels, shape.size, shape.size, device=device, dtype=torch.float16)
    weight = torch.randn(shape.channels, 1, shape.kernel, shape.kernel, device=device) / shape.kernel
    tensors = {"weight": weight.half(), "bias": torch.randn(shape.channels, device=device)}
    return x.contiguous(memory_format=torch.channels_last), tensors


def _check(got: Tensor, expected: Tensor, what: str) -> None:
    error = float((got - expected).float().norm() / expected.float().norm())
    if not error < 2e-3:
        raise SystemExit(f"bench_depthwise: {what} is wrong: relative error {error:.1e}")


def _peak(device: torch.device) -> float | None:
    """Multiplications per second in single precision, if the clock rate is known."""
    properties = torch.cuda.get_device_properties(device)
    rate = getattr(properties, "clock_rate", None)  # in kHz; newer versions of PyTorch have it
    return rate and rate * 1e3 * _LANES * properties.multi_processor_count


if __name__ == "__main__":
    main()
