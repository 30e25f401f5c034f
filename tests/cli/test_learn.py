import dataclasses
import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import halve as library
from halve.cli import app
from halve.cli.learn import PYTHON_ONLY
from halve.cli.signature import documented
from halve.errors import ModelError
from halve.learn import initialization
from halve.learn.held_back import hold_back
from halve.learn.settings import Settings
from halve.machine import device_names
from halve.select.select import SelectOptions
from halve.select.speed_plan import LayerSpeed, SpeedPlan
from halve.sources.data import load_data
from halve.sources.models import load_model
from halve.sources.weights import save_state
from tests.pictures import class_folders, encoded, tar_of
from tests.processes import environment

FAST = ("--steps", "4", "--batch", "8")


@pytest.fixture
def learned(halve, net):
    halve("learn", *net, "--data", "photos", *FAST)
    return library.load("net.masks.safetensors")


def test_masks_are_learned_beside_the_checkpoint_and_verify(halve, net, learned, folder):
    assert learned.recipe["method"] == "learn"
    assert learned.recipe["steps_done"] == 4
    assert learned.recipe["data"] == "photos"
    halve("apply", *net, "--masks", "net.masks.safetensors", "--out", "sparse.safetensors")
    halve("verify", net[0], "--weights", "sparse.safetensors", "--masks", "net.masks.safetensors")
    assert not list(folder.glob("*.learning.safetensors"))


def test_a_person_sees_an_estimate_progress_and_the_result(halve, net):
    result = halve("learn", *net, "--data", "photos", *FAST)
    assert "4 steps, about" in result.err
    assert "step 4 of 4: loss" in result.err
    assert "images/s" in result.err
    assert "net.masks.safetensors: " in result.out
    assert "50.0 % kept" in result.out


def test_json_stands_alone_on_standard_output(halve, net):
    result = halve("learn", *net, "--data", "photos", *FAST, "--log", "run.jsonl", "--json")
    assert result.json["steps_done"] == 4
    assert result.json["ended"] == "finished"
    lines = [json.loads(line) for line in Path("run.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 4
    assert {"loss", "entropy", "changed", "images_per_s"} <= lines[-1].keys()


def test_channel_orders_are_looked_for_and_what_they_gained_is_told(halve, net):
    result = halve("learn", *net, "--data", "photos", *FAST)
    assert "channel orders for 2 layers: share of the score that is kept " in result.out
    assert "channel orders" not in halve("learn", *net, "--data", "photos", *FAST, "--no-permute").out
    told = halve("learn", *net, "--data", "photos", *FAST, "--permute", "--permute-seconds", "9", "--json").json
    assert told["permute"]["layers"] == 2


def test_a_network_that_keeps_its_order_is_learned_with_a_note(halve, net, monkeypatch):
    def refuse(*_, **__):
        raise ModelError("it has no structure")

    monkeypatch.setattr(initialization, "permute", refuse)
    result = halve("learn", *net, "--data", "photos", *FAST)
    assert "note: no channel orders: it has no structure" in result.err
    assert "50.0 % kept" in result.out
    told = halve("learn", *net, "--data", "photos", *FAST, "--json").json
    assert told["not_permuted"] == "it has no structure"
    assert "no structure" in halve("learn", *net, "--data", "photos", *FAST, "--permute", code=2).err


def test_learning_goes_on_from_a_mask_file(halve, net, learned):
    more = (
        "--data",
        "photos",
        *FAST,
        "--start",
        "net.masks.safetensors",
        "--lr",
        "1e-6",
        "--out",
        "more.masks.safetensors",
    )
    halve("learn", *net, *more)
    assert library.load("more.masks.safetensors").difference(learned) == 0


def test_masks_of_few_layers_are_updated_and_keep_their_channel_orders_without_a_search(halve, net):
    halve("learn", *net, "--data", "photos", *FAST, "--exclude", "body", "--out", "few.masks.safetensors")
    first = library.load("few.masks.safetensors")
    more = ("--data", "photos", *FAST, "--lr", "1e-6", "--start", "few.masks.safetensors")
    shown = halve("learn", *net, *more)
    again = library.load("net.masks.safetensors")
    assert (list(first), again.difference(first)) == (["point"], 0)
    assert again.moves == first.moves != {}
    assert "channel orders" not in shown.out
    assert "permute" not in halve("learn", *net, *more, "--json").json


def test_a_mask_file_to_start_from_that_does_not_exist_is_told(halve, net):
    for name in ("nothere.masks.safetensors", "masks/nothere"):
        assert "no such file" in halve("learn", *net, "--data", "photos", *FAST, "--start", name, code=2).err


def test_the_papers_recipe_masks_flat_convolutions_only(halve, net):
    halve("learn", *net, "--data", "photos", *FAST, "--preset", "paper")
    masks = library.load("net.masks.safetensors")
    assert {mask.layout.order for mask in masks.values()} == {"flat"}
    assert "stem" in masks
    assert "head" not in masks
    assert masks.recipe["objective"] == "task"


def test_a_budget_for_accuracy_is_kept_and_told(halve, net):
    options = ("--data", "photos", *FAST, "--max-drop", "1.0", "--drop-data", "photos")
    told = halve("learn", *net, *options, "--json").json
    assert (told["drop"] <= 1.0, told["drop_images"], told["left_dense"]) == (True, 12, {})
    shown = halve("learn", *net, *options).out
    assert f"drop of {100 * told['drop']:.2f} % on 12 images; no layer is left dense" in shown


def test_with_a_plan_the_speed_is_estimated(halve, sure, many):
    shapes = {"body": (16, 8, 3, 3), "point": (16, 16, 1, 1)}
    layers = {name: LayerSpeed(shape, "", 1.0, 0.5) for name, shape in shapes.items()}
    SpeedPlan(layers, device_names()[-1], "float32", 8, (3, 8, 8), 5.0, 4.0, 2.0).save("plan.json")
    options = ("--data", many, *QUICK, "--lr", "1e-6", "--no-fallback", "--plan", "plan.json")
    result = halve("learn", *sure, *options)
    assert f"estimated 2.00 ms, 2.50 x as fast as dense, on {device_names()[-1]}, float32, batch 8" in result.out
    options = (*options, "--min-speedup", "1.5")
    told = halve("learn", *sure, *options, "--json").json
    assert (told["estimated"]["ms"], told["left_dense_ms"]) == (3.0, dict.fromkeys(told["left_dense"], 1.0))
    result = halve("learn", *sure, *options)
    assert "estimated 3.00 ms, 1.67 x as fast as dense" in result.out
    row = next(line for line in result.out.splitlines() if line.startswith(next(iter(told["left_dense"]))))
    assert row.split()[-1] == "1.0000"


def test_layers_that_a_budget_leaves_dense_are_told_with_the_images_that_chose_them(halve, sure, many):
    options = ("--data", many, *QUICK, "--lr", "1e-6", "--no-fallback", "--validation", many, "--max-drop")
    everything = halve("learn", *sure, *options, "1.0", "--json").json["drop_before"]
    options = (*options, str(everything - 0.001))
    told = halve("learn", *sure, *options, "--json").json
    assert told["left_dense"]
    result = halve("learn", *sure, *options)
    assert f"left dense, for a drop of {100 * told['drop']:.2f} % on 84 images" in result.out
    again = "the other layers were learned again, for 1 steps" in result.out
    assert again != ("note: the other layers were not learned again: " in result.err)
    assert again == ("relearned" in told) != ("not_relearned" in told)
    assert "no interval: these images also chose the layers that stay dense; --drop-data measures" in result.out
    again = halve("learn", *sure, *options, "--recalibrate", "--json").json["quality"]
    assert (again["agreement_interval"], again["recalibrated"]) == (None, True)
    few = halve("learn", *sure, *options[:-1], "0.01", code=2)
    assert "--max-drop 0.01 on 84 images allows no change at all" in few.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--steps", "2", "--minutes", "1"), "give one budget"),
        (("--steps", "0"), "steps must be a positive integer, got 0"),
        (("--objective", "please"), "--objective please"),
        (("--start", "nothing"), "unknown start 'nothing'"),
        (("--max-drop", "0.1"), "--drop-data"),
        (("--resume",), "no such file"),
        (("--preset", "papers"), "unknown preset"),
        (("--features", "nothing.*"), "matches no module"),
        (("--noise", "1,2,3"), "noise must be a non-negative number or a pair"),
        (("--betas", "0.9;0.99"), "not a number"),
        (("--match", "both"), "match must be one of auto, outputs+features"),
    ],
)
def test_bad_options_are_errors_that_say_what_to_do(halve, net, options, says):
    result = halve("learn", *net, "--data", "photos", *options, code=2)
    assert says in result.err
    assert not Path("net.masks.safetensors").exists()


def test_ctrl_c_keeps_what_was_learned_and_resume_goes_on(halve, net, folder):
    command = [sys.executable, "-m", "halve", "learn", *net, "--data", "photos", "--batch", "8", "--steps", "100000"]
    process = subprocess.Popen(
        [*command, "--log", "run.jsonl"], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (folder / "run.jsonl").exists() or not (folder / "run.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume continues from net.learning.safetensors" in err
    masks = library.load(folder / "net.masks.safetensors")
    assert masks.recipe["ended"] == "interrupted"
    assert masks.recipe["steps_done"] > 0
    assert (folder / "net.learning.safetensors").exists()


OPTIONS = {option.name: option for option in app.command("learn").params}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Settings)} | {
    name: parameter.default
    for name, parameter in inspect.signature(library.learn).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def test_every_option_of_the_library_is_on_the_command_line_or_listed_as_python_only():
    in_python = DEFAULTS.keys() | SelectOptions.__annotations__.keys()
    assert PYTHON_ONLY.keys() <= in_python
    assert PYTHON_ONLY.keys() & OPTIONS.keys() == set()
    assert in_python - PYTHON_ONLY.keys() <= OPTIONS.keys()
    assert all(PYTHON_ONLY.values())


def test_the_docstring_of_learn_documents_every_option_with_its_default():
    documented_ = documented(library.learn)
    assert documented_.keys() == {"model", "data", *DEFAULTS, *SelectOptions.__annotations__}
    for name, default in DEFAULTS.items():
        if default not in (None, ()):
            shown = f'"{default}"' if isinstance(default, str) else str(default)
            assert f"Default: {shown}." in documented_[name], name


def test_the_help_of_every_option_shows_its_default():
    for name, default in DEFAULTS.items():
        if name not in PYTHON_ONLY and default not in (None, (), False):
            option = OPTIONS[name]
            text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            assert f"Default: {text}." in option.help or (option.show_default and str(option.default) == text), name


def test_settings_reach_the_library_as_they_are_given(halve, net):
    given = ("--noise", "0.5,0.1", "--temperature", "2", "--betas", "0.8,0.9", "--no-augment", "--no-hard", "--final")
    given += ("sample", "--schedule", "constant", "--weight-decay", "0.01", "--accumulate", "2", "--kinds", "conv")
    given += ("--features", "body", "--features", "point", "--match", "outputs+features", "--pattern", "1:4")
    halve("learn", *net, "--data", "photos", *FAST, *given)
    recipe = library.load("net.masks.safetensors").recipe
    expected = {"noise": [0.5, 0.1], "temperature": 2.0, "betas": [0.8, 0.9], "augment": False, "hard": False}
    expected |= {"final": "sample", "schedule": "constant", "weight_decay": 0.01, "accumulate": 2}
    expected |= {"features": ["body", "point"], "match": "outputs+features", "lr": 0.07, "seed": 0}
    assert {name: recipe[name] for name in expected} == expected
    assert recipe["selection"] == {"pattern": {"*": "1:4"}, "kinds": ["conv"]}


@pytest.fixture
def many(folder):
    """The name of a folder with 84 pictures, of which eight are held back."""
    class_folders(folder / "many", ("ant", "bee", "cat", "dog", "emu", "fox"), each=14)
    return "many"


QUICK = ("--steps", "2", "--batch", "8", "--no-permute")


def test_the_quality_of_masks_is_printed_recorded_and_shown_again(halve, net, many):
    shown = halve("learn", *net, "--data", many, *QUICK, "--no-fallback").out
    assert "compared with the dense network on 8 validation images (random images of the dataset, by seed 0)" in shown
    quality = library.load("net.masks.safetensors").recipe["quality"]
    rows = [line for line in shown.splitlines() if line.startswith(("these masks (learned)", "one-shot, "))]
    assert rows[0].split()[3:6] == [f"{100 * quality['agreement']:.2f}", "%", f"{quality['kl']:.4f}"]
    assert f"{quality['one_shot']['kl']:.4f}" in rows[1]
    again = halve("inspect", "net.masks.safetensors").out
    assert all(row in again for row in rows)
    told = halve("learn", *net, "--data", many, *QUICK, "--no-fallback", "--json").json
    assert told["quality"]["learned"] == quality["learned"]


def test_masks_that_are_worse_than_one_shot_masks_are_not_written(halve, net, many):
    result = halve("learn", *net, "--data", many, *RANDOM)
    returned = library.load("net.masks.safetensors").recipe["quality"]["returned"]
    assert returned != "learned"
    assert "warning: the learned masks are worse than one-shot masks on 8 images" in result.err
    assert "--no-fallback" in result.err
    assert f"these masks (one-shot, {returned})" in result.out


def test_few_images_are_told(halve, net):
    result = halve("learn", *net, "--data", "photos", *QUICK)
    assert "warning: the quality of the masks will be unknown: 12 images are too few" in result.err
    assert "--validation" in result.err
    assert "agreement with the dense network: unknown (12 images are too few" in result.out


def test_other_images_to_validate_on_can_be_named_or_left_out(halve, net, many):
    halve("learn", *net, "--data", many, "--validation", "photos", *QUICK)
    quality = library.load("net.masks.safetensors").recipe["quality"]
    assert (quality["images"], quality["source"]) == (12, "validation=")
    result = halve("learn", *net, "--data", "photos", "--validation", "none", *QUICK)
    assert library.load("net.masks.safetensors").recipe["quality"] == {"unknown": "validation=False"}
    assert "warning" not in result.err


RANDOM = ("--steps", "1", "--lr", "1e-6", "--alpha", "0", "--final", "sample", "--batch", "8", "--no-permute")


@pytest.fixture
def sure(net, many, folder):
    """The arguments of a network that predicts each class for some pictures."""
    model = load_model(f"{folder / 'zoo.py'}:net").model
    pictures = torch.cat([batch[0] for batch in load_data(str(folder / many)).loader])
    with torch.no_grad():
        model.head.weight *= 100
        model.head.bias -= model(pictures).mean(0)
    save_state(model.state_dict(), folder / "sure.safetensors")
    return "zoo.py:net", "--weights", "sure.safetensors"


def test_too_little_agreement_has_an_exit_code_of_its_own_and_the_masks_are_written(halve, sure, many):
    options = ("--data", many, *RANDOM, "--no-fallback", "--validation", many, "--json")
    found = halve("learn", *sure, *options, "--min-agreement", "0").json["quality"]["agreement"]
    assert 0 < found < 1
    Path("sure.masks.safetensors").unlink()
    result = halve("learn", *sure, *options, "--min-agreement", "1", code=5)
    assert f"agreement with the dense network is {100 * found:.2f} %; --min-agreement asks for 100.00 %" in result.err
    assert result.json["quality"]["agreement"] == found
    assert library.load("sure.masks.safetensors").recipe["ended"] == "finished"
    assert not Path("sure.learning.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "pass --validation, or --data with at least 64 images, got 12"),
        (("--validation", "none"), "--min-agreement needs images to measure on"),
        (("--validation", "photos", "--min-agreement", "90"), "'--min-agreement'"),
    ],
)
def test_agreement_that_cannot_be_measured_is_told_before_learning(halve, net, options, says):
    result = halve("learn", *net, "--data", "photos", *QUICK, "--min-agreement", "0.5", *options, code=2)
    assert says in result.err
    assert not Path("net.masks.safetensors").exists()


def test_recalibrated_masks_are_judged_again(halve, net, many):
    before = halve("learn", *net, "--data", many, *QUICK, "--no-fallback", "--json").json["quality"]
    after = halve("learn", *net, "--data", many, *QUICK, "--no-fallback", "--recalibrate", "--json").json["quality"]
    assert after["learned"] == before["learned"]
    assert after["recalibrated"]
    assert after["kl"] != before["kl"]
    held = list(hold_back(load_data(many, batch_size=8, shuffle=True).loader).held_back)
    model, masks = load_model("zoo.py:net", Path("net.safetensors")).model, library.load("net.masks.safetensors")
    assert after["kl"] == pytest.approx(library.evaluate(model, masks, held).kl, rel=1e-3)


@pytest.fixture
def shards(folder):
    """Four shards of 20 images with labels."""
    for i in range(4):
        members = {}
        for j in range(20 * i, 20 * i + 20):
            members |= {f"{j:03}.png": encoded(j), f"{j:03}.cls": b"%d" % (j % 6)}
        tar_of(folder / f"train-{i:06}.tar", members)
    return "train-{000000..000003}.tar"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_shards_are_streamed(halve, net, shards, workers):
    reading = ("--data", shards, "--stream", "--workers", workers)
    learned = halve("learn", *net, *reading, *QUICK, "--json").json
    assert learned["quality"]["images"] == 8
    assert learned["quality"]["source"].startswith("the first images of the stream")
    masks = ("--masks", "net.masks.safetensors")
    result = halve("evaluate", *net, *masks, *reading, "--json").json
    assert result["images"] == 80
    assert result == halve("evaluate", *net, *masks, "--data", shards, "--json").json
    assert halve("evaluate", *net, *masks, *reading, "--images", "30", "--json").json["images"] == 30
    halve("prune", *net, *reading, "--score", "wanda", "--out", "pruned.masks.safetensors")
    assert halve("recalibrate", *net, *masks, *reading, "--json").json["images"] == 80


def test_a_stream_that_is_recalibrated_on_needs_other_images_to_judge_by(halve, net, shards):
    reading = ("--data", shards, "--stream", *QUICK, "--recalibrate")
    assert "--recalibrate with --stream needs --validation" in halve("learn", *net, *reading, code=2).err
    assert halve("learn", *net, *reading, "--validation", "photos", "--json").json["quality"]["recalibrated"]


def test_a_stream_with_dali_or_without_shards_is_refused(halve, net, shards):
    assert "--loader dali" in halve("learn", *net, "--data", shards, "--stream", "--loader", "dali", code=2).err
    assert "--stream reads tars" in halve("learn", *net, "--data", "photos", "--stream", code=2).err


# Eight pictures tell the data of runs apart, and twelve are two batches; what comes after them is bad.
TWO_STEPS = """
seen = []

def preprocess(image):
    seen.append(image)
    if len(seen) > 20:
        {then}
    return torch.rand(3, 8, 8)
"""


def test_a_run_that_fails_keeps_finished_masks_and_saves_its_own_beside_them(halve, net, learned, folder):
    before = (folder / "net.masks.safetensors").read_bytes()
    with (folder / "zoo.py").open("a") as zoo:
        zoo.write(TWO_STEPS.format(then="raise RuntimeError('the sensor is off')"))
    result = halve("learn", *net, "--data", "photos", *FAST, "--no-permute", code=2)
    assert "learning failed after 2 steps: preprocessing failed on " in result.err
    assert "the sensor is off" in result.err
    assert "saved to net.partial.masks.safetensors; net.masks.safetensors is unchanged" in result.err
    assert (folder / "net.masks.safetensors").read_bytes() == before
    assert library.load("net.partial.masks.safetensors").recipe["steps_done"] == 2
    assert (folder / "net.learning.safetensors").exists()


def test_a_run_that_meets_nan_keeps_finished_masks(halve, net, learned, folder):
    before = (folder / "net.masks.safetensors").read_bytes()
    with (folder / "zoo.py").open("a") as zoo:
        zoo.write(TWO_STEPS.format(then="return torch.full((3, 8, 8), float('nan'))"))
    result = halve("learn", *net, "--data", "photos", *FAST, "--no-permute", code=2)
    assert "NaN" in result.err
    assert "net.partial.masks.safetensors" in result.err
    assert (folder / "net.masks.safetensors").read_bytes() == before
    assert library.load("net.partial.masks.safetensors").recipe["ended"] == "not finite"


def test_a_failure_of_recalibration_keeps_what_was_learned(halve, net, monkeypatch):
    def refuse(*_, **__):
        raise ModelError("it has no BatchNorm")

    monkeypatch.setattr(library, "recalibrate", refuse)
    result = halve("learn", *net, "--data", "photos", *FAST, "--recalibrate", code=2)
    assert "it has no BatchNorm" in result.err
    assert library.load("net.partial.masks.safetensors").recipe["steps_done"] == 4
    assert not Path("net.masks.safetensors").exists()
