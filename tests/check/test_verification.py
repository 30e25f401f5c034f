"""What is said of checks that are made up; those of real models are in test_verify.py."""

import pytest
import torch

from halve.check.verification import LayerCheck, TensorCheck, Verification
from halve.masks.pattern import Pattern

CHANGED = {"state": "changed", "problem": "changed", "failure": "it changed"}


def layer(name="conv", **facts):
    able = {"not_tensorrt": None, "not_tensor_cores": None}
    usual = {"name": name, "pattern": Pattern("2:4"), "in_place": True, "applied": True, "state": "masked"}
    return LayerCheck(**usual | able | facts)


@pytest.mark.parametrize(
    ("layers", "tensors", "status"),
    [
        ([layer()], [TensorCheck("bias", "unchanged")], "ok"),
        ([layer()], [TensorCheck("bias", **CHANGED)], "changed"),
        ([layer()], [TensorCheck("bias", "missing", None, "broken", "it is gone")], "failed"),
        ([layer()], [TensorCheck("bias", "unknown")], "unknown"),
        ([layer(applied=False, state="dense")], [], "not applied"),
        ([layer(), layer("other", applied=False, state="dense")], [], "failed"),
        ([layer(), layer("zeros", applied=None)], [], "ok"),
        ([], [], "failed"),
    ],
)
def test_the_worst_check_decides(layers, tensors, status):
    assert Verification(tuple(layers), tuple(tensors)).status == status


def test_masks_without_digests_make_an_outcome_unknown():
    outcome = Verification((layer(),), recorded=False)
    assert outcome.status == "unknown"
    assert "do not say which model" in outcome.summary


def test_a_change_that_was_accepted_is_ok_and_its_size_is_told():
    outcome = Verification((layer(state="changed", update=0.02),), (TensorCheck("bias", "changed"),))
    assert outcome.ok
    assert outcome.accepted == {"conv": 0.02, "bias": None}
    assert outcome.notes[-1] == (
        "accepted: 1 masked weight(s) changed, by up to about 2 % (conv); 1 other tensor(s) changed (bias)"
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "TensorRT, sparse tensor cores"),
        ({"not_tensor_cores": "too narrow"}, "TensorRT; not sparse tensor cores: too narrow"),
        ({"not_tensorrt": "dense", "not_tensor_cores": "dense"}, "none: dense"),
    ],
)
def test_a_row_says_which_hardware_can_use_the_layer(facts, words):
    assert layer(**facts).cells() == ("conv", "2:4", "yes", "masked", words)


def test_casts_are_listed_by_dtype():
    outcome = Verification((layer(cast=torch.float16),), (TensorCheck("bias", "unchanged", torch.bfloat16),))
    assert outcome.casts == {"conv": "float16", "bias": "bfloat16"}
    assert "cast to bfloat16, bit for bit: bias" in outcome.notes
    assert outcome.summary == "1 layer N:M in place, all tensors unchanged or cast"


def test_a_report_is_a_table_with_notes_failures_and_the_next_step():
    outcome = Verification((layer(), layer("a.long.name")), (TensorCheck("bias", **CHANGED),))
    lines = str(outcome).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")] == [
        *("layer", "pattern", "in place", "weight", "hardware that can use it"),
    ]
    assert len({line.index("|") for line in lines[:3]}) == 1
    assert lines[3:] == [
        "other tensors: 1 changed",
        "failure: bias: it changed",
        "changed: 1 of 3 checks failed",
        "next: halve.verify(model, masks, on_changed='accept') if the update is intended",
    ]


def test_names_in_a_report_cannot_control_a_terminal():
    report = str(Verification((layer("a\x1b[2J\u202e"),)))
    assert "\x1b" not in report
    assert "\u202e" not in report
    assert r"a\x1b[2J\u202e" in report
