"""Digests of all tensors of a model: which tensors, which casts, and their place in files."""

import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import halve
from halve.errors import FileError, MaskError
from halve.masks import storage
from halve.masks.digests import (
    Digests,
    digests_of,
    dtypes_of,
    has_digest,
    matching_dtype,
    named_tensors,
    ties_of,
)
from halve.masks.file import FORMAT, header_of, tensors_of
from halve.masks.fingerprint import digest
from halve.masks.mask import MaskSet
from halve.masks.recipe import with_digests
from tests import tiny
from tests.masks.damage import accepted
from tests.random_masks import random


@pytest.mark.parametrize(
    ("dtype", "casts"),
    [
        (torch.float64, (torch.float32, torch.float16, torch.bfloat16)),
        (torch.float32, (torch.float16, torch.bfloat16)),
        (torch.float16, (torch.bfloat16,)),
        (torch.bfloat16, (torch.float16,)),
        (torch.float8_e4m3fn, ()),
        *((other, ()) for other in (torch.int64, torch.bool, torch.complex64)),
    ],
)
def test_a_tensor_is_digested_in_its_own_dtype_and_those_that_lose_something(dtype, casts):
    assert dtypes_of(dtype) == (dtype, *casts)
    tensor = random(5).to(dtype)
    assert digests_of(tensor) == {each: digest(tensor.to(each)) for each in (dtype, *casts)}


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_values_of_a_cast_are_recognised_in_any_dtype_that_holds_them(cast, stored):
    weight = random(64)
    values = weight.to(cast).to(stored)
    exact = torch.equal(values.to(cast), weight.to(cast)) and torch.equal(values.to(cast).to(stored), values)
    assert matching_dtype(values, digests_of(weight)) == (cast if exact else None)


def test_a_wider_dtype_holds_the_same_values():
    weight = random(64)
    assert matching_dtype(weight.double(), digests_of(weight)) == torch.float32
    assert matching_dtype(weight.half().double(), digests_of(weight.half())) == torch.float16
    other = weight.double()
    other[3] += 1e-12
    assert matching_dtype(other, digests_of(weight)) is None


def test_other_values_shapes_signs_and_kinds_do_not_match():
    known = digests_of(torch.tensor([0.0, 1.0, 2.0, 4.0]))
    assert matching_dtype(torch.tensor([0.0, 1.0, 2.0, 4.0]), known) == torch.float32
    for other in (
        [-0.0, 1.0, 2.0, 4.0],
        [[0.0, 1.0], [2.0, 4.0]],
        [0.0, 1.0, 2.0],
        [0, 1, 2, 4],
        [0.0, 1, 2, 4 + 1e-6],
    ):
        assert matching_dtype(torch.tensor(other), known) is None
    whole = digests_of(torch.arange(4))
    for dtype in (torch.int32, torch.float32, torch.float64, torch.uint8):
        assert matching_dtype(torch.arange(4).to(dtype), whole) is None


def test_memory_layout_and_device_do_not_matter():
    weight = random(4, 8, 3, 3)
    assert matching_dtype(weight.to(memory_format=torch.channels_last), digests_of(weight)) == torch.float32


class Lying(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


def test_tensors_whose_bytes_do_not_say_what_they_hold_have_no_digest():
    assert all(map(has_digest, (random(2), nn.Parameter(random(2)), torch.tensor(1), torch.zeros(0))))
    assert has_digest(type("Tagged", (nn.Parameter,), {})(random(2)))
    others = (random(2, 2).to_sparse(), random(2).to("meta"), random(2).as_subclass(Lying))
    assert not any(map(has_digest, others))
    assert matching_dtype(others[0], digests_of(random(2, 2))) is None


def test_parameters_and_all_buffers_are_named_but_for_counters():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.register_buffer("table", torch.arange(3), persistent=False)
    assert list(named_tensors(model, ["0"])) == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "table", "1.running_mean", "1.running_var"),
    ]


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, parametrizations.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_computed_weight_of_a_masked_layer_stands_for_what_it_is_computed_from(norm):
    layer = norm(nn.Linear(8, 8))
    model = nn.ModuleDict({"a": layer, "again": layer, "other": norm(nn.Linear(8, 8))}).eval()
    tensors = named_tensors(model, ["a"])
    assert {"a.weight", "again.weight", "a.bias", "again.bias"} <= set(tensors)
    assert not [name for name in tensors if name.startswith(("a.weight_", "a.par", "again.weight_", "again.par"))]
    assert len([name for name in tensors if name.startswith("other.")]) > 2
    assert ties_of(tensors, ["a"]) == {"again.weight": "a.weight", "again.bias": "a.bias"}
    layer = norm(nn.Linear(8, 8))
    assert "weight" in named_tensors(layer, [""])


def test_tied_tensors_are_digested_once_under_the_name_of_the_masked_layer():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[1].weight = model[0].weight
    assert ties_of(named_tensors(model, ["1"]), ["1"]) == {"0.weight": "1.weight"}
    masks = halve.prune(model)
    assert masks.digests.tied == {"1.weight": "0.weight"}
    assert "1.weight" not in masks.digests.dense


def test_digests_are_of_the_dense_model_and_of_the_masked_weights():
    model = tiny.convnet()
    masks = halve.prune(model)
    for name, tensor in named_tensors(model, masks).items():
        assert masks.digests.dense[name] == digests_of(tensor)
    for name, mask in masks.items():
        assert masks.digests.masked[name] == digests_of(mask.apply_to(model.get_submodule(name).weight))
        assert masks.digests.masked[name][torch.float32] == mask.fingerprint.masked


def test_every_way_to_masks_records_them(tmp_path):
    model, images = tiny.convnet(), tiny.images()
    expected = halve.prune(model).digests.dense
    learned = tiny.learn(model, images, steps=1)
    for masks in (
        learned,
        halve.recalibrate(model, learned, images),
        learned.with_recipe(note="x"),
        learned.without(["0"]),
        halve.prune(model, "wanda", images, recalibrate=True),
        halve.load(learned.save(tmp_path / "masks")),
        halve.unpack(halve.pack(model, learned, tmp_path / "packed", dtype=torch.float16)).masks,
    ):
        assert masks.digests.dense == expected
        assert masks.digests.masked.keys() == masks.keys()


def test_a_masked_weight_without_a_digest_leaves_masks_without_digests():
    model = tiny.convnet()
    masks = MaskSet(dict(halve.prune(model)))
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Lying), requires_grad=False)
    assert with_digests(masks, model).digests is None


def test_digests_of_other_masks_are_refused():
    masks, other = halve.prune(tiny.convnet()), halve.prune(tiny.convnet(seed=1))
    with pytest.raises(MaskError, match="the digests and the fingerprint of layer 0 are of different weights"):
        masks.with_digests(other.digests)
    with pytest.raises(MaskError, match="the digests are for other layers: 0"):
        masks.without(["0"]).with_digests(masks.digests)
    known = masks.digests
    with pytest.raises(MaskError, match="do not fit the weight of layer 0"):
        masks.with_digests(Digests({}, known.masked))
    with pytest.raises(MaskError, match="tied"):
        masks.with_digests(Digests(known.dense, known.masked, {"0.weight": "3.weight"}))


def test_masks_with_other_digests_are_not_equal():
    model, other = tiny.convnet(), tiny.convnet()
    other[10].bias.data += 1
    assert halve.prune(model) != halve.prune(other)
    assert halve.prune(model) == halve.prune(tiny.convnet())


def test_files_without_digests_are_read_as_before(tmp_path):
    masks = halve.prune(tiny.convnet())
    old = MaskSet(dict(masks), recipe=masks.recipe)
    assert "digests" not in header_of(old)
    assert halve.load(old.save(tmp_path / "old")).digests is None


def test_a_digest_takes_96_bytes_for_a_float_tensor(tmp_path):
    masks = halve.prune(tiny.convnet())
    rows = tensors_of(masks)["digests"]
    assert rows.dtype == torch.uint8
    assert tuple(rows.shape) == (3 * (len(masks.digests.dense) + len(masks)), 32)


def write(path, change):
    """A mask file with digests and a fitting checksum, after `change(header, tensors)`."""
    model = tiny.convnet()
    model[8].bias = nn.Parameter(model[8].bias.detach().half())
    masks = halve.prune(model)
    source = masks.save(path.with_name("source"))
    _, header, tensors = storage.read(source, [FORMAT])
    header = json.loads(json.dumps(header))
    change(header, tensors)
    return storage.write(path, FORMAT, header, tensors)


def tensors_entry(header):
    return header["digests"]["tensors"]


ATTACKS = {
    "null": lambda header, tensors: header.update(digests=None),
    "a list": lambda header, tensors: header.update(digests=[]),
    "empty": lambda header, tensors: header.update(digests={}),
    "no tied": lambda header, tensors: header["digests"].pop("tied"),
    "no names": lambda header, tensors: header["digests"].pop("tensors"),
    "another key": lambda header, tensors: header["digests"].update(more={}),
    "names a list": lambda header, tensors: header["digests"].update(tensors=[]),
    "tied a list": lambda header, tensors: header["digests"].update(tied=["x"]),
    "header without digests": lambda header, tensors: header.pop("digests"),
    "digests without header": lambda header, tensors: tensors.pop("digests"),
    "a tensor less": lambda header, tensors: tensors_entry(header).popitem(),
    "a tensor more": lambda header, tensors: tensors_entry(header).update(more="float32"),
    "no masked weight": lambda header, tensors: tensors_entry(header).pop("0.weight"),
    "unknown dtype": lambda header, tensors: tensors_entry(header).update({"0.weight": "float33"}),
    "another spelling": lambda header, tensors: tensors_entry(header).update({"0.weight": "float"}),
    "a name of torch": lambda header, tensors: tensors_entry(header).update({"0.weight": "nn"}),
    "a number": lambda header, tensors: tensors_entry(header).update({"0.weight": 32}),
    "another dtype": lambda header, tensors: tensors_entry(header).update({"0.weight": "float16"}),
    "an integer": lambda header, tensors: tensors_entry(header).update({"0.weight": "int64"}),
    "tied to nothing": lambda header, tensors: header["digests"]["tied"].update(x="y"),
    "tied to a number": lambda header, tensors: header["digests"]["tied"].update(x=1),
    "tied and digested": lambda header, tensors: header["digests"]["tied"].update({"10.bias": "0.weight"}),
    "bytes too few": lambda header, tensors: tensors.update(digests=tensors["digests"][:-1]),
    "bytes too many": lambda header, tensors: tensors.update(digests=tensors["digests"].repeat(2, 1)),
    "flat": lambda header, tensors: tensors.update(digests=tensors["digests"].reshape(-1)),
    "another type": lambda header, tensors: tensors.update(digests=tensors["digests"].to(torch.int8)),
    "of a masked weight": lambda header, tensors: tensors["digests"][0].add_(1),
    "of a weight with its mask": lambda header, tensors: tensors["digests"][-3].add_(1),
}


def test_crafted_digests_are_refused(tmp_path):
    assert accepted(ATTACKS, lambda attack: write(tmp_path / "x", attack), halve.load) == []


def test_a_digest_that_was_tampered_with_is_told_by_verify(tmp_path):
    """With a fitting checksum it is a valid file, but not of this model."""
    model = tiny.convnet()
    masks = halve.prune(model)
    sparse = halve.apply(model, masks)
    row = 3 * list(masks.digests.dense).index("10.bias")

    def tamper(header, tensors):
        tensors["digests"][row, 5] ^= 1

    path = masks.save(tmp_path / "masks")
    _, header, tensors = storage.read(path, [FORMAT])
    tamper(header, tensors)
    read = halve.load(storage.write(path, FORMAT, header, tensors))
    assert list(halve.verify(sparse, read).failures) == ["10.bias"]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(FileError, match="checksum"):
        halve.load(path)
