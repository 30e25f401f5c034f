"""Flips: how often a masked network predicts another class than the dense one, on images like those that were counted.

Counting needs no labels and no knowledge of the network. The bound is exact for every number of images (binomial), and
holds for the distribution that the images are drawn from.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor, nn

from halve.batches import Forward, Progress, iterate, labels_of, main_output, result_of
from halve.binomial import anytime_lower, anytime_upper, difference_lower, images_needed, lower
from halve.certify.certificate import Certificate
from halve.certify.digests import ImageDigest
from halve.errors import DataError, ModelError

By = Callable[[Any], Sequence[Any]] | str  # "class", "label", or a function of a batch
ASSUMPTIONS = (
    "the images are independent draws from the distribution that the statement is about",
    "the networks were not chosen by how they do on these images",
    "the networks were run in the precision and on the device of the model that was given",
)


@dataclass
class Counts:
    """Images, and how many of them get the same class."""

    images: int = 0
    same: int = 0

    def add(self, same: Tensor) -> None:
        self.images += len(same)
        self.same += int(same.sum())

    def plain(self) -> dict[str, Any]:
        return {"images": self.images, "same": self.same, "agreement": self.same / self.images}


@dataclass
class Seen:
    """What was counted: in total, by group, and, if two masked networks are compared, where only one agrees."""

    total: Counts = field(default_factory=Counts)
    groups: dict[str, Counts] = field(default_factory=dict)
    only_first: int = 0
    only_second: int = 0
    interrupted: bool = False
    images: ImageDigest = field(default_factory=ImageDigest)


def count(
    networks: Sequence[nn.Module],
    reference: nn.Module,
    data: Any,
    *,
    by: By | None = None,
    forward: Forward | None = None,
    progress: Progress = True,
    enough: Callable[[Counts], bool] = lambda counts: False,
) -> Seen:
    """Run one or two networks and the reference on batches, and count where they predict the same class.

    Ctrl-C ends the count; what was counted before is returned.

    Args:
        networks: The masked network, or two to compare.
        reference: The dense network.
        data: Batches of images.
        by: What to count separately by: "class", as the reference predicts, "label", or a function of a batch.
        forward: `forward(model, batch)` runs a network on an unusual batch.
        progress: Show progress.
        enough: Whether to stop, given the counts so far.
    """
    seen = Seen()
    with torch.no_grad(), suppress(KeyboardInterrupt):
        seen.interrupted = True
        for index, batch in enumerate(iterate(data, progress, "images")):
            wanted = _classes(reference, batch, forward, index, "dense")
            found = [_classes(network, batch, forward, index, "masked") == wanted for network in networks]
            groups = _groups(by, batch, wanted)
            seen.images.add(batch, forward, index)
            seen.total.add(found[0])
            for place, group in enumerate(groups):
                seen.groups.setdefault(group, Counts()).add(found[0][place : place + 1])
            if len(found) > 1:
                alone = int((found[0] & ~found[1]).sum()), int((found[1] & ~found[0]).sum())
                seen.only_first, seen.only_second = seen.only_first + alone[0], seen.only_second + alone[1]
            if enough(seen.total):
                break
        seen.interrupted = False
    if not seen.total.images:
        raise DataError("interrupted before the first batch was counted")
    return seen


def _classes(network: nn.Module, batch: Any, forward: Forward | None, index: int, which: str) -> Tensor:
    """The classes that a network predicts."""
    output = main_output(result_of(network, batch, forward))
    if not output.is_floating_point() or output.dim() != 2 or output.shape[1] < 2:
        raise ModelError(
            f"certify needs class scores (images, classes), but the {which} network returned {output.dtype} of shape "
            f"{tuple(output.shape)}; pass forward= to select or reduce them"
        )
    if not bool(output.isfinite().all()):
        raise DataError(f"the {which} network returned NaN or infinity for batch {index}: check images and weights")
    return output.argmax(1).cpu()


def _groups(by: By | None, batch: Any, wanted: Tensor) -> list[str]:
    """The group of each image, if they are grouped."""
    if by is None:
        return []
    if by == "class":
        return [str(one) for one in wanted.tolist()]
    if by == "label":
        labels = labels_of(batch)
        if labels is None:
            raise DataError("by='label' needs labels: (images, labels), or by='class' to group by predicted class")
        found: list[Any] = labels.tolist()
    else:
        assert callable(by)
        found = [one.item() if isinstance(one, Tensor) else one for one in by(batch)]
    if len(found) != len(wanted):
        raise DataError(f"by= gave {len(found)} groups for a batch of {len(wanted)} images")
    return [str(one) for one in found]


def flips(
    network: nn.Module,
    reference: nn.Module,
    data: Any,
    digests: dict[str, str],
    *,
    share: float | None = None,
    confidence: float = 0.999,
    by: By | None = None,
    names: tuple[str, str] = ("masked", "dense"),
    runtime: str | None = None,
    forward: Forward | None = None,
    progress: Progress = True,
) -> Certificate:
    """Certify the share of images for which two networks predict the same class; see `halve.certify`."""
    delta = 1 - confidence

    def enough(counts: Counts) -> bool:
        assert share is not None
        low = anytime_lower(counts.same, counts.images, delta)
        return low >= share or anytime_upper(counts.same, counts.images, delta) < share

    options: dict[str, Any] = {} if share is None else {"enough": enough}
    seen = count([network], reference, data, by=by, forward=forward, progress=progress, **options)
    anytime = share is not None or seen.interrupted  # when to stop depended on what was counted, or may have
    bound = anytime_lower if anytime else lower
    total, groups = seen.total, seen.groups
    result: dict[str, Any] = total.plain() | {"share": bound(total.same, total.images, delta)}
    if share is not None:
        expected = (total.same + 0.5) / (total.images + 1)
        refuted = anytime_upper(total.same, total.images, delta) < share
        result |= {"reached": result["share"] >= share, "refuted": refuted, "images_needed": None}
        if not result["reached"] and not refuted:
            result["images_needed"] = images_needed(share, delta, expected, bound=anytime_lower)
    if groups:  # all bounds hold at once
        each = delta / len(groups)
        result["groups"] = {
            name: one.plain() | {"share": bound(one.same, one.images, each)} for name, one in sorted(groups.items())
        }
    kind = "anytime-valid (beta-binomial mixture)" if anytime else "exact binomial (Clopper-Pearson)"
    order = ("the images come in random order",) if anytime else ()
    exported = () if runtime is None else (f"the exported network was run in {runtime}",)
    together = ("the bounds of all groups hold together, as each has its part of the allowed error",) if groups else ()
    return Certificate(
        "flips",
        _sentence(result, confidence, share, names, seen.interrupted),
        {"confidence": confidence, "share": share, "by": by if isinstance(by, str) or by is None else "function"}
        | {"method": kind, "interrupted": seen.interrupted},
        (*ASSUMPTIONS, *exported, *order, *together),
        result,
        digests | {"images": seen.images.hexdigest()},
    )


def _sentence(
    result: dict[str, Any], confidence: float, share: float | None, names: tuple[str, str], interrupted: bool
) -> str:
    flipped = f"{result['images'] - result['same']:,} of {result['images']:,} differed"
    known = (
        f"With {_percent(confidence)} confidence, {names[0]} and {names[1]} network predict the same class for at "
        f"least {_percent(result['share'], down=True)} of images like these ({flipped})"
    )
    if interrupted:
        known += ", as far as counted"
    if share is None:
        return f"{known}."
    if result["reached"]:
        return f"{known}: {_percent(share)} is reached."
    return f"{known}: {_percent(share)} is {'refuted' if result['refuted'] else 'not reached'}."


def _percent(share: float, down: bool = False) -> str:
    """A share in percent with as many digits as it needs; `down` rounds towards 0.

    >>> _percent(0.999), _percent(0.99019, down=True)
    ('99.9 %', '99.01 %')
    """
    if not down:
        return f"{float(100 * Decimal(repr(float(share))))!r} %".replace(".0 %", " %")
    return f"{int(10000 * share) / 100:.2f} %"


def _points(difference: float) -> str:
    """A difference of shares in percent, rounded towards minus infinity."""
    return f"{math.floor(10000 * difference) / 100:.2f}"


def compare(
    networks: tuple[nn.Module, nn.Module],
    reference: nn.Module,
    data: Any,
    digests: dict[str, str],
    *,
    confidence: float = 0.999,
    forward: Forward | None = None,
    progress: Progress = True,
) -> Certificate:
    """Certify how much more often the first of two masked networks agrees with the dense one; see `halve.certify`."""
    delta = 1 - confidence
    seen = count(networks, reference, data, forward=forward, progress=progress)
    n, first, second = seen.total.images, seen.only_first, seen.only_second
    same = {"first": seen.total.same, "second": seen.total.same - first + second}
    low = difference_lower(first, second, n, delta, anytime=seen.interrupted)
    result = {"images": n, "same": same, "only_first": first, "only_second": second, "difference": low}
    counted = f"of {n:,} images, {first:,} keep it with the first masks alone and {second:,} with the second alone"
    counted += ", as far as counted" * seen.interrupted
    if low > 0:
        sentence = (
            f"With {_percent(confidence)} confidence, the first masks keep the dense network's class more often than "
            f"the second, by at least {_points(low)} points ({counted})."
        )
    else:
        sentence = (
            f"These images do not tell with {_percent(confidence)} confidence that the first masks are better than the "
            f"second: the difference may be {_points(low)} points ({counted})."
        )
    method = "paired anytime-valid (beta-binomial mixture)" if seen.interrupted else "paired exact binomial"
    settings = {"confidence": confidence, "method": method, "interrupted": seen.interrupted}
    digests = digests | {"images": seen.images.hexdigest()}
    order = ("the images come in random order",) if seen.interrupted else ()
    return Certificate("comparison", sentence, settings, (*ASSUMPTIONS, *order), result, digests)
