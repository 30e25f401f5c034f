"""What a public call leaves unchanged in the process that it runs in, besides the user's model.

Loaders, a model's own code and libraries draw from the global random numbers and set environment variables and thread
counts. Training that calls halve in between must still be reproducible.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserved_process_state() -> Iterator[None]:
    """Restore random numbers, environment variables and the number of threads afterwards. Also a decorator.

    >>> before = torch.get_rng_state()
    >>> with preserved_process_state():
    ...     _ = torch.rand(1)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    environment, threads = dict(os.environ), torch.get_num_threads()
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
        for name in environment.keys() | os.environ.keys():
            if name not in environment:
                os.environ.pop(name, None)
            elif os.environ.get(name) != environment[name]:
                os.environ[name] = environment[name]
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
