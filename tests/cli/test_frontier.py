import signal
import xml.etree.ElementTree as ET

import pytest

import halve as library
from halve.cli.progress import Learning
from halve.errors import LearningError
from halve.learn.reporting import Report
from halve.select.speed_plan import LayerSpeed, SpeedPlan
from tests.pictures import class_folders


@pytest.fixture
def command(folder):
    """A plan, more pictures than can be held back, and a command that uses both."""
    layers = {"body": LayerSpeed((16, 8, 3, 3), "", 1.0, 0.5), "point": LayerSpeed((16, 16, 1, 1), "", 1.0, 0.5)}
    SpeedPlan(layers, "NVIDIA H200", "float16", 256, (3, 8, 8), 2.0, 1.8, 1.5).save(folder / "h200.json")
    class_folders(folder / "more", ("ant", "bee", "cat", "dog", "emu", "fox"), each=12)
    options = ("--plan", "h200.json", "--target", "H200", "--steps", 4, "--size", 8, "--points", 2, "--name", "net")
    return ("frontier", "zoo.py:net", "--data", "more", *options)


def test_masks_table_and_plot_are_written(halve, folder, command):
    result = halve(*command)
    first, second = (library.load(folder / f"net.{number}.masks.safetensors") for number in (1, 2))
    assert (len(first), len(second)) == (2, 1)
    assert "1.33 x" in result.out
    assert "net.frontier.svg shows them" in result.out
    root = ET.fromstring((folder / "net.frontier.svg").read_text())
    circles = root.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 4  # two points, and the network without masks, compiled and dense
    again = halve(*command, "--json").json  # over the older results
    assert [point["layers"] for point in again["points"]] == [2, 1]


def test_other_files_are_not_overwritten(halve, folder, command):
    (folder / "net.frontier.svg").write_text("<svg/>")
    result = halve(*command, code=2)
    assert "not a plot of 'halve frontier'" in result.err
    assert (folder / "net.frontier.svg").read_text() == "<svg/>"
    assert not (folder / "net.1.masks.safetensors").exists()
    for named in ("--weights", "--plan"):
        (folder / "x.2.masks.safetensors").unlink(missing_ok=True)
        (folder / "x.2.masks.safetensors").hardlink_to(
            folder / ("net.safetensors" if named == "--weights" else "h200.json")
        )
        result = halve(*command, "--weights", "net.safetensors", "--name", "x", "--force", code=2)
        assert f"same file as {named}" in result.err


def at_point_2(monkeypatch, do):
    """Do something at the first step of the second point."""
    show = Learning.__call__

    def show_and_do(bar, event):
        show(bar, event)
        if isinstance(event, Report) and bar._which.startswith("point 2"):
            do()

    monkeypatch.setattr(Learning, "__call__", show_and_do)


def test_ctrl_c_keeps_the_points_that_are_finished_and_exits_with_130(halve, folder, command, monkeypatch):
    at_point_2(monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    result = halve(*command, code=130)
    assert library.load(folder / "net.1.masks.safetensors").recipe["ended"] == "finished"
    assert not (folder / "net.2.masks.safetensors").exists()
    assert "interrupted: 1 of 2 points are finished" in result.err
    assert "run-state" not in result.err
    assert "net.1.masks.safetensors" in result.out
    root = ET.fromstring((folder / "net.frontier.svg").read_text())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 3


def test_an_error_keeps_the_points_that_are_finished(halve, folder, command, monkeypatch):
    def fail():
        raise LearningError("the machine is on fire")

    at_point_2(monkeypatch, fail)
    result = halve(*command, code=2)
    assert "the machine is on fire" in result.err
    assert "finished before the error: net.1.masks.safetensors" in result.err
    assert (folder / "net.1.masks.safetensors").exists()
    assert (folder / "net.frontier.svg").exists()


def test_the_table_says_how_sure_the_agreement_is_and_a_log_which_point_is_learned(halve, folder, command):
    result = halve(*command)
    assert "agreement on 8 images" in result.out
    assert "95 % interval" in result.out
    assert "net: agreement on 8 images, against time" in (folder / "net.frontier.svg").read_text()
    lines = result.err.splitlines()
    assert any(line.startswith("point 1 of 2: step 4 of 4: ") for line in lines)
    assert any(line.startswith("point 2 of 2: step 1 of 1: ") for line in lines)


def test_points_of_an_earlier_frontier_are_removed_and_other_files_stay(halve, folder, command):
    halve(*command)
    assert "frontier" in library.load(folder / "net.2.masks.safetensors").recipe
    halve("prune", "zoo.py:net", "--out", "net.3.masks.safetensors")
    halve(*command, "--points", 1)
    assert (folder / "net.1.masks.safetensors").exists()
    assert not (folder / "net.2.masks.safetensors").exists()
    assert (folder / "net.3.masks.safetensors").exists()


def test_options_that_messages_name_exist(halve, folder, command):
    few = ("frontier", "zoo.py:net", "--data", "photos", *command[4:])
    assert "pass --validation" in halve(*few, code=2).err
    result = halve(*few, "--validation", "photos", "--no-fallback", "--norms", "learn", "--exclude", "body")
    assert "agreement on 12 images" in result.out
    masks = library.load(folder / "net.1.masks.safetensors")
    assert (list(masks), masks.recipe["norms"]) == (["point"], "learn")
    elsewhere = [argument for argument in command if argument not in ("--target", "H200")]
    assert "pass --target 'NVIDIA H200'" in halve(*elsewhere, code=2).err
