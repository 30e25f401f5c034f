import os
import subprocess
import sys
import textwrap

import pytest
import safetensors.torch
import torch

from halve.errors import FileError, HalveError
from halve.masks import storage
from tests.masks.envelopes import FORMAT, HEADER, read, tensors
from tests.random_masks import random
from tests.untouched import same_bits


@pytest.fixture
def path(tmp_path):
    return storage.write(tmp_path / "x.safetensors", FORMAT, HEADER, tensors())


def run(script, *arguments):
    """Run a script in a process of its own; its assertions are ours."""
    command = [sys.executable, "-B", "-c", textwrap.dedent(script), *map(str, arguments)]
    single = {**os.environ, "OMP_NUM_THREADS": "1"}  # a forked child cannot use its parent's threads
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=single)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_part(tmp_path, path):
    before = path.read_bytes()
    run(
        """
        import resource, sys
        import torch
        from halve.errors import FileError
        from halve.masks import storage
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            storage.write(sys.argv[1], "halve.test", {}, {"big": torch.zeros(1_000_000)})
        except FileError as error:
            assert "nothing was written" in str(error) and sys.argv[1] in str(error), error
            assert isinstance(error.__cause__, OSError)
        else:
            raise AssertionError("the write should have failed")
        storage.write(sys.argv[2], "halve.test", {}, {"small": torch.zeros(10)})
        """,
        path,
        tmp_path / "small",
    )
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["small", path.name]


def test_a_write_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path):
    out = run(
        """
        import os, random, signal, sys, time
        import torch
        from halve.masks import storage
        path = sys.argv[1]
        def content(number):
            return {"data": torch.full((200_000,), float(number))}
        storage.write(path, "halve.test", {"number": 0}, content(0))
        seen = set()
        wait = random.Random(0)
        for _ in range(12):
            child = os.fork()
            if child == 0:
                number = 0
                while True:
                    number = number % 7 + 1
                    storage.write(path, "halve.test", {"number": number}, content(number))
            time.sleep(wait.uniform(0.02, 0.12))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            _, header, tensors = storage.read(path, ["halve.test"])
            assert (tensors["data"] == header["number"]).all() and len(tensors["data"]) == 200_000
            seen.add(header["number"])
        print(len(seen))
        """,
        tmp_path / "x",
    )
    assert int(out) > 1  # the children did write


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    run(
        """
        import os, sys
        import torch
        from halve.masks import storage
        path = sys.argv[1]
        storage.write(path, "halve.test", {"number": 9}, {"data": torch.full((20_000,), 9.0)})
        children = []
        for number in range(4):
            if (child := os.fork()) == 0:
                try:
                    data = torch.full((20_000,), float(number))
                    for _ in range(20):
                        storage.write(path, "halve.test", {"number": number}, {"data": data})
                except BaseException:
                    os._exit(1)
                os._exit(0)
            children.append(child)
        reads = 0
        while children:
            _, header, tensors = storage.read(path, ["halve.test"])
            assert (tensors["data"] == header["number"]).all()
            reads += 1
            done, status = os.waitpid(-1, os.WNOHANG)
            if done:
                assert status == 0
                children.remove(done)
        assert reads > 4
        """,
        tmp_path / "x",
    )
    assert os.listdir(tmp_path) == ["x"]


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
