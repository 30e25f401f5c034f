"""Flips over all test images, and the masks of the last stage of ResNet-50 that they are counted for."""

import copy
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from certify_statements import Statement
from certify_subjects import CHECKPOINTS, PREPROCESSING, TESTS
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import halve
from halve.sources.data import load_data
from halve.sources.models import load_model

LastStageMasks = Literal["magnitude", "learned", "learned_norms", "learned_fast"]
LAST_STAGE: dict[LastStageMasks, str] = {
    "magnitude": "magnitude in the last stage, recalibrated on other photos (tiny200_train)",
    "learned": "last stage: learned from other photos, 25 minutes on one core",
    "learned_norms": "last stage: learned from other photos with the scale and shift of norms, 1,000 steps of 64",
    "learned_fast": "last stage, where sparse kernels are a fifth faster: learned from other photos, 500 steps of 64",
}
FAST = ("layer4.*.conv2", "layer4.*.downsample.*")  # by results/plan_resnet50_v1.json


@dataclass(frozen=True)
class Flips(Statement):
    """How many predictions the masks change: all test images are counted at once.

    Args:
        last_stage: How the last stage alone is masked. Default: with the masks of the subject.
    """

    name, unit = "flips", None

    method: str = "exact binomial"
    last_stage: LastStageMasks | None = None

    @property
    def mask(self) -> str:
        return LAST_STAGE[self.last_stage] if self.last_stage else super().mask

    def count(self, run: str, assets: Path, folder: Path, device: str) -> tuple[halve.MaskSet, dict[str, Any]]:
        """The masks, and the flips over images of which none was seen when the masks were made."""
        checkpoint = assets / f"{CHECKPOINTS[self.network]}.safetensors"
        model = load_model(f"{assets / 'zoo.py'}:{self.network}", checkpoint).model.float().eval().to(device)
        file = folder / f"{run if self.last_stage else self.network}.masks.safetensors"
        if self.last_stage and not file.exists():
            last_stage_masks(model, assets, self.last_stage).save(file)
        masks, data = halve.load(file), PREPROCESSING[self.network]
        tests = [load_data(str(assets / test), data, batch_size=50).loader for test in TESTS[self.network]]
        started = time.perf_counter()
        found = halve.certify(model, masks, itertools.chain(*tests), confidence=0.999)
        seconds = time.perf_counter() - started
        keys = ("images", "same", "agreement", "share")
        about = {"data": list(TESTS[self.network]), "masked_layers": len(masks), "sentence": str(found)}
        return masks, {key: found.result[key] for key in keys} | about | {"seconds": seconds}


class LastStage(nn.Module):
    """The last stage of ResNet-50 and its head, under the names that they have in the network."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layer4, self.avgpool, self.fc = model.layer4, model.avgpool, model.fc

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(self.layer4(x)).flatten(1))  # type: ignore[no-any-return]


def last_stage_masks(model: Any, assets: Path, how: LastStageMasks) -> halve.MaskSet:
    """Masks of the last stage of ResNet-50, found on tiny200_train without the class that shares photos with a test."""
    limit = {"magnitude": 576, "learned": 4096, "learned_norms": 8192, "learned_fast": 4096}[how]
    preprocessing, batch = PREPROCESSING["resnet50_v1"], 64
    data = load_data(str(assets / "tiny200_train"), preprocessing, batch_size=batch, limit=limit, shuffle=True)
    counted = {folder.name for folder in (assets / "in20_train").iterdir()}
    other = torch.tensor([one not in counted for one in data.class_names])
    device = next(model.parameters()).device
    images = (batch[other[labels]].to(device) for batch, labels in data.loader)
    if how == "magnitude":
        return halve.recalibrate(model, halve.prune(model, include=["layer4.*"]), list(images))
    trunk = copy.deepcopy(nn.Sequential(*list(model.children())[:-3]))  # not masked: run once
    trunk.to(memory_format=torch.channels_last)
    with torch.no_grad():
        inputs = torch.cat([trunk(some) for some in images])
    if how == "learned":
        loader = DataLoader(TensorDataset(inputs), batch_size=batch, shuffle=True, drop_last=True)
        masks = halve.learn(LastStage(model).eval(), loader, minutes=25, augment=False, permute=False)
    else:
        inputs, held_back = inputs[:-512], inputs[-512:]
        order = RandomSampler(inputs, generator=torch.Generator().manual_seed(0))
        batches = BatchSampler(order, batch, drop_last=True)
        masks = halve.learn(
            LastStage(model).eval(),
            DataLoader(TensorDataset(inputs), sampler=batches, batch_size=None),
            steps=500 if how == "learned_fast" else 1000,
            norms="learn" if how == "learned_norms" else "frozen",
            include=FAST if how == "learned_fast" else ("*",),
            precision="bfloat16",
            augment=False,
            permute=False,
            validation=held_back,
        )
    print(masks.recipe["quality"], flush=True)
    return masks
