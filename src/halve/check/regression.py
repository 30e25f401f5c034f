"""Evaluate outputs that are not class scores, such as depth maps or embeddings: their distance to the dense model's."""

import math
from typing import Any

from torch import Tensor


class RegressionCount:
    """Sums over batches. Outputs are tensors of any shape, (images, ...)."""

    def __init__(self) -> None:
        self._images = 0
        self._squares, self._scale = 0.0, 0.0
        self._compared = False

    def add(self, output: Tensor, dense: Tensor | None, batch: Any, index: int) -> None:
        """Count a batch. `dense` is the dense model's output, if it is compared."""
        self._images += len(output)
        if dense is not None:
            self._compared = True
            self._squares += float((output - dense).double().square().sum())
            self._scale += float(dense.double().square().sum())

    def shares(self) -> dict[str, Any]:
        """The fields of an `Evaluation`."""
        if not self._compared:
            return {"images": self._images}
        return {"images": self._images, "output_error": math.sqrt(self._squares / max(self._scale, 1e-300))}
