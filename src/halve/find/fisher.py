"""How much the network's predictions depend on each weight: the diagonal of the Fisher information.

For class scores and softmax it is the Gauss-Newton approximation of the Hessian of the KL divergence from the dense
network's own predictions, so that `w^2 F / 2` estimates what removing a weight costs. Labels are drawn from the
predictions themselves: such gradients have zero mean and are independent across images, so the square of a whole
batch's gradient is an unbiased estimate of the sum of the images' squares, and no image needs a pass of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halve.errors import DataError, ModelError
from halve.find.batches import Forward, Progress, count_of, iterate, run
from halve.find.frozen import frozen
from halve.find.select import Choice

DRAWS = 4  # labels drawn for each image: each costs a backward pass and makes the estimate less noisy


@torch.inference_mode(False)
@torch.enable_grad()
def fisher_diagonal(
    model: nn.Module,
    choices: Sequence[Choice],
    data: Any,
    *,
    seed: int = 0,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> tuple[dict[str, Tensor], int]:
    """For each layer that the outputs depend on, summed over the images, in the weight's shape; and how many images.

    >>> from halve.find.select import select
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    >>> found, images = fisher_diagonal(model, select(model).masked, torch.randn(64, 4))
    >>> found["0"].shape, images
    (torch.Size([4, 4]), 64)
    """
    copy = frozen(model, choices)
    weights = {choice.name: copy.get_submodule(choice.name).get_parameter("weight") for choice in choices}
    for weight in weights.values():
        weight.requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    totals: dict[str, Tensor] = {}
    images = 0
    for batch in iterate(data, progress, "sensitivity"):
        output = run(copy, batch, forward)
        if output.dim() != 2 or output.shape[1] < 2:
            raise ModelError(
                f"score 'hessian' needs class scores (n, classes), not outputs of shape {tuple(output.shape)}"
            )
        if not bool(output.isfinite().all()):
            raise DataError("the model gives NaN or infinity on these images: check them and their normalisation")
        shares = output.detach().float().softmax(1).cpu()
        for draw in range(DRAWS):
            labels = torch.multinomial(shares, 1, generator=generator)[:, 0].to(output.device)
            loss = F.cross_entropy(output.float(), labels, reduction="sum")
            last = draw == DRAWS - 1
            grads = torch.autograd.grad(loss, list(weights.values()), retain_graph=not last, allow_unused=True)
            for name, grad in zip(weights, grads, strict=True):
                if grad is not None:
                    seen = grad.square() / DRAWS
                    totals[name] = totals[name] + seen if name in totals else seen
        images += count_of(batch, output, forward)
    return totals, images
