"""benchmarks/run_gpu.py runs jobs within a time limit and loses no results."""

import argparse
import tarfile
import time

import pytest

from benchmarks import run_gpu
from benchmarks.run_gpu import JOBS, Job, run

NOTE = "import time, pathlib; note = pathlib.Path('{work}') / 'events'; note.open('a').write('%s '); "


def job(name, code="", **options):
    return Job(f'-c "{NOTE % name}{code}"', **options)


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(run_gpu, "STOP_SECONDS", 1.0)
    monkeypatch.setattr(run_gpu, "PACK_SECONDS", 0.2)
    work = tmp_path / "work"
    return argparse.Namespace(work=work, assets=None, subjects=None, seconds=30.0, pack=tmp_path / "results.tgz")


def using(monkeypatch, jobs):
    monkeypatch.setattr(run_gpu, "JOBS", jobs)
    return list(jobs)


def test_jobs_that_time_something_come_first_and_alone(options, monkeypatch):
    wait = "time.sleep(0.5); note.open('a').write('%s '); "
    jobs = {"shared": job("s"), "one": job("1", wait % "1", alone=True), "two": job("2", wait % "2", alone=True)}
    assert run(using(monkeypatch, jobs), options) == {"one": 0, "two": 0, "shared": 0}
    assert (options.work / "events").read_text().split() == ["1", "1", "2", "2", "s"]


def test_what_needs_failed_results_is_not_run(options, monkeypatch, capsys):
    jobs = {"learn": job("l", "raise SystemExit(4)", alone=True), "export": job("e", after="learn"), "other": job("o")}
    assert run(using(monkeypatch, jobs), options) == {"learn": 4, "other": 0}
    assert (options.work / "events").read_text().split() == ["l", "o"]
    assert "export: not finished" in capsys.readouterr().out


def test_at_the_end_of_the_time_jobs_are_stopped_and_results_are_packed(options, monkeypatch):
    options.seconds = 4.0
    stubborn = "import signal; signal.signal(2, signal.SIG_IGN); print('begun', flush=True); time.sleep(60)"
    jobs = {"long": job("l", "print('begun', flush=True); time.sleep(60)"), "stubborn": job("s", stubborn)}
    began = time.monotonic()
    assert run(using(monkeypatch, jobs), options) == {}
    assert time.monotonic() - began < 8
    with tarfile.open(options.pack) as archive:
        assert set(archive.getnames()) == {"events", "long.log", "stubborn.log"}
        assert archive.extractfile("stubborn.log").read() == b"begun\n"


def test_every_script_of_the_jobs_exists():
    for one in JOBS.values():
        first = one.arguments.split()[0]
        assert first == "-m" or (run_gpu.ROOT / first).is_file()
        assert one.after is None or JOBS[one.after].alone
