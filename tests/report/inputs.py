"""What a run leaves behind, for a small network, with names that try to be markup."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import halve
from halve.export.check_onnx import OnnxCheck
from halve.export.eligibility import OnnxLayer
from halve.select.speed_plan import LayerSpeed, SpeedPlan

HOSTILE = "<script>alert(1)</script>"
CLASSES = ["ant", HOSTILE, 'cat" onmouseover="alert(2)', "dog & emu"]


class Net(nn.Module):
    """Three layers that are masked, one of them with a hostile name, a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 16, 3, padding=1)
        self.add_module(HOSTILE, nn.Conv2d(16, 16, 3, padding=1))
        self.point = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, len(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(self.stem(x).relu()).relu()
        return self.head(self.point(self._modules[HOSTILE](x).relu()).relu().mean((2, 3)))  # type: ignore[misc]


def network() -> Net:
    """The same network each time, whose predictions depend on the image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Net().eval()
        nn.init.normal_(model.head.weight, std=4.0)
        with torch.no_grad():
            scores = model(pictures())
            model.head.bias -= scores.mean(0)
    return model


def pictures(count: int = 96) -> torch.Tensor:
    """Images from 0 to 1."""
    return torch.rand(count, 3, 12, 12, generator=torch.Generator().manual_seed(5))


def log_lines(steps: int = 6) -> list[dict[str, Any]]:
    """The reports of a run."""
    return [
        {
            "step": 10 * i,
            "steps": 10 * steps,
            "loss": 4.0 / i,
            "entropy": 0.9 - 0.1 * i,
            "changed": 0.01 * i,
            "lr": 0.07,
            "temperature": 1.0,
            "noise": 0.5,
            "guidance": 1.0,
            "images_per_s": 100.0,
            "seconds": 1.5 * i,
            "seconds_left": 1.5 * (steps - i),
            "agreement": 0.5 + 0.05 * i if i % 2 else None,
        }
        for i in range(1, steps + 1)
    ]


def plan() -> SpeedPlan:
    """Times: the body is not faster sparse."""
    layers = {
        "body": LayerSpeed((16, 8, 3, 3), "8>16 3x3", 0.020, 0.021),
        HOSTILE: LayerSpeed((16, 16, 3, 3), "16>16 3x3", 0.040, 0.025),
        "point": LayerSpeed((8, 16, 1, 1), "16>8 1x1", 0.010, 0.006),
    }
    return SpeedPlan(layers, "NVIDIA <b>H200</b>", "float16", 256, (3, 12, 12), 0.10, 0.10, 0.08)


def onnx_check() -> OnnxCheck:
    """The table of an export."""
    layers = (
        OnnxLayer(HOSTILE, "Conv", "w", (16, 16, 3, 3), "float16", "eligible", "small: 16 input channels"),
        OnnxLayer("head", "Gemm", "v", (4, 8), "float16", "no", "dense"),
    )
    return OnnxCheck(Path("net.onnx"), layers)


def write_all(folder: Path) -> dict[str, Any]:
    """Write every input to files, and return the options of `halve.report` that name them."""
    model, images = network(), pictures()
    masks = halve.prune(model).with_recipe(source=f"zoo.py:{HOSTILE}", weights="net.safetensors")
    other = halve.prune(model, "random", exclude="body").with_recipe(quality={"agreement": 0.5, "images": 64})
    masks.save(folder / "net.masks.safetensors")
    other.save(folder / f"{HOSTILE.replace('/', '_')}.masks.safetensors")
    (folder / "net.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log_lines()))
    plan().save(folder / "plan.json")
    evaluation = halve.evaluate(model, masks, images, per_layer=True, progress=False)
    (folder / "evaluation.json").write_text(json.dumps(evaluation.as_json()))
    halve.certify(model, masks, images, progress=False).save(folder / "net.certificate.json")
    (folder / "export.json").write_text(json.dumps(onnx_check().as_json()))
    return {
        "masks": [folder / "net.masks.safetensors", folder / f"{HOSTILE.replace('/', '_')}.masks.safetensors"],
        "log": folder / "net.jsonl",
        "plan": folder / "plan.json",
        "evaluation": folder / "evaluation.json",
        "certificate": folder / "net.certificate.json",
        "export": folder / "export.json",
        "model": model,
        "data": [images],
        "class_names": CLASSES,
    }
