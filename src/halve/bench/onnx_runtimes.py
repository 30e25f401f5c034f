"""ONNX Runtime and OpenVINO, for comparison on CPUs. Both are optional, and run the masked model exported to ONNX."""

import contextlib
import copy
import importlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halve.errors import EngineError

Run = Callable[[], list[Tensor]]


def onnxruntime_call(model: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """A function that runs the model on these inputs in ONNX Runtime, with PyTorch's number of threads."""
    runtime = _module("onnxruntime")
    if inputs[0].dtype != torch.float32:
        raise EngineError(f"ONNX Runtime is measured in float32, got {inputs[0].dtype}")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with _exported(model, inputs) as path:
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {entry.name: x.numpy() for entry, x in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: [torch.from_numpy(y) for y in session.run(None, given)]


def openvino_call(model: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """A function that runs the model on these inputs in OpenVINO, in the dtype of the inputs."""
    openvino = _module("openvino")
    precision = {torch.float32: "f32", torch.bfloat16: "bf16"}.get(inputs[0].dtype)
    if precision is None:
        raise EngineError(f"OpenVINO is measured in float32 and bfloat16, got {inputs[0].dtype}")
    config = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }
    single = tuple(x.float() for x in inputs)
    with _exported(model, single) as path:
        request = openvino.compile_model(str(path), "CPU", config).create_infer_request()
    given = [x.numpy() for x in single]

    def call() -> list[Tensor]:
        found = request.infer(given, share_inputs=True, share_outputs=True)
        return [torch.from_numpy(y) for y in found.values()]

    return call


def _module(name: str) -> Any:
    """An optional package."""
    try:
        importlib.import_module("onnxscript")
        return importlib.import_module(name)
    except ImportError as error:
        raise EngineError(f"{error.name} is not installed: pip install {name} onnx onnxscript") from error


@contextlib.contextmanager
def _exported(model: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Path]:
    """The model as an ONNX file in float32, for inputs of these shapes, with its usual messages hidden."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        single = copy.deepcopy(model).float().to(memory_format=torch.contiguous_format)
        with contextlib.redirect_stdout(io.StringIO()):
            torch.onnx.export(single, inputs, str(path), dynamo=True, verbose=False)
        yield path
