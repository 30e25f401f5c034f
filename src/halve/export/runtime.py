"""Run an ONNX model in onnxruntime on the CPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halve.errors import FileError, first_line
from halve.export import packages

_QUIET = 3  # errors only: onnxruntime logs to standard error
_UNSAFE_IN_FLOAT16 = ["NchwcTransformer"]  # onnxruntime 1.31 ends the process on a patch convolution and a transformer


class Session:
    """A model that is ready to run."""

    def __init__(self, source: Path | bytes, *, float16: bool | None = None) -> None:
        """Load a model.

        Args:
            source: The model, as a file or as bytes.
            float16: Whether it has weights in float16. Default: the model is read to see.
        """
        onnxruntime = packages.onnxruntime()
        onnxruntime.set_default_logger_severity(_QUIET)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _QUIET
        options.intra_op_num_threads = torch.get_num_threads()
        # Q/DQ as the file has it: fused int8 kernels of some CPUs saturate, and give other results
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        given: Any = str(source) if isinstance(source, Path) else source
        if float16 is None:
            float16 = _reads_float16(source)
        unsafe = _UNSAFE_IN_FLOAT16 if float16 else []
        try:
            self._session = onnxruntime.InferenceSession(
                given, options, providers=["CPUExecutionProvider"], disabled_optimizers=unsafe
            )
        except Exception as error:  # onnxruntime's own classes
            raise FileError(f"onnxruntime cannot load the file: {first_line(error)}") from error
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.types = [value.type for value in self._session.get_inputs()]
        self.shapes: list[list[Any]] = [list(value.shape) for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]

    @classmethod
    def of(cls, model: Any) -> "Session":
        """A ModelProto that is ready to run."""
        return cls(model.SerializeToString(), float16=has_float16(model))

    def __deepcopy__(self, memo: object) -> "Session":
        return self  # runs do not change it

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[str] | None = None) -> list[Tensor]:
        """The outputs for some inputs, which are cast to the dtypes of the file."""
        given = {name: _array(tensor, kind) for name, tensor, kind in zip(self.inputs, inputs, self.types, strict=True)}
        try:
            found = self._session.run(None if outputs is None else list(outputs), given)
        except Exception as error:
            raise FileError(f"onnxruntime cannot run the file: {first_line(error)}") from error
        return [torch.from_numpy(np.asarray(value)) for value in found]


def has_float16(model: Any) -> bool:
    """Whether a model has weights in float16."""
    return any(tensor.data_type == packages.onnx().TensorProto.FLOAT16 for tensor in model.graph.initializer)


def _reads_float16(source: Path | bytes) -> bool:
    """The same of a file or bytes. What cannot be read has none: onnxruntime says what is wrong."""
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        return has_float16(packages.onnx().ModelProto.FromString(content))
    except Exception:  # protobuf's DecodeError, whose class depends on the implementation
        return False


def _array(tensor: Tensor, kind: str) -> Any:
    cast = {"tensor(float16)": torch.float16, "tensor(float)": torch.float32, "tensor(double)": torch.float64}.get(kind)
    plain = tensor.detach().cpu().contiguous()
    return (plain if cast is None else plain.to(cast)).numpy()
