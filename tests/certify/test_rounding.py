"""Rounding is bounded: exact arithmetic, in fractions, never lies outside."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from halve.certify import rounding
from halve.certify.rounding import Interval, Owners, around, by_image, check_products, dot, from_images, loss, total
from halve.errors import CertificateError

NUMBERS = st.floats(-1e50, 1e50, allow_subnormal=True)
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=6)
EXACTLY = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def float64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def exact(rows, vector) -> Fraction:
    return sum((Fraction(a) * Fraction(b) for a, b in zip(rows, vector, strict=True)), Fraction(0))


@given(value=NUMBERS, radius=st.floats(0, 1e50))
@EXACTLY
def test_around_holds_everything_within_the_radius(value, radius):
    low, high = (Fraction(end.item()) for end in around(float64(value), float64(radius)))
    assert low <= Fraction(value) - Fraction(radius)
    assert Fraction(value) + Fraction(radius) <= high


@given(one=NUMBERS, other=NUMBERS)
@EXACTLY
def test_the_radius_reaches_both_ends_from_the_rounded_center(one, other):
    interval = Interval(float64(min(one, other)), float64(max(one, other)))
    center, radius = Fraction(interval.center.item()), Fraction(interval.radius.item()) + Fraction(1e-300)
    assert center - radius <= Fraction(min(one, other))
    assert Fraction(max(one, other)) <= center + radius


@given(terms=ROWS)
@EXACTLY
def test_a_dot_product_is_a_lower_bound(terms):
    row, ends = [a for a, _, _ in terms], [sorted(pair) for _, *pair in terms]
    low, high = [a for a, _ in ends], [b for _, b in ends]
    worst = exact(row, [a if weight >= 0 else b for weight, a, b in zip(row, low, high, strict=True)])
    found = total([dot(float64([row]), float64([low]), float64([high]))])
    assert Fraction(found.item()) <= worst
    same = float64([low])
    assert Fraction(total([dot(float64([row]), same, same)]).item()) <= exact(row, low)


@given(terms=ROWS)
@EXACTLY
def test_a_loss_is_an_upper_bound(terms):
    row, error = [a for a, _, _ in terms], [abs(b) for _, b, _ in terms]
    found = total([-loss(float64([row]), float64([error]))])
    assert -Fraction(found.item()) >= exact(map(abs, row), error)


@given(values=st.lists(NUMBERS, min_size=1, max_size=8))
@EXACTLY
def test_a_total_is_a_lower_bound(values):
    found = total([float64([value]) for value in values])
    assert Fraction(found.item()) <= sum(map(Fraction, values))


def test_products_that_underflow_are_part_of_the_bound():
    """1e-200 times -1e-200 is 0 in float64, and less in exact arithmetic."""
    row, vector = float64([[1e-200]]), float64([[-1e-200]])
    assert (row * vector).item() == 0
    assert total([dot(row, vector, vector)]).item() < 0


def test_bounds_without_their_rounding_terms_would_be_wrong(monkeypatch):
    row, vector = float64([[1e16, 1.0, -1e16]]), float64([[1.0, -1.0, 1.0]])
    assert total([dot(row, vector, vector)]).item() <= -1
    monkeypatch.setattr(rounding, "gamma", lambda terms: 0.0)
    monkeypatch.setattr(rounding, "_TINY", 0.0)
    assert total([dot(row, vector, vector)]).item() > -1


def test_rows_of_several_images_meet_the_vectors_of_their_own():
    torch.manual_seed(0)
    rows, vectors = torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(3, 2, 3, dtype=torch.float64)
    index = torch.tensor([0, 0, 2, 2, 2])
    owners = Owners.of(index, 3)
    alone = [dot(row[None], vectors[i, None], vectors[i, None]).item() for row, i in zip(rows, index, strict=True)]
    assert dot(rows, vectors, vectors, owners=owners).tolist() == pytest.approx(alone)
    table = by_image(rows, owners)
    assert table.shape == (3, 3, 2, 3)
    assert bool((table[1] == 0).all())
    assert torch.equal(from_images(table, owners), rows)


def test_emulated_products_are_refused(monkeypatch):
    """The check runs on the CPU here, with products that drop what is small beside the largest number of a row."""
    product = Tensor.__matmul__

    def emulated(left, right):
        unit = left.abs().amax(1, keepdim=True) * 2.0**-55
        return product((left / unit).round() * unit, right)

    monkeypatch.setattr(Tensor, "__matmul__", emulated)
    with pytest.raises(CertificateError, match="not exact enough on cpu"):
        check_products(torch.device("cpu"))


def test_a_gpu_that_is_told_to_emulate_is_refused(monkeypatch):
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "1")
    check_products(torch.device("cpu"))
    with pytest.raises(CertificateError, match="unset CUBLAS_EMULATE_DOUBLE_PRECISION, which is 1"):
        check_products(torch.device("cuda"))


def test_devices_without_float64_are_refused():
    with pytest.raises(CertificateError, match="not on mps"):
        check_products(torch.device("mps"))
