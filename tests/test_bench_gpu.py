"""The processes of benchmarks/bench_gpu.py: prepared side by side, timed alone."""

import argparse
import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import bench_gpu

WORKER = """
import json, os, sys, time
from pathlib import Path
def after(name): return sys.argv[sys.argv.index(name) + 1]
network, batch, place = after("--networks"), int(after("--batches")), sys.argv.index("--pipes")
Path(__file__).with_name("pids").open("a").write(f"{os.getpid()} ")
if network == "broken":
    sys.exit(3)
if network == "prepared and gone":
    os.write(int(sys.argv[place + 1]), b"!")
    os._exit(4)
beats, began = [], time.monotonic()
while time.monotonic() < began + batch / 100:
    beats.append(time.monotonic())
    time.sleep(0.005)
os.write(int(sys.argv[place + 1]), b"!")
os.read(int(sys.argv[place + 2]), 1)
if network == "gone":
    os._exit(5)
times = time.monotonic(), time.sleep(60 if network == "slow" else 0.2), time.monotonic()
os.write(int(sys.argv[place + 1]), b"!")
time.sleep(0.8)  # ending takes time
record = {"network": network, "dtype": "float16", "batch": batch, "began": began, "beats": beats, "times": times}
for name in ("--out", "--layers-out"):
    open(after(name), "w").write(json.dumps([record]))
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(bench_gpu, "__file__", str(worker))
    return argparse.Namespace(
        networks=["one", "two"],
        batches=[30, 60],
        compile_batches=[],
        systems=["halve"],
        size=8,
        dtype="float16",
        seconds=0.1,
        processes=3,
        missing=False,
        split_networks=None,
        images=2048,
        out=tmp_path / "gpu.json",
        layers_out=tmp_path / "layers.json",
    )


def test_activations_of_random_networks_do_not_vanish():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    model, images = nn.Sequential(*layers), torch.randn(8, 3, 16, 16)
    for layer in (layers[0], layers[2]):
        layer.weight.data *= 0.1
    bench_gpu.normalise_(model, images)
    assert not model.training
    with torch.no_grad():
        assert 0.9 < float(model(images).std()) < 1.1


def test_a_process_is_alone_while_it_is_timed(options):
    bench_gpu.side_by_side(options)
    records = json.loads(options.out.read_text())
    assert {(r["network"], r["batch"]) for r in records} == {(n, b) for n in ("one", "two") for b in (30, 60)}
    assert json.loads(options.layers_out.read_text()) == records
    for timed in records:
        begin, _, end = timed["times"]
        others = [beat for r in records if r is not timed for beat in (*r["beats"], r["times"][0], r["times"][2])]
        assert not any(begin < beat < end for beat in others)
    starts = sorted(r["began"] for r in records)
    assert starts[1] < min(r["times"][0] for r in records)  # prepared side by side


def test_images_of_all_processes_are_bounded(options):
    options.images = 60
    bench_gpu.side_by_side(options)
    records = {(r["network"], r["batch"]): r for r in json.loads(options.out.read_text())}
    last = max(records["one", 30]["times"][2], records["two", 30]["times"][2])
    assert min(records["one", 60]["began"], records["two", 60]["began"]) > last


def test_others_go_on_while_a_process_ends(options):
    bench_gpu.side_by_side(options)
    records = json.loads(options.out.read_text())
    first, *others = sorted(records, key=lambda r: r["times"][0])
    end = first["times"][2]
    assert any(end < at < end + 0.7 for r in others for at in (*r["beats"], r["times"][0]))


def test_only_what_is_missing_is_measured(options):
    options.networks = ["one"]
    bench_gpu.side_by_side(options)
    before = json.loads(options.out.read_text())
    options.networks, options.missing = ["one", "two"], True
    bench_gpu.side_by_side(options)
    after = json.loads(options.out.read_text())
    assert [r for r in after if r["network"] == "one"] == before
    assert len(after) == 4


def test_our_dense_kernels_are_measured_for_the_networks_that_are_named():
    options = argparse.Namespace(systems=["halve_dense", "halve"], split_networks=["one"])
    assert bench_gpu.systems_for("one", options) == ["halve_dense", "halve"]
    assert bench_gpu.systems_for("two", options) == ["halve"]


@pytest.mark.parametrize(("network", "status"), [("broken", 3), ("prepared and gone", 4), ("gone", 5)])
def test_a_process_that_fails_does_not_stop_the_others(options, capsys, network, status):
    options.networks, options.batches = [network, "one"], [30]
    bench_gpu.side_by_side(options)
    assert [r["network"] for r in json.loads(options.out.read_text())] == ["one"]
    assert f"{network}-30: failed with exit status {status}" in capsys.readouterr().out


def test_no_process_is_left_if_the_first_one_is_killed(options, tmp_path):
    options.networks, options.batches = ["slow", "one", "two"], [30]
    parent = multiprocessing.get_context("fork").Process(target=bench_gpu.side_by_side, args=(options,))
    parent.start()
    pids = tmp_path / "pids"
    try:
        until(lambda: pids.exists() and len(pids.read_text().split()) == 3)
        processes = [int(pid) for pid in pids.read_text().split()]
        until(lambda: any(state_of(pid) == "T" for pid in processes))  # stopped while another one is timed
    finally:
        parent.kill()
        parent.join()
    until(lambda: all(state_of(pid) in (None, "Z") for pid in processes))


def until(condition):
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def test_results_of_another_run_are_merged(tmp_path, monkeypatch):
    def records(batches, **values):
        return [{"network": "one", "dtype": "float16", "batch": batch} | values for batch in batches]

    (tmp_path / "run").mkdir()
    for name in ("gpu.json", "gpu_layers.json"):
        (tmp_path / name).write_text(json.dumps(records((1, 8))))
        (tmp_path / "run" / name).write_text(json.dumps(records((8, 32), new=True)))
    arguments = ["--merge", str(tmp_path / "run"), "--out", str(tmp_path / "gpu.json")]
    monkeypatch.setattr("sys.argv", ["bench_gpu.py", *arguments, "--layers-out", str(tmp_path / "gpu_layers.json")])
    bench_gpu.main()
    for name in ("gpu.json", "gpu_layers.json"):
        assert bench_gpu.read(tmp_path / name) == records([1]) + records((8, 32), new=True)
