"""The version of the CPU kernels."""

import functools
from importlib import resources

from halve.engine.kernels.cuda import jit


@functools.cache
def version() -> str:
    """A digest of the sources, so that changed kernels are timed again."""
    folder = resources.files(__package__)
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".py"))
    return jit.digest(*((folder / name).read_text() for name in names))
