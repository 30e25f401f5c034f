"""What quantisation did to a network, and how far outputs agree with those of a reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from halve.agreement import compare


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
        unmatched: Layers and sums that stay in float, since the model's code computes their inputs differently in the
            file's dtype than in float32, which activations are measured in.
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
    unmatched: tuple[str, ...] = ()

    def with_quality(self, **networks: Quality) -> "Quantization":
        """The same, with the agreement of more networks."""
        return replace(self, quality={**self.quality, **networks})

    @property
    def quantized(self) -> tuple[str, ...]:
        """The layers and residual sums that are in int8."""
        return tuple(name for name in (*self.costs, *self.sums) if name not in self.left)

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
            "unmatched": list(self.unmatched),
            "quality": {name: vars(quality) for name, quality in self.quality.items()},
        }
