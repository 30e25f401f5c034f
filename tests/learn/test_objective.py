import math

import pytest
import timm
import torch
import torchvision
from torch import nn

from halve.errors import DataError, HalveError, OptionError
from halve.learn.objective import (
    DEPTH,
    FEATURE_WEIGHT,
    OUTPUT_WEIGHT,
    Views,
    _RelativeError,
    distill_auto,
    distill_features,
    distill_outputs,
    distill_outputs_and_features,
    distill_probabilities,
    find_blocks,
    named_blocks,
    resolve_objective,
    task,
    watching,
)
from halve.modules import kind_of
from tests.random_masks import random
from tests.tiny import convnet, images, labels, learn


def views(output, dense_output=None, features=(), dense_features=(), batch=None, guidance=1.0):
    return Views(output, list(features), dense_output, list(dense_features), batch, guidance)


def test_outputs_are_compared_by_their_relative_squared_error_less_their_mean():
    theirs = torch.tensor([[3.0, 1.0, 2.0], [0.0, 10.0, 20.0]])
    ours = torch.tensor([[4.0, 1.0, 1.0], [5.0, 15.0, 25.0]])  # (1, 0, -1) off, and the same but for a constant
    assert float(distill_outputs(views(ours, theirs))) == pytest.approx(OUTPUT_WEIGHT * (2 / 2 + 0) / 2)
    assert float(distill_outputs(views(theirs, theirs))) == 0.0


def test_outputs_that_are_no_class_scores_are_compared_as_they_are():
    for shape in ((2,), (2, 1)):
        ours, theirs = torch.tensor([3.0, 1.0]).reshape(shape), torch.tensor([2.0, 1.0]).reshape(shape)
        assert float(distill_outputs(views(ours, theirs))) == pytest.approx(OUTPUT_WEIGHT * (1 / 4 + 0) / 2)


def test_maps_of_outputs_are_centred_pixel_by_pixel():
    theirs = random(2, 5, 3, 4)
    assert float(distill_outputs(views(theirs + random(2, 1, 3, 4, seed=1), theirs))) < 1e-9
    rows = random(2, 7, 5)
    assert float(distill_outputs(views(rows + random(2, 7, 1, seed=1), rows))) < 1e-9


def test_the_gradient_of_the_output_error_is_right():
    ours, theirs = random(3, 4, dtype=torch.float64).requires_grad_(), random(3, 4, seed=1, dtype=torch.float64)
    distill_outputs(views(ours, theirs)).backward()
    step = 1e-3 * random(3, 4, seed=2, dtype=torch.float64)
    both = [float(distill_outputs(views(ours.detach() + sign * step, theirs))) for sign in (1, -1)]
    assert float((ours.grad * step).sum()) == pytest.approx((both[0] - both[1]) / 2, rel=1e-3)


def test_probabilities_are_compared_by_the_kl_divergence_from_the_dense_ones():
    ours = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])  # shares 1/4, 3/4 and 1/2, 1/2
    theirs = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    expected = (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert float(distill_probabilities(views(ours, theirs))) == pytest.approx(expected)
    assert float(distill_probabilities(views(theirs, theirs))) == 0.0


def test_the_gradient_of_the_kl_divergence_is_the_difference_of_the_shares():
    ours, theirs = random(3, 5).requires_grad_(), random(3, 5, seed=1)
    distill_probabilities(views(ours, theirs)).backward()
    assert torch.allclose(ours.grad, (ours.detach().softmax(1) - theirs.softmax(1)) / 3, atol=1e-6)


def test_maps_of_outputs_are_compared_pixel_by_pixel():
    ours, theirs = random(2, 5, 3, 4), random(2, 5, 3, 4, seed=1)
    rows = [x.permute(0, 2, 3, 1).reshape(24, 5) for x in (ours, theirs)]
    assert torch.allclose(distill_probabilities(views(ours, theirs)), distill_probabilities(views(*rows)))


def test_features_are_compared_by_their_relative_squared_error():
    theirs = [torch.tensor([3.0, 4.0]), torch.tensor([[1.0], [1.0]])]
    ours = [torch.tensor([3.0, 3.0]), torch.tensor([[1.0], [3.0]])]
    found = distill_features(views(torch.zeros(1), None, ours, theirs))
    last = math.exp(2 * DEPTH)  # a later block counts more
    assert float(found) == pytest.approx(FEATURE_WEIGHT * (1 / 25 + last * 4 / 2) / (1 + last))


def test_outputs_and_features_are_added():
    ours, theirs = (x - x.mean(1, keepdim=True) for x in (random(3, 5), random(3, 5, seed=1)))
    v = views(ours, theirs, [random(4)], [random(4, seed=1)], guidance=0.0)
    assert float(distill_outputs_and_features(v)) == pytest.approx(float(distill_outputs(v) + distill_features(v)))


@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 2, 2)])
def test_an_offset_that_all_outputs_share_counts_unless_they_are_class_scores(shape):
    theirs = random(*shape)
    v = views(theirs + 1, theirs, [theirs], [theirs])
    error = (theirs[0].numel() / theirs.flatten(1).square().sum(1)).mean()
    assert float(distill_outputs_and_features(v)) == pytest.approx(OUTPUT_WEIGHT * float(error), rel=1e-5)
    assert float(distill_outputs(v)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("guidance", [1.0, 0.25, 0.0])
@pytest.mark.parametrize(("classes", "shown"), [((0, 1, 2), 1.0), ((0, 2, 2), 2 / 3), ((1, 1, 1), 1 / 3)])
def test_outputs_and_features_give_way_to_probabilities_as_far_as_all_classes_are_shown(classes, shown, guidance):
    theirs = random(3, 3) + 9 * torch.eye(3)[list(classes)]
    v = views(random(3, 3, seed=2), theirs, [random(4)], [random(4, seed=1)], guidance=guidance)
    guide = distill_outputs(v) + distill_features(v)
    expected = (1 - shown * (1 - guidance)) * guide + shown * distill_probabilities(v)
    assert float(distill_auto(v)) == pytest.approx(float(expected))


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 4, 2, 2), (3, 6, 4)])
def test_outputs_that_are_no_rows_of_class_scores_are_not_taken_for_probabilities(shape):
    v = views(random(*shape), random(*shape, seed=1), [random(4)], [random(4, seed=1)], guidance=0.0)
    assert float(distill_auto(v)) == float(distill_outputs(v) + distill_features(v))


def test_the_gradient_of_the_relative_error_is_right():
    ours, theirs = random(3, 4, dtype=torch.float64).requires_grad_(), random(3, 4, seed=1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: _RelativeError.apply(x, theirs), ours)
    plain = (ours - theirs).square().sum() / theirs.square().sum()
    assert torch.allclose(_RelativeError.apply(ours, theirs), plain)
    loss = 3 * _RelativeError.apply(ours, theirs)
    assert torch.allclose(*(torch.autograd.grad(x, ours)[0] for x in (loss, 3 * plain)))


def test_features_in_bf16_are_summed_in_fp32():
    ours, theirs = (
        random(200, 200, dtype=torch.bfloat16).requires_grad_(),
        random(200, 200, seed=1, dtype=torch.bfloat16),
    )
    error = _RelativeError.apply(ours, theirs)
    plain = (ours.float() - theirs.float()).square().sum() / theirs.float().square().sum()
    assert error.dtype == torch.float32
    assert error.item() == pytest.approx(plain.item(), rel=5e-3)
    error.backward()
    assert ours.grad.dtype == torch.bfloat16
    expected = 2 * (ours - theirs).detach().float() / theirs.float().square().sum()
    assert torch.allclose(ours.grad.float(), expected, rtol=2e-2, atol=1e-9)


def test_features_that_are_all_zero_give_a_finite_error():
    ours = torch.zeros(4, requires_grad=True)
    error = _RelativeError.apply(ours, torch.zeros(4))
    error.backward()
    assert error.item() == 0.0
    assert ours.grad.eq(0).all()


def test_task_is_the_cross_entropy_with_the_labels():
    output = random(4, 5)
    target = torch.tensor([0, 4, 2, 2])
    expected = -output.log_softmax(1)[torch.arange(4), target].mean()
    for batch in ((None, target), {"x": 0, "label": target[:, None]}, [None, target.tolist()]):
        assert torch.allclose(task(views(output, batch=batch)), expected)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(4, 3), "needs labels, but the batches have none"),
        ((None, torch.tensor([0, 1, 2, 5])), "labels from 0 to 5, but the classifier has 5 outputs"),
        ((None, torch.tensor([-1, 1, 2, 4])), "labels from -1 to 4"),
        ((None, torch.tensor([0, 1])), r"got 2 for outputs of shape \(4, 5\)"),
        ((None, torch.rand(4)), "one integer per image"),
    ],
)
def test_task_without_usable_labels_is_a_data_error(batch, message):
    with pytest.raises(DataError, match=message):
        task(views(random(4, 5), batch=batch))


def blocks_of(model):
    return find_blocks(model, [name for name, module in model.named_modules() if kind_of(module)])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]),
        ("resnet50", [f"layer{i}.{j}" for i, n in enumerate((3, 4, 6, 3), 1) for j in range(n)]),
        ("mobilenet_v3_small", [f"features.{i}" for i in range(1, 12)]),
        (
            "densenet121",
            [
                f"features.denseblock{i}.denselayer{j}"
                for i, n in enumerate((6, 12, 24, 16), 1)
                for j in range(1, n + 1)
            ],
        ),
        ("googlenet", [f"inception{x}" for x in ("3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b")]),
        ("convnext_tiny", [f"features.{i}.{j}" for i, n in ((1, 3), (3, 3), (5, 9), (7, 3)) for j in range(n)]),
        ("swin_t", [f"features.{i}.{j}" for i, n in ((1, 2), (3, 2), (5, 6), (7, 2)) for j in range(n)]),
    ],
)
def test_the_blocks_of_known_networks_are_found(name, expected):
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    with torch.device("cpu" if name == "swin_t" else "meta"):
        model = getattr(torchvision.models, name)(**options)
    assert blocks_of(model) == expected


def test_the_blocks_of_a_timm_convnext_are_found():
    found = blocks_of(timm.create_model("convnext_atto"))
    assert found == [f"stages.{i}.blocks.{j}" for i, n in enumerate((2, 2, 6, 2)) for j in range(n)]


def test_a_network_without_repeated_blocks_is_matched_at_its_masked_layers():
    with torch.device("meta"):
        model = torchvision.models.vgg11()
    masked = [name for name, module in model.named_modules() if kind_of(module)][1:-1]
    assert find_blocks(model, masked) == masked


def test_a_block_of_which_less_than_two_layers_are_masked_does_not_count():
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    masked = ["layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer2.0.conv1", "layer2.0.conv2"]
    assert find_blocks(model, masked) == ["layer1.0", "layer2.0"]


def test_blocks_can_be_named_and_an_unknown_name_is_refused_with_the_known_ones():
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    assert named_blocks(model, ["layer3.?", "fc"]) == ["layer3.0", "layer3.1", "fc"]
    with pytest.raises(OptionError, match=r"features='layer9\.\*' matches no module; the modules are conv1, bn1"):
        named_blocks(model, ["layer1", "layer9.*"])


def test_watching_sees_outputs_in_the_order_in_which_they_run_and_leaves_no_hook():
    model = convnet()
    with watching(model, ["8", "0"]) as seen:
        model(images(2))
    assert [tuple(x.shape) for x in seen] == [(2, 8, 8, 8), (2, 16)]
    with pytest.raises(KeyError), watching(model, ["0"]):
        raise KeyError
    assert not any(module._forward_hooks for module in model.modules())


def test_objectives_by_name():
    assert resolve_objective("distill", "auto") is distill_auto
    assert resolve_objective("distill", "outputs+features") is distill_outputs_and_features
    assert resolve_objective("distill", "outputs") is distill_outputs
    assert resolve_objective("distill", "features") is distill_features
    assert resolve_objective("distill", "probabilities") is distill_probabilities
    assert resolve_objective("task", "outputs+features") is task
    assert resolve_objective(max, "outputs+features") is max
    with pytest.raises(OptionError, match=r"objective must be 'distill', 'task' or a function, got objective='distil'"):
        resolve_objective("distil", "auto")
    with pytest.raises(OptionError, match=r"match must be one of auto, outputs\+features, .*got match='output'"):
        resolve_objective("distill", "output")


def test_an_objective_of_ones_own_gets_views_of_both_networks():
    model, seen = convnet(), []

    def mine(v):
        seen.append(v)
        return (v.output - v.dense_output).square().mean()

    batch = (images(6), labels(6))
    learn(model, [batch], objective=mine, steps=2)
    v = seen[-1]
    assert isinstance(v, Views)
    assert v.batch is batch
    assert torch.equal(v.dense_output, model(images(6)))
    assert v.output.shape == (6, 5)
    assert v.output.requires_grad
    assert not v.dense_output.requires_grad
    assert [x.shape for x in v.features] == [x.shape for x in v.dense_features] == [(6, 8, 8, 8)] * 2 + [(6, 16)]


def test_named_features_are_what_an_objective_gets():
    seen = []

    def mine(v):
        seen.append(v)
        return v.features[0].square().mean()

    masks = learn(convnet(), [images(6)], objective=mine, features="4", steps=1)
    assert [tuple(x.shape) for x in seen[-1].features] == [(6, 8, 8, 8)]
    assert masks.recipe["blocks"] == ["4"]


def test_features_that_never_run_are_a_clear_error():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x

    with pytest.raises(HalveError, match="layers"):
        learn(Net().eval(), [torch.randn(4, 8)], features="layers", steps=1)
