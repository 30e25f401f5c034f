from dataclasses import asdict

import pytest
import torch

from halve.engine.operations import Convolution, MaxPool
from halve.engine.plan import Entry
from halve.engine.saved import plain

ENTRY = asdict(Entry("0", "4>8 at 2", "dense torch", False, 0.1, None, 1, None, "fastest"))


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 5},
        {"sparse": 1},
        {"time_ms": "1"},
        {"time_ms": True},
        {"reason": "\x1b[2J"},
        {"layer": None},
        {"x": 1},
    ],
    ids=str,
)
def test_dataclasses_have_the_types_of_their_annotations(change):
    assert plain.build(Entry, ENTRY).our_dense_ms == 1
    with pytest.raises(ValueError, match="Entry"):
        plain.build(Entry, ENTRY | change)


POOL = {"kernel": [2, 2], "stride": [2, 2], "padding": [0, 0], "dilation": [1, 1], "ceil_mode": False}


@pytest.mark.parametrize(
    "kernel", [[2], [2, 2, 2], [2, -1], [2, True], [2, 2.0], [2, "2"], 2, "22", [2, 2**31], [[2], 2]], ids=str
)
def test_pairs_are_two_sizes(kernel):
    assert plain.build(MaxPool, POOL).kernel == (2, 2)
    with pytest.raises(ValueError, match="kernel of a MaxPool"):
        plain.build(MaxPool, POOL | {"kernel": kernel})


def test_every_field_must_be_there():
    for fields in (None, [], {}, {"rows": 1}):
        with pytest.raises(ValueError, match="must have the fields rows, channels"):
            plain.build(Convolution, fields)


@pytest.mark.parametrize("text", ["", "0", "-1", "+1", "01", "1.0", "1e3", "٣", "1" * 19, "x"])
def test_sizes_are_positive_integers(text):
    assert plain.positive("12") == 12
    with pytest.raises(ValueError, match="positive integer"):
        plain.positive(text)


def test_dtypes_have_names():
    for name, dtype in plain.DTYPES.items():
        assert plain.dtype_named(name) is dtype
        assert plain.name_of(dtype) == name
    for name in ("quint8", "torch.float32", "Tensor", "load", None, 5, []):
        with pytest.raises(ValueError, match="unknown dtype"):
            plain.dtype_named(name)
    with pytest.raises(ValueError, match="floating-point"):
        plain.dtype_named("int8", floating=True)
    assert plain.dtype_named("bfloat16", floating=True) is torch.bfloat16
