"""Run the cells of notebooks and record what they print and show, without Jupyter.

python docs/_ext/run_notebook.py docs/tutorials/*.ipynb
"""

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run all cells in order, in one namespace; return the notebook with their outputs.

    >>> cell = {"cell_type": "code", "source": ["print('a')\\n", "1 + 1"], "outputs": []}
    >>> for output in run({"cells": [cell]})["cells"][0]["outputs"]:
    ...     print(output["output_type"], output.get("text") or output["data"])
    stream ['a\\n']
    execute_result {'text/plain': ['2']}
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = cell | {"execution_count": count, "outputs": _outputs("".join(cell["source"]), names, count)}
        cells.append(cell)
    return notebook | {"cells": cells}


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run one cell; what it prints, and the value of an expression at its end."""
    body = ast.parse(source).body
    last = body.pop().value if body and isinstance(body[-1], ast.Expr) and not source.endswith(";") else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last), "cell", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        html = getattr(value, "_repr_html_", None)
        data = {"text/html": _lines(html())} if html else {"text/plain": _lines(repr(value))}
        result = {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data}
        found.append(result)
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    for path in [Path(name).absolute() for name in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            ran = run(json.loads(path.read_text()))
        path.write_text(json.dumps(ran, indent=1, ensure_ascii=False) + "\n")
        print(os.path.relpath(path), len(ran["cells"]), "cells")
