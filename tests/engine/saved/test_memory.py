"""Loading a compiled network takes at most 64 times the file's size plus 100 MB, whatever the file claims."""

import copy

import pytest
import torch

from halve.engine.saved.file import FORMAT
from halve.engine.saved.graph import MOST_NODES
from halve.masks import storage
from tests import memory
from tests.engine.nets import compiled, sparsely
from tests.engine.saved.edited import contents
from tests.families import family
from tests.tiny import convnet


def relu(number):
    return {"call": "aten.relu.default", "args": [{"value": number}]}


LAYER = {
    "name": "",
    "operation": {"kind": "Linear", "rows": 1, "channels": 8, "activation": "none", "scaled": False},
    "dtype": "float32",
    "packed": None,
    "kernels": {},
}
CRAFTED = {
    "a long chain": {"nodes": [relu(number) for number in range(1000)], "outputs": [{"value": 1000}]},
    "as many nodes as possible": {"nodes": [{"call": "aten.sym_size.int", "args": [{"value": 0}, 0]}] * MOST_NODES},
    "many outputs": {
        "outputs": [{"value": 0}] * 100_000,
        "structure": ["tuple", ["*"] * 100_000],
    },
    "nested lists": {"nodes": [{"call": "aten.relu.default", "args": [[[]] * 500_000]}]},
    "a list of numbers": {"nodes": [{"call": "aten.relu.default", "args": [[0] * 1_000_000]}]},
    "a list of values": {"nodes": [{"call": "aten.cat.default", "args": [[{"value": 0}] * 100_000]}]},
    "nested outputs": {"structure": ["tuple", [["tuple", []]] * 100_000]},
    "many layers": {"nodes": [{"layer": LAYER, "args": [{"value": 0}]}] * 200},
    "many tensors": {"nodes": [{"tensor": None}] * 1000},
    "many batch sizes": {"plan": {"batches": {str(n): [] for n in range(1, 100_000)}, "uncompiled": {}, "dense": None}},
    "many entries": {"plan": {"batches": {"1": [{}] * 200_000}, "uncompiled": {}, "dense": None}},
    "long guards": {"conditions": ["1==1 and " * 90 + "1"] * 1200},
    "large values": {"nodes": [{"call": "aten.full.default", "args": [[2**31], 0]}] * 50},
    "a large product": {
        "nodes": [
            {"call": "aten.zeros.default", "args": [[60_000, 60_000]]},
            {"call": "aten.matmul.default", "args": [{"value": 1}, {"value": 1}]},
        ]
    },
    "many pieces": {
        "nodes": [
            {"call": "aten.zeros.default", "args": [[5000]]},
            {"call": "aten.unbind.int", "args": [{"value": 1}]},
            {"call": "aten.unbind.int", "args": [{"value": 1}]},
        ]
    },
}
TENSORS = {
    "many layers": {f"{number}.weight": torch.ones(1, 8) for number in range(1, 201)},
    "many tensors": {f"{number}.tensor": torch.zeros(0) for number in range(1, 1001)},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "net"
    sparsely(compiled(convnet())).save(path)
    return path


def test_no_crafted_network_takes_much_memory_or_time(small, tmp_path):
    header = contents(small)[0] | {"nodes": [], "outputs": [{"value": 0}], "structure": "*"}

    def maker(name):
        crafted = copy.deepcopy(header) | CRAFTED[name]
        if "conditions" in crafted:
            crafted["guards"]["conditions"] = crafted.pop("conditions")
        return lambda path: storage.write(path, FORMAT, crafted, TENSORS.get(name, {}))

    def resnet(path):
        sparsely(compiled(family("resnet_basic"), example=torch.zeros(2, 3, 64, 64))).save(path)
        return path

    makers = {name: maker(name) for name in CRAFTED}
    errors = memory.measured(tmp_path, "load_compiled", small, makers | {"a ResNet": resnet})
    assert errors["a ResNet"] == ""
    assert errors["many layers"] == ""
    assert "too large" not in errors["large values"]
    assert "is not a valid argument" in errors["nested lists"]
