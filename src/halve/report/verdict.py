"""The verdict: what the masks are, what they keep, what they gain, and what to do next."""

from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

from halve.learn.schedule import USEFUL_STEPS
from halve.markup import text
from halve.masks.mask import MaskSet
from halve.report import figures as f
from halve.report.agreed import Agreed
from halve.report.files import mapping, number, words
from halve.report.layers import LayerFacts
from halve.report.timings import Timings
from halve.text import printable

_WELL = 0.97  # from this agreement on, the next step is to use the masks
_GAIN = 1.02  # below this speed-up, a difference is noise


@dataclass(frozen=True)
class Step:
    """What to do next: why, and the command."""

    why: str
    command: str = ""


@dataclass(frozen=True)
class Verdict:
    """What the top of the page says."""

    network: str
    masked: str
    weights: str
    agreed: Agreed | None
    timings: Timings | None
    next: Step

    @property
    def sentence(self) -> str:
        """The verdict in one line, without the network's name."""
        parts = [f"{self.masked} masked"]
        if self.agreed is not None:
            interval = "" if self.agreed.ends is None else f" (95 % interval {f.ends(self.agreed.ends)})"
            parts.append(f"{f.percent(self.agreed.share)} of predictions unchanged{interval}")
        else:
            parts.append("agreement not measured")
        speed = self.timings.headline if self.timings else None
        if speed is not None and self.timings is not None:
            how = ", estimated" if self.timings.estimated else ""
            parts.append(f"{speed.speedup:.2f}x the best dense at batch {speed.batch}{how}")
        else:
            parts.append("speed not measured")
        return f"{'; '.join(parts)}. Next: {self.next.why}"

    def facts(self) -> dict[str, Any]:
        """The numbers, as JSON values."""
        agreed, speed = self.agreed, self.timings.headline if self.timings else None
        return {
            "network": self.network,
            "agreement": None if agreed is None else agreed.share,
            "agreement_interval": None if agreed is None or agreed.ends is None else list(agreed.ends),
            "images": None if agreed is None else agreed.images,
            "speedup": None if speed is None else speed.speedup,
            "estimated": None if self.timings is None else self.timings.estimated,
            "next": self.next.why,
            "command": self.next.command,
        }

    def html(self) -> str:
        """The verdict, and what stands behind each part of it."""
        tiles = [
            _tile("Masked", self.masked, self.weights),
            self._agreement(),
            self._speed(),
            _tile("Next", "", self.next.why, self.next.command),
        ]
        return f'<p class="verdict">{text(self.sentence)}</p><div class="tiles">{"".join(tiles)}</div>'

    def _agreement(self) -> str:
        agreed = self.agreed
        if agreed is None:
            return _tile("Agreement", "unknown", "not measured yet")
        kind = "held-back images" if agreed.held_back else "images"
        of = "" if agreed.counted == "images" else f"{agreed.counted} of "
        what = f"of {of}{agreed.images:,} {kind} predicted as by the dense network"
        if agreed.ends is None:
            return _tile("Agreement", f.percent(agreed.share), what)
        return _tile("Agreement", f.percent(agreed.share), f"{what}; 95 % interval {f.ends(agreed.ends)}", "", agreed)

    def _speed(self) -> str:
        speed = self.timings.headline if self.timings else None
        if speed is None or self.timings is None:
            return _tile("Speed", "unknown", "not measured yet")
        where = ", ".join(filter(None, (self.timings.where, f"batch {speed.batch}")))
        how = (
            "estimated from the times of the layers" if self.timings.estimated else f"measured against {speed.baseline}"
        )
        times = f"{f.ms(speed.ms)} ms, best dense {f.ms(speed.dense_ms)} ms; {where}; {how}"
        return _tile("Speed", f"{speed.speedup:.2f}x", times)


def verdict_of(
    masks: MaskSet,
    name: str,
    layers: list[LayerFacts],
    agreed: Agreed | None,
    timings: Timings | None,
    given: Mapping[str, Any],
) -> Verdict:
    """The verdict on masks.

    Args:
        masks: The masks.
        name: Their file, for commands.
        layers: What is known of the layers.
        agreed: How far they agree with the dense network.
        timings: Times of the network.
        given: Which further parts the page has: "certificate" and "export".
    """
    patterns = sorted({str(mask.pattern) for mask in masks.values()})
    masked = f"{len(masks)} of {f.plural(len(layers), 'layer')}"
    weights = f"{f.plural(masks.weights, 'weight')}, {f.percent(masks.density)} kept ({', '.join(patterns)})"
    step = _next(masks, name, agreed, timings, given)
    return Verdict(network_of(masks), masked, weights, agreed, timings, step)


def network_of(masks: MaskSet) -> str:
    """The name of the network that masks were made for."""
    source, model = words(masks.recipe.get("source")), words(masks.recipe.get("model"))
    return source.rpartition(":")[2] or model.rpartition(".")[2] or "network"


def _source(masks: MaskSet) -> str:
    return words(masks.recipe.get("source")) or "MODEL"


def _is_checkpoint(weights: str) -> bool:
    return weights.endswith((".safetensors", ".pth", ".pt", ".th", ".bin", ".ckpt"))


def _next(masks: MaskSet, name: str, agreed: Agreed | None, timings: Timings | None, given: Mapping[str, Any]) -> Step:
    recipe = masks.recipe
    # quoted: a name from a stranger's file must not do anything if the command is copied
    model, weights, name = (quote(printable(one)) for one in (_source(masks), words(recipe.get("weights")), name))
    network = f"{model} --weights {weights}" if _is_checkpoint(words(recipe.get("weights"))) else model
    files = f"{network} --masks {name}"
    steps, quality = number(recipe.get("steps_done")), mapping(recipe.get("quality"))
    if recipe.get("ended") == "interrupted":
        return Step("continue learning; the run was interrupted", f"halve learn {network} --data IMAGES --resume")
    if agreed is None:
        return Step("measure how often predictions change", f"halve evaluate {files} --data IMAGES --per-layer --json")
    if recipe.get("method") == "prune" and agreed.share < _WELL:
        return Step("learn masks; these are one-shot", f"halve learn {network} --data IMAGES --minutes 5")
    if steps is not None and quality.get("returned", "learned") != "learned":
        return Step("learn longer; one-shot masks were better", f"halve learn {network} --data IMAGES --minutes 10")
    if steps is not None and agreed.share < _WELL and steps < 10 * USEFUL_STEPS:
        why = f"learn longer; {f.plural(int(steps), 'step')} are few"
        return Step(why, f"halve learn {network} --data IMAGES --minutes 10")
    if agreed.share < _WELL and "max_drop" not in recipe:
        return Step(
            "leave the costliest layers dense", f"halve learn {network} --data IMAGES --start {name} --max-drop 0.02"
        )
    speed = timings.headline if timings else None
    if speed is None:
        return Step("measure the speed", f"halve bench {files} --out bench.json")
    if speed.speedup < _GAIN:
        return Step(
            "masks do not pay here; measure where the network will run", f"halve measure {network} --out plan.json"
        )
    if timings is not None and timings.estimated:
        return Step("measure the speed; it is an estimate", f"halve bench {files} --out bench.json")
    if not given.get("certificate"):
        return Step("certify what cannot change", f"halve certify {files} --data IMAGES --out net.certificate.json")
    if not given.get("export"):
        return Step("deploy", f"halve compile {files} --out net.compiled.safetensors")
    return Step("deploy; everything is measured")


def _tile(name: str, value: str, note: str, command: str = "", agreed: Agreed | None = None) -> str:
    shown = f"<strong>{text(value)}</strong>" if value else ""
    code = f"<code>{text(command)}</code>" if command else ""
    return f'<div class="tile"><h2>{name}</h2>{shown}{_range(agreed)}<p>{text(note)}</p>{code}</div>'


def _range(agreed: Agreed | None) -> str:
    """The confidence interval as a drawing, from 0 to 100 %, or from 90 % if it lies there."""
    if agreed is None or agreed.ends is None:
        return ""
    low, high = agreed.ends
    start = 0.9 if low >= 0.9 else 0.5 if low >= 0.5 else 0.0
    a, b, at = (100 * (value - start) / (1 - start) for value in (low, high, agreed.share))
    return (
        f'<svg class="range" height="26" aria-hidden="true"><rect class="track" width="100%" height="6" y="5" rx="3"/>'
        f'<rect class="sparse" x="{a:.2f}%" width="{max(b - a, 0.5):.2f}%" height="6" y="5" rx="3"/>'
        f'<circle class="dot sparse" cx="{at:.2f}%" cy="8" r="5"/><text class="tick" y="25">{100 * start:g} %</text>'
        f'<text class="tick end" x="100%" y="25">100 %</text></svg>'
    )
