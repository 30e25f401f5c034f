"""Files that are damaged by chance or on purpose."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from halve.errors import FileError


def flipped(content: bytes, count: int, first: int = 0) -> Iterator[bytes]:
    """The content with one bit flipped: each of the `first` bits, and `count` random ones."""
    chosen = np.random.default_rng(0).choice(len(content) * 8, count, replace=False)
    for bit in [*range(first), *chosen.tolist()]:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def truncated(content: bytes, step: int) -> Iterator[bytes]:
    """Beginnings of the content, `step` bytes apart, and all but its last byte."""
    for length in [*range(0, len(content), step), len(content) - 1]:
        yield content[:length]


def accepted(attacks: Mapping[str, Any], craft: Callable[[Any], Any], read: Callable[[Any], Any]) -> list[str]:
    """Names of the attacks whose crafted files `read` does not refuse as damaged."""
    wrong = []
    for name, attack in attacks.items():
        path = craft(attack)
        try:
            read(path)
        except FileError as error:
            if "damaged" in str(error):
                continue
        wrong.append(name)
    return wrong
