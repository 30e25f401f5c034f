"""What masks cost in images and minutes: `halve.learn` with its defaults beside one-shot masks.

    PYTHONPATH=ASSETS python experiments/budgets.py ASSETS --network cifar_resnet20 [--device cpu] [--seconds 600]
        [--images 100 300 1000 3000 10000 all] [--minutes 0.5 1 2 5 10]

All minutes are tried with all images, and all numbers of images with two minutes. Each result is compared with what
`halve.prune` makes of the same images: by magnitude, by magnitude in searched channel orders, and by reconstruction.
Times are worth something only if nothing else runs on the device. Masks are measured on training images that are held
back (as in screen.py). A budget that is recorded is not run again, and none is started that would not end
within --seconds, so the experiment can be run in parts. Writes experiments/results/budgets.json.
"""

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

import torch
from accuracy import NETWORKS, Pictures, load, update, validated
from screen import held_back, measured, recorded

import halve
from halve.machine import device_name

RESULTS = Path(__file__).parent / "results" / "budgets.json"
MINUTES = 2.0  # for the curve over images
MOST_FOR_SCORES = 512  # images that one-shot masks read
ONE_SHOT: dict[str, dict[str, Any]] = {
    "magnitude": {"score": "magnitude"},
    "magnitude_permuted": {"score": "magnitude", "permute": True, "permute_seconds": 30.0},
    "reconstruct": {"score": "reconstruct"},
}


def budgets(images: list[int], minutes: list[float]) -> list[tuple[int, float]]:
    """(images, minutes) of all runs, the shortest first; 0 images stand for all.

    >>> budgets([100, 0], [0.5, 2.0])
    [(0, 0.5), (100, 2.0), (0, 2.0)]
    """
    over_time = [(0, limit) for limit in minutes]
    over_images = [(count, MINUTES) for count in images]
    return sorted(dict.fromkeys(over_images + over_time), key=lambda budget: budget[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--network", required=True, choices=list(NETWORKS))
    parser.add_argument("--images", nargs="+", default=["100", "300", "1000", "3000", "10000", "all"])
    parser.add_argument("--minutes", nargs="+", type=float, default=[0.5, 1.0, 2.0, 5.0, 10.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no run that would end later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="images in a step (default: the network's, 64 on a CPU)")
    parser.add_argument("--measure", type=int, default=1000, help="measure on at most as many images of each folder")
    parser.add_argument("--note", default="", help="what else ran on the device at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    started = time.perf_counter()
    network = NETWORKS[options.network]
    batch = options.batch or (64 if options.device == "cpu" else network.batch)
    network = network._replace(batch=batch)
    model = network.model(options.network, options.assets).to(options.device)
    everything = load(options.assets, network.train, network.size, network, options.device)
    away, rest = held_back(everything, options.assets, network.train, options.measure)
    kept = torch.nonzero(~away).flatten()
    hardware = device_name(torch.device(options.device))
    common = {
        "hardware": ", ".join(filter(None, (hardware, options.note))),
        "versions": {"halve": halve.__version__, "torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
    }

    def note(record: dict[str, Any], masks: halve.MaskSet, seconds: float) -> None:
        record = {**record, **measured(model, masks, rest, network.size), "seconds": round(seconds, 1), **common}
        update(options.out, lambda old: [*old, record])
        print({key: value for key, value in record.items() if key not in common}, flush=True)

    counts = [0 if count == "all" else int(count) for count in options.images]
    for count, minutes in budgets(counts, options.minutes):
        chosen = some(kept, count)
        key = {"network": options.network, "device": torch.device(options.device).type, "images": len(chosen)}
        key |= {"seed": options.seed}
        known = recorded(options.out)
        for method, arguments in ONE_SHOT.items():
            if any((key | {"method": method}).items() <= record.items() for record in known):
                continue
            begun = time.perf_counter()
            masks = pruned(model, everything.part(some(chosen, MOST_FOR_SCORES), None), arguments)
            note(key | {"method": method}, masks, time.perf_counter() - begun)
        key |= {"method": "halve", "minutes": minutes}
        if any(key.items() <= record.items() for record in known):
            continue
        if time.perf_counter() - started + 60 * minutes > options.seconds:
            print(f"no time for {minutes:g} minutes", flush=True)
            continue
        train, validation = validated(everything.part(chosen, options.seed), options.seed)
        train.batch = min(batch, len(train.labels))
        begun = time.perf_counter()
        masks = halve.learn(*(model, train), minutes=minutes, seed=options.seed, validation=validation, progress=False)
        facts = {name: masks.recipe[name] for name in ("steps_done", "quality")}
        note(key | facts | {"batch": train.batch}, masks, time.perf_counter() - begun)


def some(images: torch.Tensor, count: int) -> torch.Tensor:
    """Evenly chosen images; all of them for a count of 0, or if there are no more."""
    if not count or count >= len(images):
        return images
    return images[torch.linspace(0, len(images) - 1, count, device=images.device).long()]


def pruned(model: torch.nn.Module, images: Pictures, arguments: dict[str, Any]) -> halve.MaskSet:
    """One-shot masks; scores that read images get them in small batches."""
    images.batch = min(images.batch, 64)
    options = {key: value for key, value in arguments.items() if key != "score"}
    if options.get("permute"):
        options["example"] = next(iter(images))[0][:2]
    data = list(images) if arguments["score"] == "reconstruct" else None
    return halve.prune(model, arguments["score"], data, progress=False, **options)


if __name__ == "__main__":
    main()
