"""Compile the kernels that planning needs on a GPU, on a machine without one.

    python benchmarks/precompile.py FOLDER [--networks resnet18 resnet50] [--batches 1 8 32 256] [--size 224]
                                    [--capability 9.0] [--processors 132] [--threads 2]

On the GPU's machine, set HALVE_CACHE to FOLDER, or copy its files to ~/.cache/halve/kernels. What FOLDER already has is
not compiled again. PyTorch brings the compiler along: its version must be the same on both machines. Networks are
torchvision's, in float16, with 2:4 masks on all layers that are masked by default.
"""

import argparse
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

import halve
from halve.engine.fuse import fuse
from halve.engine.join import KINDS, joined_compilations, with_kernels
from halve.engine.kernels.cuda import driver, wgmma
from halve.engine.layer import Layer
from halve.engine.layer_times import Jobs, compilations
from halve.engine.timing_cache import TimingCache
from halve.engine.visit import visit
from halve.graph import capture

GPU = torch.device("cuda", 0)


@contextlib.contextmanager
def pretended_gpu(capability: tuple[int, int], processors: int) -> Iterator[None]:
    """Let kernel families answer as on a GPU of this capability, for tensors on the CPU as well."""
    major, minor = capability
    architecture = f"sm_{major}{minor}" + ("a" if capability == (9, 0) else "")
    missing = None if capability == (9, 0) else "no wgmma"
    with contextlib.ExitStack() as stack:
        for module, name, answer in (
            (torch.cuda, "get_device_capability", capability),
            (torch.cuda, "get_device_name", "another GPU"),
            (driver, "processors", processors),
            (driver, "architecture", architecture),
        ):
            stack.enter_context(mock.patch.object(module, name, lambda *_, answer=answer: answer))
        stack.enter_context(
            mock.patch.object(
                wgmma, "unavailable", lambda _, dtype: missing if dtype in wgmma.DTYPES else "wrong dtype"
            )
        )
        yield


def captured(network: str, size: int) -> GraphModule:
    """The fused graph of a masked network in float16."""
    model = torchvision.models.get_model(network, weights=None).eval()
    masked = halve.apply(model, halve.prune(model))
    with torch.no_grad():
        body = fuse(capture(masked, (torch.randn(2, 3, size, size),)).parts[0])
        layers = [layer for layer in body.modules() if isinstance(layer, Layer)]
        for layer in layers:
            layer.cast_(torch.float16)
        for tensor in (*body.parameters(), *body.buffers()):
            if tensor.is_floating_point() and not any(tensor is held for layer in layers for held in layer.buffers()):
                tensor.data = tensor.data.half()
    return body


def jobs_of(body: GraphModule, batch: int, size: int) -> Jobs:
    """What planning compiles for a batch size: the kernels of all layers, and of those that could be joined.

    Call it within `pretended_gpu`.
    """
    layers = [layer for layer in body.modules() if isinstance(layer, Layer)]
    joined = [with_kernels(pairs(body), GPU) for pairs in KINDS]
    cache, jobs = TimingCache(None), Jobs()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):  # shapes are all that matters
        images = torch.empty(batch, 3, size, size, dtype=torch.float16)
        run = partial(body, images.contiguous(memory_format=torch.channels_last))
        visit(layers, run, lambda layer, inputs: jobs.update(compilations(layer, inputs, cache, GPU, True)))
        for together in joined:
            jobs |= joined_compilations(together, run, cache, GPU)
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 256])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--capability", default="9.0")
    parser.add_argument("--processors", type=int, default=132)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    os.environ["HALVE_CACHE"] = str(options.folder)
    major, minor = map(int, options.capability.split("."))
    warnings.simplefilter("ignore")
    started, failed = time.perf_counter(), 0
    with pretended_gpu((major, minor), options.processors):
        for network in options.networks:
            body, jobs = captured(network, options.size), Jobs()
            for batch in options.batches:
                jobs |= jobs_of(body, batch, options.size)
            with ThreadPoolExecutor(options.threads) as pool:
                failed += sum(done.exception() is not None for done in [pool.submit(job) for job in jobs.values()])
            kernels = len([*options.folder.glob("*.cubin")])
            print(f"{network}: {kernels} kernels after {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        sys.exit(f"{failed} kernels do not compile")


if __name__ == "__main__":
    main()
