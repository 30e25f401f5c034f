import contextlib
import re

import numpy as np
import pytest
import torch
from torch import nn

import halve
from halve.bench import bench as module
from halve.bench.bench import Measurement
from halve.bench.systems import SYSTEMS, Prepared, systems_for
from halve.errors import OptionError
from tests.tiny import convnet, images
from tests.untouched import untouched

ON_GPU_ONLY = {"best_dense", "torch_semi_structured", "halve_dense"}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def measured(*systems, model=None, **options):
    model = model or convnet()
    options = {"batch_sizes": (1,), "dtype": torch.float32, "seconds": 0.01} | options
    return halve.bench(model, halve.prune(model), images(3), systems=systems, **options)


def test_one_measurement_per_batch_size_and_system_in_the_order_given():
    found = measured("halve", "eager", batch_sizes=(4, 1))
    assert [(one.batch, one.system) for one in found] == [(4, "halve"), (4, "eager"), (1, "halve"), (1, "eager")]
    for one in found:
        assert one.error is None
        assert 0 < one.p10_ms <= one.median_ms <= one.p90_ms
        assert one.images_per_second == pytest.approx(1e3 * one.batch / one.median_ms)
        assert one.memory_bytes is None
        assert one.energy_mj_per_image is None


def test_on_a_cpu_halve_notes_that_it_runs_dense_and_gpu_systems_report_an_error():
    found = {one.system: one for one in measured("halve", *ON_GPU_ONLY)}
    assert found["halve"].note.startswith("runs dense: ")
    assert {found[name].error for name in ON_GPU_ONLY} == {"needs a CUDA GPU"}
    assert {found[name].median_ms for name in ON_GPU_ONLY} == {None}


def test_percentiles_are_over_all_calls(monkeypatch):
    rounds = {"eager": [list(range(1, 51)), list(range(51, 102))]}
    monkeypatch.setattr(module, "interleaved", lambda *_, **__: (rounds, {}))
    [one] = measured("eager")
    assert (one.p10_ms, one.median_ms, one.p90_ms) == tuple(np.percentile(range(1, 102), (10, 50, 90)))
    assert (one.p10_ms, one.median_ms, one.p90_ms) == (11, 51, 91)
    assert one.round_ms == (25.5, 76)


def test_systems_are_timed_within_a_context_once_all_are_prepared(monkeypatch):
    events = []

    @contextlib.contextmanager
    def alone():
        events.append("alone")
        yield
        events.append("done")

    timed = module.interleaved
    monkeypatch.setattr(
        module, "_prepare", lambda name, *rest, own=module._prepare: (events.append(name), own(name, *rest))[1]
    )
    monkeypatch.setattr(module, "interleaved", lambda *args, **rest: (events.append("timed"), timed(*args, **rest))[1])
    freed = module._free_memory
    monkeypatch.setattr(module, "_free_memory", lambda device: (events.append("freed"), freed(device)))
    measured("eager", "channels_last", while_timing=alone)
    assert events == ["eager", "channels_last", "alone", "timed", "done", "freed"]


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # from torch itself
def test_a_failing_system_gets_an_error_and_the_others_are_measured(monkeypatch):
    def broken(case):
        raise RuntimeError("no kernel\nfor this shape")

    monkeypatch.setitem(SYSTEMS, "compile", broken)
    failed, fine = measured("compile", "eager")
    assert failed == Measurement(1, "compile", error="RuntimeError: no kernel")
    assert fine.error is None
    assert fine.median_ms > 0


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # from torch itself
def test_a_system_with_wrong_outputs_is_not_timed(monkeypatch):
    def other(case):
        def call():
            return case.masked(*case.inputs) + 1

        return Prepared(call, call, case.masked)

    def other_shape(case):
        return Prepared(lambda: torch.zeros(7), lambda: None, case.masked)

    monkeypatch.setitem(SYSTEMS, "compile", other)
    monkeypatch.setitem(SYSTEMS, "halve_dense", other_shape)
    first, second = measured("compile", "halve_dense")
    assert re.fullmatch(
        r"the output differs from the eager model's by \d\S* \(relative\), allowed is 0\.2", first.error
    )
    assert second.error == "outputs have shapes [(7,)], the eager model's have [(1, 5)]"


def test_if_the_model_does_not_run_on_the_example_every_system_has_an_error():
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
    found = measured("eager", "halve", model=model)
    assert all(one.error and one.median_ms is None for one in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"systems": ["eager", "tensorrt"]},
            "systems must be among eager, channels_last, compile, ",
        ),
        ({"systems": []}, "systems must name at least one of eager, channels_last, compile, "),
        ({"batch_sizes": ()}, "batch_sizes must hold at least one batch size"),
        ({"batch_sizes": (0,)}, "batch_sizes must be positive integers, got 0"),
        ({"seconds": 0}, "seconds must be positive, got 0"),
        ({"example": ()}, "example must be"),
    ],
)
def test_invalid_options_raise_and_name_the_valid_ones(options, message):
    model = convnet()
    given = {"example": images(1), "systems": ["eager"], "dtype": torch.float32} | options
    with pytest.raises(OptionError, match=message):
        halve.bench(model, halve.prune(model), given.pop("example"), **given)


def test_the_model_and_the_example_are_not_changed():
    model, example = convnet(), images(2)
    masks, before = halve.prune(model), example.clone()
    with untouched(model):
        halve.bench(
            model, masks, example, batch_sizes=(3,), dtype=torch.bfloat16, systems=["eager", "halve"], seconds=0.01
        )
    assert torch.equal(example, before)


def test_progress_sees_each_system_and_each_round():
    seen = []

    def progress(items, what):
        for item in items:
            seen.append((what, item))
            yield item

    measured("eager", "halve", progress=progress)
    assert seen[:2] == [("batch 1: preparing", "eager"), ("batch 1: preparing", "halve")]
    assert {what for what, _ in seen[2:]} == {"batch 1: timing"}


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # from torch itself
def test_torch_compile_is_measured():
    [one] = measured("compile")
    assert one.error is None
    assert one.median_ms > 0


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu_every_system_is_measured_and_matches_the_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU()
        )
    model = model.cuda().eval()
    example = torch.randn(2, 32, 16, 16, device="cuda")
    found = halve.bench(model, halve.prune(model, also="*"), example, batch_sizes=(1, 8), seconds=0.02)
    assert [(one.system, one.error) for one in found] == [
        (name, None) for name in systems_for(torch.device("cuda"))
    ] * 2
    assert all(one.memory_bytes > 0 for one in found)
    assert all(one.plan for one in found if one.system == "halve")
    assert all(one.note.startswith("1 of 2 layers") for one in found if one.system == "torch_semi_structured")


def test_models_that_call_view_on_images_are_measured():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8 * 8 * 8, 3)

        def forward(self, x):
            return self.head(self.conv(x).view(len(x), -1))

    found = measured("eager", "halve", model=Rows().eval(), batch_sizes=(2,))
    assert [one.error for one in found] == [None, None]


def test_outputs_that_are_not_finite_are_not_compared():
    infinite = torch.tensor([1.0, float("inf")])
    assert module._mismatch([torch.zeros(2)], [infinite]) is None
    assert module._mismatch([torch.ones(2), torch.zeros(2)], [infinite, torch.ones(2)]).startswith("output 1 differs")
    assert module._mismatch([torch.tensor([1.0, float("nan")])], [torch.ones(2)]) is not None


def overflowing():
    """A network with a variance that is infinite in float16: PyTorch's norm then gives zeros."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    norm.running_var.fill_(83_615)
    nn.init.constant_(norm.weight, 300.0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)).eval()


WRONG = "outputs in float16 are not those of the model in float32"


@pytest.mark.parametrize("name", ["halve", "halve_unmasked"])
def test_a_system_that_is_right_where_the_eager_model_is_not_is_measured_and_the_note_is_on_the_eager_one(name):
    eager, ours = measured("eager", name, model=overflowing(), dtype=torch.float16)
    assert (eager.error, ours.error) == (None, None)
    assert WRONG in eager.note
    assert WRONG not in (ours.note or "")
    for one in measured("eager", name, model=overflowing(), dtype=torch.float32):
        assert "outputs" not in (one.note or "")


def test_a_model_of_integer_inputs_is_checked_in_the_dtype_that_it_computes_in():
    class Looked(nn.Module):
        """Looks up what the network of images gets."""

        def __init__(self):
            super().__init__()
            self.table, self.net = nn.Embedding(16, 4 * 8 * 8), overflowing()

        def forward(self, x):
            return self.net(self.table(x).unflatten(1, (4, 8, 8)))

    model, x = Looked().eval(), torch.arange(3)
    options = {"batch_sizes": (2,), "dtype": torch.float16, "seconds": 0.01}
    eager, ours = halve.bench(model, halve.prune(model), x, systems=("eager", "halve"), **options)
    assert (eager.error, ours.error) == (None, None)
    assert WRONG in eager.note
