import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from halve.learn.frozen import FrozenNorm, frozen
from halve.select.select import select
from tests.random_masks import random
from tests.tiny import convnet, images
from tests.untouched import same_bits, untouched


def a_norm(dims, **options):
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](6, **options)
    for i, tensor in enumerate((norm.running_mean, norm.weight, norm.bias)):
        if tensor is not None:
            tensor.data = random(6, seed=i)
    if norm.running_var is not None:
        norm.running_var = random(6, seed=7).square() + 0.1
    return norm.eval()


def run(module, x):
    x = x.clone().requires_grad_()
    output = module(x)
    (grad,) = torch.autograd.grad((output * random(*output.shape, seed=5)).sum(), x)
    return output.detach(), grad


@pytest.mark.parametrize("training", [True, False])
def test_outputs_are_those_of_the_model_in_eval_mode_to_the_bit(training):
    model = convnet()
    expected = model(images()).detach()
    model.train(training)
    with untouched(model):
        output = frozen(model, select(model).masked)(images())
    assert same_bits(output, expected)
    assert not output.requires_grad


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.3}])
def test_a_norm_gives_the_same_outputs_and_gradients_as_pytorchs(dims, options):
    norm = a_norm(dims, **options)
    x = random(5, 6, *[4] * (dims - 1 if dims == 1 else dims))
    copied = frozen(nn.Sequential(norm), [])[0]
    (output, grad), (theirs, their_grad) = run(copied, x), run(norm, x)
    assert same_bits(output, theirs)
    assert torch.allclose(grad, their_grad, rtol=1e-5, atol=1e-7)
    assert ("forward" in vars(copied)) == options.get("track_running_stats", True)


def test_a_norm_of_sequences_does_too():
    norm, x = a_norm(1), random(5, 6, 9)
    (output, grad), (theirs, their_grad) = run(frozen(nn.Sequential(norm), [])[0], x), run(norm, x)
    assert same_bits(output, theirs)
    assert torch.allclose(grad, their_grad, rtol=1e-5, atol=1e-7)


def test_the_gradient_of_a_frozen_norm_is_right_in_double():
    x = random(3, 2, 2, 2, dtype=torch.float64).requires_grad_()
    mean, var, weight, bias = (random(2, seed=i, dtype=torch.float64) for i in range(4))
    assert torch.autograd.gradcheck(lambda x: FrozenNorm.apply(x, mean, var.square(), weight, bias, 1e-5), x)
    assert torch.autograd.gradcheck(lambda x: FrozenNorm.apply(x, mean, var.square(), None, None, 1e-5), x)


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 4), (3, 2, 2, 2), (2, 2, 2, 2, 2)])
def test_scale_and_shift_that_are_learned_get_their_gradients(shape):
    x = random(*shape, dtype=torch.float64).requires_grad_()
    mean, var, weight, bias = (random(2, seed=i, dtype=torch.float64) for i in range(4))
    learned = weight.requires_grad_(), bias.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w, b: FrozenNorm.apply(x, mean, var.square(), w, b, 1e-5), (x, *learned))


def test_a_norm_whose_statistics_change_is_differentiated_as_it_is_then():
    norm = a_norm(2)
    copied = frozen(nn.Sequential(norm), [])[0]
    run(copied, random(5, 6, 4, 4))
    for each in (norm, copied):
        each.running_var.mul_(4.0)
    (_, grad), (_, their_grad) = run(copied, random(5, 6, 4, 4)), run(norm, random(5, 6, 4, 4))
    assert torch.allclose(grad, their_grad, rtol=1e-5, atol=1e-7)


def test_a_norm_may_be_called_with_its_input_by_name():
    norm, x = a_norm(2), random(5, 6, 4, 4)
    assert same_bits(frozen(nn.Sequential(norm), [])[0](input=x), norm(input=x))


def test_a_norm_with_a_forward_of_its_own_keeps_it():
    class Doubled(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(4)).eval()
    assert torch.equal(frozen(model, [])(images(2)), model(images(2)))


def test_gradients_through_the_whole_copy_are_those_of_the_model():
    model = convnet()
    (output, grad), (theirs, their_grad) = run(frozen(model, select(model).masked), images()), run(model, images())
    assert same_bits(output, theirs)
    assert torch.allclose(grad, their_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_become_float(dtype):
    model = convnet().to(dtype)
    with untouched(model):
        copied = frozen(model, select(model).masked)
    assert {p.dtype for p in copied.parameters()} == {torch.float32}
    assert copied[1].running_mean.dtype == torch.float32
    assert torch.equal(copied(images()), copy.deepcopy(model).float()(images()))


def test_nothing_of_the_copy_trains_and_nothing_is_shared():
    model = convnet().train()
    copied = frozen(model, select(model).masked)
    assert not any(p.requires_grad for p in copied.parameters())
    assert not any(module.training for module in copied.modules())
    theirs = {t.data_ptr() for t in model.state_dict().values()}
    assert not theirs & {t.data_ptr() for t in copied.state_dict().values()}


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_masked_layers_with_a_computed_weight_are_plain_in_the_copy(norm):
    model = nn.Sequential(norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = random(3, 8)
    with untouched(model):
        copied = frozen(model, select(model).masked)
    assert not parametrize.is_parametrized(copied[0])
    assert "weight" in copied[0]._parameters
    assert torch.allclose(copied(x), model(x), atol=1e-6)


def test_the_copy_keeps_the_models_hooks():
    model, calls = convnet(), []
    model[3].register_forward_hook(lambda *_: calls.append(1))
    frozen(model, select(model).masked)(images(2))
    assert calls == [1]
