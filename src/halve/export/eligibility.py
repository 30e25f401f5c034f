"""What TensorRT can do with a layer of an ONNX file: never "faster", and never "picked", which TensorRT decides.

- *Eligible*: 2:4 along input channels, in an operator and a form that TensorRT's sparse kernels take.
- *Likely*: eligible, and of a size at which sparse kernels have been faster.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from halve.errors import listed
from halve.export.weights import Product

Verdict = Literal["likely", "eligible", "no"]
COLUMNS = ("layer", "operator", "weight", "dtype", "TensorRT", "reason")
TYPES = ("float32", "float16", "bfloat16", "int8")  # of weights that are judged; see docs/how/export.md
DENSE = 0.9  # share of blocks with too many weights; rounding to int8 makes a few zeros in any layer
LARGE = 256  # input and output channels; see docs/how/export.md


@dataclass(frozen=True)
class OnnxLayer:
    """A convolution or matrix product, judged on the bytes of the file.

    Args:
        name: The name of the node.
        operator: "Conv", "ConvTranspose", "Gemm", "MatMul" or another kind of product.
        weight: The name of the tensor that holds the weight; None if it has none.
        shape: Its shape: (output channels, input channels, kernel ...).
        dtype: What it is stored as, such as "float16" or "int8".
        verdict: "likely", "eligible" or "no".
        reason: Why it is not better than that, or what makes it likely.
        picked: Whether a log of TensorRT says that the plan uses a sparse kernel; None if there is no log.
    """

    name: str
    operator: str
    weight: str | None
    shape: tuple[int, ...]
    dtype: str | None
    verdict: Verdict
    reason: str
    picked: bool | None = None

    @property
    def is_eligible(self) -> bool:
        return self.verdict != "no"

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        return (
            *(self.name, self.operator, "x".join(map(str, self.shape)) or "-", self.dtype or "-"),
            *("not eligible" if self.verdict == "no" else self.verdict, self.reason),
        )


def judged(product: Product) -> OnnxLayer:
    """The verdict on a product, from the values of its weight."""
    weight, operator = product.weight, str(product.node.op_type)
    if weight is None:
        return OnnxLayer(product.name, operator, None, (), None, "no", product.reason or "")
    rows = _rows(weight.values, weight.axis, operator)
    shape = (rows.shape[0], rows.shape[1], *(weight.values.shape[2:] if operator.startswith("Conv") else ()))
    reason = _not_eligible(rows, operator, product.groups, weight.dtype)
    verdict: Verdict = "no"
    if reason is None:
        verdict, reason = _outlook(shape)
    dtype = f"{weight.dtype} Q/DQ" if weight.quantized and weight.dtype.startswith("float") else weight.dtype
    return OnnxLayer(product.name, operator, weight.name, shape, dtype, verdict, reason)


def _rows(values: NDArray[Any], axis: int, operator: str) -> NDArray[np.bool_]:
    """Where a weight is not zero, as (output channels, input channels, kernel positions)."""
    nonzero: NDArray[np.bool_] = values != 0
    if operator.startswith("Conv"):
        front = np.moveaxis(nonzero, axis, 1)
        return front.reshape(*front.shape[:2], math.prod(front.shape[2:]))
    # a product: leading dimensions are a batch of matrices, and count as more output channels
    last = np.moveaxis(nonzero, axis, -1)
    return last.reshape(math.prod(last.shape[:-1]), last.shape[-1], 1)


def _not_eligible(rows: NDArray[np.bool_], operator: str, groups: int, dtype: str) -> str | None:
    if not rows.size:
        return "its weight is empty"
    if groups != 1:
        return f"grouped convolution ({groups} groups)"
    if operator == "ConvTranspose":
        return "transposed convolution"
    channels = rows.shape[1]
    if channels % 4:
        return f"{channels} input channels, not divisible by 4"
    if dtype not in TYPES:
        return f"its weight is stored as {dtype}: only {listed(TYPES)} are judged"
    crowded = _crowded(rows)
    if not crowded.any():
        return None
    if crowded.mean() > DENSE:
        return "dense"
    count, total = int(crowded.sum()), crowded.size
    row, block, position = (int(i) for i in np.argwhere(crowded)[0])
    where = f"{count:,} of {total:,} blocks of 4 input channels have more than 2 nonzero weights"
    other = _other_axis(rows)
    if other is not None:
        return f"2:4 along {other} instead of input channels: {where}"
    place = f"the first at output channel {row}, input channels {4 * block} to {4 * block + 3}"
    return f"{where}, {place}" + (f", kernel position {position}" if rows.shape[2] > 1 else "")


def _crowded(rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which blocks, as (output channel, block, kernel position), have more than two nonzero weights."""
    blocks = rows.reshape(rows.shape[0], -1, 4, rows.shape[2])
    crowded: NDArray[np.bool_] = blocks.sum(2) > 2
    return crowded


def _other_axis(rows: NDArray[np.bool_]) -> str | None:
    """Another axis that the weight is 2:4 along."""
    outputs, channels, positions = rows.shape
    if outputs % 4 == 0 and not _crowded(rows.transpose(1, 0, 2)).any():
        return "output channels"
    if positions > 1 and channels * positions % 4 == 0 and not _crowded(rows.reshape(outputs, -1, 1)).any():
        return "the flattened kernel"
    return None


def _outlook(shape: tuple[int, ...]) -> tuple[Verdict, str]:
    """Whether the size of an eligible layer makes a sparse kernel likely."""
    outputs, channels, *kernel = shape
    if small := [
        f"{count} {what} channels" for count, what in ((channels, "input"), (outputs, "output")) if count < LARGE
    ]:
        return "eligible", f"small: {' and '.join(small)}, fewer than {LARGE}"
    size = "x".join(map(str, kernel))
    if any(extent > 1 for extent in kernel):
        return "likely", f"large, {size}"
    return "likely", f"large, but {'1x1' if kernel else 'a matrix product'}: chosen less often than larger kernels"
