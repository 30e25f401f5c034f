"""Calibration: what range the activations of a network have, and which part of it int8 should cover."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from halve.export import packages
from halve.export.runtime import Session

METHODS = ("percentile 99.9", "percentile 99.99", "percentile 99.999", "mse")
LEVELS = 127  # of each sign: int8 without -128, so that a range is symmetric
_BINS = 32  # per power of two
_LOW, _HIGH = -40, 40  # powers of two that are told apart
_SAMPLES = 1 << 17  # values of a tensor that are counted per batch


@dataclass
class Histogram:
    """Counts of the magnitudes of a tensor's values, in bins of equal ratio.

    >>> histogram = Histogram()
    >>> histogram.add(np.array([0.0, -1.0, 1.0, 4.0]))
    >>> histogram.largest, round(histogram.limit("percentile 75"), 2)
    (4.0, 1.02)
    """

    largest: float = 0.0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros((_HIGH - _LOW) * _BINS, np.int64), repr=False)
    zeros: int = 0

    def add(self, values: NDArray[np.floating]) -> None:
        """Count the values of a batch; of large tensors evenly spaced ones, but the largest is always known."""
        sizes = np.abs(values.reshape(-1))
        self.largest = max(self.largest, float(sizes.max(initial=0.0)))
        sizes = sizes[:: max(1, math.ceil(sizes.size / _SAMPLES))]
        positive = sizes[sizes > 0]
        self.zeros += sizes.size - positive.size
        bins = np.floor(np.log2(positive, dtype=np.float64) * _BINS).astype(np.int64) - _LOW * _BINS
        self.counts += np.bincount(np.clip(bins, 0, self.counts.size - 1), minlength=self.counts.size)

    def limit(self, method: str) -> float:
        """The magnitude that the largest int8 value stands for."""
        if not self.counts.any():
            return self.largest
        edges = np.exp2((np.arange(self.counts.size) + 1) / _BINS + _LOW)
        if method == "mse":
            found = self._smallest_error(edges)
        else:
            below = self.zeros + np.cumsum(self.counts)
            wanted = float(method.removeprefix("percentile ")) / 100 * below[-1]
            found = float(edges[int(np.searchsorted(below, wanted))])
        return min(found, self.largest)

    def _smallest_error(self, edges: NDArray[np.float64]) -> float:
        """The limit with the smallest expected squared error: of rounding, of what is cut off, of what becomes zero."""
        values = edges * 2 ** (-0.5 / _BINS)  # the middles of the bins
        seen = np.flatnonzero(self.counts)
        candidates = edges[max(seen[0], seen[-1] - 8 * _BINS) : seen[-1] + 1]
        steps = (candidates / LEVELS)[:, None]
        errors = np.where(values > candidates[:, None], (values - candidates[:, None]) ** 2, steps**2 / 12)
        errors = np.where(values < steps / 2, values**2, errors)
        return float(candidates[int(np.argmin(errors @ self.counts))])


def measured(model: object, tensors: Iterable[str], batches: Iterable[Sequence[Tensor]]) -> dict[str, Histogram]:
    """The histograms of some tensors of a float32 model, over batches of inputs."""
    found = {name: Histogram() for name in tensors}
    session = Session.of(_with_outputs(model, found))
    for batch in batches:
        for name, values in zip(found, session.run(batch, list(found)), strict=True):
            found[name].add(values.numpy())
    return found


def _with_outputs(model: object, names: Iterable[str]) -> Any:
    """A copy of the model with more outputs."""
    onnx = packages.onnx()
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {value.name for value in copy.graph.output}
    copy.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    return copy


def limits(histograms: Mapping[str, Histogram], method: str) -> dict[str, float]:
    """The range of each tensor by a method."""
    return {name: histogram.limit(method) for name, histogram in histograms.items()}
