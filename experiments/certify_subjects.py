"""Networks with masks and images that certify.py makes statements about."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import halve
from halve.certify.network import Network, network_of
from halve.certify.reuse import weight_units
from halve.sources.data import load_data
from halve.sources.digits import DigitsResNet, digits, train_digits
from halve.sources.models import load_model
from halve.sources.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from halve.sources.weights import save_state

MASKS = {"digits": "learned, 1 minute on one core", "cifar_resnet20": "learned, 5 minutes on one core"}
MASKS["resnet50_v1"] = "magnitude, recalibrated"
CHECKPOINTS = {"cifar_resnet20": "cifar10_resnet20", "resnet50_v1": "resnet50_v1_imagenet"}
PREPROCESSING = {"cifar_resnet20": Preprocessing(), "resnet50_v1": Preprocessing(size=224, resize=232)}
TESTS = {"cifar_resnet20": ("cifar10/test",), "resnet50_v1": ("in20_train", "in20_val_dev", "in1000_dev")}
IMAGES = {"digits": 500, "cifar_resnet20": 150, "resnet50_v1": 40}


@dataclass(frozen=True)
class Subject:
    """A network with masks, and images to make statements about."""

    model: nn.Module
    masks: halve.MaskSet
    images: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]


def prepare(name: str, assets: Path, folder: Path) -> None:
    """Write what `subject` reads: weights, masks and images; what exists stays."""
    weights, masks, images = (folder / f"{name}.{end}" for end in ("safetensors", "masks.safetensors", "images"))
    folder.mkdir(parents=True, exist_ok=True)
    if name == "digits":
        if not weights.exists():
            save_state(train_digits().state_dict(), weights)
        if not masks.exists():
            halve.learn(_model(name, folder), digits("train").tensors[0], minutes=1).save(masks)
        save_file({"images": digits("test").tensors[0][: IMAGES[name]].contiguous()}, images)
        return
    weights.write_bytes((assets / f"{CHECKPOINTS[name]}.safetensors").read_bytes())
    (folder / "zoo.py").write_bytes((assets / "zoo.py").read_bytes())
    if not masks.exists():
        _masks(name, _model(name, folder), assets).save(masks)
    data = load_data(
        str(assets / TESTS[name][-1]), PREPROCESSING[name], batch_size=50, shuffle=True, limit=IMAGES[name]
    )
    save_file({"images": torch.cat([batch[0] for batch in data.loader])}, images)


def _model(name: str, folder: Path) -> nn.Module:
    if name == "digits":
        model: nn.Module = DigitsResNet()
        model.load_state_dict(load_file(folder / "digits.safetensors"))
        return model.eval()
    return load_model(f"{folder / 'zoo.py'}:{name}", folder / f"{name}.safetensors").model.float().eval()


def _masks(name: str, model: nn.Module, assets: Path) -> halve.MaskSet:
    if name == "cifar_resnet20":
        data = load_data(str(assets / "cifar10/train"), PREPROCESSING[name], batch_size=128, shuffle=True).loader
        return halve.learn(model, data, minutes=5)
    data = load_data(str(assets / "in20_train"), PREPROCESSING[name], batch_size=16, limit=128, shuffle=True).loader
    return halve.recalibrate(model, halve.prune(model), data)


def subject(name: str, folder: Path) -> Subject:
    """Open a network, its masks and its images."""
    mean, std = ((0.5,), (0.5,)) if name == "digits" else (IMAGENET_MEAN, IMAGENET_STD)
    images = load_file(folder / f"{name}.images")["images"]
    return Subject(_model(name, folder), halve.load(folder / f"{name}.masks.safetensors"), images, mean, std)


class Pair:
    """The masked and the dense network of a subject, in float64, as proofs and attacks take them.

    Args:
        subject: The network, its masks and its images.
        device: Where the networks are.
        seconds: Time limit for the bounds of a network, for one image or a few together.
    """

    def __init__(self, subject: Subject, device: str, seconds: float = math.inf) -> None:
        self.subject, self.device, self.seconds = subject, device, seconds
        masks = subject.masks
        masked = halve.restore_order(halve.apply(subject.model, masks), masks)
        self.models = {"masked": masked, "dense": halve.restore_order(subject.model, masks)}
        for model in self.models.values():
            model.double().eval().to(device).requires_grad_(False)
        self.units = weight_units(self.models["dense"], masks, relative=True)
        self.captured: dict[str, Network] = {}

    def network(self, name: str) -> Network:
        """The masked or the dense network as a graph; it is captured when it is first needed."""
        if name not in self.captured:
            self.captured[name] = network_of(self.models[name], self.subject.images[:1])
        return self.captured[name]

    @torch.no_grad()
    def agree(self) -> list[bool]:
        """Whether the two networks predict the same class, for each image."""
        found: list[bool] = []
        for some in self.subject.images.double().split(10):
            classes = [model(some.to(self.device)).argmax(1) for model in self.models.values()]
            found += (classes[0] == classes[1]).tolist()
        return found
