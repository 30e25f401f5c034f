import functools
import re
import xml.dom.minidom

import pytest

import halve as package
from halve.cli import demo
from halve.sources.letters import LettersResNet, train_letters
from halve.sources.weights import load_weights_

FILES = [
    "demo.svg",
    "letters.masks.safetensors",
    "letters.packed.safetensors",
    "letters.safetensors",
    "magnitude.masks.safetensors",
    "net.py",
]


@pytest.fixture
def short(monkeypatch, few_letters):
    monkeypatch.setattr(demo, "STEPS", 40)
    monkeypatch.setattr(demo, "train_letters", functools.partial(train_letters, epochs=8))


@pytest.mark.usefixtures("short")
def test_the_demo_shows_what_learning_is_worth_and_writes_its_files(halve, tmp_path):
    result = halve("demo", "--out", "made/here")
    folder = tmp_path / "made" / "here"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert "step 40 of 40" in result.err
    names = ("none (dense)", "random", "magnitude", "magnitude, recalibrated", "learned")
    top1 = {name: float(re.search(rf"^{re.escape(name)} +([0-9.]+) %", result.out, re.M)[1]) for name in names}
    assert top1["random"] < top1["magnitude"] < top1["magnitude, recalibrated"]
    assert (
        top1["learned"] > top1["magnitude"]
    )  # few letters and steps: the whole demo is ahead of recalibrated masks too
    assert top1["none (dense)"] > 40
    gained = float(
        re.search(r"recalibrated magnitude: ([+-][0-9.]+) points of top-1, [+-][0-9.]+ of agreement", result.out)[1]
    )
    assert gained == pytest.approx(top1["learned"] - top1["magnitude, recalibrated"], abs=0.06)
    assert "verify: masks applied, all tensors unchanged" in result.out

    model = LettersResNet().eval()
    load_weights_(model, folder / "letters.safetensors")
    masks = package.load(folder / "letters.masks.safetensors")
    assert package.verify(package.apply(model, masks), masks).ok
    assert package.unpack(folder / "letters.packed.safetensors").masks == masks
    drawing = xml.dom.minidom.parse(str(folder / "demo.svg")).documentElement
    assert drawing.tagName == "svg"
    shown = [node.firstChild.data for node in drawing.getElementsByTagName("text")]
    assert [f"{top1[name]:.1f} %" for name in ("none (dense)", "learned")] == [
        text for text in shown if text in (f"{top1['none (dense)']:.1f} %", f"{top1['learned']:.1f} %")
    ]
    assert 1 <= len(drawing.getElementsByTagName("image")) <= demo.SHOWN

    # the commands that it ends with
    commands = [line.split()[1:] for line in result.out.splitlines() if line.startswith("  halve ")]
    assert len(commands) == 2
    at = [str(folder / part) if (folder / part.partition(":")[0]).exists() else part for part in commands[0]]
    assert f"{top1['learned']:.2f} %" in halve(*at).out
    halve("inspect", folder / commands[1][-1])

    # another run would replace these files and no other
    (folder / "demo.svg").write_text("<svg/>")
    assert "is not a picture of 'halve demo'" in halve("demo", "--out", "made/here", code=2).err


def test_a_folder_that_cannot_be_made_is_noticed_before_the_training(halve, tmp_path):
    (tmp_path / "file").write_text("")
    result = halve("demo", "--out", "file/folder", code=2)
    assert "cannot create the folder file/folder" in result.err
    assert "training" not in result.err
