"""Run every GPU kernel in every tile on small inputs, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/sanitize.py [--families wgmma_sp stem]
    compute-sanitizer --tool racecheck --error-exitcode 9 python benchmarks/sanitize.py --every-lane --once

Kernels run as if the GPU had three multiprocessors, so that blocks take several tiles of a small input and reuse their
buffers; those that need more of them, such as clusters, run on all of them. Results are compared with float64. Exits
with 1 if one is wrong. With --once, each tile runs one layer only, with a residual where it can: racecheck takes
seconds for it.

In the `wgmma` kernels one lane of a warp frees a buffer for all 32, which have read it and met at a warp barrier.
racecheck only counts what the arriving lane has read. --every-lane compiles them so that every lane arrives, and
changes nothing else: findings that disappear come from this limit, those that stay need a look.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from halve.engine.kernels.cuda import driver, jit
from halve.engine.kernels.kernel import Kernel, Piece
from halve.engine.kernels.registry import FAMILIES, family_of
from halve.engine.layer_times import Jobs, compile_all
from halve.engine.operations import (
    ChainedConvolution,
    Convolution,
    JoinedConvolution,
    Linear,
    MaxPool,
    Operation,
    PooledConvolution,
)
from halve.outputs import relative_error

GPU = torch.device("cuda", 0)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
FEW_PROCESSORS = 3
EVERY_LANE = (  # what the sources say, and what they say if every lane arrives
    ("init_barrier(weights_free + 8 * i, 4)", "init_barrier(weights_free + 8 * i, 128)"),
    ("init_barrier(pixels_free + 8 * i, 4 * SHARERS)", "init_barrier(pixels_free + 8 * i, 128 * SHARERS)"),
    ("if (lane == 0 && !first) {", "if (!first) {"),
    ("if (lane == 0) {\n            if (!RESIDENT) arrive", "{\n            if (!RESIDENT) arrive"),
    ("arrive(pixels_free + 8 * held_slot, 4)", "arrive(pixels_free + 8 * held_slot, 128)"),
)
CONVOLUTIONS = [  # and sizes of their inputs
    (Convolution(128, 128, (3, 3), padding=(1, 1), activation="relu"), (12, 128, 14, 14)),
    (Convolution(128, 72, (3, 3), (2, 2), (1, 1)), (3, 72, 15, 13)),
    (Convolution(64, 64, (5, 5), padding=(2, 2), activation="hardswish"), (2, 64, 9, 20)),
    (Convolution(256, 136, activation="silu"), (4, 136, 13, 13)),
    (Convolution(128, 64, stride=(2, 2)), (3, 64, 14, 14)),
]
WITH_RESIDUALS = CONVOLUTIONS[0], CONVOLUTIONS[3]
OTHERS: list[tuple[Operation, Sequence[Sequence[int]]]] = [
    (Linear(256, 128, activation="gelu"), [(3, 49, 128)]),
    (Linear(128, 256, scaled=True), [(3, 49, 256), (3, 49, 128)]),
    (PooledConvolution(64, 3, (7, 7), (2, 2), (3, 3), "relu", (3, 3), (2, 2), (1, 1)), [(5, 3, 64, 64)]),
    (MaxPool((3, 3), (2, 2), (1, 1), (1, 1), False), [(3, 64, 15, 15)]),
    (JoinedConvolution(128, 128, (3, 3), (1, 1), (1, 1), "relu", 64, (2, 2)), [(6, 128, 14, 14), (6, 64, 27, 27)]),
    (JoinedConvolution(256, 64, (1, 1), (0, 0), (1, 1), "relu", 64, (1, 1)), [(4, 64, 14, 14), (4, 64, 14, 14)]),
    (ChainedConvolution(256, 64, "relu", 64, "relu"), [(6, 64, 14, 14), (6, 256, 14, 14)]),
    (ChainedConvolution(256, 64, "relu", 64, "relu", 64), [(6, 64, 14, 14), (6, 64, 14, 14)]),
    *(
        (
            Convolution(40, 1, (kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2, groups=40, activation="silu"),
            [(3, 40, 17, 15)],
        )
        for kernel, stride in itertools.product((3, 5, 7), (1, 2))
    ),
]
LAYERS: list[tuple[Operation, Sequence[Sequence[int]]]] = [
    *((operation, [size]) for operation, size in CONVOLUTIONS),
    *((operation, [size, operation.out_shape(size)]) for operation, size in WITH_RESIDUALS),
    *OTHERS,
]


def weight_shapes(operation: Operation) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights of an operation, and of its vectors."""
    shapes: dict[str, tuple[int, ...]] = {}
    if isinstance(operation, MaxPool):
        return shapes
    shapes["weight"] = operation.weight_shape  # type: ignore[attr-defined]
    shapes["bias"] = (shapes["weight"][0],)
    if getattr(operation, "scaled", False):
        shapes["scale"] = shapes["bias"]
    if isinstance(operation, JoinedConvolution | ChainedConvolution) and operation.shortcut is not None:
        shapes["shortcut_weight"] = operation.shortcut.weight_shape
    if isinstance(operation, ChainedConvolution):
        shapes["next_weight"], shapes["next_bias"] = operation.following.weight_shape, (operation.next_rows,)
    return shapes


def values(
    operation: Operation, sizes: Sequence[Sequence[int]], dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Random inputs and tensors on the CPU. Weights are 2:4 where their channels allow it."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in weight_shapes(operation).items():
        tensor = torch.randn(shape, generator=generator)
        if name.endswith("weight"):
            tensor = (tensor / tensor[0].numel() ** 0.5).to(dtype)
            if shape[1] % 4 == 0:
                blocks = tensor.unflatten(1, (-1, 4))
                kept = torch.rand(blocks.shape, generator=generator).argsort(2) < 2
                tensor = (blocks * kept).flatten(1, 2)
        tensors[name] = tensor
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes], tensors


@dataclass
class Check:
    """A kernel, and what it computes."""

    operation: Operation
    kernel: Kernel
    inputs: list[Tensor]
    tensors: dict[str, Tensor]

    def given(self) -> list[Tensor]:
        return family_of(self.kernel).laid_out([x.to(GPU) for x in self.inputs], self.operation)

    def compilation(self) -> partial[Any] | None:
        return family_of(self.kernel).compilation(self.given(), self.operation, self.kernel.variant)

    def error(self) -> float:
        """Run the kernel; returns its error against float64."""
        family = family_of(self.kernel)
        packed = family.pack(self.operation, {name: tensor.to(GPU) for name, tensor in self.tensors.items()})
        got = family.run(self.given(), packed, self.operation, self.kernel.variant)
        wide = {name: tensor.double() for name, tensor in self.tensors.items()}
        return relative_error(got.cpu().double(), self.operation.reference([x.double() for x in self.inputs], wide))


def checks(name: str, dtype: torch.dtype, known: set[object], once: bool) -> Iterator[Check]:
    """All kernels of a family with every layer that they fit, or `once` with one, without those that are known."""
    family = FAMILIES[name]
    for operation, sizes in sorted(LAYERS, key=lambda layer: -len(layer[1])) if once else LAYERS:
        inputs, tensors = values(operation, sizes, dtype)
        sparse = "weight" in tensors and tensors["weight"].shape[1] % 4 == 0
        for variant in family.variants(Piece(operation, dtype, is_2_4=sparse), GPU):
            check = Check(operation, Kernel(name, variant), inputs, tensors)
            key = check.kernel if once else (check.kernel, operation, len(inputs))
            if key not in known and family.fits(check.given(), operation, variant):
                known.add(key)
                yield check


def source_with_every_lane(source: str) -> str:
    """The source of a kernel in which every lane of a warp frees buffers; the same if it has no such buffers."""
    if EVERY_LANE[0][0] not in source:
        return source
    for before, after in EVERY_LANE:
        if source.count(before) != 1:
            sys.exit(f"sanitize: the source of the wgmma kernels has changed: {before!r} is not in it once")
        source = source.replace(before, after)
    return source


def run(found: Sequence[Check], dtype: torch.dtype) -> int:
    """Run kernels; returns how many results were wrong."""
    jobs = Jobs()
    for check in found:
        if (job := check.compilation()) is not None:
            jobs[job.func, job.args] = job
    compile_all(jobs)
    wrong = 0
    for check in found:
        error = check.error()
        if not error < TOLERANCE[dtype]:
            wrong += 1
            print(f"wrong: {check.kernel}, {len(check.inputs)} inputs, {check.operation}: relative error {error:.2e}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours = [name for name, family in FAMILIES.items() if family.device_type == "cuda"]
    parser.add_argument("--families", nargs="+", choices=ours, default=ours)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--every-lane", action="store_true", help="let every lane free buffers, for racecheck")
    parser.add_argument("--once", action="store_true", help="run each tile on one layer only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sanitize: no GPU, nothing run")
    dtype, plain, all_processors = getattr(torch, options.dtype), jit.source, driver.processors(0)
    changed = source_with_every_lane if options.every_lane else str
    missing = {name: FAMILIES[name].unavailable(GPU, dtype) for name in options.families}
    families = [name for name in options.families if missing[name] is None]
    for name in options.families:
        if missing[name] is not None:
            print(f"{name}: not run: {missing[name]}")
    wrong, known = 0, set[object]()
    with mock.patch.object(jit, "source", lambda *names: changed(plain(*names))):
        for name, processors in itertools.product(families, (FEW_PROCESSORS, all_processors)):
            began = time.monotonic()
            with mock.patch.object(driver, "processors", lambda _, count=processors: count):
                found = list(checks(name, dtype, known, options.once))
                wrong_here = run(found, dtype)
            wrong += wrong_here
            print(
                f"{name}, {processors} multiprocessors: {len(found)} kernels, {wrong_here} wrong, "
                f"{time.monotonic() - began:.1f} s",
                flush=True,
            )
    if not known:
        sys.exit("sanitize: no kernel fits, nothing run")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
