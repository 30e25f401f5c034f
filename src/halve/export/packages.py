"""The optional packages that this room needs, loaded on first use."""

import importlib
from typing import Any

from halve.errors import OptionError


def onnx() -> Any:
    """The onnx package, with its submodules."""
    for part in ("onnx.helper", "onnx.numpy_helper", "onnx.checker"):
        _load(part)
    return _load("onnx")


def onnxruntime() -> Any:
    """The onnxruntime package."""
    return _load("onnxruntime")


def check_exporter() -> None:
    """Raise `OptionError` if a package is missing that exporting needs."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        _load(name)


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = name.partition(".")[0]
        raise OptionError(f"ONNX files need the package {missing}: pip install 'halve[onnx]'") from error
