import pytest
from hypothesis import given
from hypothesis import strategies as st

from halve.permute.trace.axes import Span, cut, fresh, pin, resolved, tie, width_of


def sizes(spans):
    return [span.axis.size for span in resolved(spans)]


def test_tied_axes_share_a_root():
    a, b, c = fresh(4), fresh(4), fresh(4)
    tie(a, b)
    tie(c, b)
    assert resolved(a) == resolved(b) == resolved(c)


def test_axes_are_cut_if_only_parts_are_tied():
    a, b = fresh(8), fresh(2) + fresh(6)
    tie(a, b)
    assert sizes(a) == sizes(b) == [2, 6]
    assert resolved(a) == resolved(b)


def test_an_axis_can_be_tied_to_itself_with_a_shift():
    (a,), (b,), (c,) = fresh(4), fresh(4), fresh(4)
    tie((a, b), (b, c))
    assert resolved([a]) == resolved([b]) == resolved([c])


def test_halves_of_one_axis_can_be_tied_to_each_other():
    a = fresh(8)
    left, right = cut(a, 4)
    tie(left, right)
    assert resolved(left) == resolved(right)
    assert len(resolved(a)) == 2


def test_axes_that_overlap_themselves_are_cut_until_they_fit():
    (a,) = fresh(6)
    (b,) = fresh(3)
    tie((a, b), (b, a))  # elements 0-2 of a are b, elements 3-5 of a are elements 0-2 of a
    assert set(resolved([a])) == set(resolved([b]))


def test_a_pin_affects_axes_tied_before_and_after():
    a, b, c = fresh(4), fresh(4), fresh(4)
    tie(a, b)
    pin(a, "first")
    tie(b, c)
    pin(c, "second")
    assert resolved(c)[0].axis.pinned == "first"


def test_a_cut_of_a_pinned_axis_is_pinned():
    a = fresh(8, "fixed")
    assert {span.axis.pinned for part in cut(a, 3) for span in part} == {"fixed"}


def test_different_widths_and_repeats_cannot_be_tied():
    a, b = fresh(8), fresh(4)
    tie(a, b)
    assert a[0].axis.pinned
    assert b[0].axis.pinned
    c, d = fresh(8), (Span(fresh(4)[0].axis, 2),)
    tie(c, d)
    assert all(span.axis.pinned for span in (*resolved(c), *resolved(d)))


def test_a_cut_inside_a_channel_pins_it():
    (span,) = fresh(4)
    flat = (Span(span.axis, 9),)
    left, right = cut(flat, 10)
    assert (width_of(left), width_of(right)) == (10, 26)
    assert resolved(flat)[0].axis.pinned
    assert all(part.axis.pinned for part in (*left, *right))


def test_a_cut_between_channels_keeps_their_pixels():
    (span,) = fresh(4)
    left, right = cut((Span(span.axis, 9),), 18)
    assert [(s.axis.size, s.repeat) for s in (*left, *right)] == [(2, 9), (2, 9)]


@pytest.mark.parametrize("at", [0, 12])
def test_a_cut_at_an_end_cuts_nothing(at):
    a = fresh(8) + fresh(4)
    left, right = cut(a, at)
    assert (width_of(left), width_of(right)) == (at, 12 - at)
    assert sizes(a) == [8, 4]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_any_two_sequences_of_the_same_width_can_be_tied(left, right):
    total = max(sum(left), sum(right))
    rows = []
    for row in (left, right):
        parts = [*row, total - sum(row)]
        rows.append(tuple(span for size in parts if size for span in fresh(size)))
    tie(*rows)
    assert resolved(rows[0]) == resolved(rows[1])
    assert width_of(rows[0]) == total
