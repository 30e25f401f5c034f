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
    assert digest_of_code(nested) == "6ad723e32b8b810fee449eee6c2c4385ea4bad4f9536c0f2be47a74a68704f68"


def test_line_breaks_do_not_count():
    assert digest_of_code("x = [\n    1,\n]") == digest_of_code("x = [ 1, ]")
