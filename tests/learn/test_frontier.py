import signal

import pytest

import halve
from halve.errors import DataError, LearningWarning, OptionError
from halve.learn.frontier import Point, Start, _thinned
from halve.learn.reporting import Report
from halve.machine import device_names
from halve.select.speed_plan import LayerSpeed, SpeedPlan
from tests.random_masks import random
from tests.tiny import costly
from tests.untouched import untouched

QUICK = {"steps": 40, "permute": False, "progress": False, "fallback": False}


def plan(*saved):
    layers = {str(2 * i): LayerSpeed((16, 16), "", 1.0, 1.0 - ms) for i, ms in enumerate(saved)}
    return SpeedPlan(layers, device_names()[-1], "float32", 1, (16,), 8.0, 8.0, 4.0)


def test_points_lead_from_the_fastest_network_to_the_most_accurate_one():
    model, x, speeds = costly(), random(400, 16), plan(0.5, 0.5, 0.5, 0.5)
    with untouched(model):
        found = halve.frontier(model, x, speeds, points=4, **QUICK)
    assert [len(point.masks) for point in found] == [4, 3, 2, 1]
    assert [point.ms for point in found] == pytest.approx([4, 5, 6, 7])
    assert [point.speedup for point in found] == pytest.approx([8 / ms for ms in (4, 5, 6, 7)])
    assert found[-1].kl < found[0].kl
    for point in found:
        judged = halve.evaluate(model, point.masks, [x[-20:]])
        assert point.agreement == pytest.approx(judged.agreement)
        assert halve.verify(halve.apply(model, point.masks), point.masks).ok
    assert found[1].masks.recipe["left_dense"].keys() == found[0].masks.keys() - found[1].masks.keys()
    assert str(found).splitlines()[1].split(" | ")[0].strip() == "layers masked"


def test_layers_that_are_not_faster_sparse_are_masked_at_no_point():
    found = halve.frontier(costly(), random(200, 16), plan(0.5, 0.0, 0.5, 0.5), points=2, **QUICK)
    assert list(found[0].masks) == ["0", "4", "6"]
    assert "2" not in found[1].masks


def test_a_layer_that_saves_most_takes_a_step_of_its_own():
    order = ["0", "2", "4", "6"]
    assert _thinned(order, plan(0.01, 0.01, 0.01, 0.9), 5) == [["6"]]
    assert _thinned(order, plan(0.9, 0.01, 0.01, 0.01), 5) == [["2", "4", "6"], ["4", "6"], ["6"]]
    assert _thinned(order, plan(0.5, 0.5, 0.5, 0.5), 3) == [["2", "4", "6"], ["4", "6"]]
    assert _thinned(["0"], plan(0.5, 0.5, 0.5, 0.5), 3) == []


def test_a_plan_may_be_a_file_of_another_machine(tmp_path):
    path = tmp_path / "h200.json"
    SpeedPlan(plan(0.5, 0.5, 0.5, 0.5).layers, "NVIDIA H200", "float16", 256, (16,), 8.0, 8.0, 4.0).save(path)
    with pytest.raises(OptionError, match="NVIDIA H200"):
        halve.frontier(costly(), random(200, 16), path, points=1, **QUICK)
    assert len(halve.frontier(costly(), random(200, 16), path, points=1, target="H200", **QUICK)) == 1


def test_images_to_judge_by_are_needed():
    with pytest.raises(DataError, match="needs images to measure agreement on: 30 images are too few"):
        halve.frontier(costly(), random(30, 16), plan(0.5, 0.5, 0.5, 0.5), **QUICK)
    with pytest.raises(DataError, match="reads the data several times"):
        halve.frontier(costly(), iter([random(200, 16)]), plan(0.5, 0.5, 0.5, 0.5), validation=random(20, 16), **QUICK)
    with pytest.raises(OptionError, match="points must be a positive integer"):
        halve.frontier(costly(), random(200, 16), plan(0.5, 0.5, 0.5, 0.5), points=0)


def interrupting(point):
    """A report function that presses Ctrl-C at the second step of a point, and the events that it received."""
    events = []

    def report(event):
        events.append(event)
        starts = [event for event in events if isinstance(event, Start)]
        if isinstance(event, Report) and len(starts) == point and event.step == 2:
            signal.raise_signal(signal.SIGINT)

    return report, events


def test_an_interrupt_returns_the_points_that_are_finished_and_learns_no_further_ones():
    report, events = interrupting(2)
    with pytest.warns(LearningWarning) as warned:
        found = halve.frontier(costly(), random(400, 16), plan(0.5, 0.5, 0.5, 0.5), points=4, report=report, **QUICK)
    assert [str(warning.message) for warning in warned] == ["interrupted: 1 of 4 points are finished"]
    assert found.interrupted
    assert [len(point.masks) for point in found] == [4]
    assert found[0].masks.recipe["ended"] == "finished"
    assert [str(event) for event in events if isinstance(event, Start)] == ["point 1 of 4", "point 2 of 4"]
    assert [event for event in events if isinstance(event, Point)] == list(found)


def test_an_interrupt_before_the_first_point_is_finished_is_raised():
    report, _ = interrupting(1)
    with pytest.raises(KeyboardInterrupt):
        halve.frontier(costly(), random(400, 16), plan(0.5, 0.5, 0.5, 0.5), points=4, report=report, **QUICK)


def test_points_say_on_how_many_images_they_agree_and_how_sure_that_is():
    found = halve.frontier(costly(), random(400, 16), plan(0.5, 0.5, 0.5, 0.5), points=2, **QUICK)
    assert not found.interrupted
    assert [point.images for point in found] == [20, 20]
    low, high = found[0].agreement_interval
    assert 0 <= low <= found[0].agreement <= high <= 1
    assert "agreement on 20 images" in str(found)
    assert f"{100 * low:.1f}-{100 * high:.1f} %" in str(found)


def test_masks_that_make_the_network_slower_have_no_frontier():
    layers = plan(0.5, 0.5, 0.5, 0.5).layers
    slower = SpeedPlan(layers, device_names()[-1], "float32", 1, (16,), 8.0, 4.0, 5.0)
    with pytest.raises(OptionError, match="needs a plan in which masks save time"):
        halve.frontier(costly(), random(200, 16), slower, **QUICK)


def test_what_is_no_plan_is_refused():
    with pytest.raises(OptionError, match=r"plan must be what halve\.measure returned"):
        halve.frontier(costly(), random(64, 16), {"layers": {}}, points=2, steps=1)
