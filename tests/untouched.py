"""`untouched(model)`: check that a block of code does not change a model in any visible respect, nor the process."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Fail if anything about the model or the process is different afterwards, even if the block raises.

    Compared: classes and what they define, modes, hooks, attributes, and for every parameter, buffer (persistent or
    not), gradient and tensor attribute its identity, dtype, device, strides, requires_grad, version and bits. Of the
    process: random numbers (so make inputs before the block), environment variables, numbers of threads and PyTorch's
    global settings.
    """
    before = _snapshot(model) | _process()
    try:
        yield
    finally:
        after = _snapshot(model) | _process()
        assert list(before) == list(after), f"names changed: {sorted(set(before) ^ set(after))}"
        changed = [name for name in before if not _same(before[name], after[name])]
        assert not changed, f"changed: {changed}"


def bits(tensor: Tensor) -> Tensor:
    """A copy of the bytes of a tensor."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and bits are the same. Stricter than torch.equal, for which 0.0 equals -0.0."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def _snapshot(model: nn.Module) -> dict[str, Any]:
    shot: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        shot[f"{name}: module"] = (id(module), type(module), _defined(type(module)), module.training)
        shot[f"{name}: attributes"] = tuple(vars(module))
        shot[f"{name}: not persistent"] = frozenset(module._non_persistent_buffers_set)
        for key, value in vars(module).items():
            if "_hooks" in key and isinstance(value, dict):
                shot[f"{name}: {key}"] = [(number, id(hook)) for number, hook in value.items()]
            elif isinstance(value, Tensor):
                shot[f"{name}: {key}"] = _of_tensor(value)
            elif isinstance(value, bool | int | float | str | tuple | None):
                shot[f"{name}: {key}"] = repr(value)
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            shot[f"{name}: {key}"] = None if value is None else _of_tensor(value)
            if value is not None and value.is_leaf and value.grad is not None:
                shot[f"{name}: {key}: gradient"] = _of_tensor(value.grad)
    shot["state dict"] = tuple(model.state_dict(keep_vars=True))
    return shot


def _process() -> dict[str, Any]:
    shot: dict[str, Any] = {
        "random numbers of Python": random.getstate(),
        "random numbers of NumPy": repr(np.random.get_state(legacy=False)),  # noqa: NPY002
        "random numbers of PyTorch": torch.get_rng_state().tolist(),
        "environment": dict(os.environ),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default dtype": torch.get_default_dtype(),
        "autograd": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuDNN": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.enabled),
        "float32 precision": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_initialized():
        shot["random numbers of the GPUs"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    return shot


def _defined(cls: type) -> frozenset[str]:
    return frozenset(name for name in vars(cls) if not name.startswith("__"))  # Python itself caches under such names


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    known = (id(tensor), type(tensor), tensor.dtype, tensor.device, tensor.requires_grad)
    if is_lazy(tensor) or tensor.is_meta:
        return known, None
    version = 0 if tensor.is_inference() else tensor._version
    return (*known, tuple(tensor.shape), tensor.stride(), tensor.data_ptr(), version), bits(tensor)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor):
        return one[0] == other[0] and isinstance(other[1], Tensor) and torch.equal(one[1], other[1])
    return bool(one == other)
