import copy
import itertools
import json

import pytest
import torch
from torch import nn

import halve
from halve.errors import DataError, ModelError, OptionError
from tests.untouched import untouched


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.ReLU(),
        nn.Linear(8, 6),
    ).eval()


def images(count=12):
    return torch.randn(count, 4, 4, 4, generator=torch.Generator().manual_seed(1))


def best_of_each_block(scores, kept, size):
    """Kept for scores (rows, columns) by trying every choice of every block."""
    result = torch.zeros(scores.shape, dtype=torch.bool)
    for row, start in itertools.product(range(scores.shape[0]), range(0, scores.shape[1], size)):
        block = scores[row, start : start + size]
        best = max(itertools.combinations(range(size), kept), key=lambda choice: sum(block[i].item() for i in choice))
        result[row, [start + i for i in best]] = True
    return result


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "1:2", "3:8"])
def test_magnitude_keeps_the_largest_weights_of_every_block(pattern):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 5), nn.LayerNorm(5))
    kept, size = map(int, pattern.split(":"))
    mask = halve.prune(model, pattern=pattern)["0"]
    assert torch.equal(mask.kept(), best_of_each_block(model[0].weight.detach().abs(), kept, size))


def test_the_blocks_of_a_convolution_run_along_channels_at_one_kernel_position():
    model = network()
    kept = halve.prune(model)["0"].kept()
    weight = model[0].weight.detach()
    for y, x in itertools.product(range(3), range(3)):
        assert torch.equal(kept[:, :, y, x], best_of_each_block(weight[:, :, y, x].abs(), 2, 4))


def test_the_flat_order_cuts_each_row_as_it_lies_in_memory():
    model = network()
    kept = halve.prune(model, order="flat", include="0")["0"].kept()
    expected = best_of_each_block(model[0].weight.detach().abs().reshape(8, 36), 2, 4)
    assert torch.equal(kept.reshape(8, 36), expected)


def test_the_blocks_of_a_transposed_convolution_run_along_its_input_channels():
    model = network()
    kept = halve.prune(model)["4"].kept()
    weight = model[4].weight.detach()
    for y, x in itertools.product(range(2), range(2)):
        assert torch.equal(kept[:, :, y, x].T, best_of_each_block(weight[:, :, y, x].T.abs(), 2, 4))


def test_wanda_keeps_what_its_formula_says_in_every_kind_of_layer():
    model, x = network(), images()
    masks = halve.prune(model, "wanda", x, also="3")
    assert list(masks) == ["0", "3", "4", "7"]
    seen, hooks = {}, []
    for name in masks:
        layer = model.get_submodule(name)
        hooks.append(layer.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].double()})))
    with torch.no_grad():
        model(x)
    norms = seen["7"].norm(dim=0)
    assert torch.equal(masks["7"].kept(), best_of_each_block(model[7].weight.detach().abs() * norms, 2, 4))
    deconv = seen["4"].square().sum((0, 2, 3)).sqrt()  # without padding every pixel meets every kernel position
    for y, x in itertools.product(range(2), range(2)):
        score = model[4].weight.detach()[:, :, y, x].T.abs() * deconv
        assert torch.equal(masks["4"].kept()[:, :, y, x].T, best_of_each_block(score, 2, 4))
    for y, x in itertools.product(range(3), range(3)):
        window = seen["3"][:, :, y : y + 2, x : x + 2].square().sum((0, 2, 3)).sqrt()
        per_row = window.reshape(2, 1, 4).expand(2, 4, 4).reshape(8, 4)
        score = model[3].weight.detach()[:, :, y, x].abs() * per_row
        assert torch.equal(masks["3"].kept()[:, :, y, x], best_of_each_block(score, 2, 4))


def test_wanda_leaves_out_channels_that_are_always_zero():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(5, 8)
    x[:, [0, 1, 4, 5]] = 0
    assert halve.prune(model, "wanda", x)["0"].kept()[:, [2, 3, 6, 7]].all()


@pytest.mark.parametrize("score", ["magnitude", "wanda", "reconstruct"])
@pytest.mark.parametrize("kind", [list, iter])
def test_a_layer_that_the_data_never_runs_is_not_masked_and_is_listed(score, kind):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    data, first = [torch.randn(3, 8), torch.randn(3, 8)], {"forward": lambda m, x: m[0](x)}
    masks = halve.prune(model, score, kind(data), **first)
    assert list(masks) == ["0"]
    assert masks.recipe["not_masked"] == {
        "1": "did not run on the data (also='1' masks it)",
        "3": "did not run on the data (also='3' masks it)",
    }
    assert masks["0"] == halve.prune(model, score, kind(data), include="0", **first)["0"]  # no batch was lost


def test_a_layer_that_does_not_run_is_masked_if_it_is_named_by_its_magnitudes():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    masks = halve.prune(model, "wanda", [torch.randn(3, 8)], forward=lambda m, x: m[0](x), also="1")
    assert torch.equal(masks["1"].kept(), halve.prune(model)["1"].kept())
    assert list(masks) == ["0", "1"]


def test_random_is_reproducible_by_its_seed_and_leaves_the_global_generator_alone():
    model = network()
    state = torch.get_rng_state()
    first, again, other = (halve.prune(model, "random", seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.difference(other) > 0.5
    assert torch.equal(torch.get_rng_state(), state)
    assert first.recipe["seed"] == 3


def test_a_function_scores_by_name_and_weight_and_cannot_reach_the_model():
    model = network()
    seen = {}

    def smallest(name, weight):
        seen[name] = weight.clone()
        score = -weight.abs()
        weight.zero_()
        return score

    with untouched(model):
        masks = halve.prune(model, smallest)
    assert list(seen) == ["0", "4", "7"]
    assert torch.equal(seen["7"], model[7].weight)
    assert torch.equal(masks["7"].kept(), best_of_each_block(-model[7].weight.detach().abs(), 2, 4))
    assert masks.recipe["score"] == "smallest"


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda name, weight: weight[:1], r"\(8, 4, 3, 3\) for layer 0, got shape \(1, 4, 3, 3\)"),
        (lambda name, weight: None, "layer 0, got NoneType"),
        (lambda name, weight: weight.numpy(), "layer 0, got ndarray"),
        (lambda name, weight: weight / 0, "NaN or infinity for layer 0"),
        (lambda name, weight: weight * float("nan"), "NaN or infinity for layer 0"),
    ],
)
def test_a_function_that_gives_no_scores_is_refused_by_the_layers_name(result, message):
    model = network()
    with untouched(model), pytest.raises(OptionError, match=message):
        halve.prune(model, result)


def test_a_function_may_be_any_callable_and_score_with_gradients_or_integers():
    class Ranks:
        __hash__ = None

        def __call__(self, name, weight):
            return weight.flatten().argsort().argsort().reshape(weight.shape)

    model = network()
    assert halve.prune(model, lambda name, weight: weight.requires_grad_().abs()) == halve.prune(model)
    assert halve.prune(model, Ranks()).recipe["score"] == "function"


def test_an_unknown_score_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match="unknown score 'wanda2'; use magnitude, wanda, reconstruct, random"):
        halve.prune(network(), "wanda2")


def test_what_needs_data_says_so_before_any_work():
    with pytest.raises(DataError, match=r"score 'wanda' needs data"):
        halve.prune(network(), "wanda")
    with pytest.raises(DataError, match="recalibrate=True needs data"):
        halve.prune(network(), recalibrate=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_can_be_excluded(bad):
    model = network()
    with torch.no_grad():
        model[4].weight[0, 0, 0, :] = bad
    with pytest.raises(ModelError, match=r"layer 4 has 2 NaN or infinite weights.*exclude='4'"):
        halve.prune(model)
    assert list(halve.prune(model, exclude="4")) == ["0", "7"]


def test_nothing_to_mask_lists_the_reasons():
    with pytest.raises(ModelError, match=r"Sequential has no layer to mask; 0: 3 input channels.*1: output head"):
        halve.prune(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)))
    with pytest.raises(ModelError, match="ReLU has no layer to mask; it has no layers"):
        halve.prune(nn.ReLU())


def test_padded_rows_keep_what_they_can():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(9, 8, 1), nn.BatchNorm2d(8))
    masks = halve.prune(model, remainder="pad")
    kept, weight = masks["0"].kept(), model[0].weight.detach().abs()
    assert kept.sum(1).eq(2).all()
    assert (weight.argmin(1, keepdim=True) == (~kept).int().argmax(1, keepdim=True)).all()
    assert masks["2"].kept()[:, 8].all()
    assert masks["2"].density == pytest.approx(5 / 9)


def test_recalibrated_statistics_travel_with_the_masks_and_are_put_on():
    model, x = network(), images() * 3 + 1
    with untouched(model):
        masks = halve.prune(model, "wanda", x, recalibrate=True)
    assert sorted(masks.statistics) == ["1.running_mean", "1.running_var"]
    assert masks.recipe["recalibrated_on_images"] == masks.recipe["images"] == 12
    sparse = halve.apply(model, masks)
    assert torch.equal(sparse[1].running_mean, masks.statistics["1.running_mean"])
    assert not torch.equal(sparse[1].running_mean, model[1].running_mean)
    assert masks == halve.recalibrate(model, halve.prune(model, "wanda", x), x)


def test_a_one_shot_iterator_is_enough_for_one_pass_and_a_clear_error_for_two():
    model = network()
    assert halve.prune(model, "wanda", iter([images()])) == halve.prune(model, "wanda", [images()])
    with untouched(model), pytest.raises(DataError, match=r"exhausted.*DataLoader or a list"):
        halve.prune(model, "wanda", iter([images()]), recalibrate=True)


@pytest.mark.parametrize(
    "batches",
    [
        [images()],
        [images()[:5], images()[5:]],
        [(images(), torch.zeros(12))],
        [{"pixel_values": images(), "label": torch.zeros(12)}],
        [[{"data": images(), "label": torch.zeros(12, 1)}]],
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images()), batch_size=7),
    ],
    ids=["list", "two batches", "tuples", "dicts", "dali", "loader"],
)
def test_every_kind_of_batch_gives_the_same_masks(batches):
    model = network()
    masks = halve.prune(model, "wanda", batches)
    assert masks == halve.prune(model, "wanda", images())
    assert masks.recipe["images"] == 12


def test_forward_runs_the_model_on_unusual_batches():
    model = network()
    masks = halve.prune(model, "wanda", [{"a": images()}], recalibrate=True, forward=lambda m, batch: m(batch["a"]))
    assert masks == halve.prune(model, "wanda", images(), recalibrate=True)
    assert masks.recipe["images"] == masks.recipe["recalibrated_on_images"] == 12


def test_progress_sees_data_and_layers():
    seen = []

    def progress(items, description):
        for item in items:
            seen.append(description)
            yield item

    halve.prune(network(), "wanda", images(), recalibrate=True, progress=progress)
    assert seen == ["activations", *["layers"] * 3, "BatchNorm statistics"]


def test_the_recipe_is_plain_json():
    model = network()
    patterns = {"0": halve.Pattern("1:4"), "4": None, "*": "2:4"}
    masks = halve.prune(model, "random", pattern=patterns, exclude=("7", "8*", "9")[::2], seed=5)
    recipe = json.loads(json.dumps(dict(masks.recipe)))
    assert recipe == dict(masks.recipe)
    assert recipe["selection"] == {"pattern": {"0": "1:4", "4": None, "*": "2:4"}, "exclude": ["7", "9"]}
    assert recipe["score"] == "random"
    assert recipe["model"] == "torch.nn.modules.container.Sequential"
    assert recipe["halve"] == halve.__version__


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_precisions_are_pruned_in_their_own_numbers(dtype):
    model = network().to(dtype)
    with untouched(model):
        masks = halve.prune(model, "wanda", images(), recalibrate=True)
    expected = best_of_each_block(model[0].weight.detach().abs()[:, :, 1, 1], 2, 4)
    assert torch.equal(halve.prune(model)["0"].kept()[:, :, 1, 1], expected)
    assert halve.verify(halve.apply(model, masks), masks).ok
    assert halve.apply(model, masks)[0].weight.dtype == dtype


def test_large_and_tiny_float64_weights_are_still_told_apart():
    model = nn.Sequential(nn.Linear(4, 1, bias=False), nn.LayerNorm(1)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1e-60, 2e-60, 4e-60, 3e-60]], dtype=torch.float64))
    assert halve.prune(model)["0"].kept().tolist() == [[False, False, True, True]]


def test_images_of_a_wrong_shape_are_a_data_error_with_the_shape():
    model = network()
    with untouched(model), pytest.raises(DataError, match=r"\(2, 3, 4, 4\)"):
        halve.prune(model, "wanda", [torch.zeros(2, 3, 4, 4)])


@pytest.mark.parametrize("data", [[], torch.zeros(0, 4, 4, 4), 7, [images().int()], [None], ["photo.jpg"]])
def test_data_without_images_is_a_data_error(data):
    model = network()
    with untouched(model), pytest.raises(DataError):
        halve.prune(model, "wanda", data)


def test_images_with_nan_are_a_data_error_in_wanda_and_in_recalibration():
    model, x = network(), images()
    x[3, 2, 1, 0] = float("nan")
    with untouched(model), pytest.raises(DataError, match="layer 0 gets NaN"):
        halve.prune(model, "wanda", x)
    with untouched(model), pytest.raises(DataError, match="layer 1 gets NaN"):
        halve.prune(model, recalibrate=True, data=x)


@pytest.mark.parametrize("training", [True, False])
def test_no_call_touches_the_model_or_drops_its_hooks(training):
    model = network().train(training)
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[7].register_forward_pre_hook(lambda *_: calls.append("pre"))
    with untouched(model):
        masks = halve.prune(model, "wanda", images(), recalibrate=True)
        halve.apply(model, masks)
        halve.verify(model, masks)
        halve.recalibrate(model, masks, images())
        halve.evaluate(model, masks, images())
    calls.clear()
    model(images())
    assert calls == ["forward", "pre"]
    handle.remove()
    model(images())
    assert calls == ["forward", "pre", "pre"]


def test_the_model_stays_as_it_is_when_forward_raises_in_the_middle():
    model = network().train()
    count = itertools.count()

    def fail(m, batch):
        if next(count) == 1:
            raise KeyboardInterrupt
        return m(batch)

    for call in (
        lambda: halve.prune(model, "wanda", [images(), images()], forward=fail),
        lambda: halve.recalibrate(model, halve.prune(model), [images(), images()], forward=fail),
        lambda: halve.evaluate(model, None, [images(), images()], forward=fail),
    ):
        count = itertools.count()
        with untouched(model), pytest.raises(KeyboardInterrupt):
            call()


def test_ties_go_to_the_lower_position():
    model = nn.Sequential(nn.Linear(8, 2), nn.LayerNorm(2))
    nn.init.ones_(model[0].weight)
    assert halve.prune(model)["0"].kept().tolist() == [[True, True, False, False] * 2] * 2


def test_equal_models_give_equal_masks():
    model = network()
    assert halve.prune(model, "wanda", images()) == halve.prune(copy.deepcopy(model), "wanda", images())
