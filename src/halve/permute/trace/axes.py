"""Axes: sets of channels that must be permuted together.

The channel dimension of a tensor is a sequence of spans. Where two tensors are combined (a residual sum, BatchNorm
after a convolution), their axes are tied. If only parts of them are combined (concatenations, groups), the axes are cut
first. A pinned axis keeps the order of its channels, and says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(eq=False)
class Axis:
    """`size` channels. Tied axes share a root; a cut axis is replaced by its parts."""

    size: int
    pinned: str | None = None
    tied_to: "Axis | None" = None
    parts: "tuple[Axis, Axis] | None" = None

    def root(self) -> "Axis":
        axis = self
        while axis.tied_to is not None:
            axis = axis.tied_to
        return axis


class Span(NamedTuple):
    """An axis along a tensor dimension. Each channel takes `repeat` elements in a row: its pixels, after a flatten."""

    axis: Axis
    repeat: int = 1

    @property
    def width(self) -> int:
        return self.axis.size * self.repeat


Spans = tuple[Span, ...]


def fresh(size: int, pinned: str | None = None) -> Spans:
    """A new axis."""
    return (Span(Axis(size, pinned)),)


def resolved(spans: Sequence[Span]) -> Spans:
    """The same spans, with every axis replaced by its root or by its parts."""
    result: list[Span] = []
    for axis, repeat in spans:
        root = axis.root()
        result.extend([Span(root, repeat)] if root.parts is None else resolved([Span(p, repeat) for p in root.parts]))
    return tuple(result)


def width_of(spans: Sequence[Span]) -> int:
    """The number of elements that the spans cover."""
    return sum(span.width for span in spans)


def pin(spans: Sequence[Span], reason: str) -> None:
    """Keep the order of these channels. The first reason wins."""
    for axis, _ in resolved(spans):
        axis.pinned = axis.pinned or reason


def cut(spans: Sequence[Span], at: int) -> tuple[Spans, Spans]:
    """Split spans at an element; returns the spans before and after it.

    The axis at that element is cut. A cut between the pixels of one channel is not possible: it pins the axis.
    """
    before: list[Span] = []
    after = list(resolved(spans))
    left = at
    while after and left:
        span = after.pop(0)
        if span.width <= left:
            before.append(span)
            left -= span.width
            continue
        channels, rest = divmod(left, span.repeat)
        if rest:  # between the pixels of one channel
            pin([span], "split inside a channel")
            before += fresh(left, "split inside a channel")
            after[:0] = fresh(span.width - left, "split inside a channel")
            break
        span.axis.parts = (Axis(channels, span.axis.pinned), Axis(span.axis.size - channels, span.axis.pinned))
        first, second = span.axis.parts
        before.append(Span(first, span.repeat))
        after.insert(0, Span(second, span.repeat))
        break
    return tuple(before), tuple(after)


def tie(
    ours: Sequence[Span], theirs: Sequence[Span], reason: str = "combined with channels in a different layout"
) -> None:
    """Require the same channel order of both. If their channels do not correspond one to one, both are pinned.

    >>> a, b = fresh(8), fresh(4) + fresh(4)
    >>> tie(a, b)
    >>> [span.axis.size for span in resolved(a)], resolved(a) == resolved(b)
    ([4, 4], True)
    """
    if width_of(ours) != width_of(theirs):
        pin(ours, reason)
        pin(theirs, reason)
        return
    rest_ours, rest_theirs = resolved(ours), resolved(theirs)
    while rest_ours and rest_theirs:
        width = min(rest_ours[0].width, rest_theirs[0].width)
        (mine, rest_ours), (other, rest_theirs) = cut(rest_ours, width), cut(rest_theirs, width)
        mine, other, rest_ours, rest_theirs = (resolved(s) for s in (mine, other, rest_ours, rest_theirs))
        if len(mine) == len(other) == 1:
            _tie_two(mine[0], other[0], reason)
        else:  # cutting one also cut the other
            rest_ours, rest_theirs = mine + rest_ours, other + rest_theirs


def _tie_two(mine: Span, other: Span, reason: str) -> None:
    if mine.repeat != other.repeat:
        pin([mine, other], reason)
    elif mine.axis is not other.axis:
        other.axis.pinned = other.axis.pinned or mine.axis.pinned
        mine.axis.tied_to = other.axis
