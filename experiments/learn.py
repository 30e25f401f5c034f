"""Learn masks on a real checkpoint with the defaults of `halve.learn`, and record what they are worth.

    python experiments/learn.py ASSETS [--network cifar_resnet20] [--minutes 4] [--batch 128] [--seed 0] [--device cpu]

ASSETS is laid out as for one_shot.py. Masks are learned from training images alone, as they are, without augmentation;
the test images are looked at once, at the end. Weights and BatchNorm statistics are compared bit for bit before and
after. Adds a record to experiments/results/learn.json.
"""

import argparse
import copy
import json
import platform
from pathlib import Path

import torch
from one_shot import NETWORKS

import halve
from halve.cli.progress import Learning
from halve.sources.data import Preprocessing, load_data
from halve.sources.models import load_model

RESULTS = Path(__file__).parent / "results" / "learn.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("--network", default="cifar_resnet20", choices=list(NETWORKS))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    checkpoint, learn_from, tests = NETWORKS[options.network]
    source = load_model(f"{options.assets / 'zoo.py'}:{options.network}", options.assets / f"{checkpoint}.safetensors")
    model = source.model.to(options.device)
    before = copy.deepcopy(model.state_dict())
    data = load_data(
        str(options.assets / learn_from), Preprocessing(), batch_size=options.batch, shuffle=True, seed=options.seed
    )
    with Learning() as bar:
        masks = halve.learn(model, data.loader, minutes=options.minutes, seed=options.seed, report=bar)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    run = (options.network, options.seed)
    records = [record for record in old if (record["network"], record["seed"]) != run]
    magnitude = halve.prune(model)
    for where, folder in tests.items():
        wnids = options.assets / "imagenet_wnids.txt" if folder.startswith("in") else None
        test = load_data(str(options.assets / folder), Preprocessing(), batch_size=250, classes_file=wnids)
        learned = halve.evaluate(model, masks, test.loader, classes=test.classes)
        largest = halve.evaluate(model, magnitude, test.loader, classes=test.classes)
        records.append(
            {
                "network": options.network,
                "data": where,
                "pattern": "2:4",
                "seed": options.seed,
                "batch": options.batch,
                "minutes": options.minutes,
                "seconds": masks.recipe["seconds"],
                "steps": masks.recipe["steps_done"],
                "masked_layers": len(masks),
                "dense_top1": learned.dense_top1,
                "magnitude_top1": largest.top1,
                "learned_top1": learned.top1,
                "learned_agreement": learned.agreement,
                "hardware": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
                if options.device == "cpu"
                else torch.cuda.get_device_name(),
                "versions": {"halve": halve.__version__, "torch": torch.__version__},
            }
        )
        print(json.dumps(records[-1], indent=1))
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
