import pytest
import torch

from halve.prune import scores


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_magnitude_is_the_absolute_value():
    weight = numbers(3, 4, 2, 2)
    assert torch.equal(scores.magnitude(weight), weight.abs())


def test_wanda_multiplies_each_weight_of_a_linear_layer_with_its_inputs_norm():
    weight, inputs = numbers(3, 8), numbers(20, 8)
    result = scores.wanda(weight, inputs.square().sum(0).expand(3, 8))
    for row in range(3):
        for column in range(8):
            expected = abs(float(weight[row, column])) * float(inputs[:, column].norm())
            assert result[row, column].item() == pytest.approx(expected, rel=1e-5)


def test_inputs_that_are_always_zero_leave_the_magnitudes_to_decide():
    weight, squares = torch.tensor([[1.0, 3.0, 2.0, 4.0]]), torch.tensor([[0.0, 0.0, 0.0, 9.0]])
    assert scores.wanda(weight, squares).argsort().tolist() == [[0, 2, 1, 3]]
    assert torch.equal(scores.wanda(weight, torch.zeros(1, 4)), weight)


def test_random_depends_on_its_generator_alone():
    def draw(seed):
        return scores.random(torch.zeros(4, 8), torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    assert draw(0).shape == (4, 8)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_score_that_needs_data_is_a_score():
    assert set(scores.SCORES) >= scores.NEEDS_DATA
