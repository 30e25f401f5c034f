import pytest
import torch

from halve.prune.elementwise import magnitude, wanda, wanda_or_magnitude


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_magnitude_is_the_absolute_value():
    weight = numbers(3, 4, 2, 2)
    assert torch.equal(magnitude(weight), weight.abs())


def test_wanda_multiplies_each_weight_of_a_linear_layer_by_its_inputs_norm():
    weight, inputs = numbers(3, 8), numbers(20, 8)
    result = wanda(weight, inputs.square().sum(0).expand(3, 8))
    for row in range(3):
        for column in range(8):
            expected = abs(float(weight[row, column])) * float(inputs[:, column].norm())
            assert result[row, column].item() == pytest.approx(expected, rel=1e-5)


def test_inputs_that_are_always_zero_leave_the_magnitudes_to_decide():
    weight, squares = torch.tensor([[1.0, 3.0, 2.0, 4.0]]), torch.tensor([[0.0, 0.0, 0.0, 9.0]])
    assert wanda(weight, squares).argsort().tolist() == [[0, 2, 1, 3]]
    assert torch.equal(wanda(weight, torch.zeros(1, 4)), weight)


def test_a_layer_without_inputs_has_its_magnitudes():
    weight = numbers(2, 4)
    assert torch.equal(wanda_or_magnitude(weight, None), weight.abs())
    assert torch.equal(wanda_or_magnitude(weight, torch.ones(2, 4) * 4), 2 * weight.abs())
