"""halve verify."""

from dataclasses import asdict

import typer

import halve
from halve.cli import options as o
from halve.cli import show
from halve.errors import OptionError


def verify(
    model: o.Model,
    masks: o.OptionalMasks = None,
    weights: o.Weights = None,
    pattern: o.PatternOption = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    order: o.OrderOption = "channels",
    remainder: o.Remainder = "skip",
    json: o.Json = False,
) -> None:
    """Check that masks are legal and fit the model and its weights, and which hardware can use them.

    Without --masks, check that the weights themselves are N:M sparse. The exit code is 1 if a check fails.

    \b
    halve verify zoo.py:net --weights net.safetensors --masks net.masks.safetensors
    """
    opened = o.open_model(model, weights, "cpu")
    if masks is not None:
        if pattern or include or exclude or also or order != "channels" or remainder != "skip":
            raise OptionError("--masks decides which layers are checked: leave out the options that select layers")
        outcome = halve.verify(opened.model, halve.load(masks))
    else:
        outcome = halve.verify(opened.model, **o.selection(pattern, include, exclude, also, order, remainder))
    if json:
        layers = [asdict(layer) | {"pattern": str(layer.pattern)} for layer in outcome.layers]
        show.as_json({"ok": outcome.ok, "failures": outcome.failures, "layers": layers})
    else:
        rows = [
            (
                layer.name,
                str(layer.pattern),
                "legal" if layer.legal else "not legal",
                layer.state if layer.update is None else f"changed by about {100 * layer.update:.2g} %",
                layer.not_tensorrt or "yes",
                layer.not_tensor_cores or "yes",
            )
            for layer in outcome.layers
        ]
        show.table(model, ("layer", "pattern", "mask", "weight", "TensorRT", "sparse tensor cores"), rows)
        for name, failure in outcome.failures.items():
            show.fail(f"{name}: {failure}")
        if not outcome.layers:
            show.fail("no layer to check")
        passed = len(outcome.layers) - len(outcome.failures)
        show.say(f"{passed} of {len(outcome.layers)} layers ok")
    if not outcome.ok:
        raise typer.Exit(1)
