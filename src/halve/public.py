"""The public names."""

from halve.bench.bench import bench
from halve.bench.measure import measure
from halve.certify.certificate import Certificate
from halve.certify.certify import certify
from halve.check.evaluate import evaluate
from halve.check.verify import verify
from halve.engine.compile import compile
from halve.engine.compiled import load as load_compiled
from halve.errors import HalveError
from halve.export.check_onnx import check_onnx
from halve.export.export import export
from halve.export.loaded import load as load_onnx
from halve.learn.frontier import frontier
from halve.learn.learn import learn
from halve.learn.objective import Views
from halve.masks.apply import apply, restore_order
from halve.masks.file import load
from halve.masks.mask import Mask, MaskSet
from halve.masks.packed import pack, unpack
from halve.masks.pattern import Pattern
from halve.prune.prune import prune
from halve.prune.recalibrate import recalibrate
from halve.report.report import report
from halve.select.select import select
from halve.select.speed_plan import load_plan
from halve.version import VERSION as __version__

__all__ = [
    "Certificate",
    "HalveError",
    "Mask",
    "MaskSet",
    "Pattern",
    "Views",
    "__version__",
    "apply",
    "bench",
    "certify",
    "check_onnx",
    "compile",
    "evaluate",
    "export",
    "frontier",
    "learn",
    "load",
    "load_compiled",
    "load_onnx",
    "load_plan",
    "measure",
    "pack",
    "prune",
    "recalibrate",
    "report",
    "restore_order",
    "select",
    "unpack",
    "verify",
]
