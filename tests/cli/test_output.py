import os
from pathlib import Path

import pytest
import typer

from halve.cli import app
from halve.cli.output import Output, reads
from halve.errors import FileError

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
    (APPLY, "--out", MASKED),
    (("pack", *APPLY[1:]), "--out", MASKED),
    (("compile", *APPLY[1:], "--size", "16"), "--out", MASKED),
    (("bench", *APPLY[1:], "--size", "16", "--batch", "1", "--systems", "eager"), "--out", MASKED),
    (("unpack", "net.packed.safetensors"), "--out", ("net.packed.safetensors",)),
    (("unpack", "net.packed.safetensors", "--out", "x"), "--masks-out", ("net.packed.safetensors",)),
    *(
        ((*LEARN, "--classes", "classes.txt", "--start", "net.masks.safetensors", *more), option, (*MASKED, *read))
        for option, more, read in (
            ("--out", (), ("classes.txt", PHOTO)),
            ("--log", ("--out", "x"), ("classes.txt", PHOTO)),
            ("--run-state", ("--out", "x"), ("classes.txt",)),
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
            result = halve(*command, option, path, code=2)
            assert result.err.startswith(f"error: cannot write {option} {Path(path)}: it is the same file as ")
            assert f"choose another {option}" in result.err
            assert result.out == ""
        Path("soft-link.png").unlink()
        Path("hard-link").unlink(missing_ok=True)
    assert content(everything) == before


def test_every_command_that_writes_is_in_the_table_of_this_test():
    commands = typer.main.get_group(app.app).commands
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
            Output.open(Path("shard-1.tar"), reads(data=named))
    assert Output.open(Path("shard-3.tar"), reads(data="shard-*.tar")).path == Path("shard-3.tar")


def test_an_output_needs_a_folder_that_can_be_written_to(tmp_path):
    for path in (tmp_path / "nothing" / "x", tmp_path):
        with pytest.raises(FileError, match="is not a writable folder"):
            Output.open(path, {})
