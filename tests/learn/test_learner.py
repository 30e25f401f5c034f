import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import halve
from halve.learn.frozen import frozen
from halve.learn.learner import Learner, Runner
from halve.learn.objective import distill_auto, distill_probabilities
from halve.learn.sampling import Sampler
from halve.learn.schedule import StepValues
from halve.modules import weight_of
from halve.select.select import select
from tests.detectors import faster_rcnn, pictures
from tests.random_masks import random
from tests.tiny import convnet, images
from tests.untouched import untouched

STEADY = StepValues(temperature=1.0, noise=1.0, guidance=1.0, lr=0.0)


def a_learner(model, objective=distill_auto, blocks=None, alpha=8.0, **options):
    choices = select(model).masked
    weights = {c.name: weight_of(model.get_submodule(c.name)) for c in choices}
    sampler = Sampler(choices, weights, {name: w.abs() for name, w in weights.items()}, alpha)
    return Learner(frozen(model, choices), sampler, objective, list(weights) if blocks is None else blocks, **options)


def test_the_logits_are_the_learners_only_parameter_and_the_model_is_not_in_its_tree():
    learner = a_learner(convnet())
    assert [name for name, _ in learner.named_parameters()] == ["sampler.logits"]
    assert [type(m).__name__ for m in learner.modules()] == ["Learner", "Sampler"]


def test_the_loss_is_that_of_the_model_with_the_sampled_weights():
    model = convnet()
    learner = a_learner(model, distill_probabilities, [], seed=3, rank=2)
    loss = learner(images(), 5, StepValues(0.5, 0.7, 1.0, lr=0.0), 1)
    sampled = learner.sampler.sample(temperature=0.5, seed=3, step=5, rank=1002, noise=0.7)
    masked = torch.func.functional_call(model, {f"{name}.weight": w for name, w in sampled.items()}, (images(),))
    ours, theirs = masked.log_softmax(1), model(images()).log_softmax(1)
    assert torch.allclose(loss, (theirs.exp() * (theirs - ours)).sum(1).mean(), atol=1e-6)


def test_a_gradient_reaches_the_logits_of_every_layer_and_nothing_else():
    model = convnet()
    learner = a_learner(model, alpha=1.0)
    with untouched(model):
        learner(images(), 0, STEADY).backward()
    grads = learner.sampler.split(learner.sampler.logits.grad)[0].split(learner.sampler.families[0].sizes)
    assert all(part.abs().sum() > 0 for part in grads)
    assert all(p.grad is None for p in learner.model.parameters() if p.is_leaf)


def test_the_step_the_rank_and_the_number_within_a_step_give_different_samples():
    model = convnet()

    def loss(step=0, rank=0, micro=0):
        return a_learner(model, alpha=1.0, rank=rank)(images(), step, STEADY, micro).item()

    assert loss() == loss()
    assert len({loss(), loss(step=1), loss(rank=1), loss(micro=1)}) == 4


def test_without_the_dense_network_it_is_not_run():
    calls = []
    learner = a_learner(convnet(), lambda v: v.output.sum(), dense=False, forward=lambda m, x: calls.append(1) or m(x))
    learner(images(2), 0, STEADY)
    assert len(calls) == 1


def test_soft_samples_are_differentiable_too():
    learner = a_learner(convnet(), hard=False, alpha=1.0)
    learner(images(), 0, STEADY).backward()
    assert learner.sampler.logits.grad.abs().sum() > 0


def test_autocast_runs_the_model_in_bf16_and_gives_a_near_loss_in_fp32():
    seen = []

    def look(views):
        seen.append(views.output.dtype)
        return distill_auto(views)

    plain, cast = (a_learner(convnet(), look, autocast=d)(images(), 0, STEADY) for d in (None, torch.bfloat16))
    assert seen == [torch.float32, torch.bfloat16]
    assert cast.dtype == torch.float32
    assert cast.item() == pytest.approx(plain.item(), rel=0.1)


def test_the_first_layer_with_a_bad_output_is_blamed():
    learner = a_learner(convnet())
    with torch.no_grad():
        learner.model[4].running_mean[0] = float("nan")
    assert learner.blame(images(), 0, STEADY) == "4"
    assert not any(m._forward_hooks for m in learner.model.modules())
    assert a_learner(convnet()).blame(images(), 0, STEADY) is None


def test_a_runner_reaches_submodules_that_the_users_forward_runs_itself():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    runner = Runner(model, lambda m, batch: m[2](m[0](batch["a"])))
    x = random(3, 8)
    output = runner.with_tensors({"0.weight": torch.zeros(8, 8)}, {"a": x})
    assert torch.allclose(output, model[2](model[0].bias.expand(3, 8)))
    assert torch.equal(runner({"a": x}), model[2](model[0](x)))


def test_a_model_that_is_itself_a_layer_can_be_called():
    model = nn.Linear(8, 4)
    assert torch.allclose(
        Runner(model, None).with_tensors({"weight": torch.zeros(4, 8)}, random(3, 8)), model.bias.expand(3, 4)
    )


def test_tied_weights_are_replaced_together():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    eye = torch.eye(8)
    assert torch.equal(Runner(model, None).with_tensors({"0.weight": 2 * eye}, eye), 4 * eye)


def test_activations_that_are_computed_anew_are_those_of_the_sampled_weights():
    class Recomputing(nn.Module):
        def __init__(self, inner, on):
            super().__init__()
            self.inner, self.on = inner, on

        def forward(self, x):
            x = self.inner[0](x)
            return checkpoint(self.inner[1:], x, use_reentrant=False) if self.on else self.inner[1:](x)

    gradients = []
    for on in (True, False):
        learner = a_learner(Recomputing(convnet(), on))
        learner(images(), 0, STEADY).backward()
        gradients.append(learner.sampler.logits.grad)
    assert torch.equal(*gradients)


@torch.no_grad()
def test_the_output_of_a_detector_is_what_its_heads_return_whatever_ran_before():
    model, first, second = faster_rcnn(), pictures(2), pictures(2, seed=1)
    pruned = halve.prune(model).items()
    weights = {f"{name}.weight": mask.apply_to(model.get_submodule(name).weight) for name, mask in pruned}
    fresh, used = Runner(faster_rcnn(), None), Runner(model, None)
    dense = used(first)
    assert dense.dim() == 3  # so that nothing takes it for class scores
    used(second)
    assert torch.equal(used(first), dense)
    masked = used.with_tensors(weights, first)
    assert masked.shape == dense.shape
    assert not torch.allclose(masked, dense)
    used(second)
    assert torch.equal(used.with_tensors(weights, first), masked)
    assert torch.equal(fresh.with_tensors(weights, first), masked)


class ImageByImage(nn.Module):
    """A detector that runs its heads on each image by itself."""

    def __init__(self):
        super().__init__()
        self.body, self.scores, self.boxes = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images):
        found = []
        for image in images:
            x = torch.relu(self.body(image[None]))
            scores, boxes = self.scores(x).flatten(2), self.boxes(x).flatten(2)
            top = scores.max(1)
            found.append({"boxes": boxes[0].T, "labels": top.indices[0], "scores": top.values[0]})
        return found


@torch.no_grad()
def test_every_call_of_a_detectors_heads_counts_also_if_later_batches_have_more():
    runner = Runner(ImageByImage().eval(), None)
    one, three = ([torch.rand(3, 16, 16) for _ in range(count)] for count in (1, 3))
    assert runner(three).numel() == 3 * runner(one).numel()
    runner = Runner(ImageByImage().eval(), None)
    assert 3 * runner(one).numel() == runner(three).numel()
