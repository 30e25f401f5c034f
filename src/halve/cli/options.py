"""Options that several commands share, and how to open what they name."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from halve.cli.show import note
from halve.detectors import takes_lists
from halve.errors import OptionError, SourceError, first_line
from halve.masks.file import SUFFIX
from halve.select.select import SelectOptions
from halve.sources.data import Data, load_data
from halve.sources.models import FORMS, Source, load_model
from halve.sources.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing

Model = Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}.")]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint for MODEL: .safetensors, .pth, or packed by halve.")]
Masks = Annotated[Path, typer.Option(help="Mask file, as written by 'halve learn' or 'halve prune'.")]
OptionalMasks = Annotated[Path | None, typer.Option(help="Mask file, as written by 'halve learn' or 'halve prune'.")]
MaskFiles = Annotated[
    list[Path] | None,
    typer.Option("--masks", help="Mask file, as written by 'halve learn' or 'halve prune'. Repeatable, to compare."),
]
_DATA = "Image folder, .tar, WebDataset shards as 'train-{000000..000099}.tar' or a glob, 'digits' or 'letters'."
DataPath = Annotated[str, typer.Option("--data", help=_DATA)]
OptionalData = Annotated[str | None, typer.Option("--data", help=_DATA)]
Out = Annotated[Path, typer.Option(help="File to write.")]
OptionalOut = Annotated[Path | None, typer.Option(help="File to write; by default beside the checkpoint.")]
OptionalMasksOut = Annotated[
    Path | None, typer.Option(help="File to write (default: NAME.recalibrated.masks.safetensors beside --masks).")
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace an existing file, whatever it is; otherwise only an older result of the same kind."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; by default a GPU if there is one.")]
Images = Annotated[int | None, typer.Option(help="Use at most this many images, chosen at random.")]
Batch = Annotated[int, typer.Option(help="Images per batch.")]
Size = Annotated[
    int | None, typer.Option(help="Crop images to this many pixels, replacing the model's own preprocessing.")
]
Resize = Annotated[int | None, typer.Option(help="With --size: scale the shorter side to this first.")]
Mean = Annotated[str | None, typer.Option(help="Mean of each channel, such as 0.5,0.5,0.5 (default: ImageNet's).")]
Std = Annotated[str | None, typer.Option(help="Standard deviation of each channel (default: ImageNet's).")]
Workers = Annotated[
    int | None, typer.Option(help="Worker processes that decode images (default: 0 on a CPU, 4 on a GPU).")
]
LoaderOption = Annotated[
    str,
    typer.Option("--loader", help="What decodes images: pillow, or dali for NVIDIA DALI (pip install 'halve[dali]')."),
]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", help="Read shards from start to end, without listing their images first: for data of any size."
    ),
]
OnChanged = Annotated[
    str, typer.Option(help="If the weights changed since the masks were made: warn, error or ignore.")
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Pixels = Annotated[int | None, typer.Option(min=1, help="Image size in pixels (default: the model's, or 224).")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)} (default: float16 on a GPU, float32 on a CPU).")
]

Classes = Annotated[
    Path | None,
    typer.Option(help="Text file whose line i names the class folder of output i, for data with only some classes."),
]
Seed = Annotated[
    int,
    typer.Option(min=0, max=2**63 - 1, help="Seed of all random numbers, including the choice and order of images."),
]

PatternOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pattern",
        help="Keep N of every M (default 2:4), or GLOB=N:M, GLOB=dense for some layers. Repeatable; first match wins.",
    ),
]
Include = Annotated[list[str] | None, typer.Option(help="Only layers whose name matches this glob. Repeatable.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Skip layers whose name matches this glob. Repeatable.")]
Also = Annotated[
    list[str] | None, typer.Option(help="Also layers that are dense by default (head, grouped), as a glob. Repeatable.")
]
_ORDER = "Blocks along input 'channels' (default), or 'flat' as in the paper."
_REMAINDER = "If the channels are not divisible by M: skip (default), pad or error."
OrderOption = Annotated[str, typer.Option("--order", help=_ORDER)]
OptionalOrder = Annotated[str | None, typer.Option("--order", help=_ORDER)]
Remainder = Annotated[str, typer.Option(help=_REMAINDER)]
OptionalRemainder = Annotated[str | None, typer.Option("--remainder", help=_REMAINDER)]
Kinds = Annotated[
    list[str] | None, typer.Option(help="Only layers of this kind: linear, conv, conv_transpose. Repeatable.")
]

SpeedPlanOption = Annotated[
    Path | None, typer.Option("--plan", help="File of 'halve measure': layers where a mask does not pay stay dense.")
]
Target = Annotated[
    str | None,
    typer.Option(help="The device that the masks are for, such as H200, if --plan was measured on another machine."),
]

Permute = Annotated[
    bool, typer.Option(help="Search for channel orders in which blocks keep more; the network computes the same.")
]
PermuteSeconds = Annotated[float, typer.Option(min=0, help="With --permute: time limit of the search.")]


_UNCHANGED = (0.0,) * 3, (1.0,) * 3  # a mean and a standard deviation


@dataclass(frozen=True)
class Opened:
    """A model on its device, with its preprocessing."""

    source: Source
    device: torch.device
    preprocess: Any

    @property
    def model(self) -> torch.nn.Module:
        return self.source.model

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """The mean and standard deviation that the preprocessing subtracts and divides by, where they are known."""
        steps = [self.preprocess, *getattr(self.preprocess, "transforms", ())]
        found = next((step for step in steps if hasattr(step, "mean") and hasattr(step, "std")), None)
        if found is None:
            return _UNCHANGED if takes_lists(self.model) else None  # detectors normalise images themselves
        return tuple(map(float, found.mean)), tuple(map(float, found.std))

    def example(self) -> torch.Tensor:
        """Two images of noise, to capture the network on without data."""
        first = next((module for module in self.model.modules() if isinstance(module, torch.nn.Conv2d)), None)
        size = getattr(self.preprocess, "size", None) or 224
        channels = 3 if first is None else first.in_channels
        return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0)).to(self.device)

    def data(self, where: str, *, batch: int, workers: int | None, loader: str = "pillow", **options: Any) -> Data:
        """Open images for the model; DALI decodes them on its device."""
        if workers is None:
            workers = min(4, os.cpu_count() or 1) if self.device.type == "cuda" else 0
        given: dict[str, Any] = {"loader": loader, "device": self.device, "lists": takes_lists(self.model)}
        return load_data(where, self.preprocess, batch_size=batch, workers=workers, **given | options)


def open_model(
    model: str,
    weights: Path | None,
    device: str = "auto",
    size: int | None = None,
    resize: int | None = None,
    mean: str | None = None,
    std: str | None = None,
) -> Opened:
    """Build the model, load its weights and move it; options for images replace the model's own preprocessing."""
    source = load_model(model, weights)
    if source.weights == "random":
        note(f"note: {model} has random weights; name weights with '@', or pass --weights FILE")
    preprocess = source.preprocess
    if preprocess is None or any(option is not None for option in (size, resize, mean, std)):
        usual = _UNCHANGED if takes_lists(source.model) else (IMAGENET_MEAN, IMAGENET_STD)
        preprocess = Preprocessing(size, resize, _numbers(mean, usual[0]), _numbers(std, usual[1]))
    name = device
    if device == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(name)
        source.model.to(chosen)
    except (RuntimeError, AssertionError) as error:
        raise SourceError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return Opened(source, chosen, preprocess)


def selection(
    pattern: list[str] | None,
    include: list[str] | None,
    exclude: list[str] | None,
    also: list[str] | None,
    order: str,
    remainder: str,
    plan: Path | None = None,
    target: str | None = None,
) -> SelectOptions:
    """Return the options of `halve.select` from those of the command line."""
    return SelectOptions(
        pattern=pattern_rules(pattern),
        include=include or None,
        exclude=exclude or None,
        also=also or None,
        order=order,  # type: ignore[typeddict-item]
        remainder=remainder,  # type: ignore[typeddict-item]
        plan=plan,
        target=target,
    )


def pattern_rules(patterns: list[str] | None) -> dict[str, str | None]:
    """Return the `pattern` of `halve.select` from values of --pattern.

    >>> pattern_rules(["head=1:4", "stem=dense"])
    {'head': '1:4', 'stem': None, '*': '2:4'}
    """
    rules: dict[str, str | None] = {}
    everywhere = "2:4"
    for rule in patterns or []:
        glob, equals, value = rule.rpartition("=")
        if equals:
            rules.setdefault(glob, None if value == "dense" else value)
        else:
            everywhere = value
    rules.setdefault("*", everywhere)  # last, since the first match wins
    return rules


def default_masks_path(model: str, weights: Path | None) -> Path:
    """Return NAME.masks.safetensors beside the checkpoint, or in the current folder if there is no checkpoint."""
    if weights is not None:
        endings = (".packed.safetensors", ".safetensors", ".pth", ".pt", ".th", ".bin", ".ckpt")
        ending = next((ending for ending in endings if weights.name.endswith(ending)), "")
        return weights.with_name(weights.name.removesuffix(ending) + SUFFIX)
    return Path(model.rpartition(":")[2].partition("@")[0] + SUFFIX)


def type_of(name: str | None) -> torch.dtype | None:
    """Return the dtype that --dtype names."""
    known = None if name is None else name.removeprefix("torch.")
    if known is not None and known not in DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(DTYPES)}, got {name}")
    return None if known is None else DTYPES[known]


def _numbers(text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    try:
        return default if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"{text!r} is not a list of numbers such as 0.5,0.5,0.5") from error
