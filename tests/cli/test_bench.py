import json

from halve.bench.bench import Measurement
from halve.cli.bench import _show
from halve.engine.plan import Entry

QUICK = ("--size", "16", "--batch", "2", "--seconds", "0.01")
KEYS = {"network", "batch", "dtype", "hardware", "versions", "date", "system", "median_ms", "p10_ms", "p90_ms"}


def test_bench_shows_each_system_and_says_what_is_not_there(halve, net, masks):
    systems = ("--systems", "eager,best_dense", "--systems", "halve")
    result = halve("bench", *net, "--masks", masks, *QUICK, *systems, "--plan")
    lines = result.out.splitlines()
    assert lines[0].startswith("zoo.py:net, float32, ")
    assert " ".join(lines[1].split()) == "batch system median ms p10-p90 images/s speed-up memory mJ/image"
    assert [line.split()[:2] for line in lines[2:]] == [["2", "eager"], ["2", "best_dense"], ["2", "halve"]]
    assert lines[3].split()[2:] == ["-"] * 6
    assert "note: best_dense, batch 2: needs a CUDA GPU" in result.err
    assert "note: halve, batch 2: runs dense: " in result.err
    assert "note: batch 2: no plan, runs dense: " in result.err
    assert "magnitude" not in result.err


def test_bench_without_masks_makes_some_and_says_so(halve, net):
    result = halve("bench", *net, *QUICK, "--systems", "eager")
    assert "note: no --masks given, using magnitude" in result.err
    assert "error" not in result.err


def test_bench_measures_each_batch_size_and_writes_json(halve, net, masks, folder):
    arguments = ("--batch", "1", "--systems", "eager,halve", "--json", "--out", "speed.json")
    result = halve("bench", *net, "--masks", masks, *QUICK, *arguments)
    assert set(result.json) == {"measurements", "layers"}
    found = [(record["batch"], record["system"]) for record in result.json["measurements"]]
    assert found == [(2, "eager"), (2, "halve"), (1, "eager"), (1, "halve")]
    for record in result.json["measurements"]:
        assert KEYS <= set(record) <= KEYS | {"images_per_second", "note", "round_ms"}
        assert record["network"] == "zoo.py:net"
        assert record["median_ms"] > 0
    assert json.loads((folder / "speed.json").read_text()) == result.json


def test_a_system_that_is_not_there_is_answered_with_those_that_are(halve, net):
    result = halve("bench", *net, *QUICK, "--systems", "tensorrt", code=2)
    assert result.out == ""
    assert (
        "error: unknown system 'tensorrt': systems must be among eager, channels_last, compile, compile_freezing"
        in result.err
    )


def test_bad_options_are_refused_before_anything_is_measured(halve, net):
    assert "must be one of float32, float16, bfloat16, got int8" in halve("bench", *net, "--dtype", "int8", code=2).err
    assert "cannot write" in halve("bench", *net, "--out", "nowhere/speed.json", code=2).err
    assert "batch_sizes must be positive integers, got 0" in halve("bench", *net, "--batch", "0", code=2).err


def test_when_nothing_could_be_measured_the_exit_code_is_1(halve, net):
    result = halve("bench", *net, *QUICK, "--systems", "best_dense", code=1)
    assert "needs a CUDA GPU" in result.err


def test_what_a_gpu_tells_stands_in_the_table_and_the_plan(capsys):
    entry = Entry("conv1", "64>64 3x3 at 1 x 56 x 56", "mma_sp 64x64", True, 0.01, 0.02, 0.015, 0.01, "fastest")
    dense = Measurement(1, "best_dense", 0.2, 0.19, 0.21, memory_bytes=25_000_000, energy_mj_per_image=40.0)
    ours = Measurement(1, "halve", 0.1, 0.09, 0.11, memory_bytes=15_000_000, energy_mj_per_image=20.0, plan=(entry,))
    _show([dense, ours], "net", plan=True)
    lines = capsys.readouterr().out.splitlines()
    row = ["1", "halve", "0.100", "0.090-0.110", "10,000", "2.00", "x", "15.00", "MB", "20.00"]
    assert lines[3].split() == row
    assert "batch 1: 1 of 1 layers sparse" in lines
    assert lines[-1].split()[-6:] == ["64x64", "0.0100", "0.0200", "0.0150", "0.0100", "fastest"]
