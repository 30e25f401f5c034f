"""A pretrained detector by a third party: the three networks of MTCNN, which find faces; end to end on a CPU.

    pip install --no-deps facenet-pytorch    # its pins exclude current versions of PyTorch, which run it
    python experiments/faces.py TRAIN TEST WORK [--photos 640] [--tests 500] [--steps 2000]

TRAIN and TEST are folders of photos, those of TEST all of one size. No labels are used: each network learns from what
it gets to see when the dense detector looks at photos of TRAIN. Boxes of the masked and the dense detector are compared
on photos of TEST. WORK keeps masks and ONNX files. Writes experiments/results/faces.json.
"""

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from trained import median_ms, stamp

import halve
from halve.errors import EngineWarning

RESULTS = Path(__file__).parent / "results" / "faces.json"
NETWORKS = ("pnet", "rnet", "onet")  # propose, refine, decide
METHODS = ("magnitude", "reconstruct", "learned")
PATCH = 48  # pixels: what the first network learns from, cut out of the scaled photos that it sees
AT_ONCE = 20  # photos


def all_outputs(network: nn.Module, images: Tensor) -> Tensor:
    """Everything that a network of MTCNN returns, in one tensor: boxes, landmarks, probabilities."""
    return torch.cat(network(images), 1)


def photos(folder: Path, count: int) -> list[Path]:
    """Photos of a folder and its folders, spread over all of them."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    return files[:: max(1, len(files) // count)][:count]


def batches_of(files: Sequence[Path]) -> list[Tensor]:
    """The photos as MTCNN takes them: (n, height, width, 3) with values from 0 to 255."""
    pixels = [torch.from_numpy(np.array(Image.open(file).convert("RGB"))) for file in files]
    return [torch.stack(pixels[start : start + AT_ONCE]) for start in range(0, len(pixels), AT_ONCE)]


def found(detector: Any, batch: Tensor) -> list[dict[str, Tensor]]:
    """The faces in photos, as `halve.evaluate` takes them."""
    every = zip(*detector.detect(batch), strict=True)
    faces = [(np.zeros((0, 4)), []) if boxes is None else (boxes, scores) for boxes, scores in every]
    return [
        {
            "boxes": torch.tensor(np.asarray(boxes, dtype=np.float32)),
            "labels": torch.ones(len(scores), dtype=torch.long),
            "scores": torch.tensor(np.asarray(scores, dtype=np.float32)),
        }
        for boxes, scores in faces
    ]


def seen_by(detector: Any, batches: Iterable[Tensor], most: int, seed: int = 0) -> dict[str, Tensor]:
    """What each network gets to see, at most so many images, in random order."""
    seen: dict[str, list[Tensor]] = {name: [] for name in NETWORKS}

    def watch(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: seen[name].append(inputs[0].detach())

    handles = [getattr(detector, name).register_forward_pre_hook(watch(name)) for name in NETWORKS]
    for batch in batches:
        detector.detect(batch)
    for handle in handles:
        handle.remove()
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, images in seen.items():
        stacked = torch.cat(_patches(images, generator) if name == "pnet" else images)
        result[name] = stacked[torch.randperm(len(stacked), generator=generator)[:most]]
    return result


def _patches(images: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    result = []
    for image in images:
        free = [side - PATCH for side in image.shape[2:]]
        if min(free) >= 0:
            top, left = (int(torch.randint(room + 1, (), generator=generator)) for room in free)
            result.append(image[:, :, top : top + PATCH, left : left + PATCH])
    return result


def masks_by(method: str, network: nn.Module, images: Tensor, steps: int, path: Path) -> halve.MaskSet:
    """The masks of a method for one network; from the file if it is there."""
    if path.exists():
        return halve.load(path)
    if method == "learned":
        options: dict[str, Any] = {"match": "outputs+features", "steps": steps}
        masks = halve.learn(network, images, forward=all_outputs, **options)
    else:
        masks = halve.prune(network, method, images[:256], forward=all_outputs)
    masks.save(path)
    return masks


def masked(detector: Any, masks: dict[str, halve.MaskSet]) -> Any:
    """The detector with its networks masked."""
    result = copy.deepcopy(detector)
    for name, own in masks.items():
        sparse = halve.apply(getattr(detector, name), own)
        assert halve.verify(sparse, own).ok
        setattr(result, name, sparse)
    return result


def compiled(detector: Any, masks: dict[str, halve.MaskSet], examples: dict[str, Tensor]) -> Any:
    """The detector with its networks compiled; the first one for photos of any size."""
    result = copy.deepcopy(detector)
    for name, own in masks.items():
        options: dict[str, Any] = {"any_size": name == "pnet", "inductor": False}
        setattr(result, name, halve.compile(getattr(detector, name), own, examples[name][:64], **options))
    return result


def share_in_networks(detector: Any, batch: Tensor, repetitions: int = 10) -> float:
    """Share of the time that the networks take; the rest scales and crops photos and chooses boxes."""
    inside, started = 0.0, 0.0

    def enter(module: nn.Module, inputs: Any) -> None:
        nonlocal started
        started = time.perf_counter()

    def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
        nonlocal inside
        inside += time.perf_counter() - started

    networks = [getattr(detector, name) for name in NETWORKS]
    handles = [network.register_forward_pre_hook(enter) for network in networks]
    handles += [network.register_forward_hook(leave) for network in networks]
    began = time.perf_counter()
    for _ in range(repetitions):
        detector.detect(batch)
    total = time.perf_counter() - began
    for handle in handles:
        handle.remove()
    return inside / total


def main(arguments: Sequence[str] | None = None) -> None:
    from facenet_pytorch import MTCNN

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("train", "test", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--photos", type=int, default=640, help="of TRAIN")
    parser.add_argument("--tests", type=int, default=500, help="photos of TEST")
    parser.add_argument("--images", type=int, default=8192, help="that each network learns from")
    parser.add_argument("--steps", type=int, default=2000, help="to learn the masks of each network")
    low = [0.5, 0.3, 0.7]  # below MTCNN's own, so that more candidates get through
    parser.add_argument("--thresholds", nargs=3, type=float, default=low, help="of candidates to learn from")
    parser.add_argument("--seconds", type=float, default=5.0, help="to time each detector for")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--note", default="", help="what else ran at the same time")
    parser.set_defaults(device="cpu")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    detector: Any = MTCNN(keep_all=True).eval()
    before = copy.deepcopy(detector.state_dict())
    eager = MTCNN(keep_all=True, thresholds=options.thresholds).eval()
    seen = seen_by(eager, batches_of(photos(options.train, options.photos)), options.images)
    tests = batches_of(photos(options.test, options.tests))
    judged = seen_by(eager, tests, 2048)
    facts = stamp(options)
    networks, records = [], []
    masks: dict[str, halve.MaskSet] = {}
    for method in METHODS:
        masks = {
            name: masks_by(
                method,
                getattr(detector, name),
                seen[name],
                options.steps,
                options.work / f"{name}.{method}.masks.safetensors",
            )
            for name in NETWORKS
        }
        result = halve.evaluate(masked(detector, masks), None, tests, dense=detector, forward=found, task="detection")
        errors = {
            name: halve.evaluate(
                getattr(detector, name), own, judged[name], forward=all_outputs, task="regression"
            ).output_error
            for name, own in masks.items()
        }
        records.append({"method": method, **result.as_json(), "output_errors": errors, **facts})
        print(method, result, errors, flush=True)
    last = {"onet": masks["onet"]}  # no mask in the two networks that choose what the last one sees
    result = halve.evaluate(masked(detector, last), None, tests, dense=detector, forward=found, task="detection")
    records.append({"method": "last", **result.as_json(), "output_errors": {"onet": errors["onet"]}, **facts})
    print("last", result, flush=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in detector.state_dict().items())
    for name, own in masks.items():
        network = getattr(detector, name)
        done = halve.export(network, own, seen[name][:8], options.work / f"{name}.onnx")
        chosen = halve.select(network, data=[seen[name][:8]], forward=all_outputs)
        networks.append(
            {
                "network": name,
                "weights": sum(parameter.numel() for parameter in network.parameters()),
                "masked": list(own),
                "masked_weights": own.weights,
                "not_masked": dict(chosen.not_masked),
                "images": len(seen[name]),
                "steps": own.recipe["steps_done"],
                "quality": own.recipe["quality"],
                "difference": done.difference,
                "outputs": list(done.outputs),
                "check": done.check.summary,
            }
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)  # nothing of the dense networks is 2:4
        dense = compiled(detector, {name: halve.MaskSet({}) for name in NETWORKS}, seen)
        fast = compiled(detector, masks, seen)
    batch = tests[0][:1]
    calls = {
        "eager": lambda: detector.detect(batch),
        "compiled, dense": lambda: dense.detect(batch),
        "compiled, 2:4": lambda: fast.detect(batch),
    }
    measured = {
        "network": "mtcnn",
        "photos": sum(map(len, tests)),
        "size": list(tests[0].shape[1:3]),
        "accuracy": records,
        "networks": networks,
        "speed": {
            "median_ms": median_ms(calls, torch.device("cpu"), options.seconds),
            "share_in_networks": round(share_in_networks(detector, batch), 3),
            **facts,
        },
    }
    options.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(json.dumps(measured["speed"], indent=1))


if __name__ == "__main__":
    main()
