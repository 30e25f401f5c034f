"""An ONNX file as a module: what it computes can be compared with any other network."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halve.errors import DataError, FileError, OptionError
from halve.export import file
from halve.export.entry import Normalization, checked_preprocess, pixels
from halve.export.runtime import Session


class OnnxNetwork(nn.Module):
    """An ONNX file that runs in onnxruntime on the CPU; `load` opens one. It has no weights, only their digest."""

    runtime = "onnxruntime on the CPU"
    sha256: Tensor

    def __init__(self, opened: file.OnnxFile, preprocess: Normalization | None) -> None:
        super().__init__()
        self.register_buffer("sha256", torch.tensor(list(bytes.fromhex(file.digest(opened))), dtype=torch.uint8))
        self._session, self._preprocess = Session(opened.path), preprocess
        if len(self._session.inputs) != 1:
            raise FileError(f"{opened.path} has {len(self._session.inputs)} inputs; one is needed, for images")
        self._pixels = self._session.types == ["tensor(uint8)"]
        [shape] = self._session.shapes
        self._batch = shape[0] if shape and isinstance(shape[0], int) and shape[0] > 0 else None  # a name is any size
        if self._pixels and preprocess is None:
            raise OptionError(
                f"{opened.path} takes pixels: pass preprocess=(mean, std), which undoes their normalisation"
            )
        self.eval()

    def forward(self, images: Tensor) -> Any:
        """The outputs for a batch of images: a tensor, or several by name.

        A file with a fixed batch size runs once for each so many images. If the last are fewer, the first of them are
        repeated, and their outputs dropped.
        """
        if self._pixels:
            assert self._preprocess is not None
            images = pixels(images.cpu(), *self._preprocess)
        found = self._session.run([images]) if self._batch in (None, len(images)) else self._in_batches(images)
        return found[0] if len(found) == 1 else dict(zip(self._session.outputs, found, strict=True))

    def _in_batches(self, images: Tensor) -> list[Tensor]:
        """The outputs for any number of images, from a file with a fixed batch size."""
        assert self._batch is not None
        if not len(images):
            raise DataError(f"the file takes {self._batch} images at a time, got none")
        parts = []
        for some in images.split(self._batch):
            filled = some[torch.arange(self._batch) % len(some)]
            found = self._session.run([filled])
            for name, output in zip(self._session.outputs, found, strict=True):
                if output.shape[:1] != (self._batch,):
                    raise FileError(
                        f"the file takes {self._batch} images at a time, and its output {name!r} of shape "
                        f"{tuple(output.shape)} has no result for each: pass batches of {self._batch} images"
                    )
            parts.append([output[: len(some)] for output in found])
        return [torch.cat(outputs) for outputs in zip(*parts, strict=True)]


def load(path: str | Path, *, preprocess: Normalization | None = None) -> OnnxNetwork:
    """Load an ONNX file as a module that runs in onnxruntime on the CPU, to compare it with other networks.

    Args:
        path: The file, written by `halve.export` or another exporter. It takes one batch of images.
        preprocess: (mean, std) that images are normalised with, for files that take pixels (uint8).

    >>> import halve, os, tempfile
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    >>> images = torch.randn(1000, 8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "net.onnx")
    ...     _ = halve.export(model, None, images[:2], path)
    ...     certificate = halve.certify(halve.load_onnx(path), None, images, reference=model)
    >>> certificate.result["agreement"]
    1.0
    """
    return OnnxNetwork(file.read(path), checked_preprocess(preprocess))
