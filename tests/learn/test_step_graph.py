import pytest
import torch
from torch import nn

import halve
from halve.learn.schedule import StepValues
from halve.learn.step_graph import StepGraph
from tests.learn.test_learner import a_learner
from tests.tiny import convnet, images, loader

pytestmark = pytest.mark.filterwarnings("ignore:the quality of the masks will be unknown")  # of so few images


def gpu(test):
    """Runs where there is a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")(test))


def test_without_a_gpu_nothing_is_recorded_and_learning_says_so():
    assert StepGraph.recorded(a_learner(convnet()), images(6)) == "no GPU"
    assert halve.learn(convnet(), loader(), steps=1).recipe["step_graph"] is False


def test_only_steps_that_do_the_same_every_time_are_repeatable():
    assert a_learner(convnet()).repeatable
    assert not a_learner(convnet(), forward=lambda model, batch: model(batch)).repeatable
    assert not a_learner(convnet(), objective=lambda views: views.output.sum()).repeatable


def gradient_of(learner, batch, step, values):
    loss = learner(batch, step, values)
    (gradient,) = torch.autograd.grad(loss, learner.sampler.logits)
    return loss.detach(), gradient


@gpu
@pytest.mark.parametrize("augment", [False, True])
def test_a_recorded_step_is_the_step(augment):
    learner = a_learner(convnet().cuda(), augment=augment)
    batches = [images(6, seed=seed).cuda() for seed in range(4)]
    graph = StepGraph.recorded(learner, batches[0])
    assert isinstance(graph, StepGraph), graph
    for step, batch in enumerate(batches):
        values = StepValues(temperature=1.0 + step, noise=1.0 / (1 + step), guidance=0.3 * step, lr=0.0)
        loss, expected = gradient_of(learner, batch, step, values)
        got = graph.gradient_(batch, step, values)
        torch.testing.assert_close(got, loss, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(learner.sampler.logits.grad, expected, rtol=1e-3, atol=1e-6)


@gpu
def test_learning_records_its_step_and_batches_of_another_size_run_eagerly():
    masks = halve.learn(convnet().cuda(), [images(8), images(8), images(3)], steps=20)
    assert masks.recipe["step_graph"] is True
    plain = halve.learn(convnet().cuda(), [images(8), images(8), images(3)], steps=20, forward=lambda m, x: m(x))
    assert plain.recipe["step_graph"] is False


@gpu
def test_steps_with_channel_orders_are_recorded_too():
    masks = halve.learn(convnet().cuda(), [images(8), images(8)], steps=8, permute=True)
    assert any(mask.layout.channel_order for mask in masks.values())
    assert masks.recipe["step_graph"] is True, masks.recipe


class Counting(nn.Module):
    """Looks at its numbers, which no graph can record."""

    def __init__(self):
        super().__init__()
        self.net = convnet()

    def forward(self, x):
        return self.net(x) if float(x.sum()) < 1e9 else x


@gpu
def test_a_step_that_cannot_be_recorded_runs_eagerly():
    model = Counting().cuda().eval()
    masks = halve.learn(model, loader(), steps=20)
    assert masks.recipe["step_graph"] is False
    assert halve.verify(halve.apply(model, masks), masks).ok
