import json

import pytest

from halve.cli import show
from halve.cli.app import running


def test_a_table_has_a_title_a_header_and_aligned_rows(capsys):
    show.table("models", ("name", ">count"), [("a", "1"), ("bb", "1,000")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["models", "name  count", "a         1", "bb    1,000"]


def test_cells_and_lines_are_printed_as_they_are_and_not_as_markup(capsys):
    show.table("[red]t[/red]", ("name",), [("[bold]x[/bold] :smile:",)])
    show.say("[bold]y[/bold]")
    out = capsys.readouterr().out
    assert "[red]t[/red]" in out
    assert "[bold]x[/bold] :smile:" in out
    assert "[bold]y[/bold]" in out


def test_a_log_gets_every_row_on_one_line(capsys):
    row = ("layer." * 20, "why " * 30)
    show.table("t", ("name", "reason"), [row])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_long_lines_are_not_broken_in_a_log(capsys):
    show.say("word " * 100)
    show.note("word " * 100)
    show.fail("word " * 100)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1
    assert len(shown.err.splitlines()) == 2


def test_notes_and_errors_go_to_standard_error(capsys):
    show.note("remark")
    show.fail("reason")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "remark\nerror: reason\n")


def test_json_is_printed_whole_and_nothing_that_is_no_json(capsys):
    show.as_json({"a": [1, None, "ä"]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None, "ä"]}
    with pytest.raises(ValueError, match="JSON"):
        show.as_json({"a": float("nan")})


def test_messages_of_the_library_name_the_options_of_the_command_line():
    assert show.as_options("run_state= or resume=True; match='outputs+features', lr=0.1") == (
        "--run-state or --resume; --match outputs+features, --lr 0.1"
    )
    assert show.as_options("fallback=False, validation=False") == "--no-fallback, --validation none"
    assert show.as_options("pass example= or forward=") == "pass example= or forward="


def test_a_message_names_only_options_that_the_command_has():
    token = running.set("recalibrate")
    try:
        assert show.as_options("pass run_state=FILE or data=") == "pass run_state=FILE or --data"
    finally:
        running.reset(token)
    assert show.as_options("pass run_state=FILE") == "pass --run-state FILE"


def test_a_value_can_be_pasted_into_a_shell():
    assert show.as_options("pass target='NVIDIA H200', or include='layer1.*'") == (
        "pass --target 'NVIDIA H200', or --include 'layer1.*'"
    )


@pytest.mark.parametrize(
    ("share", "digits", "text"), [(None, 2, "-"), (0.5, 1, "50.0 %"), (1.0, 2, "100.00 %"), (0, 2, "0.00 %")]
)
def test_shares_are_shown_as_percent(share, digits, text):
    assert show.percent(share, digits) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1_000_000, "1.00 MB"), (2_500_000_000, "2.50 GB")],
)
def test_sizes_are_shown_for_a_person(count, text):
    assert show.formatted_bytes(count) == text


HOSTILE = "a\x1b]0;title\x07\x9b2J\u202eb\u2066\u200f\x7f\r\x08\u2028c\ud800"


@pytest.mark.parametrize("print_", [show.say, show.note, show.fail, lambda text: show.table(text, ("x",), [(text,)])])
def test_control_characters_never_reach_the_terminal(capsys, print_):
    print_(HOSTILE)
    shown = "".join(capsys.readouterr())
    assert "\\x1b]0;title\\x07\\x9b2J\\u202eb" in shown
    assert shown.isascii()
    assert shown.replace("\n", "").isprintable()


def test_ordinary_text_is_printed_as_it_is():
    for text in ("layer1.0.conv2", "ä:ö, \u4e2d\u6587, 3 % \u2192 x", "one\ntwo"):
        assert show.printable(text) == text


def test_only_masks_in_the_same_layers_are_compared(capsys):
    facts = {"agreement": 0.9, "kl": 0.1, "output_error": 0.2, "agreement_interval": None}
    about = {"images": 64, "source": "the last images of the data", **facts}
    show.quality({"quality": {"returned": "learned", "learned": None, "one_shot": None, **about}})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[2:]] == [["these", "masks", "(learned)"]]
    show.quality({"quality": {"returned": "wanda", "learned": facts, "one_shot": {"score": "wanda", **facts}, **about}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("these masks (one-shot, wanda) ")
    assert lines[3].startswith("learned ")
