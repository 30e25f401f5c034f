import dataclasses

import pytest
import torch

import halve
from halve.errors import FileError
from halve.learn.run_state import FORMAT, RunState, optimizer_state, restore_
from halve.masks import storage
from tests.random_masks import random
from tests.tiny import convnet, images, learn
from tests.untouched import same_bits

IDENTITY = {
    "settings": {"lr": 0.1, "betas": [0.9, 0.95], "features": None},
    "layers": {"a": ["2:4", [8, 4]]},
    "processes": 1,
}


def a_state(size=12, **changes):
    tensors = {name: random(size, seed=i) for i, name in enumerate(("logits", "exp_avg", "exp_avg_sq"))}
    return RunState(**{"identity": IDENTITY, "step": 7, "batches": 14, "seconds": 2.5, **tensors, **changes})


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


def test_resuming_with_other_weights_is_refused(tmp_path):
    model, path = convnet(), tmp_path / "run"
    learn(model, [images(4)], steps=2, run_state=path, save_every=0)
    with torch.no_grad():
        model[8].weight.mul_(1.01)
    with pytest.raises(FileError, match="weights"):
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
        {"step": -1},
        {"batches": None},
        {"seconds": "long"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_wrong_sizes_and_numbers_are_file_errors(tmp_path, changes):
    path = a_state(**changes).save(tmp_path / "run")
    with pytest.raises(FileError, match="does not hold the state of 12 logits"):
        RunState.load(path, IDENTITY, torch.zeros(12))


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
    state = RunState(IDENTITY, 5, 5, 0.0, logits.detach(), *optimizer_state(optimizer, logits))
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
