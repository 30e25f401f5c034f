import inspect

import pytest

from halve import HalveError, errors

KINDS = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.HalveError)]


def test_every_error_is_caught_by_the_one_public_class():
    assert HalveError is errors.HalveError
    assert len(KINDS) == 9


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not HalveError])
def test_errors_are_also_what_python_would_raise(kind):
    python = {errors.FileError: OSError, errors.LearningError: RuntimeError, errors.EngineError: RuntimeError}
    assert issubclass(kind, python.get(kind, ValueError))


@pytest.mark.parametrize("kind", KINDS)
def test_the_message_is_all_that_an_error_prints(kind):
    assert str(kind("layer conv1: 3 of 4")) == "layer conv1: 3 of 4"


def test_the_warning_on_changed_weights_is_no_error():
    assert issubclass(errors.ChangedWeightsWarning, UserWarning)
    assert not issubclass(errors.ChangedWeightsWarning, HalveError)


@pytest.mark.parametrize(
    ("names", "most", "text"),
    [
        ([], 8, ""),
        (["a"], 8, "a"),
        (["a", "b"], 2, "a, b"),
        (["a", "b", "c"], 2, "a, b and 1 more"),
        (range(12), 8, "0, 1, 2, 3, 4, 5, 6, 7 and 4 more"),
        ((name for name in "xyz"), 1, "x and 2 more"),
    ],
)
def test_listed_names_a_few_and_counts_the_rest(names, most, text):
    assert errors.listed(names, most) == text
