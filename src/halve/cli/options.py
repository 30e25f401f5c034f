"""Options that several commands share, and what is opened from them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from halve.cli.show import note
from halve.errors import FileError, HalveError, SourceError
from halve.masks.file import SUFFIX
from halve.select.select import SelectOptions
from halve.sources.data import IMAGENET_MEAN, IMAGENET_STD, Data, Preprocessing, load_data
from halve.sources.models import FORMS, Source, load_model

Model = Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}.")]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint for MODEL: .safetensors, .pth, or packed by halve.")]
Masks = Annotated[Path, typer.Option(help="Mask file that 'halve prune' wrote.")]
OptionalMasks = Annotated[Path | None, typer.Option(help="Mask file that 'halve prune' wrote.")]
DataPath = Annotated[str, typer.Option("--data", help="Image folder, .tar, 'shard-{000..003}.tar', or 'digits'.")]
OptionalData = Annotated[
    str | None, typer.Option("--data", help="Image folder, .tar, 'shard-{000..003}.tar', or 'digits'.")
]
Out = Annotated[Path, typer.Option(help="File to write.")]
OptionalOut = Annotated[Path | None, typer.Option(help="File to write; by default beside the checkpoint.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; by default a GPU where there is one.")]
Images = Annotated[int | None, typer.Option(help="Use at most this many images, taken at random.")]
Batch = Annotated[int, typer.Option(help="Images per batch.")]
Size = Annotated[
    int | None, typer.Option(help="Crop images to this many pixels, instead of the model's own preprocessing.")
]
Resize = Annotated[int | None, typer.Option(help="With --size: first scale the shorter side to this.")]
Mean = Annotated[str | None, typer.Option(help="Mean of each channel, such as 0.5,0.5,0.5 (default: ImageNet's).")]
Std = Annotated[str | None, typer.Option(help="Standard deviation of each channel (default: ImageNet's).")]
Workers = Annotated[int | None, typer.Option(help="Processes that decode images (default: 0 on a CPU, 4 for a GPU).")]
OnChanged = Annotated[str, typer.Option(help="On weights that the masks were not made for: warn, error or ignore.")]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Pixels = Annotated[int | None, typer.Option(min=1, help="Pixels along an image (default: the model's, or 224).")]
Computed = Annotated[
    str | None, typer.Option("--dtype", help=f"{', '.join(DTYPES)} (default: float16, on a CPU float32).")
]

Classes = Annotated[
    Path | None,
    typer.Option(help="Text file, line i names the class folder of output i: for data with only some of the classes."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides which images, their order, and all chance.")]

PatternOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pattern",
        help="N kept of M (default 2:4), or GLOB=N:M for some layers, GLOB=dense; repeatable, first match wins.",
    ),
]
Include = Annotated[list[str] | None, typer.Option(help="Only layers of this name; a glob, repeatable.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Not layers of this name; a glob, repeatable.")]
Also = Annotated[
    list[str] | None, typer.Option(help="These too, though left out by default (head, grouped); repeatable.")
]
OrderOption = Annotated[str, typer.Option("--order", help="Blocks along input 'channels', or 'flat' as in the paper.")]
Remainder = Annotated[str, typer.Option(help="Channels that are no multiple of M: skip, pad or error.")]

Permute = Annotated[
    bool, typer.Option(help="Look for channel orders in which blocks keep more; the network's function stays.")
]
PermuteSeconds = Annotated[float, typer.Option(min=0, help="With --permute: how long to look for orders, at most.")]


@dataclass(frozen=True)
class Opened:
    """A model on its device, and how to open data for it."""

    source: Source
    device: torch.device
    preprocess: Any

    @property
    def model(self) -> torch.nn.Module:
        return self.source.model

    def example(self) -> torch.Tensor:
        """Two images of noise, to capture the network on where there is no data."""
        first = next((module for module in self.model.modules() if isinstance(module, torch.nn.Conv2d)), None)
        size = getattr(self.preprocess, "size", None) or 224
        channels = 3 if first is None else first.in_channels
        return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0)).to(self.device)

    def data(self, where: str, *, batch: int, workers: int | None, **options: Any) -> Data:
        if workers is None:
            workers = min(4, os.cpu_count() or 1) if self.device.type == "cuda" else 0
        return load_data(where, self.preprocess, batch_size=batch, workers=workers, **options)


def open_model(
    model: str,
    weights: Path | None,
    device: str = "auto",
    size: int | None = None,
    resize: int | None = None,
    mean: str | None = None,
    std: str | None = None,
) -> Opened:
    """Build the model, load its weights, move it; options for images replace the model's own preprocessing."""
    source = load_model(model, weights)
    if source.weights == "random":
        note(f"note: {model} has random weights; name some with '@', or pass --weights FILE")
    preprocess = source.preprocess
    if preprocess is None or any(option is not None for option in (size, resize, mean, std)):
        preprocess = Preprocessing(size, resize, _numbers(mean, IMAGENET_MEAN), _numbers(std, IMAGENET_STD))
    name = device
    if device == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(name)
        source.model.to(chosen)
    except (RuntimeError, AssertionError) as error:
        raise SourceError(f"device {name!r} cannot be used: {error}") from error
    return Opened(source, chosen, preprocess)


def selection(
    pattern: list[str] | None,
    include: list[str] | None,
    exclude: list[str] | None,
    also: list[str] | None,
    order: str,
    remainder: str,
) -> SelectOptions:
    """The options of `halve.select` from those of the command line."""
    rules: dict[str, str | None] = {}
    everywhere = "2:4"
    for rule in pattern or []:
        glob, equals, value = rule.rpartition("=")
        if equals:
            rules.setdefault(glob, None if value == "dense" else value)
        else:
            everywhere = value
    rules.setdefault("*", everywhere)  # last, since the first match wins
    return SelectOptions(
        pattern=rules,
        include=include or None,
        exclude=exclude or None,
        also=also or None,
        order=order,  # type: ignore[typeddict-item]
        remainder=remainder,  # type: ignore[typeddict-item]
    )


def default_masks_path(model: str, weights: Path | None) -> Path:
    """NAME.masks.safetensors beside the checkpoint, or in this folder for a model by name."""
    if weights is not None:
        endings = (".packed.safetensors", ".safetensors", ".pth", ".pt", ".th", ".bin", ".ckpt")
        ending = next((ending for ending in endings if weights.name.endswith(ending)), "")
        return weights.with_name(weights.name.removesuffix(ending) + SUFFIX)
    return Path(model.rpartition(":")[2].partition("@")[0] + SUFFIX)


def writable(path: Path) -> Path:
    """The path, if a file can be written there: better to know before the work than after it."""
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise FileError(
            f"cannot write {path}: {folder} is no folder that can be written to, or {path.name} is a folder"
        )
    return path


def type_of(name: str | None) -> torch.dtype | None:
    """What --dtype names."""
    known = None if name is None else name.removeprefix("torch.")
    if known is not None and known not in DTYPES:
        raise HalveError(f"--dtype {name}: there are {', '.join(DTYPES)}")
    return None if known is None else DTYPES[known]


def _numbers(text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    try:
        return default if text is None else tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise HalveError(f"{text!r} is no list of numbers such as 0.5,0.5,0.5") from error
