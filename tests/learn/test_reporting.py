import json

import pytest
import torch

from halve.errors import FileError
from halve.learn.distributed import Processes
from halve.learn.probe import Estimate
from halve.learn.reporting import Report, Reporter
from tests.tiny import convnet, images, learn

REPORT = Report(10, 40, 0.5, 0.25, 0.125, 0.1, 1.0, 0.5, 0.5, 1234.0, 3.0, 9.0)


def reporter(report=None, log=None):
    return Reporter(Processes(torch.device("cpu")), report, log)


def test_events_go_to_the_function_and_kept_reports_to_the_log(tmp_path):
    seen, log = [], tmp_path / "run.jsonl"
    ours = reporter(seen.append, log)
    estimate = Estimate(0.1, 4.0, 1000, 40)
    with ours.open({}, append=False):
        ours.send(estimate)
        ours.send(REPORT)
        ours.send(REPORT, keep=True)
    assert seen == [estimate, REPORT, REPORT]
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["loss"] == 0.5


def test_a_resumed_run_adds_to_its_log(tmp_path):
    for append in (False, True):
        ours = reporter(log=tmp_path / "run.jsonl")
        with ours.open({}, append=append):
            ours.send(REPORT, keep=True)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(FileError, match="nothing"), reporter(log=tmp_path / "nothing" / "x").open({}, append=False):
        raise AssertionError("it must not get here")


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04 weights", b'{"mine": 1}\n', b"[" * 70_000], ids=["bytes", "json", "deep"]
)
def test_a_log_never_replaces_another_file(tmp_path, content):
    path = tmp_path / "dense.pth"
    path.write_bytes(content)
    with pytest.raises(FileError, match="exists and is not a log of 'halve learn'"):
        learn(convnet(), images(), steps=1, log=path)
    assert path.read_bytes() == content


def test_a_log_replaces_an_older_log_and_an_empty_file(tmp_path):
    path = tmp_path / "log.jsonl"
    path.touch()
    for steps in (2, 1):
        learn(convnet(), images(), steps=steps, log=path)
    [line] = path.read_text().splitlines()
    assert json.loads(line)["steps"] == 1
