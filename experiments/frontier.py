"""Agreement against milliseconds: masks at several speeds (`halve.frontier`), on real checkpoints.

    PYTHONPATH=ASSETS python experiments/frontier.py ASSETS --network efficientnet_lite0 --plan PLAN [--points 5]
        [--steps 2000] [--options '{"norms": "learn"}']

PLAN is from plan.py. Layers are ordered, and masks judged, on training images of classes that are held back (as in
screen.py); the evaluation images of accuracy.py are used once, at the end. Writes one record for each point to
results/frontier.json.
"""

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch
from accuracy import NETWORKS, load, masked_share, update
from screen import held_back

import halve
from halve.machine import device_name
from halve.select.speed_plan import load_plan

RESULTS = Path(__file__).parent / "results" / "frontier.json"
HELD_BACK = 512  # images that layers are ordered and masks judged by


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--network", required=True, choices=list(NETWORKS))
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--target", help="part of the name of the plan's device, if it is not this one")
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2000, help="of the first point; others take a quarter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", type=json.loads, default={}, help="more options of halve.learn, as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, help="pixels to learn from")
    parser.add_argument("--batch", type=int, help="images in a step")
    parser.add_argument("--note", default="", help="what else ran on the device at the same time")
    parser.add_argument("--masks", type=Path, help="folder to keep masks in")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    network = NETWORKS[options.network]
    network = network._replace(size=options.size or network.size, batch=options.batch or network.batch)
    model = network.model(options.network, options.assets).to(options.device)
    everything = load(options.assets, network.train, network.size, network, options.device)
    away, rest = held_back(everything, options.assets, network.train, HELD_BACK // len(network.train))
    train = everything.part(~away, options.seed)
    plan = load_plan(options.plan)
    learning = {"steps": options.steps, "seed": options.seed, **options.options}
    started = time.perf_counter()
    found = halve.frontier(
        *(model, train, plan),
        points=options.points,
        validation=[batch for pictures in rest.values() for batch in pictures],
        target=options.target,
        progress=False,
        **learning,
    )
    seconds = round(time.perf_counter() - started, 1)
    print(found, flush=True)
    records: list[dict[str, Any]] = []
    for index, point in enumerate(found):
        if options.masks:
            options.masks.mkdir(exist_ok=True)
            point.masks.save(options.masks / f"{options.network}.frontier.{options.seed}.{index}.masks.safetensors")
        evaluated = {}
        for what, (folder, _) in network.tests.items():
            data = load(options.assets, (folder,), None, network, options.device)
            result = halve.evaluate(model, point.masks, data, progress=False)
            evaluated[what] = {"agreement": result.agreement, "kl": result.kl, "top1": result.top1}
        records.append(
            {
                "network": options.network,
                "seed": options.seed,
                "point": index,
                "layers": len(point.masks),
                "masked_share": round(masked_share(model, point.masks), 4),
                "ms": point.ms,
                "speedup": round(point.speedup, 4),
                "held_back": {"agreement": point.agreement, "kl": point.kl},
                "evaluated": evaluated,
                "plan": plan.description,
                "settings": {**learning, "batch": network.batch, "size": network.size},
                "seconds": seconds,  # for all points
                "hardware": ", ".join(filter(None, (device_name(torch.device(options.device)), options.note))),
                "versions": {"halve": halve.__version__, "torch": torch.__version__},
                "date": datetime.date.today().isoformat(),
            }
        )
        print(*(records[-1][key] for key in ("layers", "masked_share", "ms", "held_back", "evaluated")), flush=True)
    same = (options.network, options.seed)
    update(options.out, lambda old: [r for r in old if (r["network"], r["seed"]) != same] + records)


if __name__ == "__main__":
    main()
