"""Which tiles are worth timing for a layer, by an estimate of how long each takes.

Compiling and timing every tile that fits takes minutes per network. The estimate only sorts out the slow ones; what
runs is still the fastest of those that were timed. Its constants are fitted to measurements on an H200, and checked on
layers that they were not fitted to, by benchmarks/fit_tiles.py.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from halve.engine.kernels.wgmma_sp.packing import BLOCK_BYTES, SIDE
from halve.engine.kernels.wgmma_sp.tiling import Shortcut, Tiling
from halve.engine.operations import Convolution

MAX_TILES = 9  # that are timed: no measured layer was fastest in one with a worse estimate
MARGIN = 1.3  # of the best estimate: slower ones are not timed. The largest of a tile that was the fastest is 1.22
_CLUSTERED = 0.9  # processors that clusters of more than two blocks can use: they need neighbours, which not all have
_SHARPNESS = 3  # of what is nearly the largest of several times that overlap


@dataclass(frozen=True)
class Costs:
    """What the estimate is made of, in microseconds."""

    launch: float = 1.95  # once
    wait: float = 0.190  # a step that multiplies little, alone on a multiprocessor: for barriers and weights
    wait_unrolled: float = 0.128
    crowd: float = 0.161  # the part of that which each further warpgroup on the multiprocessor adds
    multiply_sparse: float = 0.734e-3  # a block of 64 x 64 weights with one pixel
    multiply_dense: float = 1.20e-3
    load: float = 10.6e-6  # a byte, from the L2 cache to a multiprocessor
    memory: float = 0.243e-6  # a byte, from or to memory: 4.1 TB/s
    exchange: float = 2.28  # of sums, in a cluster
    exchange_halves: float = 0.617  # between two warpgroups
    finish: float = 2.93e-3  # 64 output channels of a pixel, from registers to memory
    gelu: float = 1.76  # times that, with GELU


class Problem(NamedTuple):
    """What tiles are compared for. Sizes are (images, height, width)."""

    convolution: Convolution
    size: tuple[int, int, int]
    sparse: bool
    residual: bool
    processors: int
    shortcut: Shortcut | None = None


def promising(plans: Mapping[str, Tiling], problem: Problem, costs: Costs | None = None) -> list[str]:
    """The names of the tilings that may be the fastest, in the order in which they are given.

    >>> from halve.engine.kernels.wgmma_sp.tiling import TILES, tiling
    >>> conv = Convolution(64, 64, (3, 3), padding=(1, 1))
    >>> given = {"sparse": True, "residual": False, "processors": 132}
    >>> plans = {name: tiling(conv, (256, 56, 56), tile, **given) for name, tile in TILES.items()}
    >>> promising({name: plan for name, plan in plans.items() if plan}, Problem(conv, (256, 56, 56), **given))
    ['64x256 own 3x3', '64x128 own 3x3']
    """
    # Unrolled taps are faster with 2:4 weights; with dense ones, layers lose less than 1 % without the others.
    unrolled = {replace(plan.tile, unrolled=False) for plan in plans.values() if plan.tile.unrolled}
    estimates = {name: estimated_us(plan, problem, costs) for name, plan in plans.items() if plan.tile not in unrolled}
    best = sorted(estimates, key=estimates.__getitem__)[:MAX_TILES]
    return [name for name in estimates if name in best and estimates[name] <= MARGIN * estimates[best[0]]]


def fastest(plans: Iterable[Tiling], problem: Problem) -> Tiling | None:
    """The tiling with the best estimate; None if there is none."""
    return min(plans, key=lambda plan: estimated_us(plan, problem), default=None)


def estimated_us(plan: Tiling, problem: Problem, costs: Costs | None = None) -> float:
    """About how many microseconds a layer takes in a tiling."""
    costs = costs or Costs()
    tile, convolution = plan.tile, problem.convolution
    chunks, added = -(-convolution.channels // SIDE), 0
    if problem.shortcut is not None:
        added = -(-problem.shortcut.channels // SIDE)
    all_steps = chunks * len(plan.shifts) + added
    steps = -(-all_steps // tile.summers) if added else -(-chunks // tile.summers) * len(plan.shifts)
    rounds, groups, on_processor = _schedule(plan, problem.processors)
    working = groups * on_processor  # warpgroups of a multiprocessor

    loads = rounds * groups if plan.resident else 1  # resident weights are loaded once, for all tiles of the block
    weight_bytes = steps * tile.blocks * BLOCK_BYTES[problem.sparse] / loads
    pixel_bytes = (chunks * plan.planes + added) / tile.summers * plan.box_pixels * 2 * SIDE / (1 if tile.own else 2)
    load = working * (weight_bytes + pixel_bytes) * costs.load
    wait = (costs.wait_unrolled if tile.unrolled else costs.wait) * (1 + costs.crowd * (working - 1))
    multiply = costs.multiply_sparse if problem.sparse else costs.multiply_dense
    results = working * tile.blocks * plan.pixels  # of 64 output channels
    finished = results // 2 if tile.halves else results
    finish = finished * costs.finish * (costs.gelu if convolution.activation == "gelu" else 1)
    tiles = rounds * (_longest(steps * wait, steps * multiply * results, load) + finish)
    exchange = costs.exchange if tile.split > 1 else costs.exchange_halves * rounds if tile.halves else 0
    return costs.launch + _longest(tiles + exchange, _bytes(problem, all_steps) * costs.memory)


def _schedule(plan: Tiling, processors: int) -> tuple[int, int, int]:
    """Tiles that a warpgroup computes one after the other, busy warpgroups of a block, and blocks of a processor."""
    tile, tiles = plan.tile, plan.row_tiles * plan.pixel_tiles
    places = processors * (2 if tile.light else 1)
    if tile.split > 1:
        available = places * (_CLUSTERED if tile.split > 2 else 1)
        blocks = tiles * tile.split
        return math.ceil(blocks / available), 2, -(-min(blocks, places) // processors)
    if tile.halves or not tile.own:
        return -(-tiles // places), 2, -(-min(tiles, places) // processors)
    rows = plan.row_tiles if plan.resident else 1  # a block with resident weights stays at one row of tiles
    columns, total = max(1, min(places // rows, tiles // rows)), tiles // rows
    return -(-total // (2 * columns)), min(2, -(-total // columns)), -(-columns * rows // processors)


def _bytes(problem: Problem, steps: int) -> int:
    """What is read and written at least."""
    convolution, (images, height, width) = problem.convolution, problem.size
    out_height, out_width = convolution.out_size(height, width)
    out: int = images * out_height * out_width
    read = out if convolution.kernel == (1, 1) else images * height * width
    channels = read * convolution.channels + out * convolution.rows * (2 if problem.residual else 1)
    if problem.shortcut is not None:
        channels += out * problem.shortcut.channels
    return 2 * channels + -(-convolution.rows // SIDE) * steps * BLOCK_BYTES[problem.sparse]


def _longest(*times: float) -> float:
    """Somewhat more than the longest of several times that overlap, the more the closer they are."""
    return math.pow(sum(math.pow(time, _SHARPNESS) for time in times), 1 / _SHARPNESS)
