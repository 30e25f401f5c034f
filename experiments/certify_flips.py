"""Flips over all test images, and the masks of the last stage of ResNet-50 that they are counted for.

    PYTHONPATH=src python experiments/certify_flips.py ASSETS SUBJECTS [--steps 4000]    # learn them on a GPU

Masks that take a GPU are learned first, with this command; certify.py counts their flips.
"""

import argparse
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accuracy import NETWORKS, load
from certify_statements import Statement
from certify_subjects import CHECKPOINTS, PREPROCESSING, TESTS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halve
from halve.sources.data import load_data
from halve.sources.models import load_model

LAST_STAGE = {
    "magnitude": "magnitude in the last stage, recalibrated on other photos (tiny200_train)",
    "learned": "last stage: learned from other photos, 25 minutes on one core",
    "learned_gpu": "last stage: learned from other photos, two minutes on one H200",
}
LEARNED_GPU = "resnet50_flips_learned_gpu"  # the run whose masks this file's command learns


@dataclass(frozen=True)
class Flips(Statement):
    """How many predictions the masks change: all test images are counted at once.

    Args:
        last_stage: How the last stage alone is masked. Default: with the masks of the subject.
    """

    name, unit = "flips", None

    method: str = "exact binomial"
    last_stage: Literal["magnitude", "learned", "learned_gpu"] | None = None

    @property
    def mask(self) -> str:
        return LAST_STAGE[self.last_stage] if self.last_stage else super().mask

    def count(self, run: str, assets: Path, folder: Path) -> tuple[halve.MaskSet, dict[str, Any]]:
        """The masks, and the flips over images of which none was seen when the masks were made."""
        checkpoint = assets / f"{CHECKPOINTS[self.network]}.safetensors"
        model = load_model(f"{assets / 'zoo.py'}:{self.network}", checkpoint).model.float().eval()
        file = folder / f"{run if self.last_stage else self.network}.masks.safetensors"
        if self.last_stage == "learned_gpu" and not file.exists():
            raise SystemExit(f"{file} does not exist: learn it on a GPU, with experiments/certify_flips.py")
        if self.last_stage and not file.exists():
            last_stage_masks(model, assets, self.last_stage == "learned").save(file)
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


def last_stage_masks(model: Any, assets: Path, learned: bool) -> halve.MaskSet:
    """Masks of the last stage of ResNet-50, found on tiny200_train without the class that shares photos with a test."""
    limit = 4096 if learned else 576
    preprocessing, batch = PREPROCESSING["resnet50_v1"], 64
    data = load_data(str(assets / "tiny200_train"), preprocessing, batch_size=batch, limit=limit, shuffle=True)
    counted = {folder.name for folder in (assets / "in20_train").iterdir()}
    other = torch.tensor([one not in counted for one in data.class_names])
    images = (batch[other[labels]] for batch, labels in data.loader)
    if not learned:
        return halve.recalibrate(model, halve.prune(model, include=["layer4.*"]), list(images))
    trunk = nn.Sequential(*list(model.children())[:-3])  # it is not masked: run once
    with torch.no_grad():
        inputs = torch.cat([trunk(some) for some in images])
    loader = DataLoader(TensorDataset(inputs), batch_size=batch, shuffle=True, drop_last=True)
    masks = halve.learn(LastStage(model).eval(), loader, minutes=25, augment=False, permute=False)
    print(masks.recipe["quality"], flush=True)
    return masks


def learned_on_gpu(assets: Path, steps: int) -> halve.MaskSet:
    """Masks of the last stage, learned within the whole network from the same photos, augmented."""
    network = NETWORKS["resnet50_v1"]
    everything = load(assets, ("tiny200_train",), network.size, network, "cuda")
    wnids = (assets / "imagenet_wnids.txt").read_text().split()
    counted = torch.tensor([wnids.index(folder.name) for folder in (assets / "in20_train").iterdir()])
    kept = torch.nonzero(~torch.isin(everything.labels, counted.to(everything.labels))).flatten()
    model = network.model("resnet50_v1", assets).to("cuda")
    return halve.learn(model, everything.part(kept, 0), steps=steps, include=["layer4.*"], progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("assets", type=Path)
    parser.add_argument("subjects", type=Path, help="folder to write the masks to")
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    started = time.perf_counter()
    masks = learned_on_gpu(options.assets, options.steps)
    options.subjects.mkdir(parents=True, exist_ok=True)
    masks.save(options.subjects / f"{LEARNED_GPU}.masks.safetensors")
    print(masks, f"{time.perf_counter() - started:.0f} s", masks.recipe["quality"], flush=True)


if __name__ == "__main__":
    main()
