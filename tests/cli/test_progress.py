import pytest
from rich.console import Console

from halve.cli import progress, show
from halve.learn.probe import Estimate
from halve.learn.reporting import Report


@pytest.fixture
def watched(monkeypatch):
    """Take standard error for a terminal."""
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    monkeypatch.setattr(show, "ERR", Console(stderr=True, force_terminal=True, color_system=None, width=120))


def test_progress_goes_to_standard_error_and_the_items_come_through(capsys, watched):
    assert list(progress.track([1, 2, 3], "images")) == [1, 2, 3]
    assert list(progress.track(iter([1, 2]), "batches")) == [1, 2]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "images" in shown.err
    assert "3/3" in shown.err
    assert "batches" in shown.err


def test_a_log_gets_no_bars(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # asks for colours, and rich takes it for a terminal
    assert list(progress.track([1, 2, 3], "images")) == [1, 2, 3]
    started = (item for item in progress.track([1, 2, 3], "layers"))
    assert next(started) == 1
    started.close()
    assert capsys.readouterr() == ("", "")
    with progress.Learning() as bar:
        bar(report(1))
    assert "━" not in capsys.readouterr().err


def test_an_error_inside_progress_passes_through(capsys):
    inverses = (1 / item for item in progress.track([1, 0], "images"))
    assert next(inverses) == 1
    with pytest.raises(ZeroDivisionError):
        next(inverses)


def test_the_rate_of_finished_work_is_not_zero(capsys, watched):
    list(progress.track([1], "images"))
    assert "1/1 0.0/s" not in capsys.readouterr().err


def report(step):
    return Report(step, 40, 0.5, 0.25, 0.125, 0.1, 1.0, 0.5, 0.5, 1234.0, float(step), 75.0)


def test_a_log_gets_the_estimate_and_a_line_now_and_then(capsys):
    with progress.Learning() as bar:
        bar(Estimate(0.5, 20.0, 2_000_000_000, 40))
        for step in range(1, 41):
            bar(report(step))
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0] == "40 steps, about 20 s (0.50 s per step), 2.00 GB of memory"
    assert lines[1] == "step 1 of 40: loss 0.5000, 1 min 15 s left, changed 12.5%, 1234 images/s, entropy 0.25"
    assert [line.split(":")[0] for line in lines[1:]] == ["step 1 of 40", "step 21 of 40", "step 40 of 40"]


def test_a_budget_in_minutes_has_no_number_of_steps(capsys):
    with progress.Learning() as bar:
        bar(Estimate(0.5, 60.0, 1000, None))
    assert capsys.readouterr().err.startswith("about 1 min 0 s (0.50 s per step)")


def test_runs_that_follow_each_other_say_which_one_it_is(capsys):
    with progress.Learning() as bar:
        for number in (1, 2):
            bar.begin(f"point {number} of 2")
            bar(Estimate(0.5, 20.0, 2_000_000_000, 40))
            bar(report(1))
    lines = [line.rpartition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["point 1 of 2", "point 1 of 2: step 1 of 40", "point 2 of 2", "point 2 of 2: step 1 of 40"]


def test_a_bar_says_which_run_it_shows(capsys, watched):
    with progress.Learning() as bar:
        bar.begin("point 2 of 5")
        bar(report(7))
    shown = capsys.readouterr().err
    assert "point 2 of 5: learning" in shown
    assert "7/40" in shown
