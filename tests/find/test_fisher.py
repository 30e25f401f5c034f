import pytest
import torch
from torch import nn

import halve
from halve.find.fisher import fisher_diagonal
from halve.find.select import select
from tests.untouched import untouched


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def images(count):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


def exact(model, layer, x):
    """Sum over images and classes of p (d log p / d w)^2."""
    total = torch.zeros_like(layer.weight)
    for image in x:
        logs = model(image[None]).log_softmax(1)[0]
        for log in logs:
            (grad,) = torch.autograd.grad(log, layer.weight, retain_graph=True)
            total += log.detach().exp() * grad.square()
    return total


def test_the_estimate_is_the_fisher_information_in_the_mean():
    model, x = net(), images(8)
    found, count = fisher_diagonal(model, select(model).masked, [x] * 400)
    assert count == 3200
    for index in (0, 2):
        truth = exact(model, model[index], x)
        estimate = found[str(index)] / 400
        assert (estimate.sum() / truth.sum()).item() == pytest.approx(1.0, abs=0.05)
        large = truth > 0.2 * truth.max()
        assert ((estimate[large] / truth[large]) - 1).abs().max() < 0.3


def test_it_is_reproducible_leaves_the_random_state_and_the_model_alone():
    model = net()
    state = torch.get_rng_state()
    with untouched(model):
        one, same, other = (fisher_diagonal(model, select(model).masked, [images(16)], seed=s)[0] for s in (0, 0, 1))
    assert torch.equal(one["0"], same["0"])
    assert not torch.equal(one["0"], other["0"])
    assert torch.equal(torch.get_rng_state(), state)


def test_pruning_by_it_gives_legal_masks_that_weigh_the_prediction():
    model = net()
    with torch.no_grad():
        model[4].weight[:, 3] = 0  # nothing that reaches hidden unit 3 of the last layer matters
    masks = halve.prune(model, "hessian", [images(256)])
    assert halve.verify(model, masks).ok
    assert masks.recipe["images"] == 256
    assert halve.learn(model, [images(16)], steps=1, start="hessian").density == 0.5


def test_a_layer_that_the_outputs_do_not_depend_on_keeps_its_largest():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.used(x))

    model = Unused().eval()
    masks = halve.prune(model, "hessian", [images(16)])
    assert masks["unused"].difference(halve.prune(model)["unused"]) == 0


@pytest.mark.parametrize(
    ("forward", "data", "says"),
    [
        (lambda m, x: m(x)[:, :1], images(8), "needs class scores"),
        (None, images(8) * float("nan"), "NaN or infinity"),
    ],
)
def test_what_gives_no_predictions_is_refused(forward, data, says):
    with pytest.raises(halve.HalveError, match=says):
        halve.prune(net(), "hessian", [data], forward=forward)
