import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

import halve
from halve.errors import ChangedWeightsWarning, DataError, HalveError, MaskError, ModelError
from tests.untouched import untouched


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ).eval()


def images(count=64, seed=1):
    return torch.randn(count, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


def trained(model, x):
    """The same model with the statistics of these images, as training on them leaves them."""
    model = copy.deepcopy(model).train()
    for norm in (model[1], model[4]):
        norm.momentum = 1.0
    with torch.no_grad():
        model(x)
    return model.eval()


def through(model, masks, x):
    """What each BatchNorm gets when all normalise with the batch's own statistics, by its name."""
    first = F.conv2d(x, model[0].weight.detach() * masks["0"].kept(), model[0].bias.detach())
    normed = F.relu(F.batch_norm(first, None, None, model[1].weight, model[1].bias, training=True)).detach()
    second = F.conv2d(normed, model[3].weight.detach() * masks["3"].kept(), model[3].bias.detach())
    return {"1": first, "4": second}


def corrected(model, masks, batches):
    """Means move by the difference between masked and dense, variances scale by their ratio."""
    everything = halve.prune(model, pattern="4:4")
    result = {}
    for name in ("1", "4"):
        norm = model.get_submodule(name)
        means, variances = [], []
        for kept in (masks, everything):
            seen = [through(model, kept, x)[name] for x in batches]
            means.append(sum(value.mean((0, 2, 3)) for value in seen) / len(seen))
            variances.append(sum(value.var((0, 2, 3)) for value in seen) / len(seen) + norm.eps)
        result[f"{name}.running_mean"] = norm.running_mean + means[0] - means[1]
        result[f"{name}.running_var"] = (norm.running_var + norm.eps) * variances[0] / variances[1] - norm.eps
    return result


@pytest.mark.parametrize("batches", [[images()], [images(), images(32, 2) * 2 + 1]], ids=["one batch", "two batches"])
def test_the_statistics_are_those_computed_by_hand(batches):
    model = trained(network(), images())
    masks = halve.prune(model)
    with untouched(model):
        result = halve.recalibrate(model, masks, batches)
    expected = corrected(model, masks, batches)
    assert result.statistics.keys() == expected.keys()
    for name, value in result.statistics.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def test_the_masks_stay_and_the_recipe_grows():
    model = network()
    masks = halve.prune(model)
    result = halve.recalibrate(model, masks, images(100))
    assert dict(result) == dict(masks)
    assert not masks.statistics
    assert result.recipe == {**masks.recipe, "recalibrated_on_images": 100}


def test_recalibrating_again_replaces_the_statistics():
    model = network()
    masks = halve.prune(model)
    once = halve.recalibrate(model, masks, images() + 5)
    again = halve.recalibrate(model, once, images())
    assert again == halve.recalibrate(model, masks, images())
    assert again != once


def test_recalibration_lifts_agreement_with_the_dense_model():
    model = trained(network(), images(200))
    masks = halve.prune(model, pattern="1:4")
    before = halve.evaluate(model, masks, images(200))
    after = halve.evaluate(model, halve.recalibrate(model, masks, images(200)), images(200))
    assert after.agreement > before.agreement + 0.1
    assert after.kl < before.kl


def test_a_mask_that_keeps_everything_moves_no_statistics_on_any_images():
    model = trained(network(), images())
    result = halve.recalibrate(model, halve.prune(model, pattern="4:4"), images(64, 3) * 7 + 2)
    for name, value in result.statistics.items():
        torch.testing.assert_close(value, model.state_dict()[name])


def test_on_the_images_that_it_was_trained_on_the_masked_models_own_statistics_come_out():
    model = trained(network(), images())
    masks = halve.prune(model)
    result = halve.recalibrate(model, masks, [images()])
    own = trained(halve.apply(model, masks), images())
    for name, value in result.statistics.items():
        torch.testing.assert_close(value, own.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_dropout_stays_off_while_statistics_are_measured():
    model = network()
    dropping = nn.Sequential(nn.Identity(), *model)
    dropping.insert(1, nn.Dropout(0.9))
    plain = nn.Sequential(nn.Identity(), nn.Identity(), *model)
    results = [halve.recalibrate(m.train(), halve.prune(m), [images()]) for m in (dropping, plain)]
    assert results[0] == results[1]


def test_a_model_without_batchnorm_has_nothing_to_recalibrate():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8, track_running_stats=False))
    with pytest.raises(ModelError, match="Sequential has nothing to recalibrate: no BatchNorm with running statistics"):
        halve.recalibrate(model, halve.prune(model), torch.randn(4, 8))


def test_one_value_per_channel_has_no_variance():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    masks, image = halve.prune(model), torch.randn(1, 4, 3, 3)
    with untouched(model), pytest.raises(HalveError, match=r"\(1, 4, 3, 3\)"):
        halve.recalibrate(model, masks, image)


def test_a_batchnorm_that_does_not_run_is_left_out():
    model = models.googlenet(weights=None, init_weights=False, aux_logits=True, num_classes=10)
    masks = halve.prune(model, include="inception4a.branch1.conv")
    x = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    statistics = halve.recalibrate(model, masks, [x]).statistics
    names = {f"{name}.running_mean" for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    left_out = {name for name in names if name not in statistics}
    assert left_out == {name for name in names if name.startswith("aux")}
    assert left_out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_recalibrated(dtype):
    half = network().to(dtype)
    masks = halve.prune(half)
    statistics = halve.recalibrate(half, masks, [images()]).statistics
    exact = halve.recalibrate(copy.deepcopy(half).float(), masks, [images()], on_changed="ignore").statistics
    for name, value in statistics.items():
        torch.testing.assert_close(value.float(), exact[name], rtol=0.05, atol=0.02)


def test_data_is_needed_and_checked():
    model = network()
    masks = halve.prune(model)
    for data in ([], [None], 3, torch.zeros(0, 4, 8, 8), torch.zeros(2, 5, 8, 8)):
        with untouched(model), pytest.raises(DataError):
            halve.recalibrate(model, masks, data)
    bad = images()
    bad[0] = float("inf")
    with untouched(model), pytest.raises(DataError, match="layer 1 gets NaN or infinite inputs"):
        halve.recalibrate(model, masks, bad)


def test_changed_weights_warn_raise_or_pass_as_asked():
    model = network()
    masks = halve.prune(model)
    with torch.no_grad():
        model[0].weight *= 1.5
    with pytest.warns(ChangedWeightsWarning, match="0 by about"):
        halve.recalibrate(model, masks, images())
    with pytest.raises(MaskError, match="changed"):
        halve.recalibrate(model, masks, images(), on_changed="error")
    halve.recalibrate(model, masks, images(), on_changed="ignore")


def test_masks_of_another_model_are_refused():
    other = nn.Sequential(*[nn.ReLU()] * 10, nn.Linear(8, 8), nn.LayerNorm(8))
    with pytest.raises(MaskError, match="another model: Sequential has no layer 10"):
        halve.recalibrate(network(), halve.prune(other), images())


def test_a_mask_that_keeps_everything_changes_no_statistic_by_a_bit():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, eps=1e-3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
    ).eval()
    model[1].running_mean.normal_()
    model[1].running_var.copy_(torch.logspace(-12, 3, 8))
    masks = halve.recalibrate(model, halve.prune(model, pattern="4:4"), torch.randn(64, 4, 8, 8))
    assert torch.equal(masks.statistics["1.running_mean"], model[1].running_mean)
    assert torch.equal(masks.statistics["1.running_var"], model[1].running_var)
