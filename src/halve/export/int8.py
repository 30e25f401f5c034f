"""Quantise a network to int8 with 2:4 weights: calibrate, choose a method, and leave in float what costs too much."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halve.batches import Progress, tracked
from halve.errors import ModelError
from halve.export import packages
from halve.export.calibration import METHODS, limits, measured
from halve.export.costs import costs_of
from halve.export.file import MAX_BYTES, is_large
from halve.export.images import BATCH, CalibrationImages, batches_of
from halve.export.network import outputs_of
from halve.export.parts import Parts, in_both, residual_sums_of
from halve.export.quantization import Quality, Quantization
from halve.export.quantize import activations_of, quantize_
from halve.export.runtime import Session

_MOST_VALUES = 1 << 26  # of outputs to measure on: those of large ones, as of segmentation, take gigabytes
_COST_BATCHES = 2  # that the cost of each layer is measured on


def _joined(batches: list[list[Tensor]]) -> list[Tensor]:
    """The outputs of all batches, each in one tensor."""
    return [torch.cat([torch.atleast_1d(x).float() for x in one]) for one in zip(*batches, strict=True)]


class Quantizer:
    """Quantises networks on the same images, within the same budget."""

    def __init__(
        self,
        images: CalibrationImages,
        dense: nn.Module,
        max_drop: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Run the dense network, which everything is compared with.

        Args:
            images: What to calibrate and measure on.
            dense: The dense network, in float32 on the CPU and in eval mode.
            max_drop: Leave the costliest sums and layers in float until at most this is lost; None quantises all.
            progress: Wraps loops that take long.
        """
        self.max_drop, self.progress = max_drop, progress
        found: list[list[Tensor]] = []
        batches = batches_of(images.held_out)
        while len(found) < len(batches) and sum(x.numel() for outputs in found for x in outputs) < _MOST_VALUES:
            found.append(outputs_of(dense, batches[len(found)]))
        self.dense = _joined(found)
        self.images = images.with_held_out(BATCH * len(found))

    def outputs(self, session: Session) -> list[Tensor]:
        """The outputs of a model for the held-out images."""
        batches = tracked(batches_of(self.images.held_out), self.progress, "measuring")
        return _joined([session.run(batch) for batch in batches])

    def quality(self, session: Session) -> Quality:
        """How far a model agrees with the dense network."""
        return Quality.of(self.outputs(session), self.dense)

    def quantize_(self, model: Any, dtype: str, exact: Any) -> Quantization:
        """Quantise a model in place.

        Args:
            model: The network in the dtype of the file.
            dtype: The name of that dtype.
            exact: The same network in float32; it may be the same object.
        """
        if is_large(exact):
            raise ModelError(f"int8 needs a network of at most {MAX_BYTES:,} bytes in float32, protobuf's limit")
        own, everything = Parts.of(model, dtype), Parts.of(exact, np.float32)
        parts = in_both(exact, everything, model, own)
        if not own.layers:
            raise ModelError("the network has no layer that can be quantised: no convolution or product with a weight")
        if not parts.layers:
            raise ModelError(
                f"the network has no layer that can be quantised: its code computes something else in {dtype} than in "
                f"float32, which activations are measured in; pass dtype=torch.float32"
            )
        masked = self.outputs(Session.of(exact))
        quality = {"float32": Quality.of(masked, self.dense)}
        if dtype != "float32":
            quality[dtype] = self.quality(Session.of(model))
        chosen, ranges, found = _Trials(self, exact, parts, masked).best()
        placed = own.named(chosen.names)
        quantize_(model, placed, _renamed(ranges, chosen, placed), dtype)
        unmatched = tuple(name for name in own.names if name not in parts.names)
        return replace(found, unmatched=unmatched, quality=quality)


def _renamed(ranges: Mapping[str, float], source: Parts, target: Parts) -> dict[str, float]:
    """The ranges of a model's activations for the same parts of another one, where casts rename tensors."""
    pairs = [pair for old, new in zip(source, target, strict=True) for pair in zip(old.inputs, new.inputs, strict=True)]
    return {new: ranges[old] for old, new in pairs}


class _Trials:
    """One network, quantised in various degrees."""

    def __init__(self, quantizer: Quantizer, exact: Any, parts: Parts, masked: list[Tensor]) -> None:
        """Calibrate a network.

        Args:
            quantizer: What to measure on.
            exact: The network in float32.
            parts: What of it can be quantised.
            masked: Its outputs for the held-out images.
        """
        self._quantizer, self._exact, self._parts, self._masked = quantizer, exact, parts, masked
        self._agreement = Quality.of(masked, quantizer.dense).agreement
        batches = tracked(batches_of(quantizer.images.calibration), quantizer.progress, "calibrating")
        self._histograms = measured(exact, activations_of(exact, parts), batches)
        self._ranges: dict[str, float] = {}  # by the best method
        self._drops = {frozenset[str](): 0.0}  # by the names of what is quantised

    def best(self) -> tuple[Parts, dict[str, float], Quantization]:
        """What to quantise, the ranges of its activations, and what that does."""
        method, distances = self._calibrated()
        images, budget = self._quantizer.images, self._quantizer.max_drop
        held_out = tracked(batches_of(images.held_out)[:_COST_BATCHES], self._quantizer.progress, "cost of each layer")
        costs = costs_of(self._exact, self._parts, self._ranges, held_out)
        chosen = by_cost = self._parts.named(sorted(costs, key=lambda name: -costs[name]))
        if budget is not None and self._drop(chosen) > budget:
            chosen = self._within(by_cost, budget)
        found = Quantization(
            method=method,
            distances=distances,
            costs={layer.name: costs[layer.name] for layer in by_cost.layers},
            sums={one.name: costs[one.name] for one in by_cost.sums},
            left=tuple(name for name in self._parts.names if name not in chosen.names),
            drop=self._drop(chosen),
            quality={},
            images=len(images.calibration[0]),
            held_out=len(images.held_out[0]),
        )
        return chosen, self._ranges, found

    def _calibrated(self) -> tuple[str, dict[str, float]]:
        """Choose the method whose ranges change the outputs least; the distances to the float network by method."""
        distances: dict[str, float] = {}
        best = ""
        for method in METHODS:
            ranges = limits(self._histograms, method)
            outputs = self._quantized(self._parts, ranges)
            distances[method] = Quality.of(outputs, self._masked).distance
            if not best or distances[method] < distances[best]:
                best, self._ranges = method, ranges
                self._drops[frozenset(self._parts.names)] = self._lost(outputs)
        return best, distances

    def _within(self, parts: Parts, max_drop: float) -> Parts:
        """What can be quantised within a budget: as few of the costliest layers, then sums, as possible stay in float.

        Layers come first: in float they lose sparse int8 kernels, while a sum only reads and writes more memory.
        """
        layers, sums = parts.layers, parts.sums
        layers = layers[_least(len(layers), lambda count: self._drop(Parts(layers[count:])) <= max_drop) :]
        joined = set(residual_sums_of(self._exact, layers, np.float32))
        sums = tuple(one for one in sums if one in joined)
        sums = sums[_least(len(sums), lambda count: self._drop(Parts(layers, sums[count:])) <= max_drop) :]
        return Parts(layers, sums)

    def _drop(self, parts: Parts) -> float:
        """What is lost if these are quantised."""
        names = frozenset(parts.names)
        if names not in self._drops:
            self._drops[names] = self._lost(self._quantized(parts, self._ranges))
        return self._drops[names]

    def _lost(self, outputs: list[Tensor]) -> float:
        """How much less outputs agree with the dense network than those in float; their error if they are no scores."""
        agreement = Quality.of(outputs, self._quantizer.dense).agreement
        if agreement is None or self._agreement is None:
            return Quality.of(outputs, self._masked).error
        return max(0.0, self._agreement - agreement)

    def _quantized(self, parts: Parts, ranges: Mapping[str, float]) -> list[Tensor]:
        """The outputs for the held-out images with some layers and sums quantised."""
        copy = packages.onnx().ModelProto()
        copy.CopyFrom(self._exact)
        quantize_(copy, parts, ranges, np.float32)
        return self._quantizer.outputs(Session.of(copy))


def _least(most: int, fits: Callable[[int], bool]) -> int:
    """The least number that fits, between 0 and one that is known to fit.

    >>> _least(10, lambda number: number >= 7)
    7
    """
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
