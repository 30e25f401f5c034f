"""A segmentation network: DeepLabV3 with a MobileNetV3 on rendered scenes, trained here; masks, mIoU, times, a file.

    python experiments/segmentation.py WORK [--device cuda] [--out FILE]

WORK keeps weights, masks and the ONNX file. Writes experiments/results/segmentation.json.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from scenes import SHAPES, Stream
from torch import Tensor, nn
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large
from trained import METHODS, exported, mask_facts, masks_by, parser_of, stamp, timed, trained

import halve

RESULTS = Path(__file__).parent / "results" / "segmentation.json"


def network() -> nn.Module:
    """torchvision's DeepLabV3 with an untrained MobileNetV3."""
    model: nn.Module = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=len(SHAPES) + 1)
    return model


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of pixels."""
    images, pixels = batch
    return F.cross_entropy(model(images)["out"].float(), pixels)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    stream = partial(Stream, size=options.size, device=options.device, task="segmentation")
    model, facts = trained(network, stream(10**6, options.batch, seed=options.seed), loss_of, options)
    learned_from = stream(10**4, options.learn_batch, seed=1000 + options.seed)
    tests = stream(-(-options.tests // options.time_batch), options.time_batch, seed=2000 + options.seed)
    records = []

    def record(method: str, result: Any, **facts: Any) -> None:
        shares = {"miou": result.miou, "pixels_right": result.top1, "agreement": result.agreement}
        records.append({"method": method, **shares, **facts, **stamp(options)})
        print(method, result, flush=True)

    for method in METHODS:
        masks = masks_by(method, model, learned_from, options)
        training = facts if method == "dense" else {}
        record(method, halve.evaluate(model, masks, tests), **mask_facts(masks), **training)
    example = next(iter(tests))[0]
    fast, speed = timed(model, masks, example, options)
    record("compiled", halve.evaluate(fast, None, tests, dense=model))
    found = {
        "network": "deeplabv3_mobilenet_v3_large",
        "images": len(tests) * tests.batch,
        "size": options.size,
        "accuracy": records,
        "speed": speed,
        "export": exported(model, masks, example[:2], options),
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
