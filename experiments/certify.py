"""What can be certified on real networks, and how far attacks get: flips, regions, updates of the weights.

    python experiments/certify.py SUBJECTS --prepare ASSETS                # once: networks, masks and images
    python experiments/certify.py SUBJECTS --run digits_region_2 [--processes 16 | --device cuda] [--seconds 500]
    python experiments/certify.py SUBJECTS --run digits_region_2 --attack  # afterwards
    python experiments/certify.py --merge FILE                             # records of another machine
    python experiments/certify.py --list

SUBJECTS is a folder that --prepare fills: networks, their masks and test images in random order. ASSETS has the layout
of one_shot.py, with tiny200_train/ for the flips of ResNet-50. Digits and ResNet-20 get learned masks, ResNet-50 keeps
the largest weights, with recalibrated statistics; where its flips are counted, on all photos, only in the last stage,
recalibrated on photos that are not counted. A run continues where an earlier one with the same masks and bounds
stopped, on the same device and with the same limits: all images of a record share its conditions. It writes its record
after every image, or every few that are taken together on a GPU, to --out, by default experiments/results/certify.json.
What runs state is in certify_runs.py, how it is proven and attacked in certify_statements.py and certify_flips.py.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from certify_flips import Flips
from certify_records import Records
from certify_runs import RUNS
from certify_statements import KeepsClass
from certify_subjects import MASKS, prepare
from certify_tasks import Runner

RESULTS = Path(__file__).parent / "results" / "certify.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", type=Path, nargs="?")
    parser.add_argument("--prepare", type=Path, metavar="ASSETS", help="make the folder, from these")
    parser.add_argument("--networks", nargs="+", default=list(MASKS), choices=MASKS, help="with --prepare")
    parser.add_argument("--run", nargs="+", default=[], choices=RUNS, metavar="RUN")
    parser.add_argument("--attack", action="store_true", help="attack what --run has recorded")
    parser.add_argument("--assets", type=Path, help="for flips: the folder with all test images")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=1, help="images at a time, each on one core")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument(
        "--image-seconds", type=float, default=math.inf, help="limit for each network on an image, or a few together"
    )
    parser.add_argument("--merge", type=Path, metavar="FILE", help="take the records of this file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print(*RUNS, sep="\n")
        sys.exit()
    torch.set_num_threads(1)
    counted = [name for name in arguments.run if isinstance(RUNS[name], Flips)]
    others = [name for name in arguments.run if not isinstance(RUNS[name], KeepsClass)]
    if arguments.attack and others:
        parser.error(
            f"--attack takes runs that prove regions or updates (digits_region_2, ...), not {', '.join(others)}"
        )
    records = Records(arguments.out)
    if arguments.merge is not None:
        records.merge(Records(arguments.merge).load())
    if arguments.prepare is not None:
        for name in arguments.networks:
            prepare(name, arguments.prepare, arguments.subjects)
    runner = Runner(
        arguments.subjects,
        records,
        arguments.device,
        arguments.processes,
        arguments.seconds,
        arguments.image_seconds,
    )
    proven = [name for name in arguments.run if name not in counted]
    for name in counted:
        runner.flips(name, arguments.assets)
    if proven:
        (runner.attack if arguments.attack else runner.execute)(proven)


if __name__ == "__main__":
    main()
