"""Axes: sets of channels that must move together when channels are put in another order.

Each channel dimension of a network's tensors is a row of spans. Where two rows meet (a residual sum, BatchNorm after a
convolution), their axes are tied, and cut where only parts of them meet (concatenations, groups). An axis can be
pinned: then its channels stay where they are, with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(eq=False)
class Axis:
    """`size` channels. Tied axes have one root; a cut axis is its parts."""

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
    """An axis as it lies along one dimension; `repeat` neighbours (pixels, after a flatten) belong to each channel."""

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
    """The same spans in terms of roots that are not cut."""
    result: list[Span] = []
    for axis, repeat in spans:
        root = axis.root()
        result.extend([Span(root, repeat)] if root.parts is None else resolved([Span(p, repeat) for p in root.parts]))
    return tuple(result)


def width_of(spans: Sequence[Span]) -> int:
    """How many places the spans take along their dimension."""
    return sum(span.width for span in spans)


def pin(spans: Sequence[Span], reason: str) -> None:
    """These channels must stay where they are. The first reason is kept."""
    for axis, _ in resolved(spans):
        axis.pinned = axis.pinned or reason


def cut(spans: Sequence[Span], at: int) -> tuple[Spans, Spans]:
    """The spans before and after a place, cutting the axis that it falls into; between the pixels of one channel no
    cut is possible: then that axis is pinned, channel for channel."""
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
        if rest:  # a channel's own pixels part: they become places of their own that cannot move
            pin([span], "its channels are taken apart")
            before += fresh(left, "its channels are taken apart")
            after[:0] = fresh(span.width - left, "its channels are taken apart")
            break
        span.axis.parts = (Axis(channels, span.axis.pinned), Axis(span.axis.size - channels, span.axis.pinned))
        first, second = span.axis.parts
        before.append(Span(first, span.repeat))
        after.insert(0, Span(second, span.repeat))
        break
    return tuple(before), tuple(after)


def tie(ours: Sequence[Span], theirs: Sequence[Span], reason: str = "it meets channels in another arrangement") -> None:
    """Both rows of spans must be ordered alike. Where that cannot be said, both are pinned.

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
        else:  # cutting one of the two cut the other as well
            rest_ours, rest_theirs = mine + rest_ours, other + rest_theirs


def _tie_two(mine: Span, other: Span, reason: str) -> None:
    if mine.repeat != other.repeat:
        pin([mine, other], reason)
    elif mine.axis is not other.axis:
        other.axis.pinned = other.axis.pinned or mine.axis.pinned
        mine.axis.tied_to = other.axis
