"""Files that are cut, damaged, crafted or foreign are refused."""

import json
import os
import pickle
import struct

import numpy as np
import pytest
import safetensors.torch
import torch

from halve.errors import FileError
from halve.masks import storage
from tests.masks.envelopes import FORMAT, HEADER, read, tensors, write_bytes, write_raw
from tests.random_masks import random


@pytest.fixture
def path(tmp_path):
    return storage.write(tmp_path / "x.safetensors", FORMAT, HEADER, tensors())


def test_every_cut_is_refused(path):
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    lengths = {*range(12), *range(header - 4, header + 4), *range(0, len(whole), 23), len(whole) - 1, len(whole) - 8}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"x\.safetensors"):
            read(path)


def test_anything_appended_is_refused(path):
    whole = path.read_bytes()
    for more in (b"\0", b" " * 8, whole):
        path.write_bytes(whole + more)
        with pytest.raises(FileError):
            read(path)


def test_every_flipped_bit_is_refused(path):
    whole = path.read_bytes()
    positions = np.random.default_rng(0).choice(len(whole) * 8, 600, replace=False)
    for bit in [*range(64), *positions.tolist()]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(FileError):
            read(path)


def test_random_bytes_are_refused(tmp_path):
    generator = np.random.default_rng(0)
    for size in (*range(1, 40), 1000, 10_000):
        raw = generator.bytes(size)
        (tmp_path / "x").write_bytes(raw)
        with pytest.raises(FileError):
            read(tmp_path / "x")
        write_bytes(tmp_path / "x", raw)
        with pytest.raises(FileError):
            read(tmp_path / "x")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileError, match=r"gone\.masks: no such file"):
        read(tmp_path / "gone.masks")


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_an_impossible_name_is_refused(tmp_path, name):
    with pytest.raises(FileError):
        read(tmp_path / name)


def test_folders_pipes_devices_and_broken_links_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (tmp_path, tmp_path / "pipe", tmp_path / "link", tmp_path / "loop", "/dev/zero"):
        with pytest.raises(FileError):
            read(place)


def test_a_file_below_a_file_is_refused(path):
    with pytest.raises(FileError):
        read(path / "x")


def test_empty_files_are_refused(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(FileError, match="cut short"):
        read(tmp_path / "x")


def test_a_file_of_an_absurd_size_is_refused_unread(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(storage.MAX_BYTES + 1)  # takes no space
    with pytest.raises(FileError, match="68,719,476,737 bytes"):
        read(tmp_path / "x")


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("save", [pickle.dumps, None], ids=["pickle", "torch"])
def test_pickles_are_refused_and_never_run(tmp_path, monkeypatch, save):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    if save is None:
        torch.save(Bomb(), tmp_path / "x")
    else:
        (tmp_path / "x").write_bytes(save(Bomb()))
    with pytest.raises(FileError):
        read(tmp_path / "x")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "halve.other", "version": "1"}])
def test_foreign_safetensors_files_are_refused_with_a_hint(tmp_path, metadata):
    safetensors.torch.save_file({"weight": random(4, 4)}, tmp_path / "x", metadata)
    with pytest.raises(FileError, match=r"halve\.test.*halve prune"):
        read(tmp_path / "x")


@pytest.mark.parametrize("version", ["2", "0", "", "1.0", "01", " 1", "ä"])
def test_unknown_versions_are_refused(tmp_path, version):
    write_raw(tmp_path / "x", {"version": version, "header": "{}"})
    with pytest.raises(FileError, match="version"):
        read(tmp_path / "x")


def test_a_crafted_file_with_a_fitting_checksum_is_read(tmp_path):
    assert read(write_raw(tmp_path / "x", {"header": "{}"}))[1] == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "1",
        '"text"',
        '{"a": 1, "a": 1}',
        '{"a": {"b": 1, "b": 2}}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1} x',
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a": ' + "9" * 5000 + "}",
    ],
    ids=lambda text: text[:12] or "empty",
)
def test_headers_that_are_no_plain_json_object_are_refused(tmp_path, text):
    write_raw(tmp_path / "x", {"header": text})
    with pytest.raises(FileError, match="damaged"):
        read(tmp_path / "x")


def test_a_file_without_a_header_is_refused_even_if_its_checksum_fits(tmp_path):
    write_raw(tmp_path / "x", {})
    with pytest.raises(FileError):
        read(tmp_path / "x")


@pytest.mark.parametrize("checksum", ["", "0" * 64, "ä"])
def test_a_wrong_checksum_is_refused(tmp_path, checksum):
    write_raw(tmp_path / "x", {"header": "{}", "sha256": checksum})
    with pytest.raises(FileError, match="checksum"):
        read(tmp_path / "x")


META = {"format": FORMAT, "version": "1", "header": "{}", "sha256": ""}


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    "header",
    [
        {"__metadata__": []},
        {"__metadata__": None},
        {"__metadata__": "text"},
        {"__metadata__": {**META, "version": 1}},
        {"__metadata__": {**META, "header": {}}},
        {"__metadata__": META, "a": entry(shape=[2**40], offsets=[0, 2**42])},
        {"__metadata__": META, "a": entry(shape=[2**63, 2**63], offsets=[0, 8])},
        {"__metadata__": META, "a": entry(shape=[-2])},
        {"__metadata__": META, "a": entry(shape=[2.0])},
        {"__metadata__": META, "a": entry(shape=[True, 2])},
        {"__metadata__": META, "a": entry(shape=["2"])},
        {"__metadata__": META, "a": entry(shape=[3])},
        {"__metadata__": META, "a": entry(offsets=[8, 0])},
        {"__metadata__": META, "a": entry(offsets=[4, 12])},
        {"__metadata__": META, "a": entry(offsets=[-8, 0])},
        {"__metadata__": META, "a": entry(), "b": entry()},
        {"__metadata__": META, "a": entry(dtype="F99")},
        {"__metadata__": META, "a": entry(dtype=32)},
        {"__metadata__": META, "a": None},
        {"__metadata__": META, "a": []},
        {"__metadata__": META, "a": {}},
        {"__metadata__": META, "a": entry(more=1)},
        {"__metadata__": META},
    ],
    ids=repr,
)
def test_impossible_safetensors_headers_are_refused(tmp_path, header):
    with pytest.raises(FileError):
        read(write_bytes(tmp_path / "x", json.dumps(header), bytes(8)))


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F8_E8M0", "F8_E4M3", "C64", "BOOL", "U16", "U64", "F64"])
def test_unusual_dtypes_are_read_or_refused(tmp_path, dtype):
    header = {"__metadata__": META, "a": entry(dtype, shape=[1], offsets=[0, 8])}
    for shape in ([1], [2], [4], [8], [16], []):
        header["a"]["shape"] = shape
        with pytest.raises(FileError):
            read(write_bytes(tmp_path / "x", json.dumps(header), bytes(8)))


@pytest.mark.parametrize(
    "text",
    [
        '{"__metadata__": {}, "__metadata__": {}}',
        '{"a": 1, "a": 2}',
        "[" * 200_000,
        '{"__metadata__": NaN}',
        "{}",
        "[]",
        "  ",
        b"\xff\xfe\xff\xfe",
        b'{"\xff": 1}',
        '{"\\ud800": {}}',
    ],
    ids=lambda text: repr(text[:20]),
)
def test_safetensors_headers_that_are_no_plain_json_are_refused(tmp_path, text):
    with pytest.raises(FileError):
        read(write_bytes(tmp_path / "x", text))


@pytest.mark.parametrize("length", [0, 1, 2, 9, 2**31, 2**62, 2**63, 2**64 - 1])
def test_any_claimed_header_length_is_checked_against_the_file(tmp_path, length):
    (tmp_path / "x").write_bytes(struct.pack("<Q", length) + b"{}      ")
    with pytest.raises(FileError):
        read(tmp_path / "x")
