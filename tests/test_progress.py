"""Progress in terminals and notebooks, and nowhere else."""

import io
import os
import pty
import subprocess
import sys
import types

import pytest
from torch.utils.data import DataLoader, IterableDataset

import halve
from halve import progress
from halve.batches import tracked
from halve.cli.progress import track as progress_bar
from halve.progress import StatusLine, bar, is_watched, track
from tests.processes import environment
from tests.tiny import convnet, images, labels


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watched_by(monkeypatch, stream):
    """Let the module write there; pytest itself replaces sys.stderr when a test starts."""
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream, modules=sys.modules))


@pytest.fixture
def terminal(monkeypatch):
    stream = Terminal()
    watched_by(monkeypatch, stream)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    return stream


def lines(stream):
    """What was on the line, one after another."""
    return [line.rstrip() for line in stream.getvalue().split("\r") if line.strip()]


def test_a_loop_shows_how_far_it_is_and_leaves_nothing_behind(terminal):
    assert list(track(["a", "b"], "layers")) == ["a", "b"]
    shown = lines(terminal)
    assert shown[0] == "layers [>                   ] 0/2"
    assert shown[1].startswith("layers [==========>         ] 1/2, ")
    assert shown[2] == "layers [====================] 2/2, 0 s left"
    assert terminal.getvalue().endswith("\r" + " " * len(shown[-1]) + "\r")


def test_items_without_a_number_are_counted(terminal):
    assert list(track(iter("abc"), "batches")) == ["a", "b", "c"]
    assert lines(terminal)[-1].startswith("batches: 3, ")


def test_a_line_is_not_longer_than_the_terminal_and_covers_the_one_before(terminal):
    line = StatusLine()
    line.show("x" * 200)
    line.show("y")
    assert terminal.getvalue() == f"\r{'x' * 79}\r{'y'.ljust(79)}"


def test_a_line_is_not_written_more_than_ten_times_a_second(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY_S", 0.1)
    list(track(range(10_000), "items"))
    assert len(lines(terminal)) < 10


def test_an_error_in_a_loop_clears_the_line_and_passes_through(terminal):
    inverses = (1 / item for item in track([1, 0], "items"))
    assert next(inverses) == 1
    with pytest.raises(ZeroDivisionError):
        next(inverses)
    assert terminal.getvalue().endswith(" \r")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999, 1.0, 1.1])
def test_a_bar_has_one_length(share):
    assert len(bar(share)) == 22


def test_nothing_is_shown_where_nobody_watches(terminal, monkeypatch):
    assert is_watched()
    monkeypatch.setenv("RANK", "1")  # of torchrun
    assert not is_watched()
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("TERM", "dumb")
    assert not is_watched()
    for stream in (io.StringIO(), None):
        watched_by(monkeypatch, stream)
        assert not is_watched()
        assert list(track([1], "items")) == [1]


def test_a_notebook_is_watched_though_it_is_no_terminal(monkeypatch):
    stream = io.StringIO()
    watched_by(monkeypatch, stream)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert is_watched()
    list(track([1, 2], "items"))
    assert lines(stream)[0].startswith("items [==========>         ] 1/2")
    ipython.get_ipython = lambda: types.SimpleNamespace()  # IPython in a pipe
    assert not is_watched()


@pytest.mark.parametrize("given", [False, None])
def test_progress_can_be_turned_off(terminal, given):
    assert list(tracked([1], given, "items")) == [1]
    assert terminal.getvalue() == ""


DATA = [(images(8), labels(8))] * 2
CALLS = {
    "learn": (
        lambda model, masks, **o: halve.learn(model, DATA, steps=3, validation=False, **o),
        ["channel orders", "learning [===="],
    ),
    "prune": (lambda model, masks, **o: halve.prune(model, "wanda", DATA, **o), ["activations [====", "layers"]),
    "prune, permuted": (
        lambda model, masks, **o: halve.prune(model, permute=True, example=images(2), **o),
        ["capturing the network ...", "channel orders", "layers"],
    ),
    "recalibrate": (lambda model, masks, **o: halve.recalibrate(model, masks, DATA, **o), ["BatchNorm statistics"]),
    "evaluate": (lambda model, masks, **o: halve.evaluate(model, masks, DATA, **o), ["images [===="]),
    "compile": (lambda model, masks, **o: halve.compile(model, masks, images(2), **o), ["capturing the network ..."]),
    "bench": (
        lambda model, masks, **o: halve.bench(
            model, masks, images(2), batch_sizes=[1], systems=["eager"], seconds=0.001, **o
        ),
        ["batch 1: timing"],
    ),
}


@pytest.mark.filterwarnings("ignore::halve.errors.EngineWarning")
@pytest.mark.parametrize(("call", "says"), CALLS.values(), ids=CALLS)
def test_long_calls_show_their_progress_unless_told_otherwise(terminal, call, says):
    model, seen = convnet(), []
    masks = halve.prune(model, progress=False)

    def watch(items, what):
        seen.append(what)
        return items

    call(model, masks, progress=False)
    call(model, masks, progress=watch)
    assert seen
    assert terminal.getvalue() == ""
    call(model, masks)
    for text in says:
        assert text in terminal.getvalue()


def test_a_report_takes_the_place_of_the_line(terminal):
    halve.learn(convnet(), images(8), steps=2, permute=False, validation=False, report=lambda event: None)
    assert "learning" not in terminal.getvalue()


@pytest.mark.parametrize("watched", [True, False])
def test_progress_is_shown_in_a_real_terminal_and_not_in_a_pipe(watched):
    learn = "halve.learn(t.convnet(), t.images(8), steps=2, permute=False, validation=False)"
    code = f"import halve, tests.tiny as t; {learn}; print('done')"
    ours, theirs = pty.openpty() if watched else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(TERM="xterm"), stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    assert process.communicate(timeout=120)[0] == b"done\n"
    try:
        shown = os.read(ours, 1 << 16)
    except OSError:  # Linux raises at the end of a terminal
        shown = b""
    os.close(ours)
    assert (b"learning" in shown) == watched
    assert watched or shown == b""


@pytest.mark.parametrize("show", [track, progress_bar])
def test_a_stream_without_a_length_is_tracked(terminal, show):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(6))

    assert [batch.tolist() for batch in show(DataLoader(Stream(), 3), "batches")] == [[0, 1, 2], [3, 4, 5]]
