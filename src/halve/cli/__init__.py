"""The command line. `halve COMMAND --help` describes each command, with an example."""

import io
import sys
import warnings
from typing import Any

from halve.errors import HalveError


def main() -> None:
    """Run the command line. Exit codes: 0 success, 1 a check failed, 2 bad input or usage, 130 interrupted.

    `verify` also has 3 (not applied) and 4 (unknown), `check-onnx` 3 (no layer eligible), `learn` 5 (the masks
    agree less than --min-agreement asks for).
    """
    from halve.cli.app import app, running

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        from halve.cli.show import note

        note(f"warning: {message}")

    warnings.showwarning = show
    for stream in (sys.stdout, sys.stderr):  # a path may hold characters that the terminal cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except HalveError as error:
        from halve.cli.show import fail

        fail(str(error))
        sys.exit(2)
    finally:
        running.set(None)
