import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from halve.cli import app, output
from halve.cli.output import MASKS, Output, reads
from halve.errors import FileError
from tests.processes import environment

COMMAND = SimpleNamespace(call_on_close=lambda release: release())  # a command that ends at once
ONE = ("--steps", "1", "--batch", "8", "--no-permute")


@pytest.fixture
def everything(halve, net, masks, folder):
    """Every kind of file that a command reads."""
    halve("pack", *net, "--masks", masks, "--out", "net.packed.safetensors")
    (folder / "classes.txt").write_text("ant\nbee\ncat\ndog\nemu\nfox\n")
    return folder


# Commands that write, each with the files that it reads.
NET = ("zoo.py:net", "--weights", "net.safetensors")
LEARN = ("learn", *NET, "--data", "photos", *ONE)
APPLY = ("apply", *NET, "--masks", "net.masks.safetensors")
MASKED = ("zoo.py", "net.safetensors", "net.masks.safetensors")
PHOTO = "photos/ant/0.png"
WRITES = [
    (("prune", *NET, "--data", "photos"), "--out", ("zoo.py", "net.safetensors", PHOTO)),
    (("measure", *NET, "--size", "16"), "--out", ("zoo.py", "net.safetensors")),
    (("certify", *NET, "--masks", "net.masks.safetensors", "--data", "photos"), "--out", (*MASKED, PHOTO)),
    (APPLY, "--out", MASKED),
    (("pack", *APPLY[1:]), "--out", MASKED),
    (("recalibrate", *APPLY[1:], "--data", "photos"), "--out", (*MASKED, PHOTO)),
    (("compile", *APPLY[1:], "--size", "16"), "--out", MASKED),
    (("bench", *APPLY[1:], "--size", "16", "--batch", "1", "--systems", "eager"), "--out", MASKED),
    (("export", *APPLY[1:], "--size", "16", "--data", "photos"), "--out", (*MASKED, PHOTO)),
    (("unpack", "net.packed.safetensors"), "--out", ("net.packed.safetensors",)),
    (("unpack", "net.packed.safetensors", "--out", "x"), "--masks-out", ("net.packed.safetensors",)),
    (("report", MASKED[2], "--model", *NET, "--data", "photos"), "--out", (*MASKED, PHOTO)),
    *(
        ((*LEARN, "--classes", "classes.txt", "--start", "net.masks.safetensors", *more), option, (*MASKED, *read))
        for option, more, read in (
            ("--out", (), ("classes.txt", PHOTO)),
            ("--log", ("--out", "x"), ("classes.txt", PHOTO)),
            ("--run-state", ("--out", "x"), ("classes.txt",)),
            ("--report", ("--out", "x"), ("classes.txt", PHOTO)),
        )
    ),
]


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(("command", "option", "files"), WRITES, ids=[case[0][0] + case[1] for case in WRITES])
def test_no_command_writes_to_a_file_that_it_reads(halve, everything, command, option, files):
    before = content(everything)
    for file in files:
        os.symlink(os.path.abspath(file), "soft-link.png")
        paths = [file, f"./{file}", os.path.abspath(file), "soft-link.png"]
        if file != PHOTO:  # of a folder the names are compared
            os.link(file, "hard-link")
            paths.append("hard-link")
        for path in paths:
            result = halve(*command, option, path, "--force", code=2)
            assert result.err.startswith(f"error: cannot write {option} {Path(path)}: it is the same file as ")
            assert f"choose another {option}" in result.err
            assert result.out == ""
        Path("soft-link.png").unlink()
        Path("hard-link").unlink(missing_ok=True)
    assert content(everything) == before


def test_every_command_that_writes_is_in_the_table_of_this_test():
    commands = {name: app.command(name) for name in app.COMMANDS}
    writing = {name for name, command in commands.items() for option in command.params if option.name == "out"}
    assert writing - {"demo"} == {command[0] for command, _, _ in WRITES}


@pytest.mark.parametrize(
    "same", [("--out", "x", "--run-state", "x"), ("--out", "x", "--log", "./x"), ("--log", "x", "--run-state", "x")]
)
def test_the_outputs_of_a_command_are_different_files(halve, folder, same):
    assert "it is the same file as --" in halve(*LEARN, *same, code=2).err
    assert not (folder / "x").exists()


def test_masks_and_weights_of_unpack_are_different_files(halve, everything):
    result = halve("unpack", "net.packed.safetensors", "--out", "x", "--masks-out", "./x", code=2)
    assert "cannot write --masks-out x: it is the same file as --out x" in result.err
    assert not (everything / "x").exists()


def test_a_tar_that_a_pattern_names_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        Path(f"shard-{i}.tar").write_bytes(b"images")
    for named in ("shard-{0..2}.tar", "shard-*.tar", "shard-1.tar", "."):
        with pytest.raises(FileError, match="same file as --data"):
            Output.open(COMMAND, Path("shard-1.tar"), MASKS, reads(data=named), True)
    assert Output.open(COMMAND, Path("shard-3.tar"), MASKS, reads(data="shard-*.tar"), False).path == Path(
        "shard-3.tar"
    )


def test_an_output_needs_a_folder_that_can_be_written_to(tmp_path):
    for path in (tmp_path / "nothing" / "x", tmp_path):
        with pytest.raises(FileError, match="is not a writable folder"):
            Output.open(COMMAND, path, MASKS, {}, True)


PRODUCES = {
    "masks": (("prune", *NET), "--out"),
    "sparse": (APPLY, "--out"),
    "packed": (("pack", *APPLY[1:]), "--out"),
    "compiled": (("compile", *APPLY[1:], "--size", "8"), "--out"),
    "results": (
        ("bench", *APPLY[1:], "--size", "8", "--batch", "1", "--systems", "eager", "--seconds", "0.01"),
        "--out",
    ),
    "onnx": (("export", *APPLY[1:], "--size", "8"), "--out"),
    "log": ((*LEARN, "--out", "learned"), "--log"),
    "page": (("report", "net.masks.safetensors"), "--out"),
}
COMPILES = pytest.mark.filterwarnings("ignore:running dense")


@COMPILES
def test_an_output_is_replaced_by_its_own_kind_and_anything_else_only_by_force(halve, everything):
    for name, (command, option) in PRODUCES.items():
        halve(*command, option, name)
    for name, (command, option) in PRODUCES.items():
        halve(*command, option, name)  # an older result of the same kind
        others = [*(other for other in PRODUCES if other != name), "net.safetensors.bak", "notes.txt", "list.json"]
        Path("net.safetensors.bak").write_bytes(Path("net.safetensors").read_bytes())
        Path("notes.txt").write_text("mine")
        Path("list.json").write_text("[1]")
        for other in others:
            before = Path(other).read_bytes()
            result = halve(*command, option, other, code=2)
            assert f"error: cannot write {option} {other}: the file exists and is not a " in result.err
            assert "with --force" in result.err
            assert result.out == ""
            assert Path(other).read_bytes() == before
        halve(*command, option, "notes.txt", "--force")
        assert Path("notes.txt").read_bytes() != b"mine"
        Path("notes.txt").write_bytes(b"")  # nothing to lose
        halve(*command, option, "notes.txt")


def test_unpack_replaces_what_apply_wrote_and_masks_by_masks(halve, everything):
    halve(*APPLY, "--out", "sparse")
    unpack = ("unpack", "net.packed.safetensors", "--out", "sparse", "--masks-out")
    halve(*unpack, "net.masks.safetensors")
    assert (
        "--masks-out net.safetensors: the file exists and is not a mask file"
        in halve(*unpack, "net.safetensors", code=2).err
    )


def test_a_run_state_replaces_nothing_not_even_by_force(halve, folder):
    before = (folder / "notes.txt").write_text("mine")
    for more in ((), ("--force",)):
        result = halve(*LEARN, "--run-state", "notes.txt", *more, code=2)
        assert "cannot write --run-state notes.txt: the file exists and is not a run state" in result.err
        assert "--force" not in result.err
    assert (folder / "notes.txt").stat().st_size == before


def test_a_link_stays_a_link_and_permissions_stay(halve, net, masks, folder):
    (folder / "real").mkdir()
    (folder / masks).chmod(0o640)
    (folder / masks).rename(folder / "real" / "x")
    (folder / masks).symlink_to("real/x")
    before = (folder / "real" / "x").read_bytes()
    halve("prune", *net, "--score", "random")
    assert (folder / masks).is_symlink()
    assert (folder / "real" / "x").read_bytes() != before
    assert (folder / "real" / "x").stat().st_mode & 0o777 == 0o640


def test_a_write_protected_file_is_replaced_only_by_force(halve, net, masks, folder):
    (folder / masks).chmod(0o444)
    assert "it is write-protected" in halve("prune", *net, code=2).err
    halve("prune", *net, "--force")


@pytest.mark.parametrize("command", ["prune", "learn"])
def test_a_device_is_not_replaced(halve, folder, command):
    options = ("--data", "photos", *ONE) if command == "learn" else ()
    assert "is not a regular file" in halve(command, *NET, *options, "--out", "/dev/null", "--force", code=2).err
    assert not Path("/dev/null").is_file()


def test_a_log_may_go_to_a_device(halve, folder):
    halve(*LEARN, "--log", "/dev/null")
    assert not Path("/dev/null").is_file()


def test_the_log_of_the_last_run_stays_until_the_next_one_has_something_to_tell(halve, folder):
    halve(*LEARN, "--log", "run.jsonl")
    before = (folder / "run.jsonl").read_bytes()
    unlabelled = ("learn", *NET, "--data", "photos/ant", *ONE, "--objective", "task")
    assert "needs labels" in halve(*unlabelled, "--log", "run.jsonl", "--run-state", "x", code=2).err
    assert (folder / "run.jsonl").read_bytes() == before
    halve(*LEARN, "--log", "run.jsonl", "--seed", "1")
    assert len((folder / "run.jsonl").read_text().splitlines()) == 1


def test_a_file_that_appears_while_the_command_works_is_kept(tmp_path):
    made = Output.open(COMMAND, tmp_path / "x", MASKS, {}, False)
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileError, match="not a mask file"):
        made.write(lambda path: path.write_text("masks"))
    assert (tmp_path / "x").read_text() == "mine"


@pytest.fixture
def running(folder):
    """A run that is busy with its images, in another process; its lock and the part of a file that it was writing."""
    command = ("prune", "zoo.py:slow", "--data", "photos", "--score", "wanda", "--out", "x.masks.safetensors")
    process = subprocess.Popen(
        [sys.executable, "-m", "halve", *command], cwd=folder, env=environment(), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (folder / "running").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_at_its_start_and_a_killed_one_blocks_nobody(halve, net, folder, running):
    (folder / "link").symlink_to("x.masks.safetensors")
    part = folder / ".x.masks.safetensors.0123456789ab.part"
    part.write_bytes(b"half")
    mine = folder / ".x.masks.safetensors.mine.part"
    mine.write_bytes(b"not by halve")
    for command in (("prune", *net), LEARN):
        for name in ("x.masks.safetensors", "link"):
            result = halve(*command, "--out", name, code=2)
            assert f"cannot write --out {name}: another run of halve is writing it; wait for it to end" in result.err
            assert result.out == ""
    assert part.exists()
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert (folder / ".x.masks.safetensors.lock").exists()
    halve("prune", *net, "--out", "x.masks.safetensors")
    assert not part.exists()
    assert mine.read_bytes() == b"not by halve"
    assert not list(folder.glob(".*.lock"))


def test_a_lock_is_released_when_the_command_ends_also_by_an_error(halve, net, folder):
    for _ in range(2):
        halve("prune", *net, "--exclude", "*", code=2)
        halve(*LEARN, "--log", "run.jsonl")
    assert not list(folder.glob(".*"))


def test_two_runs_with_one_run_state_or_one_log_are_refused(halve, folder):
    held = []
    command = SimpleNamespace(call_on_close=held.append)
    Output.open(command, folder / "state", MASKS, {}, False)
    for option in ("--run-state", "--log"):
        assert f"{option} state: another run of halve is writing it" in halve(*LEARN, option, "state", code=2).err
    held.pop()()
    halve(*LEARN, "--log", "state")


def test_only_the_first_process_of_several_takes_the_lock(tmp_path, monkeypatch):
    command = SimpleNamespace(call_on_close=lambda release: pytest.fail("it must not lock"))
    monkeypatch.setenv("RANK", "1")
    Output.open(command, tmp_path / "x", MASKS, {}, False)


def test_without_locks_in_the_system_commands_write_all_the_same(halve, net, folder, monkeypatch):
    monkeypatch.setattr(output, "fcntl", None)
    halve("prune", *net)
