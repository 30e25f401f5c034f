import dataclasses
import json
import random as random_

import pytest
import safetensors.torch
import torch

import halve
from benchmarks.fuzz_files import mutated
from halve import machine
from halve.errors import FileError, HalveError, LearningWarning
from halve.learn.run_state import FORMAT, RunState, optimizer_state, restore_, saved_permutation
from halve.masks import storage
from tests.random_masks import random
from tests.tiny import convnet, images, interrupting, learn
from tests.untouched import same_bits

IDENTITY = {
    "settings": {"lr": 0.1, "betas": [0.9, 0.95], "features": None},
    "layers": {"a": ["2:4", [8, 4]]},
    "processes": 1,
}
DATA = {"data": {"images": "00ff"}}


def a_state(size=12, **changes):
    tensors = {name: random(size, seed=i).abs() for i, name in enumerate(("logits", "exp_avg", "exp_avg_sq"))}
    progress = {"step": 7, "batches": 14, "seconds": 2.5, "fraction": 0.25}
    return RunState(**{"identity": IDENTITY, "data": DATA, **progress, **tensors, **changes})


def test_what_is_written_is_read(tmp_path):
    saved = a_state()
    path = saved.save(tmp_path / "run.learning.safetensors")
    read = RunState.load(path, IDENTITY, torch.zeros(12))
    for field in dataclasses.fields(RunState):
        mine, theirs = getattr(saved, field.name), getattr(read, field.name)
        assert same_bits(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    assert [p.name for p in tmp_path.iterdir()] == ["run.learning.safetensors"]


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"processes": 2}, ["processes (1 there, 2 here)"]), ({"layers": {}, "extra": 1}, ["extra", "layers"])],
)
def test_the_state_of_another_run_is_refused_by_what_differs(tmp_path, changes, names):
    path = a_state().save(tmp_path / "run")
    with pytest.raises(FileError, match="state of another run") as error:
        RunState.load(path, IDENTITY | changes, torch.zeros(12))
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"lr": 0.2}, ["lr", "0.07", "0.2"]),
        ({"seed": 5}, ["seed", "5"]),
        ({"exclude": "8"}, ["layers"]),
        ({"pattern": {"3": "1:4", "*": "2:4"}}, ["layers", "1:4"]),
    ],
)
def test_resuming_with_other_settings_names_the_setting(tmp_path, change, names):
    model, path = convnet(), tmp_path / "run"
    learn(model, [images(4)], steps=2, run_state=path, save_every=0)
    with pytest.raises(FileError) as error:
        learn(model, [images(4)], run_state=path, resume=True, **{"steps": 2, **change})
    assert all(name in str(error.value) for name in names), str(error.value)


@pytest.mark.parametrize("flags", [("avx2", "avx512_bf16"), ("avx512_bf16", "avx2")], ids=["faster", "slower"])
def test_a_run_goes_on_in_its_precision_on_another_cpu(tmp_path, monkeypatch, flags):
    model, options = convnet(), {"steps": 2, "run_state": tmp_path / "run", "save_every": 0}
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({flags[0]}))
    first = learn(model, [images(4)], **options)
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({flags[1]}))
    again = learn(model, [images(4)], resume=True, **options)
    assert again.recipe["precision"] == first.recipe["precision"]
    other = {"bfloat16": "float32", "float32": "bfloat16"}[first.recipe["precision"]]
    with pytest.raises(FileError, match="precision"):
        learn(model, [images(4)], resume=True, precision=other, **options)


def test_resuming_with_other_weights_is_refused(tmp_path):
    model, path = convnet(), tmp_path / "run"
    learn(model, [images(4)], steps=2, run_state=path, save_every=0)
    with torch.no_grad():
        model[8].weight.mul_(1.01)
    with pytest.raises(FileError, match=r"model\.8\.weight \("):
        learn(model, [images(4)], steps=2, run_state=path, resume=True)


def test_a_damaged_file_is_a_file_error_wherever_the_damage_is(tmp_path):
    content = a_state().save(tmp_path / "run").read_bytes()
    path = tmp_path / "bad"
    for end in [0, 4, 8, 100, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:end])
        with pytest.raises(FileError):
            RunState.load(path, IDENTITY, torch.zeros(12))
    for place in range(0, len(content), 17):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(FileError):
            RunState.load(path, IDENTITY, torch.zeros(12))


def test_a_missing_file_and_another_kind_of_file_are_file_errors(tmp_path):
    with pytest.raises(FileError, match="no such file"):
        RunState.load(tmp_path / "none", IDENTITY, torch.zeros(12))
    masks = halve.prune(convnet()).save(tmp_path / "net.masks.safetensors")
    with pytest.raises(FileError, match=r"not a run state"):
        RunState.load(masks, IDENTITY, torch.zeros(12))


@pytest.mark.parametrize(
    "changes",
    [
        {"logits": torch.zeros(11)},
        {"exp_avg": torch.zeros(13)},
        {"exp_avg_sq": torch.zeros(12, 1)},
        {"logits": torch.zeros(12, dtype=torch.float64)},
        {"exp_avg": torch.zeros(12, dtype=torch.int32)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_wrong_sizes_and_types_are_file_errors(tmp_path, changes):
    path = a_state(**changes).save(tmp_path / "run")
    with pytest.raises(FileError, match="does not hold the state of 12 logits"):
        RunState.load(path, IDENTITY, torch.zeros(12))


@pytest.mark.parametrize("key", ["step", "batches", "seconds", "fraction"])
@pytest.mark.parametrize("value", [-1, None, "long", True, 10**13, 10**400, [[1]], {}, -0.5])
def test_impossible_numbers_are_file_errors_that_name_them(tmp_path, key, value):
    path = a_state(**{key: value}).save(tmp_path / "run")
    with pytest.raises(FileError, match=f"damaged: {key} must be"):
        RunState.load(path, IDENTITY, torch.zeros(12))


def test_an_infinite_number_is_a_file_error(tmp_path):
    path = a_state(seconds=12345).save(tmp_path / "run")
    _, _, tensors = storage.read(path, [FORMAT])
    metadata = {"format": FORMAT.name, "version": str(FORMAT.version)}
    metadata["header"] = json.dumps(header_of(a_state(seconds=12345))).replace("12345", "1e999")
    metadata["sha256"] = storage._checksum(metadata, tensors)
    path.write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(FileError, match="seconds must be a number"):
        RunState.load(path, IDENTITY, torch.zeros(12))


@pytest.mark.parametrize(
    "changes",
    [
        {"logits": torch.full((12,), float("inf"))},
        {"exp_avg": torch.full((12,), float("nan"))},
        {"exp_avg_sq": torch.full((12,), -1.0)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_tensors_that_no_run_can_go_on_from_are_file_errors(tmp_path, changes):
    with pytest.raises(FileError, match="must be finite"):
        RunState.load(a_state(**changes).save(tmp_path / "run"), IDENTITY, torch.zeros(12))


def header_of(state):
    keys = ("identity", "data", "step", "batches", "seconds", "fraction", "permutation")
    return {key: getattr(state, key) for key in keys}


SUMMARY = {
    "axes": 1,
    "layers": 1,
    "fixed": {"0": "first layer"},
    "not_whole": "",
    "not_run": [],
    "kept_before": 0.5,
    "kept_after": 0.6,
    "finished": True,
    "seconds": 0.1,
}
PERMUTATION = {
    "orders": [[7, 6, 5, 4, 3, 2, 1, 0]],
    "layers": {"3": 0},
    "moves": {"3.weight": {"1": 0}, "0.weight": {"0": 0}},
    "summary": SUMMARY,
}


def permutation_of(tmp_path, permutation):
    path = a_state(permutation=permutation).save(tmp_path / "run")
    return saved_permutation(path, convnet(), halve.select(convnet()).masked)


@pytest.mark.parametrize("permutation", [None, {"reason": "no graph"}, PERMUTATION])
def test_channel_orders_come_back(tmp_path, permutation):
    assert permutation_of(tmp_path, permutation) == permutation


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ([], "a list"),
        ({"reason": 3}, "reason"),
        ({"reason": "x", "orders": []}, "reason"),
        ({}, "keys"),
        (PERMUTATION | {"orders": None}, "list of lists"),
        (PERMUTATION | {"orders": [[0, 0, 1, 2, 3, 4, 5, 6]]}, "not a permutation"),
        (PERMUTATION | {"orders": [[0.0, 1, 2, 3, 4, 5, 6, 7]]}, "not a permutation"),
        (PERMUTATION | {"orders": [["a"]]}, "not a permutation"),
        (PERMUTATION | {"orders": [[1, 0]]}, "channel order must be a permutation"),
        (PERMUTATION | {"layers": {"unknown": 0}}, "no masked layer is called unknown"),
        (PERMUTATION | {"layers": {"3": 1}}, "refer to orders"),
        (PERMUTATION | {"layers": {"3": -1}}, "refer to orders"),
        (PERMUTATION | {"layers": {"3": True}}, "refer to orders"),
        (PERMUTATION | {"layers": []}, "objects"),
        (PERMUTATION | {"moves": {"3.weight": 0}}, "object"),
        (PERMUTATION | {"moves": {"3.weight": {"-1": 0}}}, "dimensions"),
        (PERMUTATION | {"moves": {"unknown.weight": {"0": 0}}}, "unknown.weight does not exist"),
        (PERMUTATION | {"moves": {"8.weight": {"0": 0}}}, "has shape"),
        (PERMUTATION | {"summary": {}}, "summary"),
        (PERMUTATION | {"summary": SUMMARY | {"kept_after": "much"}}, "kept_after"),
        (PERMUTATION | {"summary": SUMMARY | {"fixed": {"a": 1}}}, "reasons"),
    ],
)
def test_channel_orders_that_do_not_fit_are_file_errors(tmp_path, change, what):
    with pytest.raises(FileError, match=what):
        permutation_of(tmp_path, change)


def test_mutated_headers_are_refused_or_read_but_nothing_else(tmp_path):
    """A thousand headers, each with up to three things changed, and a checksum that fits."""
    model, logits = convnet(), torch.zeros(12)
    choices = halve.select(model).masked
    valid = header_of(a_state(permutation=PERMUTATION))
    _, _, tensors = storage.read(a_state().save(tmp_path / "run"), [FORMAT])
    refused = 0
    for seed in range(1000):
        rng, header = random_.Random(seed), valid
        for _ in range(rng.randint(1, 3)):
            header = mutated(header, rng)
        try:
            path = storage.write(tmp_path / "mutated", FORMAT, header, tensors)
            saved_permutation(path, model, choices)
            RunState.load(path, IDENTITY, logits)
        except HalveError:
            refused += 1
    assert 500 < refused < 1000


@pytest.mark.parametrize(("step", "batches"), [(2, 10**12), (2, 5), (10**12, 10**12)])
def test_a_run_state_with_more_batches_than_steps_does_not_hang(tmp_path, step, batches):
    model, path = convnet(), tmp_path / "run"
    options = {"minutes": 1e6} if step > 2 else {"steps": 4}
    with pytest.warns(LearningWarning, match="interrupted"):
        learn(model, [images(4)] * 2, run_state=path, report=interrupting(2), **options)
    _, header, tensors = storage.read(path, [FORMAT])
    storage.write(path, FORMAT, header | {"step": step, "batches": batches}, tensors)
    with pytest.raises(FileError, match=f"it says {batches:,}"):
        learn(model, [images(4)] * 2, run_state=path, resume=True, **options)


def test_a_run_state_with_more_steps_than_the_run_has_is_refused(tmp_path):
    model, path = convnet(), tmp_path / "run"
    with pytest.warns(LearningWarning, match="interrupted"):
        learn(model, [images(4)] * 2, run_state=path, report=interrupting(2), steps=4)
    _, header, tensors = storage.read(path, [FORMAT])
    storage.write(path, FORMAT, header | {"step": 10**12}, tensors)
    with pytest.raises(FileError, match="it says 1,000,000,000,000 steps were done of 4"):
        learn(model, [images(4)] * 2, run_state=path, resume=True, steps=4)


def test_another_file_is_not_taken_for_a_run_state(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(FileError, match="exists and is not the state of a run: choose another run_state="):
        learn(convnet(), images(), run_state=path, steps=1)
    assert path.read_text() == "mine"


def test_missing_tensors_and_identities_are_file_errors(tmp_path):
    header = {"identity": IDENTITY, "step": 1, "batches": 1, "seconds": 1.0}
    path = storage.write(tmp_path / "run", FORMAT, header, {"logits": torch.zeros(12)})
    with pytest.raises(FileError, match="damaged"):
        RunState.load(path, IDENTITY, torch.zeros(12))
    path = storage.write(tmp_path / "run", FORMAT, {"identity": "me"}, {"logits": torch.zeros(12)})
    with pytest.raises(FileError, match="which run"):
        RunState.load(path, IDENTITY, torch.zeros(12))


def steps_of(optimizer, logits, gradients):
    for grad in gradients:
        logits.grad = grad.clone()
        optimizer.step()


def test_a_restored_optimizer_goes_on_as_if_nothing_had_happened(tmp_path):
    gradients = [random(12, seed=i) for i in range(8)]
    logits = torch.nn.Parameter(torch.zeros(12))
    optimizer = torch.optim.AdamW([logits], lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    steps_of(optimizer, logits, gradients[:5])
    state = RunState(IDENTITY, DATA, 5, 5, 0.0, 0.5, logits.detach(), *optimizer_state(optimizer, logits))
    state = RunState.load(state.save(tmp_path / "run"), IDENTITY, logits)
    steps_of(optimizer, logits, gradients[5:])
    other = torch.nn.Parameter(torch.ones(12))
    fresh = torch.optim.AdamW([other], lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    restore_(fresh, other, state)
    steps_of(fresh, other, gradients[5:])
    assert same_bits(logits, other)


def test_before_the_first_step_the_averages_are_zero():
    logits = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([logits])
    assert all(average.eq(0).all() for average in optimizer_state(optimizer, logits))
    restore_(optimizer, logits, a_state(3, step=0))
    assert not optimizer.state
