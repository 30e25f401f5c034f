"""Models by name: `torchvision:NAME[@weights]`, `timm:NAME[@pretrained]`, `path/file.py:callable`."""

import contextlib
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from halve.errors import SourceError, first_line, listed
from halve.modules import unwrapped
from halve.sources.weights import load_weights_

Preprocess = Callable[[Any], Any]
FORMS = "torchvision:NAME[@weights], timm:NAME[@pretrained] or path/file.py:callable"


@dataclass(frozen=True)
class Source:
    """A model, its preprocessing if known, and where its weights come from."""

    model: nn.Module
    preprocess: Preprocess | None
    spec: str
    weights: str


def load_model(spec: str, weights: str | Path | None = None) -> Source:
    """Build a model in eval mode, with weights from a file or from its library.

    Args:
        spec: `torchvision:NAME[@weights]`, `timm:NAME[@pretrained]` or `path/file.py:callable`.
        weights: A checkpoint to load (default: the library's weights if named, otherwise random).

    >>> source = load_model("torchvision:resnet18")
    >>> type(source.model).__name__, source.weights
    ('ResNet', 'random')
    """
    head, colon, name = spec.partition(":")
    if head == "torchvision" and colon:
        source = _torchvision(spec, *_split(name), weights)
    elif head == "timm" and colon:
        source = _timm(spec, *_split(name), weights)
    else:
        path, _, attribute = spec.rpartition(":")
        if spec.endswith(".onnx"):
            raise SourceError(
                f"{spec} is an ONNX file, and masks are made for PyTorch models: use the code that it was exported "
                f"from, or a file.py:callable that converts it (docs/how/export.md); 'halve check-onnx' judges the file"
            )
        if not path.endswith(".py"):
            raise SourceError(f"unknown model {spec!r}; use {FORMS}")
        source = _from_file(spec, Path(path), attribute)
    if weights is not None:
        load_weights_(source.model, weights)
        source = Source(source.model, source.preprocess, spec, Path(weights).name)
    source.model.eval()
    return source


def _split(name: str) -> tuple[str, str | None]:
    name, at, weights = name.partition("@")
    return name, weights if at else None


def _torchvision(spec: str, name: str, which: str | None, file: str | Path | None) -> Source:
    from torchvision import models

    if name not in models.list_models():
        raise _unknown("torchvision model", name, models.list_models())
    enum = models.get_model_weights(name)
    chosen = None
    if which is not None:
        if which not in enum.__members__:
            raise _unknown(f"weights for torchvision:{name}", which, ["DEFAULT", *(m.name for m in enum)])
        chosen = None if file is not None else enum[which]
    options: dict[str, Any] = {"weights": chosen}
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    if chosen is None and "weights_backbone" in accepted:
        options["weights_backbone"] = None  # or torchvision would download a backbone
    if chosen is None and name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # their initialisation takes a minute
    model = _build(spec, lambda: models.get_model(name, **options), named=chosen is not None)
    preprocess = (chosen or enum.DEFAULT).transforms() if len(enum) else None
    return Source(model, preprocess, spec, chosen.name if chosen else "random")


def _timm(spec: str, name: str, which: str | None, file: str | Path | None) -> Source:
    try:
        import timm
    except ImportError as error:
        raise SourceError(f"{spec} needs timm: pip install 'halve[timm]'") from error
    if which not in (None, "pretrained"):
        raise _unknown(f"weights for timm:{name}", str(which), ["pretrained"])
    if not timm.is_model(name):
        raise _unknown("timm model", name, timm.list_models())
    pretrained = which is not None and file is None
    model = _build(spec, lambda: timm.create_model(name, pretrained=pretrained), named=pretrained)
    data: Any = timm.data
    preprocess = data.create_transform(**data.resolve_model_data_config(model), is_training=False)
    return Source(model, preprocess, spec, "pretrained" if pretrained else "random")


def _from_file(spec: str, path: Path, attribute: str) -> Source:
    if not path.is_file():
        raise SourceError(f"{spec}: no such file {path}")
    loader = importlib.util.spec_from_file_location(f"halve_model_{path.stem}", path)
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module  # so that classes defined there can be pickled
    with _importing_from(path.resolve().parent):
        try:
            loader.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise SourceError(f"{path} cannot be imported: {first_line(error)}") from error
        builder = getattr(module, attribute, None)
        if not callable(builder):
            names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise _unknown(f"callable in {path}", attribute, names)
        model = builder if isinstance(builder, nn.Module) else _build(spec, builder)
    if not isinstance(model, nn.Module):
        raise SourceError(f"{spec} must return a torch.nn.Module, got {type(model).__name__}")
    model = unwrapped(model)
    preprocess = next((p for p in (getattr(x, "preprocess", None) for x in (model, module)) if callable(p)), None)
    return Source(model, preprocess, spec, "as built")


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Allow imports of modules beside the user's file."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed sys.path
            sys.path.remove(str(folder))


def _build(spec: str, builder: Callable[[], Any], named: bool = False) -> Any:
    try:
        return builder()
    except (
        Exception,
        SystemExit,
    ) as error:  # libraries and user code may raise anything
        hint = "; if it cannot be downloaded, pass --weights FILE" if named else ""
        raise SourceError(f"{spec} cannot be built: {first_line(error)}{hint}") from error


def _unknown(what: str, name: str, known: Iterable[str]) -> SourceError:
    known = list(known)
    near = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    return SourceError(
        f"unknown {what} {name!r}; " + (f"did you mean {listed(near)}?" if near else f"known are {listed(known)}")
    )
