import copy
import json
import os
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import halve
from halve.errors import FileError
from halve.masks import storage
from halve.masks.bits import pack_bits
from halve.masks.file import FORMAT, MAX_RECIPE, SUFFIX, header_of, load, save, tensors_of
from halve.masks.layout import Layout
from halve.masks.mask import MaskSet
from halve.masks.pattern import Pattern
from tests.masks.damage import accepted, flipped, truncated
from tests.random_masks import PATTERNS, a_mask, masks, random

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def small_set():
    order = Layout("conv", (2, 4, 1, 1), 4, channel_order=(3, 1, 0, 2))
    return MaskSet(
        {
            "features.0": a_mask("2:4", Layout("conv", (4, 8, 3, 3), 4)),
            "features.1": a_mask("1:4", order, seed=1),
            "head": a_mask("4:8", Layout("linear", (3, 10), 8, pad=True), seed=2),
        },
        {"bn.running_mean": random(5), "bn.running_var": random(5, dtype=torch.float64)},
        {"method": "test", "seed": 0, "nested": {"list": [1, 2.5, None, True, "ä"]}},
        {"features.1.weight": {1: (3, 1, 0, 2)}, "bn.weight": {0: (3, 1, 0, 2)}, "features.0.bias": {0: (1, 0)}},
    )


@pytest.fixture
def path(tmp_path):
    return small_set().save(tmp_path / f"small{SUFFIX}")


def write(path, change):
    """A file with a checksum that fits, after `change(header, tensors)`."""
    masks = small_set()
    header = json.loads(json.dumps(header_of(masks)))
    tensors = {f"codes:{name}": pack_bits(mask.codes, mask.pattern.bits) for name, mask in masks.items()}
    tensors |= tensors_of(masks)
    change(header, tensors)
    return storage.write(path, FORMAT, header, tensors)


@given(st.dictionaries(names, masks(), max_size=3), st.dictionaries(names, st.integers(0, 9), max_size=2))
def test_every_mask_set_comes_back_equal(tmp_path_factory, layers, sizes):
    statistics = {name: random(size, seed=size) for name, size in sizes.items()}
    masks = MaskSet(layers, statistics, {"seed": 3})
    path = tmp_path_factory.mktemp("masks") / "x"
    save(masks, path)
    again = load(path)
    assert again == masks
    assert dict(again.recipe) == {"seed": 3}
    for name, mask in masks.items():
        assert again[name].codes.dtype == mask.codes.dtype
        assert torch.equal(again[name].kept(), mask.kept())


@pytest.mark.parametrize("rule", PATTERNS)
def test_every_pattern_comes_back(tmp_path, rule):
    masks = MaskSet({"layer": a_mask(rule, Layout("linear", (7, 64), Pattern(rule).size, pad=True))})
    assert load(masks.save(tmp_path / "x")) == masks


def test_everything_of_a_set_comes_back(path):
    masks, again = small_set(), halve.load(path)
    assert again == masks
    assert again.recipe == masks.recipe
    assert {name: value.dtype for name, value in again.statistics.items()} == {
        "bn.running_mean": torch.float32,
        "bn.running_var": torch.float64,
    }
    assert again["features.0"].fingerprint == masks["features.0"].fingerprint
    assert again["features.1"].layout.channel_order == (3, 1, 0, 2)


def test_paths_may_be_texts_and_come_back_as_paths(tmp_path):
    path = small_set().save(str(tmp_path / "x"))
    assert path == tmp_path / "x"
    assert load(str(path)) == load(path)


def test_the_layers_come_back_in_the_order_of_the_model(tmp_path):
    masks = MaskSet({str(number): a_mask("2:4", Layout("linear", (1, 4), 4)) for number in range(12)})
    assert list(load(masks.save(tmp_path / "x"))) == list(masks)


def test_a_large_layer_takes_three_quarters_of_a_bit_per_weight(tmp_path):
    masks = MaskSet({"layer": a_mask("2:4", Layout("conv", (256, 256, 3, 3), 4))})
    bits = 8 * masks.save(tmp_path / "x").stat().st_size / masks.weights
    assert 0.75 <= bits < 0.8


@pytest.mark.parametrize(("rule", "bits"), [("1:4", 2 / 4), ("4:8", 7 / 8), ("1:2", 1 / 2), ("8:16", 14 / 16)])
def test_the_size_follows_the_bits_of_the_pattern(tmp_path, rule, bits):
    masks = MaskSet({"layer": a_mask(rule, Layout("linear", (1024, 512), Pattern(rule).size))})
    assert 8 * masks.save(tmp_path / "x").stat().st_size / masks.weights == pytest.approx(bits, rel=0.1)


def test_an_empty_set_can_be_stored(tmp_path):
    assert load(MaskSet({}).save(tmp_path / "x")) == MaskSet({})


def test_masks_of_any_finite_weights_can_be_stored(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    nn.init.constant_(model[0].weight, 3e38)
    masks = halve.prune(model)
    assert load(masks.save(tmp_path / "x")) == masks


def test_saving_fails_without_a_trace_and_keeps_the_old_file(tmp_path, path):
    before = path.read_bytes()
    with pytest.raises(FileError):
        small_set().with_recipe(score=lambda: None).save(path)
    assert path.read_bytes() == before
    with pytest.raises(FileError, match="nowhere"):
        small_set().save(tmp_path / "nowhere" / "x")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("kind", ["checkpoint", "pth", "packed", "run state", "text", "link"])
def test_masks_and_packed_checkpoints_replace_no_file_of_another_kind_unless_forced(tmp_path, kind):
    model, target = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), tmp_path / "net.safetensors"
    masks = halve.prune(model)
    if kind == "pth":
        torch.save(model.state_dict(), target)
    elif kind == "packed":
        halve.pack(model, masks, target)
    elif kind == "run state":
        storage.write(target, storage.Format("halve.learning", 1, "run state", ""), {}, {})
    elif kind == "text":
        target.write_text("notes")
    else:
        safetensors.torch.save_file(model.state_dict(), target)
    path = target
    if kind == "link":
        path = tmp_path / "link"
        path.symlink_to(target)
    before = target.read_bytes()
    with pytest.raises(FileError, match=f"{path.name}: the file exists and is not a mask file; .* force=True"):
        masks.save(path)
    if kind != "packed":
        with pytest.raises(FileError, match="the file exists and is not a packed checkpoint"):
            halve.pack(model, masks, path)
    assert target.read_bytes() == before
    masks.save(path, force=True)
    assert load(target) == masks
    halve.pack(model, masks, path, force=True)
    assert halve.unpack(target).masks == masks


def test_masks_replace_older_masks_and_empty_files_but_none_that_are_write_protected(tmp_path):
    masks, path = small_set(), tmp_path / "net.masks.safetensors"
    path.touch()
    masks.save(path)
    masks.with_recipe(again=True).save(path)
    path.chmod(0o444)
    with pytest.raises(FileError, match="write-protected"):
        masks.save(path)
    assert load(path).recipe["again"]
    masks.save(path, force=True)
    assert load(path) == masks


def test_no_damaged_file_gives_masks(path):
    content = path.read_bytes()
    for damaged in (*flipped(content, 200), *truncated(content, 97)):
        path.write_bytes(damaged)
        with pytest.raises(FileError):
            load(path)


def test_other_files_are_refused(tmp_path):
    safetensors.torch.save_file({"weight": random(4, 4)}, tmp_path / "checkpoint")
    torch.save({"weight": random(4, 4)}, tmp_path / "pickled")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("masks" * 100)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    halve.pack(model, halve.prune(model), tmp_path / "packed")
    for name in ("checkpoint", "pickled", "empty", "text", "packed", "missing", "."):
        with pytest.raises(FileError):
            load(tmp_path / name)


def test_an_unchanged_crafted_file_is_read(tmp_path):
    assert load(write(tmp_path / "x", lambda header, tensors: None)) == small_set()


LAYER = "features.0"


def change(key, value, layer=LAYER):
    return lambda header, tensors: header["layers"][layer].__setitem__(key, value)


def without(key):
    return lambda header, tensors: header["layers"][LAYER].pop(key)


def tensor(name, value):
    return lambda header, tensors: tensors.__setitem__(name, value)


def packed(*codes, bits=3):
    return pack_bits(torch.tensor(codes), bits)


ATTACKS = {
    "no layers": lambda header, tensors: header.pop("layers"),
    "no recipe": lambda header, tensors: header.pop("recipe"),
    "layers a list": lambda header, tensors: header.__setitem__("layers", []),
    "layers null": lambda header, tensors: header.__setitem__("layers", None),
    "recipe a text": lambda header, tensors: header.__setitem__("recipe", "prune"),
    "layer null": lambda header, tensors: header["layers"].__setitem__(LAYER, None),
    "layer a list": lambda header, tensors: header["layers"].__setitem__(LAYER, [1]),
    "layer a text": lambda header, tensors: header["layers"].__setitem__(LAYER, "conv"),
    "layer too many": lambda header, tensors: header["layers"].__setitem__("more", header["layers"][LAYER]),
    "layer missing": lambda header, tensors: header["layers"].pop(LAYER),
    **{f"no {key}": without(key) for key in ["pattern", "kind", "shape", "groups", "order", "pad", "shared_with"]},
    "no dense digest": without("dense"),
    "huge shape": change("shape", [2**20, 2**20, 3, 3]),
    "astronomic shape": change("shape", [10**30, 4]),
    "large shape": change("shape", [2**19, 2**20, 1, 1]),
    "many axes of one": change("shape", [1] * 100_000),
    "many axes": change("shape", [2] * 100_000),
    "negative shape": change("shape", [-4, -8, 3, 3]),
    "zero shape": change("shape", [0, 8, 3, 3]),
    "bool shape": change("shape", [True, 8, 3, 3]),
    "float shape": change("shape", [4.0, 8, 3, 3]),
    "text shape": change("shape", "4833"),
    "null shape": change("shape", None),
    "empty shape": change("shape", []),
    "nested shape": change("shape", [[4, 8, 3, 3]]),
    "other shape": change("shape", [4, 4, 3, 3]),
    "bool groups": change("groups", True),
    "zero groups": change("groups", 0),
    "negative groups": change("groups", -1),
    "float groups": change("groups", 1.0),
    "many groups": change("groups", 10**30),
    "three groups": change("groups", 3),
    "null groups": change("groups", None),
    "unknown kind": change("kind", "pool"),
    "number kind": change("kind", 1),
    "list kind": change("kind", ["conv"]),
    "linear kind": change("kind", "linear"),
    "unknown order": change("order", "rows"),
    "null order": change("order", None),
    "number pad": change("pad", 1),
    "null pad": change("pad", None),
    "no rule": change("pattern", "2-4"),
    "impossible rule": change("pattern", "5:4"),
    "huge rule": change("pattern", "16:32"),
    "number rule": change("pattern", 24),
    "null rule": change("pattern", None),
    "other rule": change("pattern", "1:4"),
    "other size": change("pattern", "4:8"),
    "shared with a text": change("shared_with", "abc"),
    "shared with numbers": change("shared_with", [1]),
    "shared with null": change("shared_with", None),
    "short digest": change("dense", "abc"),
    "number digest": change("dense", 1),
    "one digest": change("masked", None),
    "digest of no hexadecimal digits": change("dense", "z" * 64),
    "digests without sketch": lambda header, tensors: tensors.pop(f"sketch:{LAYER}"),
    "sketch without digests": lambda header, tensors: header["layers"][LAYER].update(dense=None, masked=None),
    "short sketch": tensor(f"sketch:{LAYER}", torch.zeros(127)),
    "sketch in double": tensor(f"sketch:{LAYER}", torch.zeros(128, dtype=torch.float64)),
    "sketch of two axes": tensor(f"sketch:{LAYER}", torch.zeros(128, 1)),
    "sketch with NaN": tensor(f"sketch:{LAYER}", torch.full((128,), float("nan"))),
    "sketch with infinity": tensor(f"sketch:{LAYER}", torch.full((128,), float("inf"))),
    "no codes": lambda header, tensors: tensors.pop(f"codes:{LAYER}"),
    "codes too short": tensor(f"codes:{LAYER}", torch.zeros(26, dtype=torch.uint8)),
    "codes too long": tensor(f"codes:{LAYER}", torch.zeros(28, dtype=torch.uint8)),
    "codes of another dtype": tensor(f"codes:{LAYER}", torch.zeros(27, dtype=torch.int8)),
    "codes in float": tensor(f"codes:{LAYER}", torch.zeros(27)),
    "codes of two axes": tensor(f"codes:{LAYER}", torch.zeros(27, 1, dtype=torch.uint8)),
    "codes of no axis": tensor(f"codes:{LAYER}", torch.tensor(0, dtype=torch.uint8)),
    "code 6 of 2:4": tensor(f"codes:{LAYER}", packed(*[0] * 71, 6)),
    "code 7 of 2:4": tensor(f"codes:{LAYER}", packed(7, *[0] * 71)),
    "code 70 of 4:8": tensor("codes:head", packed(0, 0, 0, 0, 0, 70, bits=7)),
    "stray bits": tensor("codes:features.1", torch.tensor([0b1_0000], dtype=torch.uint8)),
    "a virtual column kept": tensor("codes:head", packed(0, 69, 0, 0, 0, 0, bits=7)),
    "order not a permutation": tensor("channel_order:features.1", torch.tensor([0, 0, 1, 2], dtype=torch.int32)),
    "order out of range": tensor("channel_order:features.1", torch.tensor([1, 2, 3, 4], dtype=torch.int32)),
    "order negative": tensor("channel_order:features.1", torch.tensor([-1, 0, 1, 2], dtype=torch.int32)),
    "order in float": tensor("channel_order:features.1", torch.tensor([0.0, 1, 2, 3])),
    "order in 64 bits": tensor("channel_order:features.1", torch.tensor([0, 1, 2, 3])),
    "order too long": tensor("channel_order:features.1", torch.arange(8, dtype=torch.int32)),
    "order empty": tensor("channel_order:features.1", torch.zeros(0, dtype=torch.int32)),
    "order of two axes": tensor("channel_order:features.1", torch.arange(4, dtype=torch.int32).reshape(2, 2)),
    "order for the flat layout": change("order", "flat", "features.1"),
    "order of another layer": tensor("channel_order:other", torch.arange(4, dtype=torch.int32)),
    "moves of a list": lambda header, tensors: header.update(moves=[]),
    "moves of null": lambda header, tensors: header.update(moves=None),
    "moves without orders": lambda header, tensors: tensors.pop("order:0"),
    "orders without moves": lambda header, tensors: header.pop("moves"),
    "an order that nobody uses": tensor("order:7", torch.arange(4, dtype=torch.int32)),
    "a move of a number": lambda header, tensors: header["moves"].update(x=3),
    "a move to a text": lambda header, tensors: header["moves"].update(x={"0": "0"}),
    "a move to true": lambda header, tensors: header["moves"].update(x={"0": True}),
    "a move along no dimension": lambda header, tensors: header["moves"].update(x={"first": 0}),
    "a move along a dimension from behind": lambda header, tensors: header["moves"].update(x={"-1": 0}),
    "a move along a dimension in other digits": lambda header, tensors: header["moves"].update(x={"01": 0}),
    "moves not a permutation": tensor("order:0", torch.tensor([0, 0, 1, 2], dtype=torch.int32)),
    "moves in 64 bits": tensor("order:0", torch.tensor([0, 1, 2, 3])),
    "moves of two axes": tensor("order:0", torch.zeros(1, 4, dtype=torch.int32)),
    "extra codes": tensor("codes:other", torch.zeros(1, dtype=torch.uint8)),
    "extra tensor": tensor("weight", torch.zeros(3)),
    "extra sketch": tensor("sketch:other", torch.zeros(128)),
}


def test_crafted_files_with_a_fitting_checksum_are_refused(tmp_path):
    assert accepted(ATTACKS, lambda attack: write(tmp_path / "x", attack), load) == []


def test_the_refusal_names_file_and_layer(tmp_path):
    with pytest.raises(FileError, match=r"x\.masks.*features\.0.*not divisible by 8|x\.masks.*features\.0.*bytes"):
        load(write(tmp_path / "x.masks", change("pattern", "4:8")))


def test_a_small_file_takes_little_memory(tmp_path):
    """One bit for each block of 256 places: what a file may claim stays within reach of its size."""
    entry = header_of(small_set())["layers"]["head"] | {"dense": None, "masked": None}
    entry |= {"kind": "conv", "shape": [800, 1, 400], "pattern": "256:256", "pad": True}
    codes = torch.zeros(800 * 400 // 8, dtype=torch.uint8)
    path = storage.write(tmp_path / "x", FORMAT, {"layers": {"layer": entry}, "recipe": {}}, {"codes:layer": codes})
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = peak_bytes()
    load(path)
    assert peak_bytes() - before < 500 * path.stat().st_size


def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1])


def test_loading_shares_nothing_between_two_reads(path):
    one = load(path)
    kept = copy.copy(one["head"].codes)
    load(path)["head"].codes.zero_()
    assert torch.equal(load(path)["head"].codes, kept)


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


def test_recipes_have_a_depth_and_a_size(tmp_path):
    """What cannot be read is not written either: a reader could not trust a file that is."""
    for value in (nested(29), "a" * (MAX_RECIPE - 100)):
        assert load(small_set().with_recipe(x=value).save(tmp_path / "x")).recipe["x"] == value
    for value in (nested(40), nested(100_000), "a" * MAX_RECIPE, "\ud800"):
        with pytest.raises(FileError, match="recipe"):
            small_set().with_recipe(x=value).save(tmp_path / "y")
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    "value", ["[" * 40 + "]" * 40, "[" * 100_000 + "]" * 100_000, '"' + "a" * MAX_RECIPE + '"', r'"\ud800"']
)
def test_crafted_recipes_that_are_deep_large_or_no_text_are_refused(tmp_path, value):
    text = '{"layers": {}, "recipe": {"x": VALUE}}'.replace("VALUE", value)
    metadata = {"format": FORMAT.name, "version": str(FORMAT.version), "header": text}
    metadata["sha256"] = storage._checksum(metadata, {})
    (tmp_path / "x").write_bytes(safetensors.torch.save({}, metadata))
    with pytest.raises(FileError, match="damaged"):
        load(tmp_path / "x")
