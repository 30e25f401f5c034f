"""The paper's lemmas 1 to 6, corrected, with the text's symbols.

The classifier is f = softmax . f_d . ... . f_1 with f_i(x) = sigma(W_i x + b_i), where sigma is L-Lipschitz. Norms are
sup norms: ||W|| is the largest sum of absolute values in a row. B is a bit mask, mu(B, W) = (B - 1) * W is what it
removes, U an update. What differs from the text:

- Lemma 2 needs L^d in its second term, not L.
- Lemma 4 needs the norm of the layer's input x_{j-1}; the product of norms in its place is wrong if there are biases.
  Masks change many layers, so that the contributions of all are summed up: behind a layer the masked weights count, and
  before it the dense ones.
- Lemma 3 is sharper for legal masks: in a block of M only the M - N largest can be removed.
- Lemma 6 holds with mu(B, U) where its proof has mu(B, W + U).
- Softmax is 1/2-Lipschitz in each coordinate, and comparing scores instead of probabilities is tighter still.

On real networks all of these are vacuous, as docs/how/certificates.md shows. `halve.certify` has bounds that are not.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from halve.masks.mask import Mask

_SLACK = 1 + 1e-9  # far more than the rounding of these sums and products in float64


def norm(W: Tensor) -> float:
    """||W||, the sup norm of a matrix, or of a convolution with these weights.

    >>> norm(torch.tensor([[1.0, -2.0], [0.5, 0.5]]))
    3.0
    """
    return float(W.double().flatten(1).abs().sum(1).max())


def mu(B: Tensor, W: Tensor) -> Tensor:
    """mu(B, W): the perturbation with W + mu(B, W) = B * W.

    >>> mu(torch.tensor([[True, False]]), torch.tensor([[3.0, 4.0]]))
    tensor([[ 0., -4.]])
    """
    return torch.where(B, torch.zeros_like(W), -W)


def confidence(probabilities: Tensor) -> float:
    """gamma_f(x): the smallest change of probabilities, in the sup norm, that changes the predicted class.

    >>> f"{confidence(torch.tensor([0.7, 0.2, 0.1])):.2f}"
    '0.25'
    """
    first, second = probabilities.topk(2).values.tolist()
    return float(first - second) / 2


def lemma_1(W: Sequence[Tensor], L: float = 1.0) -> float:
    """L_f <= L^d prod ||W_i||: how much the scores change, at most, for a change of x by 1.

    >>> lemma_1([torch.eye(2) * 3, torch.eye(2) * 2]) < 6.001
    True
    """
    return math.prod(L * norm(w) for w in W) * _SLACK


def lemma_2(W: Sequence[Tensor], j: int, change: float, L: float = 1.0) -> float:
    """L_f' <= L_f + L^d ||Delta W_j|| prod_{i != j} ||W_i|| for a change of W_j by norm `change`; j counts from 1."""
    others = math.prod(norm(w) for i, w in enumerate(W, 1) if i != j)
    return lemma_1(W, L) + L ** len(W) * change * others * _SLACK


def lemma_3(W: Tensor, mask: Mask | None = None) -> float:
    """||mu(B, W)|| <= ||W|| for any mask B; with `mask`, for any legal mask of its pattern and layout.

    A legal mask removes M - N of each block, at most the largest ones.
    """
    if mask is None:
        return norm(W) * _SLACK
    blocks = mask.layout.to_blocks(W.double().abs())
    removed = blocks.sort(-1, descending=True).values[..., : mask.pattern.size - mask.pattern.kept]
    return float(removed.sum((1, 2)).max()) * _SLACK


def lemma_4(W: Sequence[Tensor], changes: Sequence[float], inputs: Sequence[float], L: float = 1.0) -> float:
    """How much the scores change, at most: sum_j L^(d-j+1) (prod_{i>j} ||W'_i||) ||Delta W_j|| ||x_{j-1}||.

    Args:
        W: The changed weights W'_1 ... W'_d.
        changes: ||Delta W_j|| for each layer; 0 where nothing changes.
        inputs: ||x_{j-1}|| for each layer, the largest absolute value of its input in the unchanged network.
        L: The Lipschitz constant of sigma. Default: 1.0.
    """
    total, behind = 0.0, 1.0
    for w, change, size in reversed(list(zip(W, changes, inputs, strict=True))):
        behind *= L
        total += behind * change * size
        behind *= norm(w)
    return total * _SLACK


def lemma_5(W: Sequence[Tensor], masks: Sequence[Mask | None], inputs: Sequence[float], L: float = 1.0) -> float:
    """Lemma 4 for all legal masks at once; None for layers without a mask.

    Args:
        W: The dense weights. Their norms also bound those of masked weights.
        masks: A mask of each layer, for its pattern and layout.
        inputs: ||x_{j-1}|| for each layer, in the dense network.
        L: The Lipschitz constant of sigma. Default: 1.0.
    """
    changes = [0.0 if mask is None else lemma_3(w, mask) for w, mask in zip(W, masks, strict=True)]
    return lemma_4(W, changes, inputs, L)


def lemma_6(
    W: Sequence[Tensor], B: Sequence[Tensor], U: Sequence[Tensor], inputs: Sequence[float], L: float = 1.0
) -> float:
    """How much the scores change, at most, by masks B and updates U together.

    B * (W + U) - W = mu(B, W) + U + mu(B, U), with a norm of at most ||mu(B, W)|| + ||U + mu(B, U)||, which is at most
    ||W|| + ||U||.

    Args:
        W: The dense weights before the update.
        B: The mask of each layer, True for kept.
        U: The update of each layer.
        inputs: ||x_{j-1}|| for each layer, in the dense network before the update.
        L: The Lipschitz constant of sigma. Default: 1.0.
    """
    changes = [norm(mu(b, w)) + norm(u + mu(b, u)) for w, b, u in zip(W, B, U, strict=True)]
    updated = [torch.where(b, w + u, torch.zeros_like(w)) for w, b, u in zip(W, B, U, strict=True)]
    return lemma_4(updated, changes, inputs, L)


def is_stable(scores: Tensor, change: float) -> bool:
    """Whether a change of all scores by at most this cannot change the predicted class.

    >>> is_stable(torch.tensor([3.0, 1.0]), 0.9), is_stable(torch.tensor([3.0, 1.0]), 1.1)
    (True, False)
    """
    first, second = scores.double().topk(2).values.tolist()
    return bool(first - second > 2 * change * _SLACK)
