"""Fit the estimate that chooses which `wgmma` tiles are timed, and check it on layers that it was not fitted to.

    python benchmarks/fit_tiles.py [--out FILE]

Needs SciPy and no GPU: it reads what was measured on one. results/conv3x3.json has the time of every tile for twelve
3x3 layers in 2:4, and of the fastest ones with dense weights; results/tile_winners.json has the fastest tile for the
layers of four networks, and its time. That is from before tiles were chosen by an estimate (later records only have the
fastest of those that it keeps), and before taps were unrolled: where the unrolled tile fits, it stands for the measured
one. Tiles whose channels two warpgroups split did not exist either, so they are left out there.

Constants are fitted to all of it, then again without some of it, which is what the tiles are then chosen for. Prints
the constants (those of `Costs` in promising.py, up to rounding) and writes benchmarks/results/tiles.json.
"""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halve.engine.kernels.wgmma_sp.promising import Costs, Problem, estimated_us, promising
from halve.engine.kernels.wgmma_sp.tiling import TILES, Shortcut, Tiling, tiling
from halve.engine.operations import Convolution

RESULTS = Path(__file__).parent / "results"
PROCESSORS = 132  # of an H200
NETWORKS = ("resnet18", "resnet50", "convnext_tiny", "mobilenet_v3_large")
_SIDES = {96: 56, 192: 28, 384: 14, 768: 7}  # of ConvNeXt's Linear layers, by the smaller number of channels
_SHAPE = re.compile(r"(\d+)>(\d+) (\d+)x(\d+)(?:/(\d))? at (\d+)(?: x (\d+) x (\d+))?")
_FITTED = [field.name for field in dataclasses.fields(Costs)]
# Known without these measurements: the rates of the tensor cores, the L2 cache and the memory. The rest is guessed.
_START = Costs(2, 0.2, 0.2, 0.5, 0.70e-3, 1.22e-3, 9e-6, 0.233e-6, 1, 0.5, 2e-3, 2)
_RANGE = 5  # times or a fraction of that
_SPREAD = 0.1  # relative errors above this count less: some tiles are slow for reasons that are not in the estimate


@dataclass(frozen=True)
class Recorded:
    """A layer and what was measured of it, in milliseconds."""

    source: str  # "3x3" or a network
    kernel: str
    problem: Problem
    plans: dict[str, Tiling]  # that fit
    times: dict[str, float]
    complete: bool  # every tile was timed; otherwise only some of the fastest
    winner: str | None = None  # the fastest of all tiles that are not unrolled

    def kept(self, costs: Costs | None = None) -> list[str]:
        return promising(self.plans, self.problem, costs)

    def loss(self, kept: Sequence[str]) -> float:
        """How much slower the best of the kept tiles is than the best of all, if all were timed."""
        return min(self.times.get(name, math.inf) for name in kept) / min(self.times.values()) - 1

    def keeps_winner(self, kept: Sequence[str]) -> bool:
        return self.winner is None or self.winner in kept or f"{self.winner} 3x3" in kept

    def __str__(self) -> str:
        conv = self.problem.convolution
        geometry = f"{conv.channels}>{conv.rows} {conv.kernel[0]}x{conv.kernel[1]}/{conv.stride[0]}"
        residual = ", residual" if self.problem.residual else ""
        return f"{self.source}: {geometry} at {self.problem.size}, {self.kernel}{residual}"


def layers_of_3x3() -> Iterator[Recorded]:
    """The layers of conv3x3.json, in 2:4 and then with dense weights."""
    for record in json.loads((RESULTS / "conv3x3.json").read_text()):
        channels, _, _, side = record["layer"].split()
        convolution = Convolution(int(channels), int(channels), (3, 3), padding=(1, 1), activation="relu")
        size = (record["batch"], int(side), int(side))
        for family, measured in (("wgmma_sp", "first_round_ms"), ("wgmma", "median_ms")):
            times = {tile: ms for name, ms in record[measured].items() if (tile := _tile(name, family))}
            problem = Problem(convolution, size, family == "wgmma_sp", False, PROCESSORS)
            yield Recorded("3x3", family, problem, plans_of(problem), times, complete=family == "wgmma_sp")


def layers_of_networks() -> Iterator[Recorded]:
    """The different layers of tile_winners.json that run on these kernels, those joined with a shortcut as one."""
    records = json.loads((RESULTS / "tile_winners.json").read_text())
    by_name = {(one["network"], one["batch"], one["layer"]): one for one in records}
    seen = set()
    for record in records:
        family, _, tile = record["kernel"].partition(" ")
        if family not in ("wgmma_sp", "wgmma", "wgmma_sp_joined", "wgmma_joined") or not record["time_ms"]:
            continue  # a layer that is computed in the kernel of another one takes no time
        shortcut = None
        if family.endswith("joined"):
            other = by_name[record["network"], record["batch"], _joined_with(record["reason"])]
            channels, _, _, _, stride, *_ = _numbers(other["shape"])
            shortcut = Shortcut(channels, stride)
        problem = _problem(record, "_sp" in family, shortcut)
        if (problem, tile) not in seen:
            seen.add((problem, tile))
            times = {tile: record["time_ms"]}
            plans = plans_of(problem, halves=False)
            yield Recorded(record["network"], family, problem, plans, times, complete=False, winner=tile)


def fit(layers: Sequence[Recorded]) -> Costs:
    """The constants with the least squares of relative errors, also of the fastest tile's distance from the best."""
    from scipy.optimize import least_squares

    def errors(logarithms: np.ndarray) -> list[float]:
        costs, found = _costs(logarithms), []
        for layer in layers:
            estimates = {name: estimated_us(plan, layer.problem, costs) for name, plan in layer.plans.items()}
            weight = 1.0 if layer.winner is None else 0.5  # times within networks were measured in other runs
            found += [weight * math.log(estimates[name] / (1e3 * ms)) for name, ms in layer.times.items()]
            if layer.winner is not None:
                others = [time for name, time in estimates.items() if not layer.plans[name].tile.unrolled]
                found.append(math.log(estimates[layer.winner] / min(others)))
        return found

    start = np.log(dataclasses.astuple(_START))
    bounds = (start - math.log(_RANGE), start + math.log(_RANGE))
    solution = least_squares(errors, start, bounds=bounds, loss="soft_l1", f_scale=_SPREAD, diff_step=1e-3)
    return _costs(solution.x)


def judged(layers: Sequence[Recorded], costs: Costs) -> dict[str, object]:
    """What choosing tiles by these constants loses on layers."""
    kept = [layer.kept(costs) for layer in layers]
    pairs = list(zip(layers, kept, strict=True))
    losses = [layer.loss(names) for layer, names in pairs if layer.complete]
    lost = [f"{layer}: {layer.winner}" for layer, names in pairs if not layer.keeps_winner(names)]
    return {
        "layers": len(layers),
        "most_kept": max(map(len, kept)),
        "kept": sum(map(len, kept)),
        "that_fit": sum(len(layer.plans) for layer in layers),
        "worst_loss": round(max(losses), 4) if losses else None,
        "winners": sum(layer.winner is not None for layer in layers),
        "winners_lost": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "tiles.json")
    options = parser.parse_args()
    layers = [*layers_of_3x3(), *layers_of_networks()]
    fitted = fit(layers)
    print(fitted)
    unseen = {f"3x3 with {channels} channels": _is_3x3(channels=channels) for channels in (64, 128, 256, 512)}
    unseen |= {f"3x3 at batch {batch}": _is_3x3(batch=batch) for batch in (8, 32, 256)}
    unseen |= {name: lambda layer, name=name: layer.source == name for name in NETWORKS}
    unseen["all networks"] = lambda layer: layer.source != "3x3"
    found = {"costs": dataclasses.asdict(Costs()), "all": judged(layers, Costs()), "unseen": {}}
    print("all", found["all"])
    for name, is_unseen in unseen.items():
        costs = fit([layer for layer in layers if not is_unseen(layer)])
        found["unseen"][name] = judged([layer for layer in layers if is_unseen(layer)], costs)
        print(name, found["unseen"][name], flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def _is_3x3(channels: int | None = None, batch: int | None = None):
    def matches(layer: Recorded) -> bool:
        problem = layer.problem
        return (
            layer.source == "3x3" and channels in (None, problem.convolution.rows) and batch in (None, problem.size[0])
        )

    return matches


def _tile(name: str, family: str) -> str | None:
    return name.removeprefix(f"{family} ") if name.startswith(f"{family} ") else None


def _joined_with(reason: str) -> str:
    return re.match(r"in one kernel with ([^,:]+?)(?:,|:| and )", reason)[1]


def _numbers(shape: str) -> list[int | None]:
    channels, rows, height, width, stride, *size = _SHAPE.fullmatch(shape).groups()
    return [*map(int, (channels, rows, height, width, stride or 1)), *(None if n is None else int(n) for n in size)]


def _problem(record: dict, sparse: bool, shortcut: Shortcut | None) -> Problem:
    channels, rows, kernel, _, stride, batch, height, width = _numbers(record["shape"])
    network, layer = record["network"], record["layer"]
    gelu = network == "convnext_tiny" and layer.endswith("block.3")
    last = {"resnet18": "conv2", "resnet50": "conv3", "convnext_tiny": "block.5"}.get(network, "none")
    padding = 1 if kernel == 3 else 0
    convolution = Convolution(
        *(rows, channels, (kernel, kernel), (stride, stride), (padding, padding)),
        activation="gelu" if gelu else "relu",
    )
    size = (1, batch * _SIDES[min(rows, channels)] ** 2, 1) if height is None else (batch, height, width)
    return Problem(convolution, size, sparse, shortcut is None and layer.endswith(last), PROCESSORS, shortcut)


def plans_of(problem: Problem, halves: bool = True) -> dict[str, Tiling]:
    """The tilings that fit; without `halves`, those in which no two warpgroups of a block split the channels."""
    how = {name: getattr(problem, name) for name in ("sparse", "residual", "processors", "shortcut")}
    tiles = {name: tile for name, tile in TILES.items() if halves or not tile.halves}
    plans = {name: tiling(problem.convolution, problem.size, tile, **how) for name, tile in tiles.items()}
    return {name: plan for name, plan in plans.items() if plan is not None}


def _costs(logarithms: np.ndarray) -> Costs:
    return Costs(**dict(zip(_FITTED, map(float, np.exp(logarithms)), strict=True)))


if __name__ == "__main__":
    main()
