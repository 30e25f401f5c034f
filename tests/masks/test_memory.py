"""Reading a file takes at most 64 times its size plus 100 MB, whatever the file claims."""

import pytest
import torch
from torch import nn

import halve
from halve.errors import HalveError
from halve.masks import file, packed, storage
from halve.masks.bits import pack_bits
from halve.masks.layout import Layout
from halve.masks.mask import MaskSet
from halve.masks.pattern import Pattern
from tests import memory
from tests.random_masks import a_mask, masks_for

ENTRY = {
    "kind": "conv",
    "groups": 1,
    "order": "channels",
    "pad": True,
    "shared_with": [],
    "dense": None,
    "masked": None,
}


def measured(tmp_path, read, makers):
    small = MaskSet({"x": a_mask("2:4", Layout("linear", (4, 4), 4))}).save(tmp_path / "small")
    return memory.measured(tmp_path, read, small, makers)


def codes(count, bits):
    return torch.zeros(-(-count * bits // 8), dtype=torch.uint8)


def mask_file(path, rule, shape, **changes):
    pattern = Pattern(rule)
    entry = ENTRY | {"pattern": rule, "shape": list(shape)} | changes
    layout = Layout(entry["kind"], tuple(shape), pattern.size, entry["groups"], entry["order"], entry["pad"])
    stream = codes(layout.rows * layout.blocks, pattern.bits)
    return storage.write(path, file.FORMAT, {"layers": {"x": entry}, "recipe": {}}, {"codes:x": stream})


def with_header(path, layers=None, recipe=None, tensors=None, **more):
    header = {"layers": layers or {}, "recipe": recipe or {}} | more
    return storage.write(path, file.FORMAT, header, tensors or {})


def every_pattern(path):
    """A layer of one block for each of a thousand patterns."""
    rules = [f"{n}:{m}" for m in range(5, 257) for n in (1, 2, m - 2, m - 1)]
    layers = {rule: ENTRY | {"pattern": rule, "shape": [1, int(rule.split(":")[1]) - 1, 1]} for rule in rules}
    tensors = {f"codes:{rule}": codes(1, Pattern(rule).bits) for rule in rules}
    return with_header(path, layers, tensors=tensors)


def ordered(path, groups, channels):
    """A channel order of two million channels."""
    order = torch.arange(channels, dtype=torch.int32).repeat(groups)
    entry = ENTRY | {"pattern": "1:1", "shape": [groups, channels, 1], "groups": groups}
    stream = codes(groups * channels, 1)
    return with_header(path, {"x": entry}, tensors={"codes:x": stream, "channel_order:x": order})


CRAFTED = {
    "2:256, one real column per block": lambda path: mask_file(path, "2:256", (174, 1, 174)),
    "254:256, one real column per block": lambda path: mask_file(path, "254:256", (174, 1, 174)),
    "256:256, one bit per block": lambda path: mask_file(path, "256:256", (4000, 1, 4000)),
    "256:256, one row": lambda path: mask_file(path, "256:256", (1, 256 * 4_000_000 - 1)),
    "1:1, one row": lambda path: mask_file(path, "1:1", (1, 16_000_000)),
    "a thousand patterns": every_pattern,
    "one long channel order": lambda path: ordered(path, 1, 2_000_000),
    "a channel order of many groups": lambda path: ordered(path, 2_000_000, 1),
    "a recipe of empty lists": lambda path: with_header(path, recipe={"x": [[]] * 2_000_000}),
    "a recipe of objects": lambda path: with_header(path, recipe={"x": [{"": 0}] * 1_000_000}),
    "a recipe of wide characters": lambda path: with_header(path, recipe={"x": "a" * 8_000_000 + "\U0001f600"}),
    "many moves": lambda path: with_header(path, moves={f"{i:x}": {"0": 0} for i in range(300_000)}),
    "many statistics": lambda path: with_header(
        path, tensors={f"statistics:{i:x}": torch.zeros(0) for i in range(30_000)}
    ),
}


def test_no_crafted_mask_file_takes_much_memory_or_time(tmp_path):
    measured(tmp_path, "load", CRAFTED)


def packed_file(path, rule, shape, dtype=torch.uint8, **changes):
    pattern = Pattern(rule)
    entry = ENTRY | {"pattern": rule, "shape": list(shape)} | changes
    layout = Layout(entry["kind"], tuple(shape), pattern.size, entry["groups"], entry["order"], entry["pad"])
    values = torch.ones(layout.rows, layout.blocks, pattern.kept, dtype=dtype)
    places = torch.arange(pattern.kept).repeat(layout.rows * layout.blocks)
    indices = pack_bits(places, max(1, (pattern.size - 1).bit_length()))
    header = {"layers": {"x": entry}, "recipe": {}, "aliases": {}}
    return storage.write(path, packed.FORMAT, header, {"values:x": values, "indices:x": indices})


PACKED = {
    "2:256, one real column per block": lambda path: packed_file(path, "2:256", (150, 1, 150)),
    "1:256, one real column per block": lambda path: packed_file(path, "1:256", (1000, 1, 1000)),
    "254:256": lambda path: packed_file(path, "254:256", (40, 256, 40)),
    "1:256, all columns real": lambda path: packed_file(path, "1:256", (2000, 256, 500)),
    "1:48 in one row": lambda path: packed_file(path, "1:48", (1, 48 * 500_000), kind="linear"),
    "1:48 transposed": lambda path: packed_file(path, "1:48", (48 * 500, 1000, 1), kind="conv_transpose"),
}


def test_no_crafted_packed_file_takes_much_memory_or_time(tmp_path):
    errors = measured(tmp_path, "unpack", PACKED)
    assert "more than 48 times" in errors.pop("1:256, all columns real")
    assert not any(errors.values())


def test_the_files_of_a_resnet_18_take_little_memory(tmp_path):
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18().eval()
    masks = halve.prune(model)
    assert measured(tmp_path, "load", {"masks": masks.save}) == {"masks": ""}
    assert measured(tmp_path, "unpack", {"packed": lambda path: halve.pack(model, masks, path, force=True)}) == {
        "packed": ""
    }


def test_nothing_is_packed_that_could_not_be_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "_FREE_GROWTH", 0)
    model = nn.Sequential(nn.Linear(256 * 64, 64, bias=False)).half()
    with pytest.raises(HalveError, match="mask file instead"):
        halve.pack(model, masks_for(model, "0", pattern="1:256"), tmp_path / "x")
    assert not list(tmp_path.iterdir())
