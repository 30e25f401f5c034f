"""Put the results of a run on one page."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from halve.batches import Forward, Progress
from halve.certify.certificate import Certificate
from halve.errors import OptionError
from halve.learn.probe import Estimate
from halve.learn.reporting import Report
from halve.markup import text
from halve.masks.apply import OnChanged
from halve.masks.file import load
from halve.masks.mask import MaskSet
from halve.process_state import preserved_process_state
from halve.report import figures as f
from halve.report.agreed import Agreed, agreed_by_recipe, agreed_in, evaluation_of
from halve.report.comparison import Candidate, comparison
from halve.report.curve import History, curve, history_of
from halve.report.files import mapping, words
from halve.report.layers import layer_table, layers_of, strip
from halve.report.page import Page, Part, page
from halve.report.pictures import PICTURES, Seen, pictures_html, seen_differently
from halve.report.proofs import certificate_html, export_html
from halve.report.speed import speed_table
from halve.report.timings import timings_of
from halve.report.verdict import verdict_of

Masks = MaskSet | str | Path
_EVERY = 5  # seconds after which a page loads itself again while masks are learned


@preserved_process_state()
def report(
    masks: Masks | Sequence[Masks] | Mapping[str, MaskSet],
    *,
    log: Any = None,
    plan: Any = None,
    evaluation: Any = None,
    export: Any = None,
    certificate: Certificate | str | Path | None = None,
    model: nn.Module | None = None,
    data: Any = None,
    class_names: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    pictures: int = PICTURES,
    forward: Forward | None = None,
    progress: Progress = True,
    on_changed: OnChanged = "warn",
) -> Page:
    """Put the results of a run on one page that opens from disk: verdict, learning curve, layers, pictures.

    A part appears if its input is given. Files are those that halve writes; the objects that halve returns do as well.

    Args:
        masks: Masks or a mask file; several are compared, and the page is about the first.
        log: The log of `halve.learn`, for the learning curve.
        plan: Times: a plan of `halve.measure` or of a compiled network, or measurements of `halve.bench`.
        evaluation: What `halve.evaluate` returned, or the output of `halve evaluate --json`; with `--per-layer`, also
            what each mask costs. Several are in the order of `masks`.
        export: What `halve.export` or `halve.check_onnx` returned, or the output of these commands with `--json`.
        certificate: What `halve.certify` returned, or its file.
        model: The dense model. With `data`, the page shows images that the masked model sees differently.
        data: Batches of images for that.
        class_names: The names of the model's outputs. Default: their numbers.
        mean: Mean of each channel that `data` was normalised with, to show images in their own colours.
        std: Standard deviation of each channel.
        pictures: The most images to show. Default: 24.
        forward: `forward(model, batch)` runs the model on an unusual batch.
        progress: Show progress in terminals and notebooks, or a function such as `tqdm.tqdm` that wraps loops.
            Default: True.
        on_changed: What to do if the weights are not those the masks were made for: "warn" (default), "error" or
            "ignore".

    >>> import halve, torch
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    >>> page = halve.report(halve.prune(model, pattern="4:4"), model=model, data=torch.randn(64, 8))
    >>> print(page)  # page.save("net.report.html") writes it
    Sequential: 1 of 2 layers masked; 100 % of predictions unchanged (95 % interval 94.4-100 %); speed not measured. \
Next: measure the speed
    """
    named = _named(masks)
    name, first = next(iter(named.items()))
    if (model is None) != (data is None):
        raise OptionError("pictures need both model= and data=")
    evaluations = _by_masks([] if evaluation is None else evaluation_of(evaluation), list(named))
    timings = None if plan is None else timings_of(plan, first)
    history = [] if log is None else history_of(log)
    seen = None
    if model is not None:
        options: dict[str, Any] = {"forward": forward, "progress": progress, "on_changed": on_changed}
        seen = seen_differently(model, first, data, most=pictures, mean=mean, std=std, **options)
    agreed = _agreed(first, evaluations.get(name), seen)
    layers = layers_of(first, timings, mapping(evaluations.get(name)).get("layers"))
    verdict = verdict_of(first, name, layers, agreed, timings, {"certificate": certificate, "export": export})

    parts = []
    if history:
        parts.append(Part("learning", "Learning", curve(history)))
    parts.append(Part("layers", "Layers", strip(layers) + layer_table(layers, timings), "map"))
    if timings is not None and not timings.estimated and timings.networks:
        parts.append(Part("speed", "Speed", speed_table(timings)))
    if len(named) > 1:
        candidates = [
            Candidate(key, one, agreed if one is first else _agreed(one, evaluations.get(key)), timings)
            for key, one in named.items()
        ]
        parts.append(Part("comparison", "Mask files", comparison(candidates)))
    if seen is not None:
        parts.append(Part("pictures", "Seen differently", pictures_html(seen, class_names)))
    if certificate is not None:
        known = certificate if isinstance(certificate, Certificate) else Certificate.load(certificate)
        parts.append(Part("certificate", "Certificate", certificate_html(known)))
    if export is not None:
        parts.append(Part("export", "Export", export_html(export)))
    html = page(verdict.network, verdict.html(), parts, foot=_origin(first, name))
    return Page(f"{verdict.network}: {verdict.sentence}", html, verdict.facts())


def while_learning(network: str, event: Estimate | Report | None, history: History, *, error: str = "") -> Page:
    """The page of a run that has not ended; it loads itself again every few seconds.

    Args:
        network: The name of the network.
        event: The last report; None before the first.
        history: All reports so far.
        error: Why the run failed, if it did: the page then stays as it is.
    """
    if error:
        standing = f"learning failed: {error}"
    elif isinstance(event, Report):
        of = "" if event.steps is None else f" of {event.steps:,}"
        standing = f"learning, step {event.step:,}{of}, {f.time(event.seconds_left)} left; this page refreshes itself"
    else:
        standing = "learning is about to start; this page refreshes itself"
    parts = [Part("learning", "Learning", curve(history))] if history else []
    top = f'<p class="verdict">{text(standing[0].upper() + standing[1:])}</p>'
    html = page(network, top, parts, refresh=None if error else _EVERY)
    return Page(f"{network}: {standing}", html)


def _named(masks: Any) -> dict[str, MaskSet]:
    """Masks with names: their files, or numbers."""
    if isinstance(masks, MaskSet):
        return {"NAME.masks.safetensors": masks}
    if isinstance(masks, str | Path):
        return {str(masks): load(masks)}
    if isinstance(masks, Mapping):
        found = {str(name): one for name, one in masks.items()}
    elif isinstance(masks, Sequence):
        found = {
            str(one) if isinstance(one, str | os.PathLike) else f"masks {i}": one
            for i, one in enumerate(masks, start=1)
        }
        found = {name: load(one) if isinstance(one, str | Path) else one for name, one in found.items()}
    else:
        found = {}
    if not found or not all(isinstance(one, MaskSet) for one in found.values()):
        raise OptionError(f"masks must be masks, a mask file, or several of these, got {type(masks).__name__}")
    return found


def _by_masks(evaluations: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Evaluations by the mask file that they belong to: by name if they have one, otherwise in order."""
    if len(evaluations) > 1 and all(isinstance(one.get("masks"), str) for one in evaluations):
        by_file = {Path(words(one["masks"])).name: one for one in evaluations}
        return {name: by_file[Path(name).name] for name in names if Path(name).name in by_file}
    return dict(zip(names, evaluations, strict=False))


def _agreed(masks: MaskSet, evaluation: Mapping[str, Any] | None, seen: Seen | None = None) -> Agreed | None:
    """How far masks agree with the dense network: as evaluated, as counted here, or as they record it."""
    known = None if evaluation is None else agreed_in(evaluation)
    return known or (seen.agreed if seen else None) or agreed_by_recipe(masks)


def _origin(masks: MaskSet, name: str) -> str:
    recipe = masks.recipe
    made = {"learn": "learned", "prune": "pruned"}.get(words(recipe.get("method")), "made")
    steps, seconds = recipe.get("steps_done"), recipe.get("seconds")
    took = f", {steps} steps in {f.time(seconds)}" if isinstance(steps, int) and isinstance(seconds, float) else ""
    versions = ", ".join(f"{key} {words(recipe[key])}" for key in ("halve", "torch") if words(recipe.get(key)))
    return f"{name}: {made}{took}{f', by {versions}' if versions else ''}"
