"""Quantise a network to int8 with 2:4 weights: calibrate, choose a method, and leave in float what costs too much."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halve.agreement import compare
from halve.batches import Progress, images_of, iterate, tracked
from halve.errors import DataError, ModelError, listed
from halve.export import packages
from halve.export.calibration import METHODS, limits, measured
from halve.export.file import MAX_BYTES, is_large
from halve.export.network import outputs_of
from halve.export.quantize import Quantizable, activations_of, quantizable, quantize_
from halve.export.runtime import Session
from halve.export.sums import ResidualSum, residual_sums

LEAST_IMAGES = 8
_HELD_OUT = 0.25  # of the images, to choose on
_MOST_HELD_OUT = 128
_MOST_VALUES = 1 << 26  # of outputs to measure on: those of large ones, as of segmentation, take gigabytes
_BATCH = 8


@dataclass(frozen=True)
class Quality:
    """How far outputs agree with those of a reference.

    Args:
        agreement: The share of images with the same top-1 class; None if the first output is not class scores.
        kl: The mean KL divergence of class probabilities; None if the first output is not class scores.
        error: The norm of the difference, relative to the norm of the reference, of the output where it is largest.
    """

    agreement: float | None
    kl: float | None
    error: float

    @classmethod
    def of(cls, outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> "Quality":
        error = max(_error(one, other) for one, other in zip(outputs, reference, strict=True))
        scores = reference[0]
        if scores.dim() != 2 or scores.shape[1] < 2:
            return cls(None, None, error)
        counted = compare(outputs[0].double(), scores.double())
        return cls(counted.share, counted.kl, error)

    @property
    def distance(self) -> float:
        """The smaller, the closer."""
        return self.error if self.kl is None else self.kl


def _error(values: Tensor, reference: Tensor) -> float:
    exact = reference.double()
    return float((values.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@dataclass(frozen=True)
class Quantization:
    """What quantisation did to a network.

    Args:
        method: How activation ranges were chosen: the best of `METHODS` on images that were not calibrated on.
        distances: The distance to the masked network by method: KL divergence, or the relative error of outputs.
        costs: For each layer the relative error of its output when it alone is quantised, the largest first.
        sums: The same for each residual sum, when only its two inputs are quantised.
        left: Layers and residual sums that stay in float, since they cost too much.
        drop: What agreement is lost to the masked network in float; the relative error if outputs are not class scores.
        quality: Agreement with the dense network, of the masked one in "float32", in the file's dtype and in "int8".
        images: The number of images that were calibrated on.
        held_out: The number of images that were measured on.
    """

    method: str
    distances: dict[str, float]
    costs: dict[str, float]
    sums: dict[str, float]
    left: tuple[str, ...]
    drop: float
    quality: Mapping[str, Quality]
    images: int
    held_out: int

    def with_quality(self, name: str, quality: Quality) -> "Quantization":
        """The same, with the agreement of one more network."""
        return replace(self, quality={**self.quality, name: quality})

    @property
    def summary(self) -> str:
        """The outcome in one line."""
        measure = (
            "agreement with the dense network" if self._agrees else "relative error of the dense network's outputs"
        )
        values = {name: q.error if q.agreement is None else q.agreement for name, q in self.quality.items()}
        shown = ", ".join(f"{name} {100 * value:.1f} %" for name, value in values.items())
        counts = [f"{len(self.costs.keys() - self.left)} of {len(self.costs)} layers"]
        if self.sums:
            counts.append(f"{len(self.sums.keys() - self.left)} of {len(self.sums)} residual sums")
        return (
            f"{' and '.join(counts)} in int8, ranges by {self.method}; "
            f"{measure} on {self.held_out} held-out images: {shown}"
        )

    @property
    def _agrees(self) -> bool:
        return all(quality.agreement is not None for quality in self.quality.values())

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            **{
                key: getattr(self, key)
                for key in ("method", "distances", "costs", "sums", "drop", "images", "held_out")
            },
            "left": list(self.left),
            "quality": {name: vars(quality) for name, quality in self.quality.items()},
        }


@dataclass(frozen=True)
class CalibrationImages:
    """Images to calibrate on, and others to choose and measure on: a tensor for each input of the file."""

    calibration: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, data: Any, inputs_of: Callable[[Any], tuple[Tensor, ...]], example: tuple[Tensor, ...]
    ) -> "CalibrationImages":
        """Read all images of some data.

        Args:
            data: Batches that the model takes.
            inputs_of: The inputs of the file for a batch.
            example: The inputs of the file for the example.
        """
        count, wanted = len(example), [tuple(x.shape[1:]) for x in example]
        parts = []
        for batch in iterate(data):
            parts.append(inputs_of(images_of(batch) if count == 1 else _several(batch, count)))
            if (found := [tuple(x.shape[1:]) for x in parts[-1]]) != wanted:
                raise DataError(
                    f"calibration images must have the size of the example: they are {listed(found)}, it is "
                    f"{listed(wanted)} (without the batch size)"
                )
        images = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        total = len(images[0])
        if total < LEAST_IMAGES:
            raise DataError(f"calibration needs at least {LEAST_IMAGES} images, got {total}; use a few hundred")
        held_out = min(max(LEAST_IMAGES // 2, round(_HELD_OUT * total)), _MOST_HELD_OUT)
        return cls(tuple(x[:-held_out] for x in images), tuple(x[-held_out:] for x in images))


def _several(batch: Any, count: int) -> tuple[Tensor, ...]:
    """The inputs in a batch for a model that takes several."""
    given = tuple(batch[:count]) if isinstance(batch, tuple | list) else ()
    if len(given) < count or not all(isinstance(x, Tensor) for x in given):
        raise DataError(f"each calibration batch must be a tuple of {count} tensors, as the model takes them")
    return given


def _batches(images: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(x.split(_BATCH) for x in images), strict=True))


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
        batches = _batches(images.held_out)
        while len(found) < len(batches) and sum(x.numel() for outputs in found for x in outputs) < _MOST_VALUES:
            found.append(outputs_of(dense, batches[len(found)]))
        self.dense = _joined(found)
        count = _BATCH * len(found)
        self.images = replace(images, held_out=tuple(x[:count] for x in images.held_out))

    def outputs(self, source: Path | bytes) -> list[Tensor]:
        """The outputs of a file for the held-out images."""
        session = Session(source)
        return _joined([session.run(x) for x in tracked(_batches(self.images.held_out), self.progress, "measuring")])

    def quality(self, source: Path | bytes) -> Quality:
        """How far a file agrees with the dense network."""
        return Quality.of(self.outputs(source), self.dense)

    def quantize_(self, model: Any, dtype: str, exact: Any) -> Quantization:
        """Quantise a model in place.

        Args:
            model: The network in the dtype of the file.
            dtype: The name of that dtype.
            exact: The same network in float32.
        """
        if is_large(exact):
            raise ModelError(f"int8 needs a network of at most {MAX_BYTES:,} bytes in float32, protobuf's limit")
        in_float = {"float32": exact} | ({} if dtype == "float32" else {dtype: model})
        quality = {name: self.quality(one.SerializeToString()) for name, one in in_float.items()}
        possible = {layer.name: layer for layer in quantizable(model, dtype)}
        kind = packages.onnx().helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        possible_sums = {one.name: one for one in residual_sums(model, possible, kind)}
        trials = _Trials(self, exact, possible.keys(), possible_sums.keys())
        method, layers, sums, found = trials.best()
        placed = _placed(possible, possible_sums, layers, sums, limits(trials.histograms, method))
        quantize_(model, *placed, np.dtype(dtype))
        return replace(found, quality=quality)


def _placed(
    own: Mapping[str, Quantizable],
    own_sums: Mapping[str, ResidualSum],
    layers: Sequence[Quantizable],
    sums: Sequence[ResidualSum],
    ranges: Mapping[str, float],
) -> tuple[list[Quantizable], list[ResidualSum], dict[str, float]]:
    """These layers, sums and ranges in a model of another dtype: casts in it give its tensors other names.

    Args:
        own: The layers of that model, by name.
        own_sums: Its residual sums, by name.
        layers: Layers of the model in float32.
        sums: Residual sums of the model in float32.
        ranges: The ranges of its tensors.
    """
    found, added = [own[layer.name] for layer in layers], [own_sums[one.name] for one in sums]
    pairs = [(new.activation, old.activation) for new, old in zip(found, layers, strict=True)]
    pairs += [pair for new, old in zip(added, sums, strict=True) for pair in zip(new.inputs, old.inputs, strict=True)]
    return found, added, {name: ranges[source] for name, source in pairs}


class _Trials:
    """One network, quantised in various degrees."""

    def __init__(self, quantizer: Quantizer, exact: Any, layers: Collection[str], sums: Collection[str]) -> None:
        """Calibrate a network.

        Args:
            quantizer: What to measure on.
            exact: The network in float32.
            layers: The names of the layers that the file can have in int8.
            sums: The names of its residual sums.
        """
        self._quantizer, self._exact, self._progress = quantizer, exact, quantizer.progress
        self._possible_sums = set(sums)
        self.layers = [layer for layer in quantizable(exact, np.float32) if layer.name in layers]
        if not self.layers:
            raise ModelError("the network has no layer that can be quantised: no convolution or product with a weight")
        self.sums = self._joined_by(self.layers)
        batches = tracked(_batches(quantizer.images.calibration), self._progress, "calibrating")
        self.histograms = measured(exact, activations_of(exact, self.layers, self.sums), batches)
        self._masked = quantizer.outputs(exact.SerializeToString())

    @property
    def _parts(self) -> list[Quantizable | ResidualSum]:
        return [*self.layers, *self.sums]

    def best(self) -> tuple[str, list[Quantizable], list[ResidualSum], Quantization]:
        """The method, the layers and sums to quantise, and what that does."""
        tried = {
            method: Quality.of(self._quantized(self.layers, self.sums, method), self._masked) for method in METHODS
        }
        method = min(tried, key=lambda name: tried[name].distance)
        costs = self._costs(method)
        layers = sorted(self.layers, key=lambda layer: -costs[layer.name])
        sums = sorted(self.sums, key=lambda one: -costs[one.name])
        by_layer, by_sum = ({part.name: costs[part.name] for part in parts} for parts in (layers, sums))
        drop, budget = self._drop(layers, sums, method), self._quantizer.max_drop
        if budget is not None and drop > budget:
            layers, sums = self._within(layers, sums, method, budget)
            drop = self._drop(layers, sums, method)
        chosen = {layer.name for layer in layers} | {one.name for one in sums}
        left = tuple(part.name for part in self._parts if part.name not in chosen)
        distances = {name: quality.distance for name, quality in tried.items()}
        counts = [len(images[0]) for images in (self._quantizer.images.calibration, self._quantizer.images.held_out)]
        return method, layers, sums, Quantization(method, distances, by_layer, by_sum, left, drop, {}, *counts)

    def _within(
        self, layers: list[Quantizable], sums: list[ResidualSum], method: str, max_drop: float
    ) -> tuple[list[Quantizable], list[ResidualSum]]:
        """What can be quantised within a budget: as few of the costliest layers, then sums, as possible stay in float.

        Layers come first: in float they lose sparse int8 kernels, while a sum only reads and writes more memory.
        """
        layers = layers[_least(len(layers), lambda count: self._drop(layers[count:], [], method) <= max_drop) :]
        joined = set(self._joined_by(layers))
        sums = [one for one in sums if one in joined]
        return layers, sums[_least(len(sums), lambda count: self._drop(layers, sums[count:], method) <= max_drop) :]

    def _joined_by(self, layers: Sequence[Quantizable]) -> list[ResidualSum]:
        kind = packages.onnx().TensorProto.FLOAT
        found = residual_sums(self._exact, [layer.name for layer in layers], kind)
        return [one for one in found if one.name in self._possible_sums]

    def _drop(self, layers: Sequence[Quantizable], sums: Sequence[ResidualSum], method: str) -> float:
        outputs = self._quantized(layers, sums, method)
        dense = self._quantizer.dense
        ours, masked = Quality.of(outputs, dense), Quality.of(self._masked, dense)
        if ours.agreement is None or masked.agreement is None:
            return Quality.of(outputs, self._masked).error
        return max(0.0, masked.agreement - ours.agreement)

    def _quantized(self, layers: Sequence[Quantizable], sums: Sequence[ResidualSum], method: str) -> list[Tensor]:
        """The outputs for the held-out images with some layers and sums quantised."""
        if not layers and not sums:
            return self._masked
        copy = packages.onnx().ModelProto()
        copy.CopyFrom(self._exact)
        quantize_(copy, layers, sums, limits(self.histograms, method))
        return self._quantizer.outputs(copy.SerializeToString())

    def _costs(self, method: str) -> dict[str, float]:
        """The relative error of the output of each layer and sum when it alone is quantised, from one run."""
        session = Session(self._with_errors(method))
        images = _batches(self._quantizer.images.held_out)[:2]
        parts = [part.name for part in self._parts]
        names = [f"{part}/{what}" for part in parts for what in ("error", "norm")]
        totals = torch.zeros(len(names), dtype=torch.float64)
        for batch in tracked(images, self._progress, "cost of each layer"):
            totals += torch.stack([value.double().reshape(()) for value in session.run(batch, names)])
        errors = (totals[0::2] / totals[1::2].clamp(min=1e-30)).sqrt().tolist()
        return dict(zip(parts, errors, strict=True))

    def _with_errors(self, method: str) -> bytes:
        """The exact network, with two more outputs per layer and sum: its squared error when quantised, and norm."""
        onnx, chosen = packages.onnx(), limits(self.histograms, method)
        helper = onnx.helper
        model = onnx.ModelProto()
        model.CopyFrom(self._exact)
        by_name = {node.name: node for node in self._exact.graph.node}
        tensors = {tensor.name: tensor for tensor in self._exact.graph.initializer}
        for part in self._parts:
            layers, sums = ([part], []) if isinstance(part, Quantizable) else ([], [part])
            shared = {part.activation} if isinstance(part, Quantizable) else set(part.inputs)
            single = onnx.ModelProto()
            single.graph.node.append(by_name[part.name])
            single.graph.initializer.extend(tensors[name] for name in by_name[part.name].input if name in tensors)
            single.graph.input.extend(helper.make_empty_tensor_value_info(name) for name in shared)
            quantize_(single, layers, sums, chosen)
            prefix = f"{part.name}//"
            for tensor in single.graph.initializer:
                tensor.name = prefix + tensor.name
                model.graph.initializer.append(tensor)
            for node in single.graph.node:
                for place in (node.input, node.output):
                    for i, name in enumerate(place):
                        place[i] = name if name in shared or not name else prefix + name
                node.name = prefix + node.name
                model.graph.node.append(node)
            output = by_name[part.name].output[0]
            model.graph.node.extend(
                [
                    helper.make_node("Sub", [output, prefix + output], [f"{part.name}/difference"]),
                    helper.make_node(
                        "ReduceSumSquare", [f"{part.name}/difference"], [f"{part.name}/error"], keepdims=0
                    ),
                    helper.make_node("ReduceSumSquare", [output], [f"{part.name}/norm"], keepdims=0),
                ]
            )
            for what in ("error", "norm"):
                model.graph.output.append(
                    helper.make_tensor_value_info(f"{part.name}/{what}", onnx.TensorProto.FLOAT, [])
                )
        content: bytes = model.SerializeToString()
        return content


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
