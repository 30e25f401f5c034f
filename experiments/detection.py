"""A detector: RetinaNet with a ResNet-18 on rendered scenes, trained here; masks, mAP, times, and an ONNX file.

    python experiments/detection.py WORK [--device cuda]
    python experiments/detection.py WORK --score      # mAP of what WORK holds, where torchmetrics and pycocotools are

The first command trains the network, makes masks and keeps the boxes that each network finds in WORK, with all that is
measured without a library; it ends with the second one if there are torchmetrics and pycocotools. That writes
experiments/results/detection.json.
"""

import json
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from scenes import SHAPES, Stream
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops.feature_pyramid_network import LastLevelP6P7
from trained import METHODS, exported, mask_facts, masks_by, parser_of, stamp, timed, trained

import halve

RESULTS = Path(__file__).parent / "results" / "detection.json"
MEASURED, BOXES = "measured.json", "boxes.safetensors"  # in the work folder
SHOWN = 0.3  # score of a box that a user would see
PARTS = ("boxes", "labels", "scores")


def detector(size: int) -> nn.Module:
    """torchvision's RetinaNet with an untrained ResNet-18 and norms in its head, for images of one size."""
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18",
        weights=None,
        norm_layer=nn.BatchNorm2d,
        trainable_layers=5,
        returned_layers=[2, 3, 4],
        extra_blocks=LastLevelP6P7(256, 256),
    )
    sides = [tuple(size / 256 * side * 2 ** (step / 3) for step in range(3)) for side in (20, 40, 80, 160, 320)]
    anchors = AnchorGenerator(tuple(sides), ((0.5, 1.0, 2.0),) * 5)
    norm = partial(nn.GroupNorm, 32)  # trains faster from scratch, as in torchvision's second version
    head = RetinaNetHead(256, anchors.num_anchors_per_location()[0], len(SHAPES) + 1, norm_layer=norm)
    options = {"min_size": size, "max_size": size, "detections_per_img": 50}
    return RetinaNet(backbone, len(SHAPES) + 1, anchor_generator=anchors, head=head, **options)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """torchvision's own loss."""
    losses: dict[str, Tensor] = model(*batch)
    return sum(losses.values(), torch.zeros((), device=batch[0][0].device))


@torch.no_grad()
def found_by(model: nn.Module, batches: Stream) -> dict[str, Tensor]:
    """All boxes of all images, with the number of their image."""
    found = [one for images, _ in batches for one in model(images)]
    return flat(found)


def flat(found: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The boxes of images as one tensor for each part, with the number of the image."""
    parts = [part for part in PARTS if part in found[0]]
    numbers = [torch.full_like(one["labels"], number) for number, one in enumerate(found)]
    return {part: torch.cat([one[part] for one in found]).cpu() for part in parts} | {"image": torch.cat(numbers).cpu()}


def by_image(flattened: dict[str, Tensor], images: int) -> list[dict[str, Tensor]]:
    """The reverse of `flat`."""
    parts = flattened.keys() - {"image"}
    chosen = [flattened["image"] == number for number in range(images)]
    return [{part: flattened[part][rows] for part in parts} for rows in chosen]


def measure(options: Any) -> None:
    """Train, make masks, and keep what they change."""
    stream = partial(Stream, size=options.size, device=options.device, task="detection")
    model, facts = trained(
        partial(detector, options.size), stream(10**6, options.batch, seed=options.seed), loss_of, options
    )
    learned_from = stream(10**4, options.learn_batch, seed=1000 + options.seed)
    tests = stream(-(-options.tests // options.time_batch), options.time_batch, seed=2000 + options.seed)
    boxes = {"target": flat([target for _, targets in tests for target in targets])}
    records = []
    for method in METHODS:
        masks = masks_by(method, model, learned_from, options)
        boxes[method] = found_by(halve.apply(model, masks), tests)
        shown = halve.evaluate(model, masks, tests, min_score=SHOWN)
        records.append(
            {
                "method": method,
                "agreement": shown.agreement,
                "boxes": shown.boxes,
                **mask_facts(masks),
                **(facts if method == "dense" else {}),
                **stamp(options),
            }
        )
        print(method, shown, flush=True)
    example = next(iter(tests))[0]
    fast, speed = timed(model, masks, example, options)
    boxes["compiled"] = found_by(fast, tests)
    shown = halve.evaluate(fast, None, tests, dense=model, min_score=SHOWN)
    records.append({"method": "compiled", "agreement": shown.agreement, "boxes": shown.boxes, **stamp(options)})
    flattened = {f"{name}.{part}": tensor for name, parts in boxes.items() for part, tensor in parts.items()}
    save_file(flattened, options.work / BOXES)
    found = {
        "network": "retinanet_resnet18_fpn",
        "images": len(tests) * tests.batch,
        "size": options.size,
        "accuracy": records,
        "speed": speed,
        "export": exported(model, masks, example[:2], options),
    }
    (options.work / MEASURED).write_text(json.dumps(found, indent=1) + "\n")


def score(work: Path, out: Path) -> None:
    """Add the mean average precision of the boxes that are kept in the work folder, and write the results."""
    from torchmetrics.detection import MeanAveragePrecision

    found = json.loads((work / MEASURED).read_text())
    kept: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(work / BOXES).items():
        kept.setdefault(name.split(".")[0], {})[name.split(".")[1]] = tensor
    targets = by_image(kept["target"], found["images"])
    for record in found["accuracy"]:
        metric = MeanAveragePrecision()
        metric.update(by_image(kept[record["method"]], found["images"]), targets)
        result = metric.compute()
        record |= {name: round(float(result[name]), 4) for name in ("map", "map_50", "map_75")}
        print(record["method"], {name: record[name] for name in ("map", "map_50", "map_75", "agreement")})
    out.write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(lr=6e-4)
    parser.add_argument("--score", action="store_true", help="only compute mAP and write the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    if not options.score:
        measure(options)
    if options.score or (find_spec("torchmetrics") and find_spec("pycocotools")):
        score(options.work, options.out)
    else:
        print(f"no torchmetrics or no pycocotools here: run {__file__} {options.work} --score where they are")


if __name__ == "__main__":
    main()
