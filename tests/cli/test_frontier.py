import xml.etree.ElementTree as ET

import pytest

import halve as library
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
