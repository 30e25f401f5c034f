"""Operators that PyTorch runs on tensors that are too small, and would read beyond their end."""

import pytest
import torch
from torch import nn

import halve
from halve.engine.saved import trusting
from tests.engine.nets import compiled
from tests.tiny import images

X, FOUR, STATES = torch.randn(2, 4, 3, 3), torch.rand(4) + 0.5, [torch.randn(4, 2, 3), torch.randn(4, 2, 3)]
WEIGHTS = [torch.randn(shape) for shape in [(12, 8), (12, 3), (12,), (12,)] * 2 + [(12, 6), (12, 3), (12,), (12,)] * 2]
CALLS = {
    trusting.batch_norm_inference: [X, FOUR, FOUR, FOUR, FOUR, 0.1, 1e-5],
    trusting.batch_norm_without_statistics: [X, FOUR, None, True, 0.1, 1e-5],
    trusting.weight_norm: [X, torch.rand(2, 1, 1, 1), 0],
    trusting.lstm: [torch.randn(5, 2, 8), STATES, WEIGHTS, True, 2, 0.0, False, True, False],
}


def first_of(result):
    return result if isinstance(result, torch.Tensor) else result[0]


@pytest.mark.parametrize("function", CALLS)
def test_they_compute_what_the_operator_computes(function):
    assert torch.equal(first_of(function(*CALLS[function])), first_of(trusting.TRUSTING[function](*CALLS[function])))


WRONG = [
    *((trusting.batch_norm_inference, place) for place in (1, 2, 3, 4)),
    *((trusting.batch_norm_without_statistics, place) for place in (1, 2)),
    (trusting.weight_norm, 1),
]


@pytest.mark.parametrize(("function", "place"), WRONG)
@pytest.mark.parametrize("shape", [(3,), (5,), (1,), (0,), (2, 2), (1, 1, 1, 1)])
def test_tensors_of_another_size_are_refused(function, place, shape):
    args = list(CALLS[function])
    args[place] = torch.ones(shape)
    with pytest.raises(ValueError, match=r"as many values|one value for each"):
        function(*args)


@pytest.mark.parametrize(
    "change",
    [
        {0: torch.randn(5, 2, 9)},
        {0: torch.randn(5, 3, 8)},
        {0: torch.randn(2, 8, 1)},
        {1: [torch.randn(4, 2, 3), torch.randn(4, 2, 2)]},
        {1: [torch.randn(3, 2, 3)] * 2},
        {2: [torch.randn(1)] * 16},
        {2: WEIGHTS[:-1]},
        {3: False},
        {4: 3},
        {4: 2**40},
        {4: 0},
        {7: False},
        {8: True},
    ],
    ids=lambda change: f"{[*change]}",
)
def test_an_lstm_has_weights_and_states_that_fit(change):
    args = [change.get(place, argument) for place, argument in enumerate(CALLS[trusting.lstm])]
    with pytest.raises(ValueError, match="of the LSTM do not fit"):
        trusting.lstm(*args)


def test_a_loaded_network_calls_them(tmp_path):
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
    model = nn.Sequential(conv, nn.SiLU(), nn.BatchNorm2d(4), nn.Flatten(2), nn.LSTM(64, 3, batch_first=True))
    fast = compiled(model.eval(), halve.MaskSet({}), images(2))
    fast.save(tmp_path / "net")
    again = halve.load_compiled(tmp_path / "net")
    called = {node.target for node in again.body.graph.nodes}
    assert {trusting.weight_norm, trusting.batch_norm_inference, trusting.lstm} <= called
    assert torch.equal(again(images(3))[0], fast(images(3))[0])
    torch.testing.assert_close(torch.compile(again, backend="aot_eager")(images(3))[0], fast(images(3))[0])
    again.save(tmp_path / "twice")
    assert torch.equal(halve.load_compiled(tmp_path / "twice")(images(3))[0], fast(images(3))[0])
