"""benchmarks/run_gpu.py runs jobs within a time limit and loses no results."""

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import run_gpu
from benchmarks.run_gpu import JOBS, Job, run
from tests.processes import environment

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
    keeps = "import atexit; atexit.register(lambda: print('kept')); print('begun', flush=True); time.sleep(60)"
    jobs = {"long": job("l", keeps), "stubborn": job("s", stubborn)}
    began = time.monotonic()
    assert run(using(monkeypatch, jobs), options) == {}
    assert time.monotonic() - began < 8
    with tarfile.open(options.pack) as archive:
        assert set(archive.getnames()) == {"events", "long.log", "stubborn.log"}
        assert archive.extractfile("stubborn.log").read() == b"begun\n"
        assert archive.extractfile("long.log").read().endswith(b"kept\n")  # it was interrupted, not killed


def test_files_that_are_gone_by_the_time_they_are_packed_are_left_out(options, monkeypatch):
    options.work.mkdir()
    for name in ("kept", "renamed"):
        (options.work / name).write_text(name)
    read = Path.read_bytes

    def read_bytes(path):
        (options.work / "renamed").unlink(missing_ok=True)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    run_gpu.pack(options.work, options.pack)
    with tarfile.open(options.pack) as archive:
        assert archive.getnames() == ["kept"]


def test_large_files_are_left_out_and_listed(options, monkeypatch):
    options.work.mkdir()
    monkeypatch.setattr(run_gpu, "LARGEST", 10)
    for name, size in (("results.json", 10), ("weights.safetensors", 11)):
        (options.work / name).write_bytes(b"x" * size)
    run_gpu.pack(options.work, options.pack)
    with tarfile.open(options.pack) as archive:
        assert archive.getnames() == ["results.json", "left_out.txt"]
        assert archive.extractfile("left_out.txt").read() == b"weights.safetensors 11\n"


def test_jobs_end_with_the_program_that_runs_them(options, tmp_path):
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    script, pid = tmp_path / "run.py", tmp_path / "pid"
    script.write_text(
        "from benchmarks import run_gpu\n"
        f"run_gpu.JOBS['probe'] = run_gpu.Job({f'-c {shlex.quote(code)} {pid}'!r})\n"
        "run_gpu.STOP_SECONDS = 1.0\n"
        "run_gpu.main()\n"
    )
    command = [sys.executable, str(script), str(options.work), "--jobs", "probe"]
    process = subprocess.Popen(command, env=environment())
    ends = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < ends:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_every_script_of_the_jobs_exists():
    for one in JOBS.values():
        first = one.arguments.split()[0]
        assert first == "-m" or (run_gpu.ROOT / first).is_file()
        assert one.after is None or JOBS[one.after].alone


def test_what_a_job_leaves_running_ends_with_it(options, monkeypatch):
    child = "import subprocess, sys; left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    jobs = {"leaves": job("l", child + "note.open('a').write(str(left.pid))")}
    assert run(using(monkeypatch, jobs), options) == {"leaves": 0}
    pid = int((options.work / "events").read_text().split()[1])
    ends = time.monotonic() + 5
    while time.monotonic() < ends and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
