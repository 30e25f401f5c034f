"""Random patterns, layouts and masks, and masks for a model without selection."""

import itertools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from halve.masks.fingerprint import Fingerprint
from halve.masks.layout import Layout
from halve.masks.mask import Mask, MaskSet
from halve.masks.pattern import Pattern
from halve.modules import kind_of, weight_of

PATTERNS = ("1:1", "1:2", "2:3", "2:4", "1:4", "4:4", "4:8", "8:16", "1:32")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed numbers, determined by the seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def a_mask(pattern: str, layout: Layout, seed: int = 0) -> Mask:
    """A random legal mask with the fingerprint of a random weight."""
    weight = random(*layout.shape, seed=seed)
    mask = Mask.from_scores(Pattern(pattern), layout, weight.abs())
    return Mask(mask.pattern, layout, mask.codes, Fingerprint.of(weight, mask.apply_to(weight)))


def masks_for(model: nn.Module, *names: str, pattern: str = "2:4", **layout: Any) -> MaskSet:
    """Magnitude masks for the named layers."""
    masks = {}
    for name in names:
        module = model.get_submodule(name)
        weight = weight_of(module).clone()
        groups = getattr(module, "groups", 1)
        place = Layout(kind_of(module), tuple(weight.shape), Pattern(pattern).size, groups, **layout)
        mask = Mask.from_scores(Pattern(pattern), place, weight.abs())
        masks[name] = Mask(mask.pattern, place, mask.codes, Fingerprint.of(weight, mask.apply_to(weight)))
    return MaskSet(masks, recipe={"method": "test"})


@st.composite
def layouts(draw: st.DrawFn, block: int) -> Layout:
    """Small layouts of any kind, order, kernel, number of groups, padding and channel order."""
    kind = draw(st.sampled_from(["linear", "conv", "conv_transpose"]))
    groups = 1 if kind == "linear" else draw(st.integers(1, 3))
    kernel = () if kind == "linear" else tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    rows = draw(st.integers(1, 3))
    channels = draw(st.one_of(st.integers(1, 2).map(lambda n: n * block), st.integers(1, block + 3)))
    shape = (rows * groups, channels) if kind != "conv_transpose" else (channels * groups, rows)
    order = draw(st.sampled_from(["channels", "flat"]))
    channel_order = None
    if order == "channels" and draw(st.booleans()):
        orders = [draw(st.permutations(range(channels))) for _ in range(groups)]
        channel_order = tuple(itertools.chain.from_iterable(orders))
    layout = Layout(kind, (*shape, *kernel), block, groups, order, True, channel_order)
    pad = bool(layout.virtual) or draw(st.booleans())
    return Layout(kind, layout.shape, block, groups, order, pad, channel_order)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    """Legal masks of any pattern and layout, with or without fingerprint."""
    pattern = draw(st.sampled_from(PATTERNS))
    mask = a_mask(pattern, draw(layouts(Pattern(pattern).size)), draw(st.integers(0, 99)))
    shared = tuple(draw(st.lists(st.sampled_from(["a", "b.c", "ä:ö"]), max_size=2)))
    fingerprint = mask.fingerprint if draw(st.booleans()) else None
    return Mask(mask.pattern, mask.layout, mask.codes, fingerprint, shared)
