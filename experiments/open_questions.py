"""What the paper leaves open: how temperature, start, objective, data and pattern change learned masks, and more.

    python experiments/open_questions.py [--network digits] [--studies start data ...] [--seeds 0 1 2] [--steps 150]
    PYTHONPATH=ASSETS python experiments/open_questions.py --assets ASSETS --network cifar_resnet20 [--device cuda]

Each study varies one thing and leaves the rest at the defaults of `halve.learn`, without a search for channel orders,
which is limited by time and would make runs differ. Settings are compared on images that masks are not learned from:
the test digits, and for the other networks training images that are held back (every tenth image or class), never
their test images. ASSETS has the layout of accuracy.py.

A run that is in the results is not made again, nor is one that another study has made with the same settings.
--seconds starts nothing that would end later. Writes experiments/results/open_questions.json.
"""

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accuracy import NETWORKS, Network, Pictures, held_out, load, update
from lost_information import layers_alone
from screen import patched
from torch import Tensor, nn
from weight_decay import dense_with, proofs

import halve
from halve.learn import augment, learner
from halve.learn.sampling import FORBIDDEN, Sampler
from halve.learn.settings import Settings
from halve.machine import device_name
from halve.sources.digits import digits, train_digits

RESULTS = Path(__file__).parent / "results" / "open_questions.json"
DIGITS = Network("", (), 8, 64, {}, mean=(0.5,), std=(0.5,))
SUBJECTS = {"digits": DIGITS, **{name: NETWORKS[name] for name in ("cifar_resnet20", "resnet50_v1")}}
CALIBRATION = 512  # images for one-shot masks
PERMUTE_SECONDS = 10.0
MOST = 5000  # held-back images to measure on

TEMPERATURES = (0.1, 0.3, 1.0, 3.0)
NOISES = {"0": 0.0, "0.3": 0.3, "1": 1.0, "1 to 0": (1.0, 0.0)}
NOISE = NOISES["1 to 0"]  # of all other studies, however many steps they take
LONGER = 4.0  # times the steps, for some of the noises
AMOUNTS = {"digits": (10, 30, 100, 200, 400, 800), "cifar_resnet20": (100, 300, 1000, 3000, 10000)}
AMOUNTS["resnet50_v1"] = (100, 300, 1000, 3000)
FEW = 100  # images of the study of augmentation, beside all of them
VIEWS: dict[str, dict[str, Any]] = {
    "none": {"augment": False},
    "shifted": {"VIEWS": "shifted"},
    "mixed": {"VIEWS": "mixed"},
    "both": {},
}
PATTERNS = ("1:2", "2:4", "4:8", "1:4", "2:8")
BOUNDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)
DECAYS = (0.0, 5e-4, 2e-3, 1e-2)


class Arm(NamedTuple):
    """One setting of a study: options of `halve.learn`, those of `masks_of` in capitals, and a share of the steps."""

    setting: dict[str, Any]
    share: float = 1.0  # 0 stands for masks in one shot


class Subject(NamedTuple):
    """A dense network, the images to learn from, and those to measure on."""

    name: str
    model: nn.Module
    train: Pictures
    rest: Pictures


def arms_of(study: str, network: str) -> dict[str, Arm]:
    """The arms of a study, by name."""
    return {name: Arm(_plain(setting), share) for name, (setting, share) in STUDIES[study](network).items()}


def _plain(setting: dict[str, Any]) -> dict[str, Any]:
    """A setting without what is the default anyway, as JSON has it, so that equal runs are found."""
    defaults = Settings().described() | {"pattern": "2:4", "noise": list(NOISE)}
    listed = json.loads(json.dumps(setting))
    return {key: value for key, value in listed.items() if key not in defaults or defaults[key] != value}


def temperature(network: str) -> dict[str, Arm]:
    found = {
        f"{t:g}, {name}": Arm({"temperature": t, "noise": noise})
        for t in TEMPERATURES
        for name, noise in NOISES.items()
    }
    return found | {f"1, {name}; longer": Arm({"noise": NOISES[name]}, LONGER) for name in ("0", "1 to 0")}


def start(network: str) -> dict[str, Arm]:
    found = {}
    for name in ("magnitude", "wanda", "reconstruct", "random"):
        found[f"{name}, one shot"] = Arm({"ONE_SHOT": name}, 0)
    found["permuted, one shot"] = Arm({"ONE_SHOT": "magnitude", "PERMUTE": PERMUTE_SECONDS}, 0)
    settings: dict[str, dict[str, Any]] = {
        name: {"start": name} for name in ("magnitude", "wanda", "reconstruct", "random", "glorot")
    }
    settings["masks"] = {"MASKS": "reconstruct"}
    settings["permuted"] = {"PERMUTE": PERMUTE_SECONDS}
    for share, words in ((0.125, "short"), (1.0, "long")):
        found |= {f"{name}, {words}": Arm(setting, share) for name, setting in settings.items()}
    return found


def objective(network: str) -> dict[str, Arm]:
    settings: dict[str, dict[str, Any]] = {
        match: {"match": match} for match in ("auto", "outputs+features", "outputs", "features", "probabilities")
    }
    settings["task"] = {"objective": "task"}  # with labels, which hold for images that are not augmented only
    found = {name: Arm(setting) for name, setting in settings.items()}
    return found | {f"{name}; half": Arm(setting | {"CLASSES": 0.5}) for name, setting in settings.items()}


def data(network: str) -> dict[str, Arm]:
    found = {}
    for name, setting in (("augmented", {}), ("not augmented", {"augment": False})):
        found |= {f"{n}, {name}": Arm({**setting, "IMAGES": n}) for n in AMOUNTS[network]}
        found[f"all, {name}"] = Arm(setting)
    return found


def augmentation(network: str) -> dict[str, Arm]:
    few = {f"{name}; few": Arm({**setting, "IMAGES": FEW}) for name, setting in VIEWS.items()}
    return few | {f"{name}; all": Arm(setting) for name, setting in VIEWS.items()}


def pattern(network: str) -> dict[str, Arm]:
    found = {f"{rule}, magnitude": Arm({"pattern": rule, "ONE_SHOT": "magnitude"}, 0) for rule in PATTERNS}
    return found | {f"{rule}, learned": Arm({"pattern": rule}) for rule in PATTERNS}


def layers(network: str) -> dict[str, Arm]:
    look = {"LOOK": True}
    return {"magnitude": Arm({"ONE_SHOT": "magnitude", **look}, 0), "learned": Arm(look)}


def bound(network: str) -> dict[str, Arm]:
    return {"none": Arm({})} | {f"{share:g}": Arm({"BOUND": share}) for share in BOUNDS}


def weight_decay(network: str) -> dict[str, Arm]:
    if network != "digits":
        raise SystemExit("weight_decay trains the dense network itself: it is for --network digits only")
    return {f"{decay:g}": Arm({"WEIGHT_DECAY": decay}) for decay in DECAYS}


STUDIES: dict[str, Callable[[str], dict[str, Arm]]] = {
    study.__name__: study
    for study in (temperature, start, objective, data, augmentation, pattern, layers, bound, weight_decay)
}


def subject(name: str, assets: Path | None, device: str, batch: int | None, most: int) -> Subject:
    """Open a network and its images."""
    network = SUBJECTS[name]
    network = network._replace(batch=batch or network.batch)
    if name == "digits":
        pixels, labels = ([], [])
        for split in ("train", "test"):
            images, classes = digits(split).tensors
            pixels.append((127.5 * (images + 1)).to(device))
            labels.append(classes.to(device))
        train, rest = (Pictures(p, c, network) for p, c in zip(pixels, labels, strict=True))
        return Subject(name, train_digits().to(device), train, rest)
    if assets is None:
        raise SystemExit(f"{name} needs --assets")
    everything = load(assets, network.train, network.size, network, device)
    away = held_out(everything)
    chosen = away.nonzero().flatten()
    chosen = chosen[torch.linspace(0, len(chosen) - 1, min(most, len(chosen)), device=chosen.device).long()]
    model = network.model(name, assets).to(device)
    return Subject(name, model, everything.part(~away, None), everything.part(chosen, None))


def images_for(train: Pictures, setting: dict[str, Any], seed: int) -> Pictures:
    """The images that an arm learns from, reshuffled for every pass: all, some of them, or some of the classes."""
    chosen = torch.arange(len(train.labels), device=train.labels.device)
    if "CLASSES" in setting:
        chosen = chosen[seen(train.labels, setting["CLASSES"])[train.labels]]
    if "IMAGES" in setting:
        order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed)).to(chosen.device)
        chosen = chosen[order[: setting["IMAGES"]].sort().values]
    part = train.part(chosen, seed)
    part.batch = min(part.batch, len(chosen))
    return part


def seen(labels: Tensor, share: float) -> Tensor:
    """Which classes are learned from, as a table of all classes: the first of those that occur.

    >>> seen(torch.tensor([0, 2, 2, 5, 7]), 0.5).nonzero().flatten().tolist()
    [0, 2]
    """
    classes = labels.unique()
    table = torch.zeros(int(classes.max()) + 1, dtype=torch.bool, device=labels.device)
    table[classes[: round(share * len(classes))]] = True
    return table


def bounded(quantile: float) -> Callable[[Sampler, int], Tensor]:
    """Offsets of logits that forbid to drop weights above a quantile of their layer.

    In a block with more of these than can be kept, as few as possible are dropped.
    """

    def forbidden(self: Sampler, index: int) -> Tensor:
        family, table = self.families[index], self.get_buffer(f"table{index}")
        assert not any(layout.virtual for layout in family.layouts)
        rows = []
        for part in self.get_buffer(f"weights{index}").abs().split(family.sizes):
            large = (part > part.flatten().quantile(quantile)).to(table)
            dropped = large @ (1 - table).T
            rows.append(dropped > dropped.amin(1, keepdim=True))
        return FORBIDDEN * torch.cat(rows).to(table)

    return forbidden


def dropped_above(model: nn.Module, masks: halve.MaskSet, quantile: float) -> float:
    """Share of the weights above a quantile of their layer that masks drop."""
    dropped = large = 0
    for name, mask in masks.items():
        weight = model.get_submodule(name).weight.detach().abs()
        above = weight > weight.flatten().quantile(quantile)
        large += int(above.sum())
        dropped += int((above & ~mask.kept().to(above.device)).sum())
    return dropped / large


def view(kind: str) -> Callable[..., Tensor]:
    """A part of the augmentation of `learn`: flips and shifts or crops, or mixtures of two images."""
    if kind == "shifted":
        return lambda images, generator: augment.augmented(images, generator, mixed=False)
    return lambda images, generator: augment._pasted(augment._blended(images, generator), generator)


def masks_of(model: nn.Module, images: Pictures, setting: dict[str, Any], steps: int, seed: int) -> halve.MaskSet:
    """The masks of an arm: in one shot if there are no steps."""
    few = [batch for batch, _ in zip(images, range(-(-CALIBRATION // images.batch)), strict=False)]
    options = {key: value for key, value in setting.items() if not key.isupper()}
    permute: dict[str, Any] = {"permute": False}
    if "PERMUTE" in setting:
        permute = {"permute": True, "permute_seconds": setting["PERMUTE"], "example": few[0][0]}
    if not steps:
        return halve.prune(model, setting["ONE_SHOT"], few, seed=seed, progress=False, **permute, **options)
    if "MASKS" in setting:
        options["start"] = halve.prune(model, setting["MASKS"], few, progress=False)
        permute = {}
    with ExitStack() as hooks:
        if "BOUND" in setting:
            hooks.enter_context(patched(Sampler, "_forbidden", bounded(setting["BOUND"])))
        if "VIEWS" in setting:
            hooks.enter_context(patched(learner, "augmented", view(setting["VIEWS"])))
        options = {"noise": NOISE} | options
        return halve.learn(
            model, images, steps=steps, seed=seed, validation=False, progress=False, **permute, **options
        )


def measured(model: nn.Module, masks: halve.MaskSet, rest: Pictures) -> dict[str, Any]:
    """Accuracy, agreement with the dense network and KL divergence from it."""
    result = halve.evaluate(model, masks, rest, progress=False)
    shares = {"top1": result.top1, "agreement": result.agreement, "kl": result.kl, "dense_top1": result.dense_top1}
    return {"images": result.images, **{name: float(share or 0) for name, share in shares.items()}}


def run(subject: Subject, arm: Arm, steps: int, seed: int) -> dict[str, Any]:
    """Make the masks of an arm, and measure them."""
    setting, model = arm.setting, subject.model
    if "WEIGHT_DECAY" in setting:
        model = dense_with(setting["WEIGHT_DECAY"], seed).to(subject.train.pixels.device)
    images = images_for(subject.train, setting, seed)
    begun = time.perf_counter()
    masks = masks_of(model, images, setting, steps, seed)
    found: dict[str, Any] = {"learned_from": len(images.labels), "seconds": round(time.perf_counter() - begun, 1)}
    found |= measured(model, masks, subject.rest)
    if "CLASSES" in setting:
        unseen = ~seen(subject.train.labels, setting["CLASSES"])[subject.rest.labels]
        found["unseen"] = measured(model, masks, subject.rest.part(unseen, None))
    if "LOOK" in setting:
        found["layers"] = layers_alone(model, masks, subject.rest)
    if "WEIGHT_DECAY" in setting:
        found |= proofs(model, masks, next(iter(subject.rest))[0])
    if set(setting) <= {"BOUND"}:
        found["dropped_above"] = {f"{share:g}": dropped_above(model, masks, share) for share in BOUNDS}
    return found


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, str, Arm, int]]:
    """Study, arm and seed of everything that was asked for; magnitude masks need one seed only."""
    for study in options.studies:
        for name, arm in arms_of(study, options.network).items():
            if not any(fnmatchcase(name, glob) for glob in options.arms):
                continue
            fixed = arm.setting.get("ONE_SHOT") == "magnitude"
            for seed in options.seeds[:1] if fixed else options.seeds:
                yield study, name, arm, seed


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="digits", choices=list(SUBJECTS))
    parser.add_argument("--studies", nargs="+", default=list(STUDIES), choices=list(STUDIES))
    parser.add_argument("--arms", nargs="+", default=["*"], help="globs of the arms' names, such as '*, long'")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, help="images in a step (default: 64 digits, 256 of CIFAR-10, 128 photos)")
    parser.add_argument("--measure", type=int, default=MOST, help="held-back images to measure on, at most")
    parser.add_argument("--assets", type=Path, help="folder with checkpoints and images; digits need none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run that would end later")
    parser.add_argument("--note", default="", help="what else ran on the device at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    begun, longest, opened = time.perf_counter(), 0.0, None
    jobs = list(wanted(options))
    for number, (study, name, arm, seed) in enumerate(jobs, 1):
        steps = round(arm.share * options.steps)
        key = {"network": options.network, "study": study, "arm": name, "setting": arm.setting, "seed": seed}
        key |= {"budget": options.steps, "steps": steps, "batch": options.batch or SUBJECTS[options.network].batch}
        records: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
        if any(key.items() <= record.items() for record in records):
            continue
        same = {part: value for part, value in key.items() if part not in ("study", "arm", "budget")}
        twin = next((record for record in records if same.items() <= record.items()), None)
        if twin is None:
            if time.perf_counter() - begun + longest > options.seconds:
                sys.exit(f"no time for {study}: {name}; the same command continues")
            opened = opened or subject(
                *(options.network, options.assets, options.device, options.batch, options.measure)
            )
            started = time.perf_counter()
            twin = run(opened, arm, steps, seed) | {
                "hardware": ", ".join(filter(None, (device_name(torch.device(options.device)), options.note))),
                "versions": {"halve": halve.__version__, "torch": torch.__version__},
                "date": datetime.date.today().isoformat(),
            }
            longest = max(longest, time.perf_counter() - started)
        record = {**key, **{part: value for part, value in twin.items() if part not in key}}
        update(options.out, lambda old, new=record: [*old, new])  # type: ignore[misc]
        print(
            f"{number} of {len(jobs)}: {study}: {name}, seed {seed}: top-1 {100 * record['top1']:.1f} %, agreement "
            f"{100 * record['agreement']:.1f} %, KL {record['kl']:.4f}, {record['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
