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
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accuracy import NETWORKS, Pictures, held_out, load, update
from torch import Tensor, nn

import halve
from halve.learn import initialization, loop, norms, objective
from halve.learn.accuracy_budget import costs_of
from halve.learn.baseline import Baseline
from halve.learn.initialization import Inputs, select_layers
from halve.learn.objective import distill_features
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
    "mosaic": {"MOSAIC": 0.5},
    "colours": {"COLOURS": 0.5},
    "per_channel": {"PER_CHANNEL": True},
    "noise_norms_mosaic": {"noise": (0.3, 0.0), "norms": "learn", "MOSAIC": 0.5},
    "noise_norms_colours": {"noise": (0.3, 0.0), "norms": "learn", "COLOURS": 0.5},
    "noise_norms_per_channel": {"noise": (0.3, 0.0), "norms": "learn", "PER_CHANNEL": True},
    "noise_norms_fast": {"noise": (0.3, 0.0), "norms": "learn", "RATE": 0.06},
    "noise_norms_lr_double": {"noise": (0.3, 0.0), "norms": "learn", "lr": 0.14},
    "noise_norms_lr_half": {"noise": (0.3, 0.0), "norms": "learn", "lr": 0.035},
    "noise_norms_224": {"noise": (0.3, 0.0), "norms": "learn", "SIZE": 224},
    "no_noise_norms": {"noise": 0.0, "norms": "learn"},
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


class Varied:
    """Batches in which some images are mosaics of four, or have other colours."""

    def __init__(self, batches: Any, mosaics: float, colours: float, seed: int) -> None:
        self.batches, self.mosaics, self.colours, self.seed, self.passes = batches, mosaics, colours, seed, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.passes += 1
        for index, (images, labels) in enumerate(self.batches):
            generator = torch.Generator(images.device).manual_seed(1_000_003 * index + 7919 * self.passes + self.seed)
            changed = recoloured(images, self.colours, generator)
            count = round(self.mosaics * len(images))
            yield torch.cat([mosaics(changed, generator)[:count], changed[count:]]), labels


def mosaics(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each of four images side by side, at half the size: small photos are as sharp as large ones there."""
    half = nn.functional.interpolate(images, scale_factor=0.5, mode="bilinear", antialias=True)
    orders = [torch.randperm(len(half), generator=generator, device=half.device) for _ in range(4)]
    first, second, third, fourth = (half[order] for order in orders)
    return torch.cat([torch.cat([first, second], 3), torch.cat([third, fourth], 3)], 2)


def recoloured(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Some images with another brightness, contrast and gain of each channel."""
    count = len(images)
    chosen = torch.rand(count, 1, 1, 1, generator=generator, device=images.device) < share
    shape = (count, images.shape[1], 1, 1)
    gain = torch.exp(0.3 * torch.randn(shape, generator=generator, device=images.device))
    shift = 0.3 * torch.randn(shape, generator=generator, device=images.device)
    return torch.where(chosen, gain * images + shift, images)


def features_per_channel(views: objective.Views) -> Tensor:
    """Errors of features relative to each channel's own variance, instead of the whole block's power."""
    pairs = zip(views.features, views.dense_features, strict=True)
    errors = []
    for ours, theirs in pairs:
        axes = [axis for axis in range(theirs.dim()) if axis != 1]
        spread = theirs.float().var(axes, keepdim=True)
        spread = spread.clamp(min=1e-12) + 0.01 * spread.mean()
        errors.append(((ours.float() - theirs.float()).square() / spread).mean())
    depths = [math.exp(2 * objective.DEPTH * place / max(len(errors) - 1, 1)) for place in range(len(errors))]
    total = torch.stack([depth * error for depth, error in zip(depths, errors, strict=True)]).sum()
    return objective.FEATURE_WEIGHT * total / sum(depths)


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
    if "MOSAIC" in own or "COLOURS" in own:
        data = Varied(data, own.get("MOSAIC", 0.0), own.get("COLOURS", 0.0), seed)
    kept = None
    if "KEPT" in own:
        images = [batch for batch, _ in zip(train, range(math.ceil(CALIBRATION / train.batch)), strict=False)]
        kept = reconstructed(model, orders, images)
    first = round(steps * (FIRST if "REFINE" in own else 1))
    with (
        patched(norms, "RATE", own.get("RATE", norms.RATE)),
        patched(initialization, "_kept", graded(own.get("KEPT", 0.0), kept)),
        patched(objective, "distill_features", features_per_channel if "PER_CHANNEL" in own else distill_features),
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


def measured(model: nn.Module, masks: halve.MaskSet, rest: Mapping[str, Any], size: int) -> dict[str, float]:
    """Agreement and KL divergence on the images that are held back, by where they are from."""
    found: dict[str, float] = {}
    for folder, pictures in rest.items():
        result = halve.evaluate(model, masks, Sizes(pictures, (size,)), progress=False)
        found |= {f"agreement_{folder}": float(result.agreement or 0), f"kl_{folder}": float(result.kl or 0)}
    return found


def held_back(everything: Pictures, assets: Path, folders: tuple[str, ...], most: int | None) -> tuple[Tensor, dict]:
    """True for images that are held back, and these by folder.

    Where there are many classes these are whole classes: every fourth of the first folder, whose photos look most like
    those of the evaluation, and every tenth of the others.
    """
    if len(folders) == 1:
        away, sources = held_out(everything), torch.zeros_like(everything.labels)
    else:
        counts = [sum(1 for _ in (assets / folder).glob("*/*")) for folder in folders]
        sources = torch.repeat_interleave(torch.arange(len(folders)), torch.tensor(counts)).to(everything.labels)
        classes = everything.labels[sources == 0].unique()[1::4]
        others = everything.labels[sources > 0].unique()[5::10]
        away = torch.isin(everything.labels, torch.cat([classes, others]))
    rest = {}
    for index, folder in enumerate(folders):
        chosen = torch.nonzero(away & (sources == index)).flatten()
        if most is not None and len(chosen) > most:
            chosen = chosen[torch.linspace(0, len(chosen) - 1, most, device=chosen.device).long()]
        rest[folder] = everything.part(chosen, None)
    return away, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--network", required=True, choices=list(NETWORKS))
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--seconds", type=float, default=120.0, help="start no arm that would end later")
    parser.add_argument(
        "--orders", type=Path, help="masks with channel orders; searched for 30 s if there is no such file"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, help="pixels to learn from and to measure at (default: the network's, 224)")
    parser.add_argument("--batch", type=int, help="images in a step")
    parser.add_argument("--images", type=int, help="learn from some images only")
    parser.add_argument("--measure", type=int, help="measure on at most as many images of each folder")
    parser.add_argument("--note", default="", help="what else ran on the device at the same time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    out = options.out or RESULTS / f"screen_{options.network}.json"
    network = NETWORKS[options.network]
    seen_at = options.size or (SIZE if network.size > 32 else network.size)
    network = network._replace(batch=options.batch or network.batch, size=options.size or network.size)
    model = network.model(options.network, options.assets).to(options.device)
    everything = load(options.assets, network.train, network.size, network, options.device)
    away, rest = held_back(everything, options.assets, network.train, options.measure)
    kept = torch.nonzero(~away).flatten()
    if options.images and options.images < len(kept):
        kept = kept[torch.linspace(0, len(kept) - 1, options.images, device=kept.device).long()]
    if options.orders and options.orders.exists():
        orders = halve.load(options.orders)
    else:
        example = next(iter(everything))[0][:2]
        orders = halve.prune(model, permute=True, permute_seconds=30.0, example=example, progress=False)
        if options.orders:
            orders.save(options.orders)
    sizes = ", ".join(f"{len(pictures.labels)} of {folder}" for folder, pictures in rest.items())
    print(f"{options.network}: held back {sizes}; ready in {time.perf_counter() - started:.0f} s", flush=True)
    longest, missing = 0.0, list[str]()
    for seed in options.seeds:
        for name in options.arms:
            key = {"network": options.network, "arm": name, "steps": options.steps, "seed": seed}
            key |= {"size": network.size, "batch": network.batch, "learned_from": len(kept), "seen_at": seen_at}
            if any(key.items() <= record.items() for record in recorded(out)):
                continue
            if time.perf_counter() - started + longest > options.seconds:
                print(f"no time for {name}", flush=True)
                missing.append(name)
                continue
            begun = time.perf_counter()
            try:
                masks = learned(model, everything.part(kept, seed), orders, ARMS[name], options.steps, seed)
            except Exception as error:  # the other arms must not be lost
                print(f"{name} failed: {type(error).__name__}: {error}", flush=True)
                missing.append(name)
                continue
            seconds = time.perf_counter() - begun
            found = measured(model, masks, rest, seen_at)
            longest = max(longest, time.perf_counter() - begun)
            record = {
                **key,
                "options": ARMS[name],
                "images": {folder: len(pictures.labels) for folder, pictures in rest.items()},
                **found,
                "seconds": round(seconds, 1),
                "step_graph": masks.recipe["step_graph"],
                "hardware": ", ".join(filter(None, (device_name(torch.device(options.device)), options.note))),
                "versions": {"halve": halve.__version__, "torch": torch.__version__},
                "date": datetime.date.today().isoformat(),
            }
            update(out, lambda records, new=record: [*records, new])  # type: ignore[misc]
            print(name, seed, *(f"{what} {value:.4f}" for what, value in found.items()), f"{seconds:.0f} s", flush=True)
    if missing:
        sys.exit(f"without a result: {', '.join(missing)}")


def recorded(out: Path) -> list[dict[str, Any]]:
    return json.loads(out.read_text()) if out.exists() else []


if __name__ == "__main__":
    main()
