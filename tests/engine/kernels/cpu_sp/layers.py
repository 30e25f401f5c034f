"""Random 2:4 layers, the error that a layer may have, and memory between guard pages."""

import ctypes
import faulthandler
import mmap
import os
import signal
from dataclasses import replace

import numpy as np
import torch

from halve.engine.kernels.cpu_sp.family import CpuDense, CpuSparse
from tests.random_masks import random

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
FAMILIES = {"cpu_sp": CpuSparse(), "cpu": CpuDense()}


def two_of_four(*shape, seed=0):
    """A weight that keeps two of every four input channels, at random."""
    weight, (rows, channels, *kernel) = random(*shape, seed=seed), shape
    scores = random(rows, channels // 4, 4, *kernel, seed=seed + 1)
    return weight.masked_fill((scores.argsort(2).argsort(2) >= 2).reshape(shape), 0)


def weights_of(operation, family="cpu_sp", dtype=torch.float32, bias=True):
    weight = (two_of_four if family == "cpu_sp" else random)(*operation.weight_shape).to(dtype)
    tensors = {"weight": weight, "bias": random(operation.rows, seed=7)} if bias else {"weight": weight}
    return {**tensors, "scale": random(operation.rows, seed=8)} if operation.scaled else tensors


def run(operation, tensors, inputs, family="cpu_sp", variant="avx512"):
    kernels = FAMILIES[family]
    given = [kernels.reads.of(x, operation.channel_dim) for x in inputs]
    return kernels.run(given, kernels.pack(operation, tensors), operation, variant)


def relative_error(y, operation, tensors, inputs):
    """The largest |y - exact| / conv(|x|, |w|), in float64."""
    exact = [x.double() for x in inputs], {name: tensor.double() for name, tensor in tensors.items()}
    magnitudes = [x.abs() for x in exact[0]], {name: tensor.abs() for name, tensor in exact[1].items()}
    expected = operation.reference(*exact)
    bound = replace(operation, activation="none").reference(*magnitudes)
    assert y.shape == expected.shape
    error = (y.double() - expected).abs()
    return float((error / bound.clamp(min=1e-30)).max()) if y.numel() else 0.0


def check(operation, shape, family="cpu_sp", dtype=torch.float32, residual=False, bias=True, variant="avx512"):
    """Compare a layer with the reference in float64."""
    tensors = weights_of(operation, family, dtype, bias)
    inputs = [random(*shape, seed=3).to(dtype)]
    if residual:
        inputs.append(random(*operation.out_shape(shape), seed=4).to(dtype))
    y = run(operation, tensors, inputs, family, variant)
    assert y.dtype == dtype
    assert relative_error(y, operation, tensors, inputs) <= TOLERANCE[dtype]


class Guarded:
    """Memory for a number of bytes, right before or right after a page that must not be touched."""

    def __init__(self, size, at_end):
        pages = -(-size // mmap.PAGESIZE)
        self._map = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (0, pages + 1):
            assert libc.mprotect(ctypes.c_void_p(start + page * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
        offset = mmap.PAGESIZE + (pages * mmap.PAGESIZE - size if at_end else 0)
        self.address, self._offset, self._size = start + offset, offset, size

    def tensor(self, like, shape, strides):
        """A tensor in this memory."""
        numbers = torch.from_numpy(np.frombuffer(self._map, np.uint8, self._size, self._offset)).view(like)
        return numbers.as_strided(shape, strides)


def in_child(function):
    """Run a function in a forked process. Returns its exit code, negative for a signal such as SIGSEGV.

    The child has none of PyTorch's threads: a large operation of PyTorch would wait for them until the alarm.
    """
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.alarm(30)
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
