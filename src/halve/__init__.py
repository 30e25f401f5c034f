"""halve: 2:4 sparsity for trained convolutional networks, without touching their weights."""

from halve.check.evaluate import evaluate
from halve.check.verify import verify
from halve.engine.bench.measure import bench
from halve.engine.compile import compile
from halve.engine.saved import load as load_compiled
from halve.errors import HalveError
from halve.find.learn import learn
from halve.find.objective import Views
from halve.find.prune import prune
from halve.find.recalibrate import recalibrate
from halve.find.select import select
from halve.masks.apply import apply
from halve.masks.file import load
from halve.masks.mask import Mask, MaskSet
from halve.masks.packed import pack, unpack
from halve.masks.pattern import Pattern
from halve.version import VERSION as __version__

__all__ = [
    "HalveError",
    "Mask",
    "MaskSet",
    "Pattern",
    "Views",
    "__version__",
    "apply",
    "bench",
    "compile",
    "evaluate",
    "learn",
    "load",
    "load_compiled",
    "pack",
    "prune",
    "recalibrate",
    "select",
    "unpack",
    "verify",
]
