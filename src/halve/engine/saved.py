"""A compiled network <-> one file: the graph with its packed weights (torch.export's format) and the plan as JSON.

Weights are stored in the form in which the layers run. Nothing is timed again when it is loaded; on another kind of GPU
it runs all the same, with the plan of the first. Load only files that you trust: the format is PyTorch's, not ours.
"""

import copy
import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule

from halve.engine import ops
from halve.engine.capture.guards import Guards
from halve.engine.compiled import Compiled, missing, move_
from halve.engine.layer import DENSE, Layer
from halve.engine.lower import lower_
from halve.engine.plan import Plan
from halve.errors import EngineError, FileError
from halve.graph import TRACING, Sizes
from halve.masks.storage import write_atomically

_ABOUT = "halve.json"
_VERSION = 3


def save(fast: Compiled, path: str | Path) -> None:
    """Write a compiled network to a file, whole or not at all."""
    if not isinstance(fast.body, GraphModule) or fast.guards is None:
        raise EngineError(
            "the network was captured in parts, around code of its own, and cannot be saved: compile it again where it "
            "is needed; what was timed is remembered"
        )
    body: nn.Module = copy.deepcopy(fast.body).cpu()
    move_(body, fast.device, torch.device("cpu"))
    for layer in body.modules():
        if isinstance(layer, Layer):
            ours = [way for way in layer.ways.values() if way not in ops.DENSE_WAYS]
            layer.take({1: (ours or [DENSE])[0]})  # one form is stored: a packed one has the bias in single precision
            if layer.weight is not None:
                layer.weight = layer.weight.contiguous()  # the format stores nothing else without complaint
    inputs = tuple(fast.entering(torch.cat([x, x])) for x in fast.example)
    sizes = fast.sizes
    try:
        program = _exported(body, inputs, sizes)
    except Exception:  # what holds for some sizes may not be provable for all: those of the example are left
        sizes = tuple((limits[0], *((n, n) for n in x.shape[1:])) for x, limits in zip(inputs, sizes, strict=True))
        program = _exported(body, inputs, sizes)
    about = {
        "version": _VERSION,
        "dtype": _name(fast.dtype),
        "inputs": [
            {"dtype": _name(dtype), "shape": list(x.shape)}
            for dtype, x in zip(fast.input_dtypes, fast.example, strict=True)
        ],
        "sizes": sizes,
        "guards": {"names": fast.guards.names, "conditions": fast.guards.conditions},
        "device": fast.device.type,
        "plan": fast.plan.as_json(),
        "layers": [{"name": layer.name, "ways": layer.ways} for layer in _in_order(fast.body)],
    }
    buffer = io.BytesIO()
    try:
        torch.export.save(program, buffer, extra_files={_ABOUT: json.dumps(about)})
    except Exception as error:  # outputs of types that the format does not know
        raise EngineError(f"the network cannot be saved, PyTorch's format does not take it: {error}") from error
    write_atomically(Path(path), buffer.getvalue())


def _exported(body: nn.Module, inputs: tuple[torch.Tensor, ...], sizes: Sizes) -> torch.export.ExportedProgram:
    """The graph as a program, its sizes free where the network's are."""
    free = tuple(
        {dim: Dim.AUTO for dim, (least, most) in enumerate(limits) if least != most and dim in (0, 2, 3)}
        for limits in sizes
    )
    with TRACING, torch.no_grad():
        return torch.export.export(_Called(body), inputs, dynamic_shapes=(free,), strict=False)


def load(path: str | Path, device: str | torch.device | None = None) -> Compiled:
    """Read a compiled network; on the kind of device it was saved from, unless told otherwise.

    >>> import halve, tempfile, warnings
    >>> model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()).eval()
    >>> images = torch.randn(2, 4, 8, 8)
    >>> with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
    ...     fast = halve.compile(model, halve.prune(model), images)
    ...     fast.save(f"{folder}/net.pt2")
    ...     again = halve.load_compiled(f"{folder}/net.pt2")
    >>> torch.equal(again(images), fast(images))
    True
    """
    extra = {_ABOUT: ""}
    try:
        content = Path(path).read_bytes()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:  # PyTorch does not look at the checksums
            if (damaged := archive.testzip()) is not None:
                raise FileError(f"{path} is damaged: {damaged} in it is not what was written")
        with TRACING, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # PyTorch to itself
            program = torch.export.load(io.BytesIO(content), extra_files=extra)
        about = json.loads(extra[_ABOUT])
        if about["version"] != _VERSION:
            raise FileError(f"{path}: version {about['version']} of the file is not known, this halve reads {_VERSION}")
        fast = _built(program, about)
    except FileError:
        raise
    except Exception as error:  # torch raises whatever the bytes lead it to
        raise FileError(f"{path} is no compiled network of halve: {type(error).__name__}: {error}") from error
    if device is None:
        device = about["device"] if about["device"] != "cuda" or torch.cuda.is_available() else "cpu"
    fast = fast.to(device)
    if about["device"] == "cuda" and (reason := missing(fast.device, fast.dtype)) is not None and fast.reason is None:
        fast.fall_back(reason)
    return fast.warmup(list(fast.plan.batches))


def _built(program: torch.export.ExportedProgram, about: dict[str, Any]) -> Compiled:
    module = program.module(check_guards=False)
    module.requires_grad_(False)
    body = GraphModule(module, module.graph).eval()
    for layer, known in zip(lower_(body), about["layers"], strict=True):
        layer.name = known["name"]
        layer.take({int(pixels): way for pixels, way in known["ways"].items()})
    example = tuple(torch.zeros(x["shape"], dtype=getattr(torch, x["dtype"])) for x in about["inputs"])
    fast = Compiled(body, example, getattr(torch, about["dtype"]), {})
    sizes = tuple(tuple((least, most) for least, most in limits) for limits in about["sizes"])
    fast.hold_for(sizes, Guards(*(tuple(about["guards"][key]) for key in ("names", "conditions"))))
    fast.plan = Plan.from_json(about["plan"])
    return fast


class _Called(nn.Module):
    """A graph under a forward of its own: export asks for a signature with names."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        return self.body(*inputs)


def _in_order(body: GraphModule) -> list[Layer]:
    """The layers as they run."""
    called = [body.get_submodule(str(node.target)) for node in body.graph.nodes if node.op == "call_module"]
    return [module for module in called if isinstance(module, Layer)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
