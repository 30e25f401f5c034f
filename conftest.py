"""For tests and for the examples in docstrings alike."""

import os

# Tiny tensors gain nothing from threads, and threads that spin beside another busy process cost minutes. Set before
# torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("halve", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("halve")


@pytest.fixture(autouse=True)
def same_chance() -> None:
    """Every test and every example draws the same random numbers, in whatever order they run."""
    torch.manual_seed(0)
