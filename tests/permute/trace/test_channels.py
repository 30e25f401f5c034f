"""Channels of whole networks."""

from torch import nn

from halve.graph import capture
from halve.permute.trace.channels import Channels
from tests.permute.orders import images, lively, shuffled


def test_weights_that_are_tied_move_together():
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 3, 1))
    net[3].weight = net[1].weight
    difference, free, channels = shuffled(lively(net), images(6))
    assert difference < 1e-12
    assert {"1", "4"} <= free
    assert channels.along("3.weight", 1) is None  # it goes by its first name


def test_outputs_and_inputs_stay():
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1))
    channels = Channels(capture(net, images(6).float()))
    assert "input of the model" in channels.along("0.weight", 1)[0].axis.pinned
    assert channels.along("1.weight", 0)[0].axis.pinned == "output of the model"
