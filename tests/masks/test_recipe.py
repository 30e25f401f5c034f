import json

import torch
from torch import nn

from halve import Pattern, prune, select
from halve.masks.fingerprint import digest
from halve.masks.recipe import origin_of, with_fingerprint
from halve.select.select import plain_options


def test_options_become_plain_json():
    options = {"pattern": {"a": Pattern("1:4"), "b": None}, "include": ("x", "y"), "order": "flat", "exclude": None}
    plain = plain_options(options)
    assert json.loads(json.dumps(plain)) == plain
    assert plain == {"pattern": {"a": "1:4", "b": None}, "include": ["x", "y"], "order": "flat", "exclude": None}


def test_the_origin_names_the_class_and_the_versions():
    origin = origin_of(nn.Sequential())
    assert origin["model"].endswith("Sequential")
    assert origin["torch"] == torch.__version__


def test_a_fingerprint_is_of_the_weight_and_of_what_the_mask_leaves():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    mask = prune(model)["0"]
    again = with_fingerprint(mask, model[0].weight, ())
    assert again == mask
    assert again.fingerprint.dense == digest(model[0].weight)
    assert again.fingerprint.masked == digest(mask.apply_to(model[0].weight)) != again.fingerprint.dense


def test_a_mask_remembers_the_layers_that_share_its_weight():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[1].weight = model[0].weight
    mask = prune(model)["0"]
    assert select(model)[0].shared_with == mask.shared_with == ("1",)
    assert with_fingerprint(mask, model[0].weight, ("1", "2")).shared_with == ("1", "2")
