"""The envelope of all files: written atomically; what is truncated, damaged, crafted or foreign is refused."""

import json
import os
import pickle
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import safetensors.torch
import torch

from halve.errors import FileError, HalveError
from halve.masks import storage
from tests.masks.damage import flipped
from tests.random_masks import random
from tests.untouched import same_bits

FORMAT = storage.Format("halve.test", 3, "test file", "'halve test'")
HEADER = {"layers": {}, "note": 'ä "quoted" \n'}


def tensors():
    return {"a": random(3, 4), "b": torch.arange(5, dtype=torch.uint8), "empty": torch.zeros(0, 3)}


def read(path):
    return storage.read(path, [FORMAT])


def write_raw(path, metadata, data=None):
    """A safetensors file with any metadata and a checksum that fits."""
    data = tensors() if data is None else data
    metadata = {"format": FORMAT.name, "version": str(FORMAT.version), **metadata}
    metadata.setdefault("sha256", storage._checksum(metadata, data))
    path.write_bytes(safetensors.torch.save(data, metadata))
    return path


def write_bytes(path, text, data=b""):
    """A file with any text in place of the safetensors header."""
    raw = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.fixture
def path(tmp_path):
    return storage.write(tmp_path / "x.safetensors", FORMAT, HEADER, tensors())


def test_what_was_written_is_read(path):
    format_, header, found = read(path)
    assert (format_, header) == (FORMAT, HEADER)
    assert found.keys() == tensors().keys()
    assert all(same_bits(found[name], value) for name, value in tensors().items())


def test_the_file_is_an_ordinary_safetensors_file(path):
    found = safetensors.torch.load_file(path)
    assert all(same_bits(found[name], value) for name, value in tensors().items())


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int8, torch.int64, torch.bool, torch.complex64),
    ],
)
def test_every_dtype_and_memory_order_comes_back(tmp_path, dtype):
    value = (random(2, 3, 4, 5) * 3).to(dtype)
    data = {
        "plain": value,
        "last": value.to(memory_format=torch.channels_last),
        "part": value[:, 1:],
        "one": value[0, 0, 0, 0],
    }
    _, _, found = read(storage.write(tmp_path / "x", FORMAT, {}, data))
    assert all(same_bits(found[name], data[name]) for name in data)


def test_tensors_that_share_memory_are_written_both(tmp_path):
    value = random(4, 4)
    _, _, found = read(storage.write(tmp_path / "x", FORMAT, {}, {"a": value, "b": value, "c": value[:2]}))
    assert torch.equal(found["b"], value)
    assert torch.equal(found["c"], value[:2])


def test_a_single_number_cut_out_of_a_larger_tensor_is_written(tmp_path):
    data = {"a": torch.ones(2, 2)[:1, ::2], "b": torch.ones(4)[::2][:1]}
    _, _, found = read(storage.write(tmp_path / "x", FORMAT, {}, data))
    assert all(same_bits(found[name], data[name]) for name in data)


def test_what_is_read_can_be_written_to(path):
    _, _, found = read(path)
    found["a"].zero_()
    assert read(path)[2]["a"].abs().sum() > 0


def test_writing_replaces_the_old_file_and_leaves_nothing_else(tmp_path, path):
    storage.write(path, FORMAT, {"new": True}, {})
    assert read(path)[1] == {"new": True}
    assert os.listdir(tmp_path) == [path.name]


def test_writing_through_a_link_replaces_the_target_and_keeps_its_permissions(tmp_path, path):
    path.chmod(0o600)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "link"
    link.symlink_to("../x.safetensors")
    assert storage.write(link, FORMAT, {"new": True}, {}) == link
    assert link.is_symlink()
    assert read(path)[1] == {"new": True}
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "links") == ["link"]
    link.unlink()
    link.symlink_to("new")
    storage.write(link, FORMAT, {}, {})
    assert sorted(os.listdir(tmp_path / "links")) == ["link", "new"]


def test_links_in_a_circle_and_pipes_are_not_replaced(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    os.mkfifo(tmp_path / "pipe")
    for name in ("one", "pipe"):
        with pytest.raises(FileError, match="it is not a regular file"):
            storage.write(tmp_path / name, FORMAT, {}, {})
    assert sorted(os.listdir(tmp_path)) == ["one", "pipe", "two"]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What became of writers that fail, are killed, or write at the same time: run once, in another process."""
    folder = tmp_path_factory.mktemp("processes")
    script = """
        import json, os, random, resource, signal, sys, time
        import torch
        from halve.errors import FileError
        from halve.masks import storage

        os.chdir(sys.argv[1])
        FORMAT = storage.Format("halve.test", 3, "test file", "'halve test'")

        def write(path, number, count):
            storage.write(path, FORMAT, {"number": number}, {"data": torch.full((count,), float(number))})

        def number_in(path):
            _, header, tensors = storage.read(path, [FORMAT])
            assert (tensors["data"] == header["number"]).all()
            return header["number"]

        # Writers that are killed leave the old file or the new one.
        write("killed", 0, 200_000)
        seen = set()
        wait = random.Random(0)
        for _ in range(8):
            child = os.fork()
            if child == 0:
                number = 0
                while True:
                    number = number % 7 + 1
                    write("killed", number, 200_000)
            time.sleep(wait.uniform(0.02, 0.1))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            seen.add(number_in("killed"))

        # Writers at the same time leave one complete file.
        write("together", 9, 20_000)
        children = []
        for number in range(4):
            if (child := os.fork()) == 0:
                try:
                    for _ in range(10):
                        write("together", number, 20_000)
                except BaseException:
                    os._exit(1)
                os._exit(0)
            children.append(child)
        reads, failed = 0, 0
        while children:
            number_in("together")
            reads += 1
            done, status = os.waitpid(-1, os.WNOHANG)
            if done:
                failed += status != 0
                children.remove(done)

        # A write that fails half way leaves the old file.
        write("failed", 1, 10)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            write("failed", 2, 1_000_000)
            message = ""
        except FileError as error:
            message = str(error) if isinstance(error.__cause__, OSError) else ""
        outcome = {"seen": len(seen), "reads": reads, "failed": failed, "message": message, "kept": number_in("failed")}
        print(json.dumps(outcome))
        """
    command = [sys.executable, "-B", "-c", textwrap.dedent(script), str(folder)]
    single = {**os.environ, "OMP_NUM_THREADS": "1"}  # a forked child cannot use its parent's threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=single)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_part(processes):
    folder, outcome = processes
    assert "cannot write failed" in outcome["message"]
    assert "nothing was written" in outcome["message"]
    assert outcome["kept"] == 1
    assert not list(folder.glob(".failed*"))


def test_a_write_that_is_killed_leaves_the_old_file_or_the_new_one(processes):
    assert processes[1]["seen"] > 1  # the children did write


def test_writers_at_the_same_time_leave_one_complete_file(processes):
    folder, outcome = processes
    assert outcome["failed"] == 0
    assert outcome["reads"] > 4
    assert not list(folder.glob(".together*"))


def test_a_write_into_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"missing.x\.masks.*No such file"):
        storage.write(tmp_path / "missing" / "x.masks", FORMAT, {}, {})


def test_a_write_into_a_folder_that_takes_no_files_is_refused():
    with pytest.raises(FileError, match="cannot write /proc/x"):
        storage.write("/proc/x", FORMAT, {}, {})


def test_a_write_over_a_folder_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="folder"):
        storage.write(tmp_path / "folder", FORMAT, {}, {})
    assert os.listdir(tmp_path) == ["folder"]


def test_a_write_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("content")
    with pytest.raises(FileError, match="file"):
        storage.write(tmp_path / "file" / "x", FORMAT, {}, {})


def test_a_write_to_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(FileError, match="xxxxxx"):
        storage.write(tmp_path / ("x" * 300), FORMAT, {}, {})


@pytest.mark.parametrize("name", ["", ".", "/", "a\0b"])
def test_a_write_to_what_is_no_file_name_is_refused(name):
    with pytest.raises(FileError):
        storage.write(name, FORMAT, {}, {})


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {1, 2}, b"bytes", torch.zeros(1), object(), nested(50_000), "\ud800"],
    ids=["nan", "inf", "set", "bytes", "tensor", "object", "nested", "surrogate"],
)
def test_a_header_that_json_cannot_hold_is_refused(tmp_path, path, value):
    before = path.read_bytes()
    with pytest.raises(FileError, match="header"):
        storage.write(path, FORMAT, {"value": value}, {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex128), torch.eye(2).to_sparse(), torch.zeros(2, device="meta")],
    ids=["complex128", "sparse", "meta"],
)
def test_a_tensor_that_the_format_cannot_hold_is_refused_by_name(tmp_path, tensor):
    with pytest.raises(HalveError, match="odd"):
        storage.write(tmp_path / "x", FORMAT, {}, {"odd": tensor})
    assert os.listdir(tmp_path) == []


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
    for damaged in flipped(path.read_bytes(), 600, first=64):
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
    with pytest.raises(FileError, match="truncated"):
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
    with pytest.raises(FileError, match="not a test file; 'halve test' writes a test file"):
        read(tmp_path / "x")


@pytest.mark.parametrize("version", ["", "3.0", "03", " 3", "ä", "-1", "²", "9" * 5000])
def test_what_is_no_version_is_refused(tmp_path, version):
    write_raw(tmp_path / "x", {"version": version, "header": "{}"})
    with pytest.raises(FileError, match="version"):
        read(tmp_path / "x")


def test_a_newer_file_asks_for_an_upgrade_and_an_older_one_to_be_made_again(tmp_path):
    write_raw(tmp_path / "x", {"version": "4", "header": "{}"})
    with pytest.raises(FileError, match=r"test file of format version 4.*version 3.*upgrade halve"):
        read(tmp_path / "x")
    write_raw(tmp_path / "x", {"version": "2", "header": "{}"})
    with pytest.raises(FileError, match=r"format version 2.*older halve, make it again with 'halve test'") as refused:
        read(tmp_path / "x")
    assert "upgrade" not in str(refused.value)


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


META = {"format": FORMAT.name, "version": "3", "header": "{}", "sha256": ""}


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
