import json
import sys
import warnings
from dataclasses import dataclass

import pytest
import torch

from halve.cli import main
from halve.errors import ChangedWeightsWarning, DtypeWarning, LearningWarning
from halve.sources.models import load_model
from halve.sources.weights import save_state
from tests.pictures import class_folders

ZOO = """
import time
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 6)

    def forward(self, x):
        x = self.bn(self.stem(x)).relu()
        return self.head(self.point(self.depthwise(self.body(x).relu())).relu().mean((2, 3)))


def net():
    torch.manual_seed(0)
    return Net().eval()


class Slow(Net):
    def forward(self, x):
        Path(__file__).with_name("running").touch()
        time.sleep(30)
        return super().forward(x)


def slow():
    return Slow().eval()


def plain():
    return nn.Linear(8, 8)


def deep():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(1500)))


def sick():
    model = net()
    model.point.weight.data[0, 0] = float("nan")
    return model
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def halve(capsys, monkeypatch, tmp_path):
    """Run the command line in this process and in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the same commands, with and without a GPU
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["halve", *map(str, arguments)])
        capsys.readouterr()
        with warnings.catch_warnings():
            for category in (ChangedWeightsWarning, DtypeWarning, LearningWarning):
                warnings.simplefilter("always", category)
            with pytest.raises(SystemExit) as raised:
                main()
        shown = capsys.readouterr()
        result = Result(int(raised.value.code or 0), shown.out, shown.err)
        assert result.code == code, f"exit code {result.code}\n{result.out}\n{result.err}"
        assert "Traceback" not in result.out + result.err
        return result

    yield run
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path):
    """zoo.py, net.safetensors and photos/ with six classes of two pictures each."""
    (tmp_path / "zoo.py").write_text(ZOO)
    save_state(load_model(f"{tmp_path / 'zoo.py'}:net").model.state_dict(), tmp_path / "net.safetensors")
    class_folders(tmp_path / "photos", ("ant", "bee", "cat", "dog", "emu", "fox"), each=2)
    return tmp_path


NET = ("zoo.py:net", "--weights", "net.safetensors")


@pytest.fixture
def net(folder):
    """The arguments that name the model and its checkpoint."""
    return NET


@pytest.fixture
def masks(halve, net):
    """net.masks.safetensors, by magnitude."""
    halve("prune", *net)
    return "net.masks.safetensors"
