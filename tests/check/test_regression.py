import pytest
import torch
from torch import nn

import halve
from halve.errors import ModelError, OptionError


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs)).eval()


def test_the_error_is_relative_to_the_norm_of_the_dense_outputs():
    model, x = network(), torch.randn(20, 8)
    masks = halve.prune(model)
    result = halve.evaluate(model, masks, x.split(8), task="regression")
    with torch.no_grad():
        dense, sparse = model(x), halve.apply(model, masks)(x)
    assert (result.task, result.images, result.agreement) == ("regression", 20, None)
    assert result.output_error == pytest.approx(float((sparse - dense).norm() / dense.norm()))
    assert result.output_error > 0
    assert halve.evaluate(model, halve.prune(model, pattern="4:4"), x, task="regression").output_error == 0.0
    assert halve.evaluate(model, None, x, task="regression").output_error is None


def test_one_number_per_image_is_no_class_score():
    with pytest.raises(ModelError, match=r"\(20, 1\), which may not be class scores; pass .*task='regression'"):
        halve.evaluate(network(), None, torch.randn(20, 8))


@pytest.mark.parametrize("convert", [lambda y: y.argmax(1), lambda y: y[:, 0], lambda y: y.sum(), lambda y: y.long()])
def test_predicted_classes_and_numbers_are_no_class_scores(convert):
    with pytest.raises(ModelError, match="outputs of shape"):
        halve.evaluate(network(3), None, torch.randn(20, 8), forward=lambda m, x: convert(m(x)))
    with pytest.raises(ModelError, match="outputs"):
        halve.evaluate(network(3), None, torch.randn(20, 8), forward=lambda m, x: convert(m(x)), task="classification")


def test_a_task_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(OptionError, match="classification, segmentation, detection, regression, got 'boxes'"):
        halve.evaluate(network(), None, torch.randn(2, 8), task="boxes")
