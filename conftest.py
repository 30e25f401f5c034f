"""Setup for all tests and doctests."""

import os

# Threads do not speed up tiny tensors, and spinning threads are very slow next to another busy process. Set this before
# importing torch. Subprocesses of tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

settings.register_profile("halve", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("halve")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Make random numbers independent of the order of tests."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that take longest: at the end, all other processes would wait for them."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
