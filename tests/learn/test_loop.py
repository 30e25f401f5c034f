import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halve
from halve.errors import DataError, FileError, LearningError, LearningWarning, OptionError
from halve.learn import loop
from halve.learn.probe import Estimate
from halve.learn.reporting import Report
from halve.learn.run_state import FORMAT
from halve.masks import storage
from tests.processes import ROOT, environment
from tests.tiny import convnet, images, interrupting, labels, learn, loader
from tests.untouched import same_bits, untouched


def state_of(path):
    """Header and tensors of a run state."""
    _, header, tensors = storage.read(path, [FORMAT])
    return header, tensors


def whole(path, **options):
    """An uninterrupted run: masks and final state."""
    masks = learn(convnet(), loader(), run_state=path, save_every=0, **options)
    return masks, state_of(path)


def same_state(one, other):
    assert (one[0]["step"], one[0]["batches"]) == (other[0]["step"], other[0]["batches"])
    assert all(same_bits(one[1][name], other[1][name]) for name in ("logits", "exp_avg", "exp_avg_sq"))
    return True


@pytest.mark.parametrize("accumulate", [1, 2])
def test_interrupted_and_resumed_is_the_same_as_uninterrupted_to_the_bit(tmp_path, accumulate):
    options = {"steps": 14, "accumulate": accumulate, "weight_decay": 0.01, "temperature": (2.0, 0.5)}
    expected, state = whole(tmp_path / "whole", **options)
    path = tmp_path / "run"
    with pytest.warns(LearningWarning, match=r"interrupted after 5 steps; resume=True continues from .*run"):
        part = learn(convnet(), loader(), run_state=path, report=interrupting(5), **options)
    assert part.recipe["steps_done"] == state_of(path)[0]["step"] == 5
    assert part.recipe["ended"] == "interrupted"
    assert halve.verify(halve.apply(convnet(), part), part).ok
    masks = learn(convnet(), loader(), run_state=path, save_every=0, resume=True, **options)
    assert masks == expected
    assert same_state(state_of(path), state)
    assert masks.recipe["ended"] == "finished"


EIGHT = {"steps": 8, "augment": False}  # images that a user's own forward reads are not augmented either


@pytest.fixture(scope="module")
def eight_steps(tmp_path_factory):
    """Masks and state of eight steps without an interruption."""
    return whole(tmp_path_factory.mktemp("whole") / "run", **EIGHT)


@pytest.mark.parametrize(("at", "presses"), [(1, 1), (3, 2), (8, 1), (8, 2), (13, 1)])
def test_ctrl_c_in_the_middle_of_a_step_loses_no_batch_even_if_pressed_twice(tmp_path, eight_steps, at, presses):
    expected, state = eight_steps
    count = itertools.count(-1)  # the first two calls look at which layers run, and how they can be run

    def forward(model, batch):
        if next(count) == at:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return model(batch[0])

    path, handler = tmp_path / "run", signal.getsignal(signal.SIGINT)
    with pytest.warns(LearningWarning, match="interrupted"):
        learn(convnet(), loader(), run_state=path, forward=forward, **EIGHT)
    assert signal.getsignal(signal.SIGINT) is handler
    masks = learn(convnet(), loader(), run_state=path, save_every=0, resume=True, **EIGHT)
    assert masks == expected
    assert same_state(state_of(path), state)


def test_a_run_can_be_interrupted_and_resumed_many_times(tmp_path):
    expected, state = whole(tmp_path / "whole", steps=9)
    path = tmp_path / "run"
    for step in (1, 4, 7):
        with pytest.warns(LearningWarning, match=f"after {step} steps"):
            learn(convnet(), loader(), run_state=path, resume=step > 1, report=interrupting(step), steps=9)
    masks = learn(convnet(), loader(), run_state=path, save_every=0, resume=True, steps=9)
    assert masks == expected
    assert same_state(state_of(path), state)


def test_resuming_a_finished_run_gives_its_masks_at_once(tmp_path):
    expected, _ = whole(tmp_path / "run", steps=6)
    seen = []
    again = learn(convnet(), loader(), steps=6, run_state=tmp_path / "run", resume=True, report=seen.append)
    assert again == expected
    assert seen == []


KILLED = """
import sys, torch, halve
from tests.tiny import convnet, images, labels, learn, loader
torch.set_num_threads(int(sys.argv[2]))
def report(what):
    print(getattr(what, "step", 0) if hasattr(what, "loss") else 0, flush=True)
learn(convnet(), loader(), steps=2000, run_state=sys.argv[1], save_every=0, report=report, precision="float32")
"""


def test_a_killed_run_loses_at_most_one_interval_and_goes_on_to_the_same_bits(tmp_path):
    script, path = tmp_path / "run.py", tmp_path / "run"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(path), str(torch.get_num_threads())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT) as process:
        told = next(step for line in process.stdout if (step := int(line)) >= 8)
        os.kill(process.pid, signal.SIGKILL)
        last = max([told, *(int(line) for line in process.stdout if line.strip())])
    assert process.returncode == -signal.SIGKILL
    saved = state_of(path)[0]["step"]
    assert saved >= last - 1
    stop = saved + 6
    with pytest.warns(LearningWarning, match=f"after {stop} steps"):
        resumed = learn(convnet(), loader(), steps=2000, run_state=path, resume=True, report=interrupting(stop))
    with pytest.warns(LearningWarning, match=f"after {stop} steps"):
        expected = learn(convnet(), loader(), steps=2000, run_state=tmp_path / "whole", report=interrupting(stop))
    assert resumed == expected
    assert same_state(state_of(path), state_of(tmp_path / "whole"))


def test_an_iterator_can_be_resumed_with_a_warning_that_its_order_is_lost(tmp_path):
    path = tmp_path / "run"
    with pytest.warns(LearningWarning, match="interrupted"):
        learn(convnet(), iter(loader()), steps=4, run_state=path, report=interrupting(2))
    with pytest.warns(LearningWarning, match="cannot be rewound"):
        masks = learn(convnet(), iter(loader()), steps=4, run_state=path, resume=True)
    assert masks.recipe["steps_done"] == 4


def test_resuming_without_a_file_is_a_file_error(tmp_path):
    with pytest.raises(OptionError, match="needs run_state="):
        learn(convnet(), loader(), steps=2, resume=True)
    with pytest.raises(FileError, match="no such file"):
        learn(convnet(), loader(), steps=2, resume=True, run_state=tmp_path / "none")


def test_resuming_with_data_that_is_empty_now_is_a_data_error(tmp_path):
    whole(tmp_path / "run", steps=2)
    with pytest.raises(DataError, match="no batch"):
        learn(convnet(), [], steps=2, run_state=tmp_path / "run", resume=True)


def test_data_that_is_exhausted_gives_masks_and_a_warning(tmp_path):
    with pytest.warns(LearningWarning, match=r"exhausted after 4 steps; .*DataLoader"):
        masks = learn(convnet(), iter(loader()), steps=9, run_state=tmp_path / "run")
    assert (masks.recipe["ended"], masks.recipe["steps_done"]) == ("data exhausted", 4)
    assert state_of(tmp_path / "run")[0]["step"] == 4
    assert halve.verify(halve.apply(convnet(), masks), masks).ok


@pytest.mark.parametrize("data", [[], iter(()), torch.zeros(0, 4, 8, 8)], ids=["list", "iterator", "tensor"])
def test_empty_data_is_a_data_error(data):
    model = convnet()
    with untouched(model), pytest.raises(DataError):
        learn(model, data, steps=3)


def test_a_loss_that_is_not_finite_ends_with_the_layer_and_what_was_learned(tmp_path):
    bad = images(6)
    bad[2, 1, 3, 3] = float("nan")
    model, path = convnet(), tmp_path / "run"
    good = [images(6, seed=i) for i in range(3)]
    with untouched(model), pytest.raises(LearningError, match=r"by step 4, first in layer 0; .*lower lr=") as error:
        learn(model, [*good, bad], steps=9, run_state=path)
    masks = error.value.masks
    assert masks.recipe["ended"] == "not finite"
    assert halve.verify(halve.apply(model, masks), masks).ok
    header, tensors = state_of(path)
    assert header["step"] == 4
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_an_infinite_activation_is_blamed_on_its_layer():
    class Overflow(nn.Module):
        def forward(self, x):
            return torch.exp(x.abs() * 1e4)

    model = convnet()
    model[5] = Overflow()
    with pytest.raises(LearningError, match="first in layer 5"):
        learn(model, [images(6)], steps=3)


def test_the_batch_with_the_bad_values_is_the_one_that_is_looked_into():
    bad = images(6)
    bad[0] = float("nan")
    with pytest.raises(LearningError, match="first in layer 0"):
        learn(convnet(), [bad, images(6)], steps=3, accumulate=2)


def test_a_bad_objective_is_blamed_itself():
    with pytest.raises(LearningError, match="in the objective itself"):
        learn(convnet(), [images(6)], steps=3, objective=lambda v: v.output.sum() * float("nan"))


def test_the_budget_in_epochs_counts_batches_and_accumulation():
    for options, steps in (
        ({"epochs": 2}, 8),
        ({"epochs": 0.5}, 2),
        ({"epochs": 3, "accumulate": 2}, 6),
        ({"epochs": 0.01}, 1),
    ):
        assert learn(convnet(), loader(), **options).recipe["steps_done"] == steps
    with pytest.raises(DataError, match=r"epochs= needs data with a length.*steps= or minutes="):
        learn(convnet(), (batch for batch in loader()), epochs=1)


# What a machine that is busy may say.
BY_THE_CLOCK = pytest.mark.filterwarnings("ignore:there is time for only", "ignore:the learned masks are worse")


@BY_THE_CLOCK
@pytest.mark.parametrize("validation", [None, False], ids=["validated", "not validated"])
def test_the_budget_in_minutes_is_the_time_of_the_whole_call(validation):
    halve.learn(convnet(), loader(), steps=1, validation=False)  # the first capture imports large parts of PyTorch
    seen, started = [], time.perf_counter()
    noise = (1.0, 0.0)
    masks = halve.learn(convnet(), loader(640), minutes=0.1, noise=noise, report=seen.append, validation=validation)
    seconds = time.perf_counter() - started
    assert 0.9 * 6 < seconds < 1.15 * 6 + 0.5
    assert masks.recipe["seconds"] == pytest.approx(seconds, abs=0.3)
    assert masks.recipe["permute"]["axes"] > 0
    assert masks.recipe["steps_done"] == len(seen) - 1 > 5
    assert {report.steps for report in seen} == {None}
    assert seen[-1].lr < 0.01 < 0.04 < seen[1].lr
    assert seen[-1].noise == 0 < 0.9 < seen[1].noise
    assert seen[1].seconds_left > seen[-1].seconds_left >= 0


class Slow(nn.Module):
    """Takes a hundredth of a second for each image."""

    def __init__(self):
        super().__init__()
        self.net = convnet()

    def forward(self, x):
        time.sleep(0.01 * len(x))
        return self.net(x)


@BY_THE_CLOCK
@pytest.mark.parametrize(
    ("options", "noise"),
    [
        ({"steps": 3}, [0.3, 0.0]),
        ({"minutes": 0.03}, [0.3, 0.0]),
        ({"steps": 3, "noise": (1.0, 0.0)}, [1.0, 0.0]),
        ({"steps": 3, "noise": 0.5}, [0.5, 0.5]),
    ],
    ids=str,
)
def test_short_runs_have_less_noise_and_the_recipe_tells_it(options, noise):
    seen = []
    masks = halve.learn(Slow(), loader(), validation=False, permute=False, report=seen.append, **options)
    assert masks.recipe["noise"] == noise
    assert seen[1].noise == noise[0]


def test_a_time_that_is_too_short_is_told_with_the_time_it_would_take():
    with pytest.warns(LearningWarning, match="there is time for only about") as told:
        masks = learn(Slow(), [images(4)] * 40, minutes=0.03)
    steps = masks.recipe["steps_done"]
    assert 5 < steps < 25
    expected, minutes = re.search(r"about (\d+) steps, .* minutes=([\d.]+)", str(told[0].message)).groups()
    assert 0.5 * steps <= int(expected) <= 2 * steps
    assert 100 * 0.08 / 60 < float(minutes) < 3 * 100 * 0.08 / 60  # a step runs the network twice
    assert len(told) == 1


def test_slow_checks_take_a_bounded_share_of_the_time():
    """512 validation images alone would take five seconds for each set of masks."""
    data, started = DataLoader(TensorDataset(images(10_240)), 4), time.perf_counter()
    with pytest.warns(LearningWarning, match="there is time for only about"):
        masks = learn(Slow(), data, minutes=0.05, validation=None, fallback=False)
    assert time.perf_counter() - started < 1.15 * 3 + 0.5
    assert masks.recipe["quality"]["images"] == 8


@BY_THE_CLOCK
def test_time_that_was_spent_before_counts_when_resumed(tmp_path):
    path, options = tmp_path / "run", {"minutes": 0.06, "run_state": tmp_path / "run", "save_every": 0}
    with pytest.warns(LearningWarning, match="interrupted"):
        learn(convnet(), loader(), report=interrupting(9), **options)
    header, _ = state_of(path)
    assert 0 < header["fraction"] < 0.9
    assert 0 < header["seconds"] < 3.2
    seen, started = [], time.perf_counter()
    masks = learn(convnet(), loader(), resume=True, report=seen.append, **options)
    assert time.perf_counter() - started < 1.15 * (3.6 - header["seconds"]) + 0.5
    assert masks.recipe["seconds"] == pytest.approx(3.6, rel=0.2)
    assert seen[1].lr < 0.07 * 0.5 * (1 + math.cos(math.pi * header["fraction"])) + 1e-6
    assert state_of(path)[0]["fraction"] > 0.9


def test_accumulated_batches_count_as_one_step():
    seen = []
    masks = learn(convnet(), loader(), steps=3, accumulate=4, report=seen.append)
    assert masks.recipe["steps_done"] == 3
    assert [report.step for report in seen[1:]] == [1, 2, 3]


def test_the_loss_of_accumulated_batches_is_their_mean():
    seen = {1: [], 2: []}
    for accumulate, found in seen.items():
        learn(
            convnet(),
            [images(4, seed=1), images(4, seed=2)],
            objective=lambda v: 0 * v.output.sum() + v.dense_output.square().mean(),
            steps=2 // accumulate,
            accumulate=accumulate,
            report=lambda r, found=found: found.append(r.loss) if isinstance(r, Report) else None,
        )
    assert seen[2][0] == pytest.approx(sum(seen[1]) / 2)


def test_a_report_comes_after_each_step_and_the_estimate_before():
    seen = []
    learn(convnet(), loader(), steps=12, temperature=(2.0, 1.0), report=seen.append)
    assert [type(what) for what in seen] == [Estimate, *[Report] * 12]
    reports = seen[1:]
    assert [report.step for report in reports] == list(range(1, 13))
    assert {report.steps for report in reports} == {12}
    assert all(0 <= report.entropy <= 1 and 0 <= report.changed <= 1 for report in reports)
    assert all(report.images_per_s > 0 and report.loss > 0 for report in reports)
    assert reports[0].lr == 0.07
    assert reports[0].temperature == 2.0
    assert reports[0].seconds < reports[-1].seconds
    assert reports[-1].seconds_left == 0


def test_the_rate_of_the_papers_schedule_falls_with_the_first_batch_of_the_fourth_epoch():
    seen = []
    learn(convnet(), [images(4)] * 2, steps=9, schedule="paper", report=seen.append)
    assert [report.lr for report in seen[1:]] == pytest.approx([0.07] * 6 + [0.007] * 3)


def test_the_log_has_lines_of_json_and_goes_on_when_resumed(tmp_path):
    log, path = tmp_path / "run.jsonl", tmp_path / "run"
    log.write_text('{"step": 1, "loss": 2.0}\n')  # of an older run
    with pytest.warns(LearningWarning, match="interrupted"):
        learn(convnet(), loader(), steps=34, log=log, run_state=path, report=interrupting(25))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20]
    learn(convnet(), loader(), steps=34, log=log, run_state=path, resume=True)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 34]
    for line in lines:
        assert {"loss", "entropy", "changed", "lr", "temperature", "images_per_s", "seconds"} <= line.keys()
        assert line["images_per_s"] > 0
        assert 0 < line["entropy"] < 1
    assert lines[-1]["changed"] > 0


def test_a_log_that_cannot_be_written_is_a_file_error_before_the_first_step(tmp_path):
    seen = []
    with pytest.raises(FileError, match="cannot write the log"):
        learn(convnet(), loader(), steps=3, log=tmp_path / "none" / "run.jsonl", report=seen.append)
    assert seen == []


def test_a_run_state_that_cannot_be_written_is_a_file_error_before_the_first_step(tmp_path):
    seen = []
    with pytest.raises(FileError, match="cannot write"):
        learn(convnet(), loader(), steps=3, run_state=tmp_path / "none" / "run", report=seen.append)
    assert not any(isinstance(what, Report) for what in seen)


def test_nothing_is_written_that_was_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learn(convnet(), [(images(6), labels(6))], steps=2)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_not_overwritten_by_accident(tmp_path):
    path = tmp_path / "run"
    learn(convnet(), loader(), steps=2, run_state=path)
    before = path.read_bytes()
    with pytest.raises(FileError, match="holds the state of a run: continue it with resume=True"):
        learn(convnet(), loader(), steps=2, run_state=path)
    assert path.read_bytes() == before


def test_ctrl_c_that_also_kills_the_loaders_workers_keeps_what_was_learned(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        """
import sys, warnings, torch, halve
from torch.utils.data import DataLoader
from tests.tiny import convnet, images, labels, learn, loader
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, i):
        import time; time.sleep(0.02)
        return images(1)[0]
warnings.simplefilter("ignore")
masks = learn(convnet(), DataLoader(Slow(), 4, num_workers=2), steps=10**6, run_state=sys.argv[1],
                    report=lambda r: print("step", flush=True))
print("ended", masks.recipe["ended"], masks.recipe["steps_done"] > 0, flush=True)
"""
    )
    command = [sys.executable, str(script), str(tmp_path / "state")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(6):
        process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert "ended interrupted True" in out
    assert (tmp_path / "state").exists()


def failing_data(after):
    """Batches, then an error of the loader."""
    for i in range(after):
        yield images(6, seed=i)
    raise ConnectionError("the store is gone")


def failing_report(event):
    if isinstance(event, Report) and event.step == 3:
        raise KeyError("chart")


FAILURES = {
    "loader": (lambda: failing_data(3), {}, ConnectionError, "ConnectionError: the store is gone"),
    "batch": (lambda: [*(images(6, seed=i) for i in range(3)), images(6)[:, :2]], {}, Exception, r"\(6, 2, 8, 8\)"),
    "report": (
        lambda: [images(6, seed=i) for i in range(3)],
        {"report": failing_report},
        KeyError,
        "KeyError: 'chart'",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_after_the_first_step_saves_the_state_and_gives_what_was_learned(tmp_path, name):
    data, options, cause, says = FAILURES[name]
    model, path = convnet(), tmp_path / "run"
    with untouched(model), pytest.raises(LearningError, match=f"learning failed after 3 steps: .*{says}") as error:
        learn(model, data(), steps=9, run_state=path, **options)
    assert isinstance(error.value.__cause__, cause)
    assert f"resume=True continues from {path}" in str(error.value)
    masks = error.value.masks
    assert (masks.recipe["ended"], masks.recipe["steps_done"]) == ("failed", 3)
    assert halve.verify(halve.apply(model, masks), masks).ok
    assert state_of(path)[0]["step"] == 3


def test_a_run_that_failed_is_resumed_to_the_same_bits(tmp_path):
    expected, state = whole(tmp_path / "whole", steps=8)
    with pytest.raises(LearningError, match="KeyError"):
        learn(convnet(), loader(), steps=8, run_state=tmp_path / "run", report=failing_report)
    masks = learn(convnet(), loader(), steps=8, run_state=tmp_path / "run", save_every=0, resume=True)
    assert masks == expected
    assert same_state(state_of(tmp_path / "run"), state)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_under_the_log_saves_the_state_and_gives_what_was_learned(tmp_path):
    with pytest.raises(LearningError, match="after 10 steps: cannot write the log /dev/full: No space left") as error:
        learn(convnet(), loader(), steps=12, run_state=tmp_path / "run", log="/dev/full")
    assert isinstance(error.value.__cause__, FileError)
    assert error.value.masks.recipe["steps_done"] == state_of(tmp_path / "run")[0]["step"] == 10


def test_a_failure_in_the_first_step_is_raised_as_it_is(tmp_path):
    with pytest.raises(ConnectionError, match="the store is gone"):
        learn(convnet(), failing_data(0), steps=3)


def test_a_failure_of_the_images_for_the_drop_keeps_what_was_learned():
    with pytest.raises(LearningError, match="ConnectionError: the store is gone; the masks as learned") as error:
        learn(convnet(), loader(), steps=2, max_drop=0.1, drop_data=failing_data(1))
    assert error.value.masks.recipe["steps_done"] == 2


def agreements(log):
    return [line["agreement"] for line in map(json.loads, log.read_text().splitlines())]


@pytest.mark.filterwarnings("ignore:the learned masks are worse")
def test_the_agreement_so_far_is_measured_now_and_then_and_changes_nothing(tmp_path, monkeypatch):
    options = {"steps": 60, "permute": False, "validation": [images(16, seed=7)], "fallback": False}
    for share, name in ((0.0, "never"), (math.inf, "always")):
        monkeypatch.setattr(loop, "_GLIMPSES", share)
        masks = halve.learn(convnet(), loader(), log=tmp_path / name, **options)
        if name == "never":
            expected = masks
    assert masks == expected
    assert agreements(tmp_path / "never") == [None] * 6
    assert None not in agreements(tmp_path / "always")
    assert agreements(tmp_path / "always")[-1] == masks.recipe["quality"]["agreement"]


def test_without_images_held_back_there_is_no_agreement(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_GLIMPSES", math.inf)
    learn(convnet(), loader(), steps=10, log=tmp_path / "log")
    assert agreements(tmp_path / "log") == [None]
