"""The state of a learning run in a file: a run that is killed resumes from the last one that was saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from halve.errors import FileError, LearningWarning, MaskError, listed, warn
from halve.learn.form import Precision
from halve.learn.moving import MovingStatistics
from halve.masks import storage
from halve.masks.moves import check_moves
from halve.permute.permute import Permutation
from halve.select.select import Choice

FORMAT = storage.Format("halve.learning", 2, "run state", "'halve learn'")
SUFFIX = ".learning.safetensors"
_HEADER = ("identity", "data", "step", "batches", "seconds", "fraction", "permutation")
_LARGEST = 10**12  # steps, batches or seconds: beyond any run
_TENSORS = ("logits", "exp_avg", "exp_avg_sq")
_STATISTICS = "statistics:"


@dataclass(frozen=True)
class RunState:
    """The state of a run after a step.

    `identity` tells runs apart: settings, layers, model, precision, number of processes, and what is certain of the
    data. `data` is what only may tell data apart, such as a digest of images that may be transformed at random.
    `fraction` is the share of the budget that was spent. `permutation` holds the channel orders, since a search with a
    time limit may not find them again, or the reason why there are none; it is None if no search was made. `statistics`
    are those of BatchNorm that moved while learning, by state-dict name.
    """

    identity: dict[str, Any]
    data: dict[str, Any]
    step: int
    batches: int
    seconds: float
    fraction: float
    logits: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    permutation: dict[str, Any] | None = None
    statistics: Mapping[str, Tensor] = field(default_factory=dict)

    def save(self, path: str | Path) -> Path:
        """Write the file atomically."""
        header = {name: getattr(self, name) for name in _HEADER}
        tensors = {name: getattr(self, name) for name in _TENSORS}
        moved = {f"{_STATISTICS}{name}": tensor for name, tensor in self.statistics.items()}
        return storage.write(path, FORMAT, header, tensors | moved)

    @classmethod
    def load(
        cls,
        path: str | Path,
        identity: Mapping[str, Any],
        logits: Tensor,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> "RunState":
        """Read the file; raises `FileError` if it is damaged or belongs to another run."""
        _, header, tensors = storage.read(path, [FORMAT])
        theirs = header.get("identity")
        if not isinstance(theirs, dict):
            raise FileError(f"{path} is damaged: it does not say which run it belongs to")
        if different := _differences(theirs, identity):
            raise FileError(
                f"{path} is the state of another run: {different} differ; "
                f"resume with the same model, data and settings, or start a new run with another run_state="
            )
        if header.keys() != set(_HEADER):
            raise FileError(f"{path} is damaged: its header must have the keys {', '.join(_HEADER)}")
        step, batches = (_number(path, header, key, (int,)) for key in ("step", "batches"))
        seconds = float(_number(path, header, "seconds", (int, float)))
        fraction = float(_number(path, header, "fraction", (int, float), most=1))
        data = header["data"]
        if not isinstance(data, dict):
            raise FileError(f"{path} is damaged: what it says of the data must be a JSON object")
        moved = {key: tensors.pop(key) for key in list(tensors) if key.startswith(_STATISTICS)}
        moved = {key.removeprefix(_STATISTICS): tensor for key, tensor in moved.items()}
        _check_tensors(path, tensors, logits)
        _check_statistics(path, moved, statistics or {})
        permutation = header["permutation"]
        if not isinstance(permutation, dict | None):
            raise FileError(f"{path} is damaged: its permutation must be a JSON object or null")
        logits, exp_avg, exp_avg_sq = (tensors[name] for name in _TENSORS)
        return cls(
            dict(identity), data, step, batches, seconds, fraction, logits, exp_avg, exp_avg_sq, permutation, moved
        )


@dataclass(frozen=True)
class RunFile:
    """Where a run saves its state and how often, with the parts of the state that do not change."""

    path: Path
    save_every: float  # seconds
    identity: dict[str, Any]
    data: dict[str, Any]
    permutation: dict[str, Any] | None
    statistics: MovingStatistics

    def save(
        self,
        optimizer: torch.optim.Optimizer,
        logits: Tensor,
        step: int,
        batches: int,
        seconds: float,
        fraction: float,
    ) -> None:
        """Save the state of the run."""
        progress, learned = (step, batches, seconds, fraction), (logits.detach(), *optimizer_state(optimizer, logits))
        moved = self.statistics.tensors
        RunState(self.identity, self.data, *progress, *learned, self.permutation, moved).save(self.path)

    def restore_(self, optimizer: torch.optim.Optimizer, logits: Tensor) -> RunState:
        """Load the state, and put its logits and averages in place. Warns if the data seems to be other data."""
        state = RunState.load(self.path, self.identity, logits, self.statistics.tensors)
        if different := _differences(state.data, self.data):
            warn(
                f"{self.path} seems to be learned from other data: {different} differ. If the data is not shuffled or "
                f"transformed at random, resume with the data that the run was started with",
                LearningWarning,
            )
        restore_(optimizer, logits, state)
        self.statistics.restore_(state.statistics)
        return state


def _is_state(path: str | Path) -> bool:
    try:
        return storage.format_of(path) == FORMAT.name
    except FileError:
        return False


def check_new(path: str | Path) -> None:
    """Raise `FileError` if a new run would overwrite the state of another one."""
    if Path(path).is_file() and not _is_state(path):
        raise FileError(f"{path} exists and is not the state of a run: choose another run_state=")
    if Path(path).exists():
        raise FileError(
            f"{path} holds the state of a run: continue it with resume=True, delete the file to start again, "
            f"or choose another run_state="
        )


def saved_permutation(path: str | Path, model: nn.Module, choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Return what a run state says about channel orders; None if the run made no search.

    Raises `FileError` if the orders do not fit the model or the choices.
    """
    _, header, _ = storage.read(path, [FORMAT])
    found = header.get("permutation")
    if found is None:
        return None
    try:
        if not isinstance(found, dict):
            raise MaskError(f"expected an object, got a {type(found).__name__}")
        if "reason" not in found:
            check_moves(model, Permutation.restored(choices, found).moves)
        elif found.keys() != {"reason"} or not isinstance(found["reason"], str):
            raise MaskError("a reason must be text, and stand alone")
    except MaskError as error:
        raise FileError(
            f"{path} is damaged, or the state of another run: its permutation: {error}; "
            f"start a new run with another run_state="
        ) from error
    return found


def saved_precision(path: str | Path) -> Precision:
    """What the run computes in, whatever another machine would choose; "auto" if the file does not say it."""
    _, header, _ = storage.read(path, [FORMAT])
    identity = header.get("identity")
    found = identity.get("precision") if isinstance(identity, dict) else None
    return next((known for known in get_args(Precision) if known == found), "auto")


def optimizer_state(optimizer: torch.optim.Optimizer, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return Adam's two averages; zeros before the first step."""
    state = optimizer.state.get(logits, {})
    return tuple(state.get(key, torch.zeros_like(logits)) for key in ("exp_avg", "exp_avg_sq"))


def restore_(optimizer: torch.optim.Optimizer, logits: Tensor, state: RunState) -> None:
    """Restore logits and averages."""
    with torch.no_grad():
        logits.copy_(state.logits)
    if state.step:
        optimizer.state[logits] = {
            "step": torch.tensor(float(state.step), device=logits.device if logits.is_cuda else None),
            "exp_avg": state.exp_avg.to(logits),
            "exp_avg_sq": state.exp_avg_sq.to(logits),
        }


def _number(
    path: str | Path, header: Mapping[str, Any], key: str, kinds: tuple[type, ...], most: int = _LARGEST
) -> Any:
    value = header[key]
    if type(value) not in kinds or not 0 <= value <= most:
        what = "an integer" if kinds == (int,) else "a number"
        raise FileError(f"{path} is damaged: {key} must be {what} from 0 to {most:,}, got {_brief(value)}")
    return value


def _check_tensors(path: str | Path, tensors: Mapping[str, Tensor], logits: Tensor) -> None:
    """Raise `FileError` unless the tensors are logits and averages that a run can go on from."""
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if shapes != dict.fromkeys(_TENSORS, (tuple(logits.shape), logits.dtype)):
        raise FileError(
            f"{path} is damaged: it does not hold the state of {logits.numel():,} logits, "
            f"which is {', '.join(_TENSORS)} of shape {tuple(logits.shape)} and type {logits.dtype}"
        )
    bad = [name for name, tensor in tensors.items() if bool(tensor.isnan().any())]
    if bad or bool(tensors["logits"].isinf().any()) or bool((tensors["exp_avg_sq"] < 0).any()):
        raise FileError(f"{path} is damaged: its logits and averages must be finite, and its squares not negative")


def _check_statistics(path: str | Path, moved: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> None:
    """Raise `FileError` unless these are statistics that a run can go on from."""
    theirs, ours = ({name: (t.shape, t.dtype) for name, t in each.items()} for each in (moved, here))
    if theirs != ours or not all(bool(tensor.isfinite().all()) for tensor in moved.values()):
        raise FileError(f"{path} is damaged: it must hold finite statistics of {len(ours)} BatchNorm buffers")


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What differs, by name and with both values; empty if nothing does."""
    theirs, ours = _flat(there), _flat(here)
    different = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    shown = [f"{key} ({_brief(theirs.get(key))} there, {_brief(ours.get(key))} here)" for key in different]
    return listed(shown, 4)


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity, flattened by one level so that a message can name the setting or the layer."""
    flat: dict[str, Any] = {}
    for key, value in identity.items():
        flat |= {f"{key}.{inner}": part for inner, part in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
