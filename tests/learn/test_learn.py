import json

import pytest
import torch
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halve
from halve import machine
from halve.errors import DataError, LearningError, LearningWarning, MaskError, ModelError, OptionError
from halve.learn.reporting import Report
from halve.machine import device_names
from halve.masks.layout import unpermuted
from halve.select.speed_plan import LayerSpeed, SpeedPlan
from halve.sources.digits import digits, train_digits
from tests.tiny import convnet, images, labels, learn, loader
from tests.untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore:the quality of the masks will be unknown")  # of so few images


@pytest.fixture(scope="module")
def trained():
    """A small network that knows its digits, some of them to learn from and some to judge by."""
    model = train_digits(epochs=3)
    return model, digits("train").tensors[0][:256], digits("test").tensors


def batches(x):
    return DataLoader(TensorDataset(x), 32, shuffle=True, generator=torch.Generator().manual_seed(0))


BF16 = {"precision": "bfloat16", "match": "outputs", "validation": False}


@pytest.mark.parametrize(
    ("flags", "dtype"), [({"avx512_bf16"}, torch.bfloat16), ({"amx_bf16"}, torch.bfloat16), ({"avx2"}, torch.float32)]
)
def test_cpus_with_instructions_for_bfloat16_learn_in_it(monkeypatch, flags, dtype):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset(flags))
    seen = set()

    def look(views):
        seen.add(views.output.dtype)
        return views.output.float().square().mean()

    options = {"objective": look, "steps": 2, "validation": False, "permute": False}
    masks = halve.learn(convnet(), images(8), **options)
    assert seen == {dtype}
    assert masks.recipe["precision"] == str(dtype).removeprefix("torch.")
    seen.clear()
    halve.learn(convnet(), images(8), precision="float32", **options)
    assert seen == {torch.float32}


def test_depthwise_convolutions_stay_in_float32_on_cpus(monkeypatch):
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1), nn.Flatten()).eval()
    masks = halve.learn(model, images(8), steps=2, validation=False, permute=False, match="outputs")
    assert masks.recipe["precision"] == "float32"


@pytest.mark.parametrize("options", [{}, BF16], ids=["defaults", "bf16"])
def test_learned_masks_beat_magnitude_by_far_and_the_loss_falls(trained, options):
    model, x, test = trained
    losses = []
    with untouched(model):
        masks = halve.learn(
            model,
            batches(x),
            steps=35,
            report=lambda r: losses.append(r.loss) if isinstance(r, Report) else None,
            **options,
        )
    learned, magnitude = (halve.evaluate(model, m, [test]) for m in (masks, halve.prune(model)))
    assert learned.agreement > 0.8
    assert learned.agreement > magnitude.agreement + 0.2
    assert learned.kl < magnitude.kl / 5
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert halve.verify(halve.apply(model, masks), masks).ok


@pytest.mark.parametrize("score", ["magnitude", "random"])
def test_masks_to_start_from_get_better_in_a_short_run(trained, score):
    model, x, test = trained
    start = halve.prune(model, score)
    masks = learn(model, batches(x), steps=40, start=start, validation=False)
    before, after = (halve.evaluate(model, m, [test]).kl for m in (start, masks))
    assert after < before / 3


def test_labels_can_be_learned_from(trained):
    model, _, test = trained
    data = DataLoader(TensorDataset(*digits("train").tensors), 64)
    masks = learn(model, data, objective="task", steps=25)
    assert halve.evaluate(model, masks, [test]).top1 > halve.evaluate(model, halve.prune(model), [test]).top1 + 0.3


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": "1:4"},
        {"pattern": {"0": "1:2", "3": "2:8", "*": "2:4"}},
        {"order": "flat"},
        {"remainder": "pad", "pattern": "2:3", "also": "10"},
        {"hard": False, "final": "sample", "schedule": "constant"},
        {"temperature": (4.0, 0.5), "match": "features", "features": ["1", "4"]},
        {"include": "3", "seed": 7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_masks_are_legal_and_fit_the_model(options):
    model = convnet()
    with untouched(model):
        masks = learn(model, loader(), steps=6, **options)
    selection = {k: v for k, v in options.items() if k in ("pattern", "order", "remainder", "also", "include")}
    expected = halve.prune(model, **selection)
    assert list(masks) == list(expected)
    assert [(m.pattern, unpermuted(m.layout), m.density) for m in masks.values()] == [
        (m.pattern, m.layout, m.density) for m in expected.values()
    ]
    assert [m.fingerprint.dense for m in masks.values()] == [m.fingerprint.dense for m in expected.values()]
    assert halve.verify(halve.apply(model, masks), masks).ok
    assert json.loads(json.dumps(masks.recipe)) == masks.recipe


def test_masks_are_saved_and_loaded_with_their_recipe(tmp_path):
    masks = learn(convnet(), loader(), steps=2, pattern="1:4", exclude=["8"])
    read = halve.load(masks.save(tmp_path / "net.masks.safetensors"))
    assert read == masks
    assert read.recipe == masks.recipe
    assert (read.recipe["method"], read.recipe["steps"], read.recipe["seed"]) == ("learn", 2, 0)
    assert read.recipe["selection"] == {"pattern": "1:4", "exclude": ["8"]}
    assert read.recipe["model"] == "torch.nn.modules.container.Sequential"


def test_two_runs_are_equal_and_another_seed_differs():
    state = torch.get_rng_state()
    first = halve.learn(convnet(), loader(), steps=15)
    torch.manual_seed(99)
    again = halve.learn(convnet(), loader(), steps=15)
    torch.set_rng_state(state)
    one, other = (halve.learn(convnet(), loader(), steps=15, seed=seed, permute=False) for seed in (0, 1))
    assert first == again
    assert one.difference(other) > 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_stays_as_it_is_and_keeps_its_hooks(training):
    model, calls = convnet().train(training), []
    handle = model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[8].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model(images(2)).sum().backward()
    with untouched(model):
        halve.learn(model, loader(), steps=3)
    calls.clear()
    model(images(2))
    handle.remove()
    model(images(2))
    assert calls == ["forward", "pre", "pre"]


@pytest.mark.parametrize(
    ("training", "failure", "raised"), [(True, KeyError, LearningError), (False, SystemExit, SystemExit)]
)
def test_the_model_stays_as_it_is_when_something_raises(training, failure, raised):
    model = convnet().train(training)

    def report(what):
        if getattr(what, "step", 0) == 2:
            raise failure

    with untouched(model), pytest.raises(raised):
        learn(model, loader(), steps=3, report=report)
    with untouched(model), pytest.raises(DataError, match=r"\(2, 3, 8, 8\)"):
        learn(model, [torch.zeros(2, 3, 8, 8)], steps=3)


def test_in_train_mode_the_same_is_learned_as_in_eval_mode():
    model = nn.Sequential(convnet(), nn.Dropout(0.5)).eval()
    expected = learn(model, loader(), steps=5)
    assert learn(model.train(), loader(), steps=5) == expected


def test_one_image_is_enough_for_a_batch():
    masks = learn(convnet(), [images(1)], steps=3)
    assert masks.recipe["steps_done"] == 3


@pytest.mark.parametrize(
    "batch",
    [
        images(6),
        (images(6), labels(6)),
        {"pixel_values": images(6)},
        [{"data": images(6), "label": labels(6)[:, None]}],
    ],
    ids=["tensor", "tuple", "dict", "dali"],
)
def test_every_kind_of_batch_gives_the_same_masks(batch):
    assert learn(convnet(), [batch], steps=4) == learn(convnet(), [images(6)], steps=4)


def test_a_small_step_leaves_the_mask_that_it_starts_from():
    model = convnet()
    for score in ("random", "magnitude"):
        start = halve.prune(model, score)
        assert learn(model, loader(), steps=2, lr=1e-6, start=start) == start
    mixed = halve.prune(model, "random", pattern={"0": "1:4", "3": "3:7", "*": "1:2"}, remainder="pad", seed=3)
    options = {"pattern": {"0": "1:4", "3": "3:7", "*": "1:2"}, "remainder": "pad"}
    masks = learn(model, loader(), steps=1, lr=1e-6, start=mixed, **options)
    assert all(torch.equal(masks[name].kept(), mixed[name].kept()) for name in mixed)  # virtual places may differ


@pytest.mark.parametrize("permute", [True, False])
@pytest.mark.parametrize("score", ["magnitude", "random", "wanda"])
def test_a_small_step_leaves_the_score_that_it_starts_from(score, permute):
    model = convnet()
    expected = halve.prune(model, score, images(), seed=4, permute=permute)
    learned = halve.learn(model, images(), steps=1, lr=1e-6, start=score, seed=4, permute=permute)
    assert learned == expected
    assert learned.moves == expected.moves
    assert learned.recipe["start"] == score


def test_wanda_and_learning_can_both_run_over_a_loader():
    masks = learn(convnet(), loader(), steps=3, start="wanda")
    assert masks == learn(convnet(), loader(), steps=3, start="wanda")


def test_the_random_start_of_the_paper_depends_on_the_seed():
    first, again, other = (learn(convnet(), loader(), steps=1, lr=1e-6, start="glorot", seed=s) for s in (0, 0, 1))
    assert first == again
    assert first.difference(other) > 0.5
    assert first.difference(halve.prune(convnet())) > 0.5


@pytest.mark.parametrize("made", [{"exclude": "3"}, {"also": "10"}], ids=["fewer layers", "the head too"])
def test_the_layers_of_the_masks_to_start_from_are_masked_again(made):
    model = convnet()
    start = halve.prune(model, **made)
    masks = learn(model, loader(), steps=2, lr=1e-6, start=start)
    assert masks == start
    assert masks.recipe["not_masked"] == dict.fromkeys({"3", "10"} - start.keys(), "not masked by start=")
    assert list(halve.select(model, **masks.recipe["selection"]).not_masked) == list(masks.recipe["not_masked"])
    assert list(learn(model, loader(), steps=1, start=halve.prune(model), exclude="3")) == ["0", "8"]


def test_a_plan_masks_those_layers_of_the_start_where_a_mask_pays():
    model = convnet()
    shapes = {"0": (8, 4, 3, 3), "3": (8, 8, 3, 3), "8": (16, 32)}
    layers = {name: LayerSpeed(shape, "", 1.0, 2.0 if name == "8" else 0.5) for name, shape in shapes.items()}
    plan = SpeedPlan(layers, device_names()[-1], "float32", 8, (4, 8, 8), 5.0, 4.0, 3.0)
    assert list(learn(model, loader(), steps=1, start=halve.prune(model, plan=plan))) == ["0", "3"]
    assert list(learn(model, loader(), steps=1, start=halve.prune(model), plan=plan)) == ["0", "3"]
    assert list(learn(model, loader(), steps=1, start=halve.prune(model, exclude="3"), plan=plan)) == ["0"]


def test_a_start_that_does_not_fit_is_refused_by_the_layers_name():
    model = convnet()
    for start in (
        halve.prune(model, pattern={"3": "1:4", "*": "2:4"}),
        halve.prune(model, order="flat", include=["0", "3"]),
    ):
        with untouched(model), pytest.raises(MaskError, match=r"start= has no 2:4 mask that fits layer \d"):
            learn(model, loader(), steps=1, start=start)
    fewer = halve.prune(model, exclude="3")
    with pytest.raises(MaskError, match=r"start= has no 2:4 mask that fits layer 3"):
        learn(model, loader(), steps=1, start=fewer, include=["0", "3"])
    with pytest.raises(MaskError, match=r"the masks are for another model: Sequential has no layer 99"):
        learn(model, loader(), steps=1, start=halve.MaskSet({"99": fewer["0"]}))
    with pytest.raises(OptionError, match=r"unknown start 'magnitud'; use magnitude, .*glorot, a MaskSet"):
        learn(model, loader(), steps=1, start="magnitud")


def test_a_start_by_a_function_can_be_saved(tmp_path):
    model, asked = convnet(), []

    def score(name, w):
        asked.append(name)
        return w.abs()

    options = {"steps": 1, "lr": 1e-6, "run_state": tmp_path / "run", "save_every": 0}
    masks = halve.learn(model, loader(), start=score, **options)
    assert asked == ["0", "3", "8"]  # once for each layer, whether or not orders are looked for
    assert masks == halve.prune(model, score, permute=True, example=images())
    masks.save(tmp_path / "net.masks.safetensors")


class Collecting(GeneralTracker):
    name = "collecting"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self):
        super().__init__()
        self.config, self.lines, self.finished = None, [], False

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **_):
        self.lines.append((step, values))

    def finish(self):
        self.finished = True


def test_a_tracker_of_accelerate_gets_settings_and_values():
    tracker = Collecting()
    masks = learn(convnet(), loader(), steps=12, trackers=[tracker])
    assert tracker.config["lr"] == 0.07
    assert [step for step, _ in tracker.lines] == [10, 12]
    assert all(values.keys() == {"loss", "entropy", "changed", "lr", "images_per_s"} for _, values in tracker.lines)
    assert tracker.finished
    assert masks == learn(convnet(), loader(), steps=12)


def test_a_tracker_is_finished_when_learning_fails():
    tracker = Collecting()
    with pytest.raises(halve.HalveError, match="NaN"):
        learn(convnet(), [images(4) * float("nan")], steps=3, trackers=[tracker])
    assert tracker.finished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision must be one of auto, float32, bfloat16, got 'fp8'"),
        ({"objective": "distil"}, "distill"),
        ({"features": "layer9"}, "'layer9' matches no module"),
        ({"pattern": "5:4"}, "5:4"),
        ({"include": "nothing"}, "matches no layer"),
        ({"kinds": ["conv_transpose"]}, "no layer to mask"),
    ],
)
def test_mistakes_are_halves_own_errors_and_touch_nothing(options, message):
    model = convnet()
    with untouched(model), pytest.raises(halve.HalveError, match=message):
        learn(model, loader(), steps=1, **options)


def test_weights_that_are_not_finite_are_named():
    model = convnet()
    with torch.no_grad():
        model[3].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"layer 3 has 1 NaN"):
        learn(model, loader(), steps=1)


def test_labels_that_are_missing_or_outside_are_data_errors():
    with pytest.raises(DataError, match="needs labels"):
        learn(convnet(), [images(4)], objective="task", steps=1)
    with pytest.raises(DataError, match="labels from 0 to 5, but the classifier has 5"):
        learn(convnet(), [(images(6), torch.arange(6))], objective="task", steps=1)


def test_an_iterator_is_used_up_by_wanda():
    with pytest.raises(DataError, match=r"has no batches.*iterator that is already exhausted"):
        learn(convnet(), iter([images(4)]), start="wanda", steps=2)


def test_learning_under_no_grad_works_all_the_same():
    expected = learn(convnet(), loader(), steps=2)
    with torch.no_grad():
        assert learn(convnet(), loader(), steps=2) == expected


def test_an_interrupted_run_without_a_run_state_says_how_it_could_be_resumed():
    def report(what):
        raise KeyboardInterrupt

    with pytest.warns(LearningWarning, match=r"interrupted after 0 steps; pass run_state=FILE"):
        masks = halve.learn(convnet(), loader(), steps=2, report=report)
    assert masks == halve.prune(convnet(), permute=True, example=images())


def test_learning_works_in_inference_mode_and_on_images_made_in_it():
    model, plain = convnet(), learn(convnet(), [images()], steps=3)
    with torch.inference_mode():
        made = [images() + 0]
        assert learn(model, made, steps=3) == plain
    assert learn(model, made, steps=3) == plain


@pytest.mark.parametrize("value", [lambda views: views.output.mean(1), lambda views: "low"], ids=["vector", "text"])
def test_an_objective_that_gives_no_number_is_named(value):
    with pytest.raises(LearningError, match="must return a tensor with one element, got a"):
        learn(convnet(), [images()], steps=3, objective=value)
