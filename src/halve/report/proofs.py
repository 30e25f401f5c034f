"""What was certified, and what TensorRT can use of an exported file."""

from typing import Any

from halve.certify.certificate import Certificate
from halve.errors import FileError
from halve.markup import text
from halve.report.files import json_of, mapping, words
from halve.report.tables import Cell, label, table


def certificate_html(certificate: Certificate) -> str:
    """The statement of a certificate, and what it assumes."""
    assumed = "".join(f"<li>{text(one)}</li>" for one in certificate.assumptions)
    made = ", ".join(f"{name} {version}" for name, version in certificate.made_with.items())
    digests = "".join(
        f"<li>{text(name)}: <code>{text(value)}</code></li>" for name, value in certificate.digests.items()
    )
    return (
        f"<blockquote>{text(certificate.sentence)}</blockquote><h3>Assuming that</h3><ul>{assumed}</ul>"
        f"<details><summary>SHA-256 of what it was computed from, by {text(made)}</summary><ul>{digests}</ul></details>"
    )


def export_html(given: Any) -> str:
    """The layers of an ONNX file, with what TensorRT's sparse kernels can take."""
    plain = mapping(json_of(given, "a result of 'halve export --json' or 'halve check-onnx --json'"))
    check = mapping(plain.get("check")) or plain
    layers = check.get("layers")
    if not isinstance(layers, list):
        raise FileError(f"{given} is not a result of 'halve export --json' or 'halve check-onnx --json'")
    rows = [("", _row(mapping(layer))) for layer in layers]
    able, likely = (sum(mapping(one).get("verdict") in verdicts for one in layers) for verdicts in (_ABLE, _LIKELY))
    summary = (
        f"{words(check.get('file'))}: {able} of {len(layers)} layers eligible for sparse kernels, {likely} likely."
    )
    note = "Whether they are used, TensorRT decides: it times both."
    columns = ("layer", "operator", "weight", "dtype", "TensorRT")
    return f"<p>{text(summary)} {note}</p>{table('Layers of the ONNX file', columns, rows)}"


_ABLE, _LIKELY = ("eligible", "likely"), ("likely",)


def _row(layer: Any) -> list[Cell]:
    verdict, shape = words(layer.get("verdict")), layer.get("shape")
    size = "x".join(str(extent) for extent in shape) if isinstance(shape, list | tuple) else ""
    kind = {"likely": "state sparse", "eligible": "state unused"}.get(verdict, "state out")
    picked = {True: "; picked", False: "; not picked"}.get(layer.get("picked"), "")
    return [
        label(words(layer.get("name")), "name"),
        label(words(layer.get("operator"))),
        label(size or "-"),
        label(words(layer.get("dtype")) or "-"),
        label(("not eligible" if verdict == "no" else verdict) + picked, kind, words(layer.get("reason"))),
    ]
