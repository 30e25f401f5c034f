"""Digests of what a certificate was computed from: weights, masks and images; and of the bounds themselves."""

import ast
import hashlib
import io
import itertools
import tokenize
from pathlib import Path
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from halve.batches import images_of
from halve.errors import DataError
from halve.masks.digests import has_digest, named_tensors
from halve.masks.fingerprint import digest
from halve.masks.mask import MaskSet

_BOUNDS = ("rounding", "operators", "network", "changes", "crown", "branch", "margins")


def digest_of_code(source: str) -> str:
    """The digest of what a source computes: comments, blank lines, docstrings and messages of errors do not count.

    It is one of the lines that are left, since syntax trees differ from version to version of Python.

    >>> digest_of_code("x = 1  # one") == digest_of_code("x = 1"), digest_of_code("x = 1") == digest_of_code("x = 2")
    (True, False)
    """
    left = bytearray(source.encode())
    starts = [0, *itertools.accumulate(len(line) + 1 for line in bytes(left).split(b"\n"))]

    def remove(first: int, last: int) -> None:
        left[first:last] = b"".join(b"\n" if byte == b"\n"[0] else b" " for byte in left[first:last])

    def end_of(node: ast.expr) -> int:
        return starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            remove(end_of(node.exc.func), end_of(node.exc))
        elif isinstance(node, ast.Expr) and _is_text(node.value):
            remove(starts[node.lineno - 1] + node.col_offset, end_of(node.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            first = starts[token.start[0] - 1] + len(token.line[: token.start[1]].encode())
            remove(first, first + len(token.string.encode()))
    lines = [line.rstrip() for line in left.split(b"\n") if line.strip()]
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def digest_of_bounds(*more: str) -> str:
    """The digest of the code that bounds are computed by: a record of tests says by it what was tested.

    Args:
        more: Other files of this folder that count, such as "joint".

    >>> len(digest_of_bounds()), digest_of_bounds("joint") == digest_of_bounds()
    (64, False)
    """
    state = hashlib.sha256()
    for name in (*_BOUNDS, *more):
        state.update(digest_of_code((Path(__file__).parent / f"{name}.py").read_text()).encode())
    return state.hexdigest()


def digest_of_model(model: nn.Module) -> str:
    """The digest of all parameters and buffers of a model.

    >>> layer = nn.Linear(2, 2)
    >>> digest_of_model(layer) == digest_of_model(layer), digest_of_model(layer) == digest_of_model(nn.Linear(2, 2))
    (True, False)
    """
    state = hashlib.sha256()
    for name, tensor in sorted(named_tensors(model, ()).items()):
        state.update(f"{name} {digest(tensor) if has_digest(tensor) else 'opaque'}\n".encode())
    return state.hexdigest()


def digest_of_masks(masks: MaskSet) -> str:
    """The digest of masks: which weights are kept, recalibrated statistics, corrected norms and moved channels."""
    state = hashlib.sha256()
    for name, mask in sorted(masks.items()):
        state.update(f"{name} {mask.pattern} {digest(mask.kept())}\n".encode())
    for name, value in sorted(masks.statistics.items()):
        state.update(f"statistics {name} {digest(value)}\n".encode())
    for name, value in sorted(masks.corrections.items()):
        state.update(f"correction {name} {digest(value)}\n".encode())
    state.update(repr(sorted(masks.moves.items())).encode())
    return state.hexdigest()


class ImageDigest:
    """The digest of images in the order in which they come, however they are divided into batches.

    >>> import torch
    >>> images, one, two = torch.randn(4, 3), ImageDigest(), ImageDigest()
    >>> one.add(images, None)
    >>> two.add(images[:1], None), two.add(images[1:], None)
    (None, None)
    >>> one.hexdigest() == two.hexdigest()
    True
    """

    def __init__(self) -> None:
        self._state = hashlib.sha256()

    def add(self, batch: Any, forward: object, index: int = 0) -> None:
        """Add a batch. Raises `DataError` for NaN and infinity. With `forward`, all tensors of the batch count."""
        images: Any = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        if forward is None:
            images = images_of(batch)
        for image in images:
            if image.is_floating_point() and not bool(image.isfinite().all()):
                raise DataError(f"batch {index} has images with NaN or infinity, which no certificate covers")
            self._state.update(bytes.fromhex(digest(image)))

    def hexdigest(self) -> str:
        """The digest of all images so far."""
        return self._state.hexdigest()
