import inspect
import warnings

import pytest

import halve
from halve import HalveError, errors
from tests.tiny import convnet, images

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]
ERRORS = [cls for cls in CLASSES if not issubclass(cls, Warning)]


def test_every_class_is_caught_by_the_public_error_or_is_a_warning():
    assert HalveError is errors.HalveError
    strange = [cls for cls in CLASSES if not issubclass(cls, HalveError | UserWarning)]
    assert not strange
    assert not [cls for cls in CLASSES if issubclass(cls, HalveError) and issubclass(cls, Warning)]


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind is not HalveError])
def test_errors_are_also_what_python_would_raise(kind):
    python = {errors.FileError: OSError, errors.LearningError: RuntimeError, errors.EngineError: RuntimeError}
    assert issubclass(kind, python.get(kind, ValueError))


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_prints_its_message_alone(kind):
    assert str(kind("layer conv1: 3 of 4")) == "layer conv1: 3 of 4"


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


def test_the_first_line_of_an_error_is_short_and_names_foreign_types():
    assert errors.first_line(errors.ModelError("it is odd\nin two respects")) == "it is odd"
    assert errors.first_line(KeyError()) == "KeyError"
    assert errors.first_line(RuntimeError("x" * 500)) == "RuntimeError: " + "x" * 160


def test_warnings_point_to_the_users_line_whatever_public_call_it_is():
    model = convnet()
    masks = halve.prune(model)
    model[0].weight.data += 0.01
    for call in (
        lambda: halve.apply(model, masks),
        lambda: halve.evaluate(model, masks, images(4)),
        lambda: halve.compile(model, masks, images(4)),
        lambda: halve.learn(model, iter([images(4)]), steps=2, permute=False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert caught
        assert {warning.filename for warning in caught} == {__file__}


def test_control_characters_of_files_reach_no_terminal():
    with pytest.warns(errors.LearningWarning, match=r"^layer \\x1b\]0;title\\x07$"):
        errors.warn("layer \x1b]0;title\x07", errors.LearningWarning)
    for error in (errors.MaskError("a\x1b[2J\u202e\nb"), errors.FileError("a\x1b[2J\u202e\nb")):
        assert str(error) == "a\\x1b[2J\\u202e\nb"
