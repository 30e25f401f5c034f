"""Which changes of the sources of bounds make a record of tests one of other bounds."""

import pytest

from halve.certify.digests import digest_of_code

RAISE = 'raise ValueError(f"x must be positive, got {x}")'
SOURCE = f"""
def bound(x):
    'The bound.'
    if x < 0:
        {RAISE}
    return x * 2  # twice
"""


@pytest.mark.parametrize(("old", "new"), [("The bound", "Another"), ("must be", "has to be"), ("  # twice", "")])
def test_texts_do_not_count(old, new):
    assert old in SOURCE
    assert digest_of_code(SOURCE.replace(old, new)) == digest_of_code(SOURCE)


@pytest.mark.parametrize(("old", "new"), [("x * 2", "x * 3"), ("x < 0", "x <= 0"), (RAISE, "x = 0")])
def test_code_counts(old, new):
    assert old in SOURCE
    assert digest_of_code(SOURCE.replace(old, new)) != digest_of_code(SOURCE)


def test_a_text_that_is_used_counts():
    assert digest_of_code("mode = 'zeros'") != digest_of_code("mode = 'reflect'")


def test_the_digest_is_the_same_in_every_version_of_python():
    nested = """def text(names):  # é
    return f"{', '.join(f'{name!r:>{4}}' for name in names)} or \\"none\\""
"""
    assert digest_of_code(nested) == "626c10b44f8dbae00372ed63ba84b53fe4b025c8511678070bfce14067a07117"


def test_blank_lines_do_not_count():
    assert digest_of_code("x = 1\n\n\n# one\n\ny = 2") == digest_of_code("x = 1\ny = 2\n")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("if x:\n    y = 1\n    z = 2\n", "if x:\n    y = 1\nz = 2\n"),
        ("def f(x, y):\n    return x\n    -y\n", "def f(x, y):\n    return x - y\n"),
        ("raise TypeError('x')", "raise ValueError('x')"),
        ("raise TypeError('x')", "raise"),
        ("x = 'a  b'", "x = 'a b'"),
    ],
    ids=["indentation", "statements", "the type of an error", "an error", "blanks in a text"],
)
def test_these_are_different(one, other):
    assert digest_of_code(one) != digest_of_code(other)
