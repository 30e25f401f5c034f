"""What the frozen model runs in while masks are learned: bfloat16 or float32, channels last or contiguous."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from halve.batches import Forward, result_of
from halve.machine import fast_in_bfloat16

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Form:
    """How the frozen model runs.

    Args:
        half: In bfloat16, otherwise in float32.
        channels_last: With weights, and so images, in channels last, which is faster. Otherwise both are contiguous.
    """

    half: bool
    channels_last: bool = True

    @property
    def precision(self) -> Literal["bfloat16", "float32"]:
        """The precision by its name."""
        return "bfloat16" if self.half else "float32"

    @property
    def autocast(self) -> torch.dtype | None:
        """What to cast to; None for float32."""
        return torch.bfloat16 if self.half else None

    def convert_(self, copy: nn.Module) -> None:
        """Convert the weights of 2d and 3d convolutions, also those with a 1x1 kernel, which are in both formats."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        for parameter in copy.parameters():
            if format_ := formats.get(parameter.dim()):
                format_ = format_ if self.channels_last else torch.contiguous_format
                parameter.data = parameter.data.clone(memory_format=format_)


def form_of(copy: nn.Module, batch: Any, forward: Forward | None, precision: Precision) -> Form:
    """The fastest form in which the model runs on a batch; converts the model to it.

    Not all models run in all forms: `x.view(len(x), -1)` fails in channels last, and values of a mixed dtype may not be
    written into each other in bfloat16. A model that fails in all of them keeps the first: the first step raises the
    error.

    Args:
        copy: The frozen model.
        batch: A batch that it can run on.
        forward: Runs the model on an unusual batch.
        precision: "auto" stands for bfloat16 where it is faster, which on CPUs depthwise convolutions are not.
    """
    half = precision == "bfloat16" or (precision == "auto" and _faster_in_bfloat16(copy))
    forms = [Form(half), Form(half, channels_last=False)]
    if half and precision == "auto":
        forms += [Form(False), Form(False, channels_last=False)]
    for form in forms:
        form.convert_(copy)
        if _runs(copy, batch, forward, form):
            return form
    forms[0].convert_(copy)
    return forms[0]


def _faster_in_bfloat16(copy: nn.Module) -> bool:
    device = next(copy.parameters()).device
    depthwise = any(getattr(m, "groups", 1) == getattr(m, "in_channels", 0) > 1 for m in copy.modules())
    return fast_in_bfloat16(device) and not (device.type == "cpu" and depthwise)


@torch.no_grad()
def _runs(copy: nn.Module, batch: Any, forward: Forward | None, form: Form) -> bool:
    device = next(copy.parameters()).device.type
    try:
        with torch.autocast(device, form.autocast or torch.bfloat16, enabled=form.half):
            result_of(copy, batch, forward)
    except torch.OutOfMemoryError:
        return True  # the first step says which batch would fit
    except Exception:  # the model's code may raise anything
        return False
    return True
