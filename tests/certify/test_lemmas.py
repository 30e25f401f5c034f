import itertools
import math

import pytest
import torch
from torch import Tensor

from halve.certify.lemmas import (
    confidence,
    is_stable,
    lemma_1,
    lemma_2,
    lemma_3,
    lemma_4,
    lemma_5,
    lemma_6,
    mu,
    norm,
)
from halve.masks.layout import Layout
from halve.masks.mask import Mask
from halve.masks.pattern import Pattern

SIZES = (8, 8, 8, 3)


def leaky(x: Tensor) -> Tensor:
    """2-Lipschitz, and not 0 at 0."""
    return torch.where(x > 0, 2 * x, 0.5 * x) + 0.3


def random_classifier(seed):
    generator = torch.Generator().manual_seed(seed)
    W = [torch.randn(o, i, generator=generator, dtype=torch.float64) for i, o in itertools.pairwise(SIZES)]
    b = [torch.randn(len(w), generator=generator, dtype=torch.float64) for w in W]
    x = torch.randn(SIZES[0], generator=generator, dtype=torch.float64)
    return W, b, x, generator


def scores(W, b, x):
    """The scores, and the norm of each layer's input."""
    inputs = []
    for w, bias in zip(W, b, strict=True):
        inputs.append(float(x.abs().max()))
        x = leaky(w @ x + bias)
    return x, inputs


def random_masks(W, generator):
    pattern = Pattern("2:4")
    found = []
    for w in W:
        layout = Layout("linear", tuple(w.shape), 4)
        found.append(Mask.from_scores(pattern, layout, torch.rand(w.shape, generator=generator)))
    return found


def change(one, other):
    return float((one - other).abs().max())


@pytest.mark.parametrize("seed", range(20))
def test_the_corrected_lemmas_hold(seed):
    W, b, x, generator = random_classifier(seed)
    dense, inputs = scores(W, b, x)
    near = x + 0.1 * torch.rand(x.shape, generator=generator, dtype=torch.float64)
    assert change(scores(W, b, near)[0], dense) <= lemma_1(W, 2.0) * change(near, x)

    masks = random_masks(W, generator)
    B = [mask.kept() for mask in masks]
    for w, mask, kept in zip(W, masks, B, strict=True):
        assert norm(mu(kept, w)) <= lemma_3(w, mask) <= lemma_3(w)
    masked = [torch.where(kept, w, 0.0) for w, kept in zip(W, B, strict=True)]
    assert lemma_1(masked[:1] + W[1:], 2.0) <= lemma_2(W, 1, norm(mu(B[0], W[0])), 2.0)
    found = change(scores(masked, b, x)[0], dense)
    exact = lemma_4(masked, [norm(mu(kept, w)) for kept, w in zip(B, W, strict=True)], inputs, 2.0)
    assert found <= exact <= lemma_5(W, masks, inputs, 2.0)

    U = [0.1 * torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in W]
    updated = [torch.where(kept, w + u, 0.0) for w, u, kept in zip(W, U, B, strict=True)]
    assert change(scores(updated, b, x)[0], dense) <= lemma_6(W, B, U, inputs, 2.0)
    if is_stable(dense, lemma_6(W, B, U, inputs, 2.0)):
        assert scores(updated, b, x)[0].argmax() == dense.argmax()


def test_lemma_2_of_the_text_is_wrong_with_l_instead_of_its_power():
    W = [torch.eye(2, dtype=torch.float64)] * 2
    changed = [W[0] + 1.0 * W[0], W[1]]
    true_constant = 4 * 2.0  # sigma = 2 x twice, and the first matrix doubled
    text = 2.0**2 * 1 + 2.0 * 1.0 * 1
    assert lemma_1(changed, 2.0) >= true_constant > text
    assert lemma_2(W, 1, 1.0, 2.0) >= true_constant


def test_lemma_4_of_the_text_is_wrong_with_biases():
    """x = 0 and b = 1: the text's bound is 0, but removing a weight of the second layer flips the prediction."""
    W = [torch.ones(1, 1, dtype=torch.float64), torch.tensor([[2.0], [0.0]], dtype=torch.float64)]
    b = [torch.ones(1, dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)]
    x = torch.zeros(1, dtype=torch.float64)
    removed = [W[0], torch.zeros_like(W[1])]

    def run(weights):
        hidden = (weights[0] @ x + b[0]).relu()
        return (weights[1] @ hidden + b[1]).relu()

    assert run(W).argmax() != run(removed).argmax()
    text = norm(W[1]) * float(x.abs().max()) * norm(W[0])
    assert text == 0
    ours = lemma_4(removed, [0.0, norm(W[1])], [0.0, 1.0])
    assert ours >= change(run(W), run(removed))
    assert not is_stable(run(W), ours)


def test_an_inequality_in_the_proof_of_lemma_6_is_wrong_and_ours_holds():
    W, U = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    B = torch.tensor([[True, False]])
    assert norm(U + mu(B, W + U)) > norm(U)
    assert norm(U + mu(B, U)) <= norm(U)
    assert norm(mu(B, W) + U + mu(B, U)) <= norm(W) + norm(U)


def test_softmax_changes_each_probability_by_half_of_the_change_of_scores_at_most():
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(500, 5, generator=generator, dtype=torch.float64)
    step = 0.1 * torch.randn(500, 5, generator=generator, dtype=torch.float64)
    moved = ((z + step).softmax(1) - z.softmax(1)).abs().amax(1)
    assert bool((moved <= 0.5 * step.abs().amax(1) + 1e-15).all())
    assert confidence(torch.tensor([0.5, 0.5])) == 0
    assert math.isclose(confidence(torch.tensor([0.9, 0.1], dtype=torch.float64)), 0.4)
