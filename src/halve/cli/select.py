"""halve select."""

import halve
from halve.cli import options as o
from halve.cli import show


def select(
    model: o.Model,
    weights: o.Weights = None,
    pattern: o.PatternOption = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    also: o.Also = None,
    order: o.OrderOption = "channels",
    remainder: o.Remainder = "skip",
    plan: o.SpeedPlanOption = None,
    target: o.Target = None,
    json: o.Json = False,
) -> None:
    """List the layers of a model: which are masked, and why the others are not.

    \b
    halve select torchvision:resnet50 --exclude 'layer1.*'
    """
    opened = o.open_model(model, weights, "cpu")
    chosen = halve.select(opened.model, **o.selection(pattern, include, exclude, also, order, remainder, plan, target))
    rows = [
        (c.name, c.type, "x".join(map(str, c.shape)), str(c.pattern or "dense"), show.as_options(c.reason))
        for c in chosen
    ]
    if json:
        keys = ("layer", "type", "shape", "pattern", "reason")
        show.as_json(
            [dict(zip(keys, row, strict=True)) | {"masked": c.masked} for row, c in zip(rows, chosen, strict=True)]
        )
        return
    show.table(model, ("layer", "type", ">weights", "pattern", "why"), rows)
    inside = sum(c.layout.weights for c in chosen if c.layout)
    total = sum(p.numel() for p in opened.model.parameters())
    show.say(
        f"{len(chosen.masked)} of {len(chosen)} layers masked, "
        f"{show.percent(inside / max(total, 1), 1)} of all parameters"
    )
