import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import halve as package
from halve.cli import app
from halve.version import VERSION
from tests.processes import environment

COMMANDS = list(app.COMMANDS)
HALVE = str(Path(sys.executable).with_name("halve"))


def start(folder, *arguments, **options):
    return subprocess.Popen(
        [HALVE, *map(str, arguments)],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", COLUMNS="80"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finished(process):
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in out + err
    return process.returncode, out, err


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in str(path))


def test_the_list_of_commands_names_every_command_and_the_exit_codes(halve):
    shown = halve("--help").out
    for name in COMMANDS:
        assert f"\n  {name} " in shown
    words = " ".join(shown.split())
    assert "Exit codes: 0 success, 1 a check failed, 2 bad input, 130 interrupted; verify: 3 not applied, 4" in words
    assert "learn: 5 below --min-agreement." in words


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"], ["lern"]], ids=" ".join)
def test_what_needs_no_torch_does_not_wait_for_it(arguments):
    code = f"""if True:
        import sys
        from halve.cli import main
        sys.argv = ["halve", *{arguments}]
        try:
            main()
        finally:
            print(*[name for name in ("torch", "numpy", "rich") if name in sys.modules], "loaded")"""
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert result.stdout.splitlines()[-1].strip() == "loaded"
    if arguments == ["lern"]:
        assert "Did you mean 'learn'?" in result.stderr


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_nothing_of_a_help_is_cut_off_at_80_columns(halve, command):
    shown = halve(*[command] if command else [], "--help").out
    assert not re.search(r"\w\.\.\.$|…", shown, re.M)
    assert not [line for line in shown.splitlines() if len(line) > 80 and not line.strip().startswith("halve ")]


def test_without_a_command_the_help_is_shown(halve):
    shown = halve(code=2)
    assert "Commands:" in shown.out + shown.err


def test_the_version_is_printed(halve):
    assert halve("--version").out == f"halve {VERSION}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_commands_help_has_an_example_on_one_line_and_describes_every_option(halve, command):
    lines = halve(command, "--help").out.splitlines()
    example = next(i for i, line in enumerate(lines) if line.strip().startswith(f"halve {command} "))
    assert lines[example + 1].strip() == ""
    options = app.command(command).params
    shown = [line for line in lines if line.startswith("  --")]
    assert len(shown) == 1 + sum(option.opts[0].startswith("--") for option in options)  # and --help
    assert all(option.help for option in options)


def test_every_file_of_the_folder_with_a_command_is_in_the_table():
    folder = Path(app.__file__).parent
    commands = {path.stem for path in folder.glob("*.py") if path.read_text().startswith('"""halve ')}
    assert commands == set(app.COMMANDS.values())


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["select"], ["evaluate", "zoo.py:net"], ["prune", "zoo.py:net", "--nothing"]]
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(halve, folder, arguments):
    result = halve(*arguments, code=2)
    assert result.out == ""
    assert "Error: " in result.err
    assert "--help" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["select", "resnet18"],
        ["select", "torchvision:resnet19"],
        ["select", "nothing.py:net"],
        ["select", "zoo.py:nothing"],
        ["select", "zoo.py:net", "--include", "nothing"],
        ["select", "zoo.py:net", "--order", "nothing"],
        ["select", "zoo.py:net", "--remainder", "error"],
        ["select", "zoo.py:net", "--pattern", "5:4"],
        ["select", "zoo.py:net", "--pattern", "stem="],
        ["prune", "zoo.py:net", "--exclude", "*"],
        ["prune", "zoo.py:sick"],
        ["prune", "zoo.py:net", "--score", "nothing"],
        ["prune", "zoo.py:net", "--score", "wanda"],
        ["prune", "zoo.py:net", "--recalibrate"],
        ["prune", "zoo.py:net", "--weights", "nothing.pth"],
        ["prune", "zoo.py:net", "--weights", "zoo.py"],
        ["prune", "zoo.py:net", "--out", "nothing/net.masks.safetensors"],
        ["prune", "zoo.py:net", "--out", "photos"],
        ["prune", "zoo.py:net", "--score", "wanda", "--data", "nothing"],
        ["prune", "zoo.py:net", "--score", "wanda", "--data", "photos", "--images", "0"],
        ["prune", "zoo.py:net", "--device", "nothing"],
        ["prune", "zoo.py:net", "--device", "cuda:99"],
        ["apply", "zoo.py:net", "--masks", "nothing", "--out", "x.safetensors"],
        ["apply", "zoo.py:net", "--masks", "zoo.py", "--out", "x.safetensors"],
        ["apply", "zoo.py:net", "--masks", "net.safetensors", "--out", "x.safetensors"],
        ["verify", "zoo.py:net", "--masks", "net.safetensors"],
        ["evaluate", "zoo.py:net", "--data", "nothing"],
        ["evaluate", "zoo.py:net", "--data", ""],
        ["evaluate", "zoo.py:net", "--data", "photos", "--batch", "0"],
        ["evaluate", "zoo.py:net", "--data", "photos", "--workers", "-1"],
        ["evaluate", "zoo.py:net", "--data", "photos", "--mean", "a,b"],
        ["evaluate", "zoo.py:net", "--data", "photos", "--mean", "0.5,0.5"],
        ["evaluate", "zoo.py:net", "--data", "photos", "--std", "0,0,0"],
        ["evaluate", "zoo.py:net", "--data", "photos", "--size", "0"],
        ["evaluate", "zoo.py:net", "--data", "photos", "--resize", "-3"],
        ["evaluate", "zoo.py:net", "--data", "photos", "--classes", "nothing.txt"],
        ["evaluate", "zoo.py:sick", "--data", "photos"],
        ["evaluate", "zoo.py:net", "--data", "digits"],
        ["learn", "zoo.py:net", "--data", "photos", "--steps", "1", "--trackers", "nope"],
        ["learn", "zoo.py:net", "--data", "photos", "--steps", "1", "--features", ""],
        ["recalibrate", "zoo.py:net", "--masks", "nothing", "--data", "photos"],
        ["inspect", "nothing"],
        ["inspect", "net.safetensors"],
        ["inspect", "photos"],
        ["unpack", "net.safetensors", "--out", "x.safetensors"],
        ["pack", "zoo.py:net", "--masks", "nothing", "--out", "x", "--dtype", "int8"],
        ["demo", "--out", "zoo.py"],
    ],
    ids=" ".join,
)
def test_bad_input_exits_with_2_and_one_error_on_standard_error(halve, folder, arguments):
    before = files(folder)
    result = halve(*arguments, code=2)
    assert result.out == ""
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert len(lines[0]) > 20
    assert files(folder) == before


def test_an_interrupt_exits_with_130_and_leaves_no_half_written_file(folder):
    before = files(folder)
    process = start(folder, "prune", "zoo.py:slow", "--data", "photos", "--score", "wanda", "--recalibrate")
    deadline = time.monotonic() + 60
    while not (folder / "running").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    code, out, _ = finished(process)
    assert (code, out) == (130, "")
    assert files(folder) == sorted([*before, "running"])


def test_a_full_disk_exits_with_2_and_keeps_the_old_file(halve, folder, monkeypatch):
    old = folder / "net.masks.safetensors"
    old.write_bytes(b"old")
    before = files(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
    try:
        result = halve("prune", "zoo.py:net", "--weights", "net.safetensors", "--force", code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.out == ""
    assert "error: cannot write net.masks.safetensors: File too large; nothing was written" in result.err
    assert old.read_bytes() == b"old"
    assert files(folder) == before


def test_concurrent_runs_of_the_installed_command_leave_one_complete_result(folder):
    running = [
        start(folder, "prune", "zoo.py:net", "--score", "random", "--seed", seed, "--out", "same.masks.safetensors")
        for seed in (1, 2)
    ]
    done = sorted(map(finished, running))
    assert done[0][0] == 0
    for code, out, err in done:
        if code == 0:
            assert out.startswith("same.masks.safetensors: 2 layers")  # the result, apart from notes
            assert err == ""
        else:
            assert (code, out) == (2, "")
            assert "another run of halve is writing it" in err
    assert package.load(folder / "same.masks.safetensors").recipe["seed"] in (1, 2)
    assert not [name for name in files(folder) if ".part" in name or ".lock" in name]


def test_a_reader_that_stops_early_gets_no_traceback(folder):
    process = start(folder, "select", "zoo.py:deep")  # prints more than a pipe or a buffer holds
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert "Exception" not in err


def test_a_seed_that_no_generator_takes_is_bad_usage(halve, folder):
    assert "--seed" in halve("prune", "zoo.py:net", "--seed", str(2**70), code=2).err
