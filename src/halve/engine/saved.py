"""Files with compiled networks: the graph and its packed weights in torch.export's format, and the plan as JSON.

Nothing is timed again after loading: on another GPU, the network uses the plan it was saved with. Only load files that
you trust: the format is PyTorch's.
"""

import copy
import io
import json
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from halve.engine.capture.guards import Guards
from halve.engine.kernels.kernel import Kernel
from halve.engine.kernels.registry import FALLBACK, family_of
from halve.engine.layer import Layer
from halve.engine.lower import lower_, move_
from halve.engine.plan import Plan
from halve.errors import EngineError, FileError, first_line
from halve.graph import TRACING_LOCK, Sizes
from halve.masks.storage import write_atomically

_ABOUT = "halve.json"
VERSION = 4


@dataclass(frozen=True)
class SavedNetwork:
    """The contents of a file."""

    body: GraphModule
    example: tuple[Tensor, ...]  # one image of each input, in the dtype of inputs
    dtype: torch.dtype  # the compute dtype
    guards: Guards
    device: torch.device
    plan: Plan


def write(path: str | Path, network: SavedNetwork, inputs: tuple[Tensor, ...]) -> None:
    """Save a network to a file, atomically. `inputs` are two images of each input, in the compute dtype."""
    body = copy.deepcopy(network.body).cpu()
    move_(body, network.device, torch.device("cpu"))
    for layer in _in_order(body):
        packed = [kernel for kernel in layer.kernels.values() if not family_of(kernel).library]
        layer.use({1: (packed or [FALLBACK])[0]})  # only one family's packed tensors are stored
    guards = network.guards
    try:
        program = _exported(body, inputs, guards.sizes)
    except Exception:  # torch cannot prove that other sizes are valid: fix those of the example
        sizes = tuple(
            (limits[0], *((n, n) for n in x.shape[1:])) for x, limits in zip(inputs, guards.sizes, strict=True)
        )
        guards = Guards(sizes, guards.names, guards.conditions)
        program = _exported(body, inputs, sizes)
    about = {
        "version": VERSION,
        "dtype": _name(network.dtype),
        "inputs": [{"dtype": _name(x.dtype), "shape": list(x.shape)} for x in network.example],
        "guards": {"sizes": guards.sizes, "names": guards.names, "conditions": guards.conditions},
        "device": network.device.type,
        "plan": network.plan.as_json(),
        "layers": [{"name": layer.name, "kernels": layer.kernels} for layer in _in_order(network.body)],
    }
    buffer = io.BytesIO()
    try:
        torch.export.save(program, buffer, extra_files={_ABOUT: json.dumps(about)})
    except Exception as error:  # output types that the format does not support
        raise EngineError(f"the network cannot be saved in PyTorch's format: {first_line(error)}") from error
    write_atomically(Path(path), buffer.getvalue())


def is_compiled(path: str | Path) -> bool:
    """Whether a file is a compiled network, of any version."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.rpartition("/")[2] == _ABOUT for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _exported(body: nn.Module, inputs: tuple[Tensor, ...], sizes: Sizes) -> ExportedProgram:
    """Export the graph, with dynamic sizes where the network has them."""
    free = tuple(
        {dim: Dim.AUTO for dim, (least, most) in enumerate(limits) if least != most and dim in (0, 2, 3)}
        for limits in sizes
    )
    for name, tensor in body.named_buffers():
        if not tensor.is_contiguous():  # the format warns about other layouts; loading packs weights again
            body.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = tensor.contiguous()
    with TRACING_LOCK, torch.no_grad():
        return torch.export.export(_Called(body), inputs, dynamic_shapes=(free,), strict=False)


def read(path: str | Path) -> SavedNetwork:
    """Load a file. Raises `FileError` if it is damaged, from another version, or not a compiled network."""
    extra = {_ABOUT: ""}
    try:
        content = Path(path).read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:  # PyTorch does not verify checksums
            if (damaged := archive.testzip()) is not None:
                raise FileError(f"{path} is damaged: the checksum of {damaged} in it is wrong")
        with TRACING_LOCK, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # PyTorch's own
            program = torch.export.load(io.BytesIO(content), extra_files=extra)
        about = json.loads(extra[_ABOUT])
        if about["version"] != VERSION:
            older = about["version"] < VERSION
            advice = "it was saved by an older halve: compile the model again" if older else "upgrade halve"
            raise FileError(f"{path} has format version {about['version']}, this halve reads {VERSION}: {advice}")
        return _built(program, about)
    except FileError:
        raise
    except Exception as error:  # torch.export.load may raise anything on invalid bytes
        raise FileError(f"{path} is not a compiled network: {first_line(error)}") from error


def _built(program: ExportedProgram, about: dict[str, Any]) -> SavedNetwork:
    module = program.module(check_guards=False)
    module.requires_grad_(False)
    body = GraphModule(module, module.graph).eval()
    for layer, known in zip(lower_(body), about["layers"], strict=True):
        layer.name = known["name"]
        layer.use({int(size): Kernel(*kernel) for size, kernel in known["kernels"].items()})
    sizes, names, conditions = (about["guards"][key] for key in ("sizes", "names", "conditions"))
    limits = tuple(tuple((least, most) for least, most in one) for one in sizes)
    return SavedNetwork(
        body,
        tuple(torch.zeros(x["shape"], dtype=getattr(torch, x["dtype"])) for x in about["inputs"]),
        getattr(torch, about["dtype"]),
        Guards(limits, tuple(names), tuple(conditions)),
        torch.device(about["device"]),
        Plan.from_json(about["plan"]),
    )


class _Called(nn.Module):
    """A module with a `forward` that torch.export can inspect."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        return self.body(*inputs)


def _in_order(body: GraphModule) -> list[Layer]:
    """The layers in execution order."""
    called = [body.get_submodule(str(node.target)) for node in body.graph.nodes if node.op == "call_module"]
    return [module for module in called if isinstance(module, Layer)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
