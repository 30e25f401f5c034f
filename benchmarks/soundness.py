"""Bound random networks, and search for inputs and updates that break the bounds: there must be none.

    python benchmarks/soundness.py --cases 100000 [--processes 12] [--seconds 200]
    python benchmarks/soundness.py --joint --cases 10000

A case is a random network of all operators that have bounds, an image, and a box around it or a box around the weights
of some layers. Its bounds, with and without tightening, optimising and dividing the proof into parts, must not exceed
the margin of any input or update that sampling and projected gradient descent find. With --joint, a network with random
masks and the dense one are bounded together: combinations of their margins, and how far the dense one leads where they
differ. Continues after the networks that the record has, and writes it after each: benchmarks/results/soundness.json or
soundness_joint.json. The record says by a digest of their sources for which bounds it holds; if these have changed
since, it starts anew.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import platform
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halve
from halve.certify.attack import attack_input, attack_lead, attack_weights, margin_of
from halve.certify.changes import WeightBox
from halve.certify.crown import Bounds
from halve.certify.digests import digest_of_bounds
from halve.certify.joint import JointBounds, shared_updates, side_by_side
from halve.certify.margins import proven_margins
from halve.certify.network import Network, network_of
from halve.certify.rounding import Interval, around
from halve.masks.storage import write_atomically
from halve.version import VERSION

RESULT = Path(__file__).parent / "results" / "soundness.json"
JOINT = RESULT.with_name("soundness_joint.json")


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over channels, as in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scaled(nn.Module):
    """A residual branch with a layer scale."""

    def __init__(self, inner: nn.Module, channels: int) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.randn(channels, 1, 1) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


class Shortcut(nn.Module):
    """A residual sum whose shortcut is a slice with zero channels around it, as in CIFAR ResNets."""

    def __init__(self, inner: nn.Module, extra: int) -> None:
        super().__init__()
        self.inner, self.extra = inner, extra

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return nn.functional.relu(y + nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra)))


class Joined(nn.Module):
    """Two branches, side by side."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)], 1) - 0.1


def norm(rng: random.Random, channels: int) -> nn.Module:
    layer = nn.BatchNorm2d(channels)
    nn.init.uniform_(layer.running_mean, -0.5, 0.5)
    nn.init.uniform_(layer.running_var, 0.2, 2.0)
    nn.init.uniform_(layer.weight, -1.5, 1.5)
    nn.init.normal_(layer.bias, std=0.3)
    return rng.choice([layer, LayerNorm2d(channels), nn.Identity()])


def activation(rng: random.Random) -> nn.Module:
    return rng.choice(
        [nn.ReLU(), nn.ReLU(), nn.GELU(), nn.SiLU(), nn.GELU("tanh"), nn.Sigmoid(), nn.Tanh(), nn.ReLU6()]
    )


def padding_mode(rng: random.Random) -> str:
    return rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"])


def block(rng: random.Random, channels: int, mode: str) -> tuple[nn.Module, int]:
    """A block and its number of output channels, for 6x6 inputs that stay 6x6; `mode` is that of the padding."""
    kind = rng.randrange(4)
    if kind == 0:
        out = rng.choice([4, 8])
        groups = rng.choice([1, 2])
        kernel = rng.choice([1, 3])
        options = {"padding": kernel // 2, "padding_mode": mode, "groups": groups}
        conv = nn.Conv2d(channels, out, kernel, **options, bias=rng.random() < 0.5)
        return nn.Sequential(conv, norm(rng, out), activation(rng)), out
    if kind == 1:
        depthwise = nn.Conv2d(channels, channels, 3, padding=1, padding_mode=mode, groups=channels)
        inner = nn.Sequential(depthwise, norm(rng, channels), activation(rng))
        return Scaled(inner, channels), channels
    if kind == 2:
        square = nn.Conv2d(channels, channels, 3, padding=1, padding_mode=mode)
        conv = nn.Sequential(square, norm(rng, channels))
        return nn.Sequential(Scaled(conv, channels), nn.ReLU()), channels
    return Joined(nn.Conv2d(channels, 4, 1), nn.Sequential(nn.Conv2d(channels, 4, 1), activation(rng))), 8


def network(seed: int) -> nn.Sequential:
    """A network for inputs (4, 6, 6) with 3 classes, in float64."""
    rng, paddings = random.Random(seed), random.Random(f"paddings {seed}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        channels, parts = 4, []
        for _ in range(rng.choice([1, 2, 3])):
            part, channels = block(rng, channels, padding_mode(paddings))
            parts.append(part)
        if rng.random() < 0.4:
            half = nn.Conv2d(channels, channels + 4, 3, 2, 1, padding_mode=padding_mode(paddings))
            down = nn.Sequential(half, norm(rng, channels + 4))
            parts.append(Shortcut(down, 2))
            channels += 4
        if paddings.random() < 0.2:
            pads = [nn.ReflectionPad2d((2, 1, 0, 2)), nn.ReplicationPad2d((0, 3, 1, 2)), nn.CircularPad2d((1, 2, 2, 0))]
            parts.append(paddings.choice(pads))
        pools = [
            nn.MaxPool2d(2),
            nn.MaxPool2d(3, 2, 1),
            nn.AvgPool2d(2),
            nn.Identity(),
            nn.MaxPool2d(2, ceil_mode=True),
        ]
        parts += [rng.choice(pools), nn.AdaptiveAvgPool2d(rng.choice([1, 2, 3])), nn.Flatten()]
        model = nn.Sequential(*parts)
        with torch.no_grad():
            features = model.eval()(torch.zeros(1, 4, 6, 6)).shape[1]
        model.append(nn.Linear(features, 8)).append(nn.ReLU()).append(nn.Linear(8, 3))
    return model.eval().double().requires_grad_(False)


def image(seed: int) -> Tensor:
    """An input for these networks."""
    return torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """The bounds of a case, and the smallest margin that was found."""

    kind: str  # "inputs" or "weights"
    size: float
    bounds: dict[str, float]
    found: float

    @property
    def broken(self) -> bool:
        """Whether a bound is wrong; rounding of the search itself is allowed for."""
        return max(self.bounds.values()) > self.found + 1e-12 * (1 + abs(self.found))

    @property
    def only_in_parts(self) -> bool:
        """Whether only a proof in parts succeeded."""
        others = [bound for name, bound in self.bounds.items() if name != "in parts"]
        return self.bounds.get("in parts", -math.inf) > 0 >= max(others)


def cases(seed: int, count: int) -> Iterator[Case]:
    """Check a random network on boxes of random sizes."""
    rng, model = random.Random(f"cases {seed}"), network(seed)
    captured = network_of(model, image(0)[None])
    for index in range(count):
        x, size = image(rng.randrange(10**9)), 10 ** rng.uniform(-5, 0)
        label = int(model(x[None]).argmax())
        if index % 2:
            yield _inputs(model, captured, x, label, size, rng)
        else:
            yield _weights(model, captured, x, label, size, rng)


def _inputs(model: nn.Module, captured: Network, x: Tensor, label: int, size: float, rng: random.Random) -> Case:
    box = around(x[None], torch.full_like(x[None], size))
    generator = torch.Generator().manual_seed(rng.randrange(10**9))
    share = torch.rand(16, *x.shape, generator=generator, dtype=torch.float64)
    share[:8] = share[:8].round()  # corners
    sampled = margin_of(model(box.low + (box.high - box.low) * share), label)
    found = min(attack_input(model, box, label, steps=6, seed=rng.randrange(10**9)), float(sampled.min()))
    return Case("inputs", size, _bounds(captured, box, {}, label, rng), found)


def _weights(model: nn.Module, captured: Network, x: Tensor, label: int, size: float, rng: random.Random) -> Case:
    names = list(captured.layers)[-rng.randrange(1, len(captured.layers) + 1) :]
    generator = torch.Generator().manual_seed(rng.randrange(10**9))
    weights = {name: model.get_submodule(name).weight for name in names}
    kept = {name: torch.rand(weight.shape, generator=generator) < 0.6 for name, weight in weights.items()}
    radii = {name: size * weight.square().mean().sqrt() * kept[name] for name, weight in weights.items()}
    found = attack_weights(model, x, label, radii, steps=6)
    for _ in range(4):
        signs = {name: torch.randint(0, 2, r.shape, generator=generator) * 2 - 1 for name, r in radii.items()}
        moved = {f"{name}.weight": weights[name] + radii[name] * signs[name] for name in names}
        found = min(found, float(margin_of(torch.func.functional_call(model, moved, (x[None],))[0], label)))
    changes = {name: WeightBox(radius) for name, radius in radii.items()}
    return Case("weights", size, _bounds(captured, Interval(x[None], x[None]), changes, label, rng), found)


def _bounds(
    captured: Network, box: Interval, changes: dict[str, WeightBox], label: int, rng: random.Random
) -> dict[str, float]:
    tight = Bounds(captured, box, changes)
    found = {"CROWN": tight.margins([label])[0]}
    found["intervals inside"] = Bounds(captured, box, changes, tighten=False).margins([label])[0]
    if rng.random() < 0.2:
        found["optimised"] = tight.margins([label], optimise=True)[0]
        inside = Bounds(captured, box, changes, steps=2, known=tight.values)
        found["optimised inside"] = inside.margins([label], optimise=True)[0]
    if rng.random() < (0.1 if found["CROWN"] <= 0 else 0.02):  # also several images at once, each with its own changes
        twice = torch.tensor([0, 0], device=box.low.device)
        two = Interval(box.low[twice], box.high[twice])
        scale = torch.tensor([1.0, 0.5], dtype=torch.float64, device=box.low.device)
        scaled = {name: WeightBox(change.radii, scale) for name, change in changes.items()}
        margins = proven_margins(captured, two, scaled, [label, label], True, branches=12)
        found["in parts"] = margins[0].bound
    return found


@dataclass(frozen=True)
class JointCase:
    """Bounds of a dense and a masked network together, and what was found.

    Args:
        size: How far weights move, relative to the root mean square of their layer.
        bounds: Lower bounds of combinations of the margins of two classes in both networks.
        found: The smallest values of these that were found.
        lead: An upper bound of the dense margin where the networks differ.
        found_lead: The largest one that was found; None if no update was found after which they differ.
    """

    size: float
    bounds: tuple[float, ...]
    found: tuple[float, ...]
    lead: float
    found_lead: float | None

    @property
    def broken(self) -> bool:
        """Whether a bound is wrong; rounding of the search itself is allowed for."""
        pairs = [*zip(self.bounds, self.found, strict=True)]
        if self.found_lead is not None:
            pairs.append((-self.lead, -self.found_lead))
        return any(bound > found + 1e-12 * (1 + abs(found)) for bound, found in pairs)


def joint_cases(seed: int, count: int) -> Iterator[JointCase]:
    """Check a random network and its random masks on updates of random sizes, on images on which they agree or not."""
    rng, dense = random.Random(f"joint cases {seed}"), network(seed)
    masks = halve.prune(dense, "random", seed=seed, pattern=rng.choice(["1:4", "2:4", "3:4", "4:4"]), also="*")
    masked = halve.apply(dense, masks).requires_grad_(False)
    captured = [network_of(model, image(0)[None]) for model in (dense, masked)]
    both = side_by_side(captured[0], captured[1])
    for _ in range(count):
        x, size = image(rng.randrange(10**9)), 10 ** rng.uniform(-5, -0.5)
        names = list(captured[0].layers)[-rng.randrange(1, len(captured[0].layers) + 1) :]
        weights = {name: dense.get_submodule(name).weight for name in names}
        units = {name: torch.full_like(weight, weight.square().mean().sqrt()) for name, weight in weights.items()}
        bounds = JointBounds(both, Interval(x[None], x[None]), shared_updates(captured[1], masks, units, names, size))
        rows = torch.tensor([_combination(rng) for _ in range(6)], dtype=torch.float64)
        with torch.no_grad():
            lower = bounds.lower(rows)
        found, lead = _searched(dense, masked, masks, x, {n: size * unit for n, unit in units.items()}, rows, rng)
        most = bounds.lead(int(dense(x[None]).argmax()), optimise=rng.random() < 0.2)
        yield JointCase(size, tuple(lower.tolist()), tuple(found.tolist()), most, lead)


def _combination(rng: random.Random) -> list[float]:
    """Coefficients of the scores of both networks: margins of one class over another, with random factors."""
    one, other = rng.sample(range(3), 2)
    factors = rng.choice([(1.0, -1.0), (-1.0, rng.uniform(0, 2)), (1.0, -rng.uniform(0, 2)), (0.0, 1.0), (1.0, 1.0)])
    return [factor * ((k == one) - (k == other)) for factor in factors for k in range(3)]


def _searched(
    dense: nn.Module,
    masked: nn.Module,
    masks: halve.MaskSet,
    x: Tensor,
    radii: dict[str, Tensor],
    rows: Tensor,
    rng: random.Random,
) -> tuple[Tensor, float | None]:
    """The smallest values of rows . scores of both networks, and the largest dense margin where they differ."""
    generator = torch.Generator().manual_seed(rng.randrange(10**9))
    lead = attack_lead(masked, dense, x, radii, masks, steps=4)
    least = torch.full((len(rows),), math.inf, dtype=torch.float64)

    def scores(moved: dict[str, Tensor]) -> Tensor:
        found = []
        for model in (dense, masked):
            new = {}
            for name, change in moved.items():
                kept = masks[name].kept() if model is masked and name in masks else 1.0
                new[f"{name}.weight"] = model.get_submodule(name).weight + change * kept
            found.append(torch.func.functional_call(model, new, (x[None],))[0])
        return torch.cat(found)

    tried = []
    for _ in range(4):
        signs = {name: torch.randint(0, 2, r.shape, generator=generator) * 2 - 1 for name, r in radii.items()}
        tried.append({name: radius * signs[name] for name, radius in radii.items()})
    for row in rows:  # against the derivative at 0, and once more from there
        moved = {name: torch.zeros_like(radius) for name, radius in radii.items()}
        for _ in range(2):
            leaves = {name: change.requires_grad_(True) for name, change in moved.items()}
            with torch.enable_grad():
                gradients = torch.autograd.grad(scores(leaves) @ row, list(leaves.values()))
            moved = {name: -r * g.sign() for (name, r), g in zip(radii.items(), gradients, strict=True)}
            tried.append(moved)
    for moved in tried:
        both = scores(moved).detach()
        least = torch.minimum(least, rows @ both)
        ours, theirs = both[3:], both[:3]
        label = int(theirs.argmax())
        if int(ours.argmax()) != label:
            lead = max(lead if lead is not None else -math.inf, float(margin_of(theirs, label)))
    return least, lead


def checked_joint(seed: int, count: int) -> dict[str, Any]:
    """What came of the joint cases of one network."""
    torch.set_num_threads(1)
    started, found = time.perf_counter(), list(joint_cases(seed, count))
    return {
        "cases": len(found),
        "proven": sum(case.lead < 0 for case in found),
        "differ": sum(case.found_lead is not None for case in found),
        "seconds": time.perf_counter() - started,
        "broken": [{"network": seed, **asdict(case)} for case in found if case.broken],
    }


def checked(seed: int, count: int) -> dict[str, Any]:
    """What came of the cases of one network."""
    torch.set_num_threads(1)
    started, found = time.perf_counter(), list(cases(seed, count))
    return {
        "cases": len(found),
        "proven": sum(case.bounds["CROWN"] > 0 for case in found),
        "in_parts": sum("in parts" in case.bounds for case in found),
        "proven_in_parts_alone": sum(case.only_in_parts for case in found),
        "seconds": time.perf_counter() - started,
        "broken": [{"network": seed, **asdict(case)} for case in found if case.broken],
    }


def started(path: Path, joint: bool = False) -> dict[str, Any]:
    """The record to continue: a new one, unless there is one of the same bounds."""
    digest = digest_of_bounds("joint") if joint else digest_of_bounds()
    fresh: dict[str, Any] = {"bounds": digest, "networks": 0, "cases": 0, "proven": 0}
    fresh |= {"differ": 0} if joint else {"in_parts": 0, "proven_in_parts_alone": 0}
    fresh |= {"seconds": 0.0, "broken": []}
    found = json.loads(path.read_text()) if path.exists() else fresh
    return found if found.get("bounds") == fresh["bounds"] else fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--joint", action="store_true", help="bound masked and dense networks together")
    parser.add_argument("--cases", type=int, default=100_000, help="in all, with those of the record")
    parser.add_argument("--per-network", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/soundness.json or soundness_joint.json")
    arguments = parser.parse_args()
    out, check = (JOINT, checked_joint) if arguments.joint else (RESULT, checked)
    out = arguments.out or out
    result = started(out, arguments.joint)
    deadline, first = time.perf_counter() + arguments.seconds, result["networks"]
    left = -(-(arguments.cases - result["cases"]) // arguments.per_network)
    workers = ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn"))
    waiting = [workers.submit(check, first + index, arguments.per_network) for index in range(left)]
    for one in waiting:  # in order, so that a later run knows where to continue
        try:
            found = one.result(max(0.0, deadline - time.perf_counter()) if math.isfinite(deadline) else None)
        except TimeoutError:
            break
        result["networks"] += 1
        for key, value in found.items():
            result[key] = result[key] + value
        result["seconds"] = round(result["seconds"], 1)
        result["versions"] = {"halve": VERSION, "python": platform.python_version(), "torch": torch.__version__}
        result["date"] = datetime.date.today().isoformat()
        write_atomically(out, f"{json.dumps(result, indent=2)}\n".encode())
    workers.shutdown(cancel_futures=True)
    print(json.dumps(result, indent=2))
    sys.exit(1 if result["broken"] else 0)


if __name__ == "__main__":
    main()
