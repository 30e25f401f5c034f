"""The public names."""

from halve.bench.measure import bench
from halve.check.evaluate import evaluate
from halve.check.verify import verify
from halve.engine.compile import compile
from halve.engine.compiled import load as load_compiled
from halve.errors import HalveError
from halve.learn.learn import learn
from halve.learn.objective import Views
from halve.masks.apply import apply, restore_order
from halve.masks.file import load
from halve.masks.mask import Mask, MaskSet
from halve.masks.packed import pack, unpack
from halve.masks.pattern import Pattern
from halve.prune.prune import prune
from halve.prune.recalibrate import recalibrate
from halve.select.select import select
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
    "restore_order",
    "select",
    "unpack",
    "verify",
]
