import json

import torch

from halve.bench.bench import Measurement
from halve.bench.records import OPTIONAL, layer_records, records
from halve.engine.plan import Entry

KEYS = {"network", "batch", "dtype", "hardware", "versions", "date", "system", "median_ms", "p10_ms", "p90_ms"}


def test_records_are_complete_and_omit_unknown_fields():
    found = [
        Measurement(1, "eager", 1.0, 0.9, 1.1, round_ms=(0.95, 1.05)),
        Measurement(1, "best_dense", error="needs a CUDA GPU"),
    ]
    written = json.loads(json.dumps(records(found, "net", torch.float32, torch.device("cpu"))))
    assert set(written[0]) == KEYS | {"images_per_second", "round_ms"}
    assert written[0]["round_ms"] == [0.95, 1.05]
    assert set(written[1]) == KEYS | {"error"}
    assert set(OPTIONAL) >= {key for record in written for key in set(record) - KEYS}
    assert written[0]["dtype"] == "float32"
    assert written[1]["median_ms"] is None
    assert layer_records(found, "net", torch.float32, torch.device("cpu")) == []


def test_layer_records_contain_the_plan():
    entry = Entry("conv1", "4>8 3x3 at 1 x 8 x 8", "mma_sp 64x64", True, 0.1, 0.2, 0.15, 0.1, "fastest")
    measured = [Measurement(1, "halve", 1.0, 1.0, 1.0, plan=(entry,))]
    [record] = layer_records(measured, "net", torch.float32, torch.device("cpu"))
    assert list(record) == [
        *("network", "batch", "dtype", "hardware", "versions", "date"),
        "layer",
        "shape",
        "kernel",
        "sparse",
        "time_ms",
        "dense_ms",
        "our_dense_ms",
        "sparse_ms",
        "reason",
    ]
    assert record["kernel"] == "mma_sp 64x64"
