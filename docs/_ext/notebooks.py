"""Notebooks as pages: their text, code and recorded outputs, without any other package."""

import json
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx


class NotebookParser(MystParser):
    """A notebook, read as the Markdown page that it amounts to."""

    supported = ("ipynb",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(markdown(json.loads(inputstring)), document)


def markdown(notebook: dict[str, Any]) -> str:
    """The cells of a notebook as Markdown.

    >>> cell = {"cell_type": "code", "source": ["1 + 1"], "outputs": [{"data": {"text/plain": ["2"]}}]}
    >>> print(markdown({"cells": [{"cell_type": "markdown", "source": ["# Sums"]}, cell]}))
    # Sums
    <BLANKLINE>
    ```python
    1 + 1
    ```
    <BLANKLINE>
    ```text
    2
    ```
    <BLANKLINE>
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [_fenced("python", source), *map(_output, cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return _fenced("{raw} html", '<div class="output">' + "".join(data["text/html"]) + "</div>")
    return _fenced("text", "".join(output.get("text") or data["text/plain"]).rstrip("\n"))


def _fenced(kind: str, text: str) -> str:
    return f"```{kind}\n{text}\n```"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_source_suffix(".ipynb", "ipynb")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True}
