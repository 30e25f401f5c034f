"""Install a wheel into an empty environment and run the demo from it, as `make wheel` does.

    python experiments/try_wheel.py dist/halve-VERSION-py3-none-any.whl

The environment sees the packages that this Python has, so that PyTorch is not downloaded again, but not the source: the
wheel must bring all of its files.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from halve.version import VERSION


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "empty"
        venv.create(home, with_pip=True)
        python = home / "bin" / "python"
        installed = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
        _run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel.absolute()], folder)
        (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own packages
        where = _run([python, "-c", "import halve, sys; print(halve.__file__)"], folder)
        assert Path(where.strip()).is_relative_to(installed), f"halve comes from {where.strip()}, not from the wheel"
        halve = home / "bin" / "halve"
        assert _run([halve, "--version"], folder).strip() == f"halve {VERSION}"
        found = json.loads(_run([halve, "demo", "--json"], folder))
        assert found["verified"]
        print(f"{wheel.name}: {', '.join(found['files'])} in {found['seconds']:.0f} s")


def _run(command: list[object], folder: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
