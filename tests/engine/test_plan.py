import json

import pytest
import torch

from halve.engine.geometry import Geometry
from halve.engine.layer import Layer
from halve.engine.memory import Memory
from halve.engine.plan import Entry, Plan, Timed

LAYER = Layer("fc", Geometry(4, 8), torch.randn(4, 8), None, linear=True)


def timing(**times):
    return Timed(LAYER, 1, "8>4", {name.replace("_", " "): time for name, time in times.items()})


def test_the_fastest_of_each_kind():
    found = timing(torch=3.0, gemm=2.0, sparse_64x64=1.5, twin_64x64=1.0)
    assert (found.best("dense"), found.best("ours"), found.best("any")) == ("gemm", "twin 64x64", "twin 64x64")


@pytest.mark.parametrize(("bar", "way"), [(1.0, "gemm"), (0.8, "sparse 64x64"), (0.6, "sparse 64x64")])
def test_our_kernels_are_taken_above_a_bar(bar, way):
    assert timing(torch=3.0, gemm=2.0, sparse_64x64=2.2).above(bar) == way


def test_a_layer_that_our_kernels_cannot_run_takes_its_fastest_dense_way():
    assert timing(torch=3.0, cudnn=2.0).above(0.6) == "cudnn"
    assert timing().above(1.0) == "torch"


def test_a_plan_is_written_and_read():
    plan = Plan({1: [Entry("a", "4>2", "torch", 0.1, None, "why")], 8: []}, {"b": "left"})
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
    assert "b: as it was (left)" in str(plan)


def test_timings_are_kept_and_added_to_what_others_wrote(tmp_path):
    path = tmp_path / "folder" / "timings.json"
    one, other = Memory(path), Memory(path)
    one.remember("a", {"torch": 1.0})
    one.save()
    other.remember("b", {"torch": 2.0})
    other.save()
    again = Memory(path)
    assert again.recall("a", ["torch"]) == {"torch": 1.0}
    assert again.recall("b", ["torch"]) == {"torch": 2.0}
    assert again.recall("b", ["torch", "gemm"]) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff\xfe"])
def test_a_torn_file_is_as_good_as_none(tmp_path, content):
    path = tmp_path / "timings.json"
    path.write_bytes(content)
    memory = Memory(path)
    assert memory.known == {}
    memory.remember("a", {"torch": 1.0})
    memory.save()
    assert Memory(path).recall("a", ["torch"]) == {"torch": 1.0}


def test_a_disk_that_cannot_be_written_to_costs_nothing_but_time(tmp_path):
    (tmp_path / "file").write_text("")
    memory = Memory(tmp_path / "file" / "timings.json")
    memory.remember("a", {"torch": 1.0})
    memory.save()
    assert memory.recall("a", ["torch"]) == {"torch": 1.0}
