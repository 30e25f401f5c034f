"""What the experiments on detection and segmentation share: training, masks, times, an ONNX file, and records."""

import argparse
import copy
import datetime
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import halve
from halve.bench.rounds import burst_timer, interleaved
from halve.errors import EngineWarning
from halve.machine import device_name

METHODS = ("dense", "magnitude", "reconstruct", "learned")
_LOOK_EVERY = 20  # steps


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options of an experiment that trains its own network."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder that keeps weights and masks: what is there is used again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=256, help="of the images, in pixels")
    parser.add_argument("--batch", type=int, default=32, help="images to train on at once")
    parser.add_argument("--train-seconds", type=float, default=60)
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate of training")
    parser.add_argument("--learn-batch", type=int, default=16, help="images to learn masks from at once")
    parser.add_argument("--learn-minutes", type=float, default=0.5)
    parser.add_argument("--tests", type=int, default=512, help="images to measure on")
    parser.add_argument("--time-batch", type=int, default=8, help="images of a timed call")
    parser.add_argument("--time-seconds", type=float, default=2.0, help="to time each version for")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--note", default="", help="what is special about this run")
    return parser


def trained(
    build: Callable[[], nn.Module],
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    options: argparse.Namespace,
) -> tuple[nn.Module, dict[str, Any]]:
    """The dense network, and how it was trained; from the work folder if it is there."""
    torch.manual_seed(options.seed)
    model = build().to(options.device)
    weights, training = options.work / "weights.safetensors", options.work / "training.json"
    if weights.exists():
        model.load_state_dict(load_file(weights))
    else:
        facts = train_(model, batches, loss_of, options.train_seconds, options.lr)
        training.write_text(json.dumps(facts))
        save_file(model.state_dict(), weights)
    return model.eval(), json.loads(training.read_text())


def train_(
    model: nn.Module, batches: Iterable[Any], loss_of: Callable[[nn.Module, Any], Tensor], seconds: float, lr: float
) -> dict[str, Any]:
    """Train for about so many seconds: AdamW, a warm-up and a cosine over the time, bfloat16 on a GPU."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.01, fused=True)
    model.train().to(memory_format=torch.channels_last)
    started, steps, losses = time.perf_counter(), 0, []
    for batch in batches:
        done = (time.perf_counter() - started) / seconds
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * min(done / 0.1, 0.5 * (1 + math.cos(math.pi * done)))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % _LOOK_EVERY == 0:
            losses.append(float(loss.detach()))  # waits for the GPU, so that the time is right
            if steps % (5 * _LOOK_EVERY) == 0:
                print(f"step {steps}, {100 * done:.0f} %, loss {statistics.mean(losses[-5:]):.4f}", flush=True)
    model.to(memory_format=torch.contiguous_format)
    return {"train_steps": steps, "train_seconds": round(time.perf_counter() - started, 1)}


def masks_by(method: str, model: nn.Module, batches: Any, options: argparse.Namespace) -> halve.MaskSet:
    """The masks of a method; from the work folder if they are there. The network stays bit for bit the same."""
    if method == "dense":
        return halve.MaskSet({})
    path = options.work / f"{method}.masks.safetensors"
    if path.exists():
        return halve.load(path)
    before = copy.deepcopy(model.state_dict())
    if method == "learned":
        masks = halve.learn(model, batches, minutes=options.learn_minutes, seed=options.seed)
    else:
        few = [batch for batch, _ in zip(batches, range(4), strict=False)]
        masks = halve.prune(model, method, few)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert halve.verify(halve.apply(model, masks), masks).ok
    masks.save(path)
    return masks


def mask_facts(masks: halve.MaskSet) -> dict[str, Any]:
    """What a record says of masks."""
    recipe = masks.recipe
    facts = {"masked_layers": len(masks), "masked_weights": masks.weights}
    if recipe.get("method") == "learn":
        facts |= {"steps": recipe["steps_done"], "seconds": recipe["seconds"], "quality": recipe["quality"]}
    return facts


def timed(
    model: nn.Module, masks: halve.MaskSet, example: Any, options: argparse.Namespace
) -> tuple[nn.Module, dict[str, Any]]:
    """The compiled network, and milliseconds of a call: eager, compiled dense, and with masks; float16 on a GPU."""
    device = torch.device(options.device)
    half = device.type == "cuda"
    dtype = torch.float16 if half else torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)  # nothing of the dense network is 2:4
        dense = halve.compile(model, halve.MaskSet({}), example, dtype=dtype, inductor=False)
    fast = halve.compile(model, masks, example, dtype=dtype, inductor=False)

    def eager() -> Any:
        with torch.no_grad(), torch.autocast(device.type, torch.float16, enabled=half):
            return model(example)

    calls = {"eager": eager, "compiled, dense": lambda: dense(example), "compiled, 2:4": lambda: fast(example)}
    sparse = sum(layer.is_2_4 for layer in fast.layers)
    return fast, {
        "batch": len(example),
        "size": options.size,
        "dtype": str(dtype).removeprefix("torch."),
        "median_ms": median_ms(calls, device, options.time_seconds),
        "layers_2_4": sparse,
        "uncompiled": dict(fast.plan.uncompiled),
        **stamp(options),
    }


def median_ms(calls: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, float]:
    """The median time of each call. Raises what one of them raises."""
    times, failed = interleaved(calls, burst_timer(device), seconds=seconds)
    if failed:
        raise next(iter(failed.values()))
    return {name: round(statistics.median(itertools.chain(*rounds)), 3) for name, rounds in times.items()}


def exported(model: nn.Module, masks: halve.MaskSet, example: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What the ONNX file of the masked network holds, and how far it differs."""
    done = halve.export(model, masks, example, options.work / "network.onnx")
    return {
        "outputs": list(done.outputs),
        "bytes": done.size,
        "dtype": done.dtype,
        "difference": done.difference,
        "summary": done.check.summary,
        "notes": list(done.notes),
        **stamp(options),
    }


def stamp(options: argparse.Namespace) -> dict[str, Any]:
    """Where and when something was measured."""
    return {
        "hardware": device_name(torch.device(options.device)) + (f", {options.note}" if options.note else ""),
        "versions": {"halve": halve.__version__, "torch": torch.__version__},
        "date": datetime.date.today().isoformat(),
    }
