"""Processes that tests start import this checkout and its tests, wherever they run."""

import os
from pathlib import Path

import halve

ROOT = Path(__file__).parents[1]


def environment(**variables: str) -> dict[str, str]:
    """The environment of such a process."""
    paths = [str(ROOT), str(Path(halve.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables
