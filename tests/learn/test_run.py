from dataclasses import replace

import pytest
import torch

import halve
from halve.learn.distributed import Processes
from halve.learn.form import Form
from halve.learn.held_back import hold_back
from halve.learn.initialization import ChannelOrders, Inputs, initial_sampler, initial_scores, select_layers
from halve.learn.run import Run
from halve.learn.settings import Settings
from halve.learn.stream import BatchStream
from tests.tiny import convnet, images


@pytest.fixture
def run():
    torch.manual_seed(0)
    model, split = convnet().eval(), hold_back(images(64))
    inputs, layers = Inputs(model, split.data), select_layers(model, {})
    stream, processes = BatchStream(split.data), Processes(torch.device("cpu"))
    return Run(inputs, layers, ChannelOrders(), Settings.of({"steps": 4}), split, stream, processes, Form(half=False))


def test_what_must_be_the_same_to_resume_is_told_from_what_should_be(run):
    identity, likely = run.identity()
    assert list(identity) == ["settings", "layers", "model", "precision", "data", "processes"]
    assert list(likely) == ["data"]
    assert run.identity() == (identity, likely)
    assert replace(run, form=Form(half=True)).identity()[0] == identity | {"precision": "bfloat16"}


def test_masks_are_completed_for_the_model_that_they_are_made_for(run):
    scores = initial_scores(run.inputs, run.layers, run.settings, None)
    sampler = initial_sampler(run.inputs, run.layers, run.settings, run.orders, None, scores)
    learner = run.learner(run.inputs.model, sampler, [])
    recipe = run.recipe(None, [], {"also": "head"})
    assert (recipe["method"], recipe["steps"], recipe["selection"]) == ("learn", 4, {"also": "head"})
    masks = run.complete(learner.masks("argmax", 0), recipe)
    assert masks.recipe == recipe
    assert all(mask.fingerprint is not None for mask in masks.values())
    assert halve.verify(halve.apply(run.inputs.model, masks), masks).ok
