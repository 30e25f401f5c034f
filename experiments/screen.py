"""Screen ways to learn masks on training images that are held back; settings are chosen by this, never by test images.

    PYTHONPATH=ASSETS python experiments/screen.py ASSETS --network efficientnet_lite0 [--arms default norms ...]
        [--steps 800] [--seeds 0] [--seconds 120] [--orders orders.masks.safetensors] [--device cuda] [--out FILE]

ASSETS has the layout of accuracy.py, and for EfficientNet-Lite0 the folders that efficientnet_lite0.py names. Every
tenth class is held back. All arms learn from the same images in the same channel orders (of --orders, or searched once)
for the same number of steps; seconds are recorded, since steps cost different times. Agreement with the dense network
and KL divergence are measured at the size of the training images and at 224 pixels. An arm that is in the results
already is not run again, and none is started that would not end within --seconds.
Writes experiments/results/screen_NETWORK.json.
"""

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accuracy import NETWORKS, Pictures, held_out, load
from torch import Tensor, nn

import halve
from halve.learn import initialization, loop, norms
from halve.learn.accuracy_budget import costs_of
from halve.learn.baseline import Baseline
from halve.learn.initialization import Inputs, select_layers
from halve.learn.settings import Settings
from halve.machine import device_name
from halve.masks.mask import Mask
from halve.permute.policy import orders_of

RESULTS = Path(__file__).parent / "results"
SIZE = 224  # pixels that the networks were trained for
CALIBRATION = 512  # images for one-shot masks
FIRST = 0.6  # share of the steps before masks are refined
Arm = dict[str, Any]  # options of halve.learn, and those of `learned` in capitals

ARMS: dict[str, Arm] = {
    "default": {},
    "norms": {"norms": "learn"},
    "norms_slow": {"norms": "learn", "RATE": 0.005},
    "norms_fast": {"norms": "learn", "RATE": 0.06},
    "noise": {"noise": (0.3, 0.0)},
    "noise_norms": {"noise": (0.3, 0.0), "norms": "learn"},
    "reconstruct": {"KEPT": 1.0},
    "reconstruct_sharp": {"KEPT": 3.0},
    "reconstruct_noise_norms": {"KEPT": 1.0, "noise": (0.3, 0.0), "norms": "learn"},
    "refine_all": {"REFINE": 1.0},
    "refine_worst": {"REFINE": 0.5},
    "size_224": {"SIZE": 224},
    "size_224_norms": {"SIZE": 224, "norms": "learn"},
    "sizes": {"SIZES": (128, 160, 192, 224)},
    "lr_half": {"lr": 0.035},
    "lr_double": {"lr": 0.14},
    "alpha_4": {"alpha": 4.0},
    "outputs": {"match": "outputs"},
    "features": {"match": "features"},
    "probabilities": {"match": "probabilities"},
    "not_augmented": {"augment": False},
}


class Sizes:
    """Batches of images at several sizes in turn."""

    def __init__(self, pictures: Pictures, sizes: tuple[int, ...]) -> None:
        self.pictures, self.sizes = pictures, sizes

    def __len__(self) -> int:
        return len(self.pictures)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index, (images, labels) in enumerate(self.pictures):
            yield resized(images, self.sizes[index % len(self.sizes)]), labels


def resized(images: Tensor, size: int) -> Tensor:
    if images.shape[-1] == size:
        return images
    return nn.functional.interpolate(images, (size, size), mode="bicubic", antialias=size < images.shape[-1])


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class for a while: what is tried is no option of the library."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def graded(bonus: float, kept: Mapping[str, Mask] | None) -> Callable[..., dict[str, Tensor]]:
    """Scores to start from: magnitudes, and for what a mask keeps a bonus relative to the mean of its block."""

    def scores(start: halve.MaskSet, choices: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for choice in choices:
            size, layout = weights[choice.name].abs().float(), choice.layout
            found[choice.name] = size
            if kept is not None:
                blocks = layout.to_blocks(size)
                mean = layout.from_blocks(blocks.mean(-1, keepdim=True).expand_as(blocks).contiguous())
                found[choice.name] = size + bonus * mean * kept[choice.name].kept().to(size)
        return found

    return scores


def only(worst: set[str]) -> Callable[[loop.Loop], Tensor]:
    """A gradient that is zero for the logits of all layers but some."""
    guarded = loop.Loop._guarded_gradient_

    def gradient(self: loop.Loop) -> Tensor:
        fine = guarded(self)
        grad, sampler = self.logits.grad, self.learner.sampler
        assert grad is not None
        for family, part in zip(sampler.families, sampler.split(grad), strict=True):
            for name, rows in zip(family.names, part.split(family.sizes), strict=True):
                if name not in worst:
                    rows.zero_()
        return fine

    return gradient


def learned(model: nn.Module, train: Pictures, orders: halve.MaskSet, arm: Arm, steps: int, seed: int) -> halve.MaskSet:
    """The masks of an arm."""
    own = {key: value for key, value in arm.items() if key.isupper()}
    options = {"seed": seed, "validation": False, "progress": False}
    options |= {key: value for key, value in arm.items() if key not in own}
    alpha = options.pop("alpha", 8.0)
    data: Any = train
    if "SIZE" in own or "SIZES" in own:
        data = Sizes(train, own.get("SIZES", (own.get("SIZE", 0),)))
    kept = None
    if "KEPT" in own:
        images = [batch for batch, _ in zip(train, range(math.ceil(CALIBRATION / train.batch)), strict=False)]
        kept = reconstructed(model, orders, images)
    first = round(steps * (FIRST if "REFINE" in own else 1))
    with (
        patched(norms, "RATE", own.get("RATE", norms.RATE)),
        patched(initialization, "_kept", graded(own.get("KEPT", 0.0), kept)),
    ):
        masks = halve.learn(model, data, start=orders, alpha=4 * alpha, steps=first, **options)
    if "REFINE" not in own:
        return masks
    sample = [batch for batch, _ in zip(train, range(2), strict=False)]
    costs = costs_of(model, masks, sample)
    worst = set(sorted(costs, key=lambda name: -costs[name])[: round(own["REFINE"] * len(costs))])
    again = options | {"noise": (0.3, 0.0), "start": masks, "alpha": alpha, "steps": steps - first, "lr": 0.035}
    with patched(loop.Loop, "_guarded_gradient_", only(worst)):
        return halve.learn(model, data, **again)


def reconstructed(model: nn.Module, orders: halve.MaskSet, images: list[Any]) -> dict[str, Mask]:
    """Masks by reconstruction in the given channel orders."""
    layers = select_layers(model, {}, images[0])
    ordered = orders_of(orders, layers.choices)
    choices = layers.choices if ordered is None else ordered.choices
    baseline = Baseline(Inputs(model, images), layers, choices, Settings(), orders)
    return dict(baseline._masks("reconstruct", images, False))


def measured(model: nn.Module, masks: halve.MaskSet, rest: Pictures, sizes: list[int]) -> dict[str, float]:
    """Agreement and KL divergence on the images that are held back, by size."""
    found: dict[str, float] = {}
    for size in sizes:
        result = halve.evaluate(model, masks, Sizes(rest, (size,)), progress=False)
        found |= {f"agreement_{size}": float(result.agreement or 0), f"kl_{size}": float(result.kl or 0)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--network", required=True, choices=list(NETWORKS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="start no arm that would end later")
    parser.add_argument(
        "--orders", type=Path, help="masks with channel orders; searched for 30 s if there is no such file"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, help="learn from the first images only, and measure on as many")
    parser.add_argument("--note", default="", help="what else ran on the device at the same time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    out = options.out or RESULTS / f"screen_{options.network}.json"
    records: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    network = NETWORKS[options.network]
    if options.images:
        network = network._replace(batch=min(network.batch, options.images))
    model = network.model(options.network, options.assets).to(options.device)
    everything = load(options.assets, network.train, network.size, network, options.device)
    away = held_out(everything)
    rest = everything.part(away, None)
    if options.images:
        rest = rest.part(torch.arange(min(options.images, len(rest.labels))), None)
    sizes = sorted({network.size, SIZE if network.size > 32 else network.size})
    if options.orders and options.orders.exists():
        orders = halve.load(options.orders)
    else:
        example = next(iter(everything))[0][:2]
        orders = halve.prune(model, permute=True, permute_seconds=30.0, example=example, progress=False)
        if options.orders:
            orders.save(options.orders)
    print(f"{options.network}: {len(rest.labels)} images held back; ready in {time.perf_counter() - started:.0f} s")
    longest = 0.0
    for seed in options.seeds:
        for name in options.arms:
            key = {"network": options.network, "arm": name, "steps": options.steps, "seed": seed}
            if any(key.items() <= record.items() for record in records):
                continue
            if time.perf_counter() - started + longest > options.seconds:
                print(f"no time for {name}", flush=True)
                continue
            train = everything.part(~away, seed)
            if options.images:
                train = train.part(torch.arange(options.images), seed)
            begun = time.perf_counter()
            try:
                masks = learned(model, train, orders, ARMS[name], options.steps, seed)
            except Exception as error:  # the other arms must not be lost
                print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
                continue
            seconds = time.perf_counter() - begun
            found = measured(model, masks, rest, sizes)
            longest = max(longest, time.perf_counter() - begun)
            records.append(
                {
                    **key,
                    "options": ARMS[name],
                    "images": len(rest.labels),
                    **found,
                    "seconds": round(seconds, 1),
                    "step_graph": masks.recipe["step_graph"],
                    "hardware": ", ".join(filter(None, (device_name(torch.device(options.device)), options.note))),
                    "versions": {"halve": halve.__version__, "torch": torch.__version__},
                    "date": datetime.date.today().isoformat(),
                }
            )
            print(name, seed, *(f"{what} {value:.4f}" for what, value in found.items()), f"{seconds:.0f} s", flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
