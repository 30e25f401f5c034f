"""How long each layer takes with dense and with sparse kernels on one machine: where a mask pays."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from halve.errors import FileError, OptionError, listed
from halve.markup import table
from halve.masks.storage import write_atomically
from halve.text import aligned

FORMAT = "halve.speed_plan"
VERSION = 2
NOISE = 0.02  # a layer, or the network, is faster if it is so by more than this share; timings vary by about as much
LAST = 0.05  # share of what masks save that is not worth masks in many weights
_LARGEST = 16 << 20  # bytes of a file


@dataclass(frozen=True)
class LayerSpeed:
    """Milliseconds of one layer with its fastest dense and its fastest sparse kernel; None if there is no such kernel.

    >>> LayerSpeed((64, 64, 3, 3), "64>64 3x3 at 56x56", dense_ms=0.12, sparse_ms=0.08).faster
    True
    """

    weight: tuple[int, ...]
    shape: str
    dense_ms: float | None
    sparse_ms: float | None

    @property
    def saved_ms(self) -> float:
        """Milliseconds that a mask saves; 0 if it saves none."""
        if self.dense_ms is None or self.sparse_ms is None:
            return 0.0
        return max(0.0, self.dense_ms - self.sparse_ms)

    @property
    def faster(self) -> bool:
        """Whether it is faster sparse, beyond what timings vary by."""
        return self.saved_ms > NOISE * (self.dense_ms or 0.0)

    @property
    def weights(self) -> int:
        """The number of weights."""
        return math.prod(self.weight)


@dataclass(frozen=True)
class SpeedPlan(Mapping[str, LayerSpeed]):
    """What `halve.measure` found, layer by layer, and the machine that it holds for. Prints as a table.

    `halve.select`, `halve.prune` and `halve.learn` take it as `plan`, and mask only layers where that pays.

    Args:
        layers: Times of each layer that can be masked, by name.
        device: Name of the GPU or CPU.
        dtype: What was computed in, such as "float16".
        batch: Batch size.
        image: Shape of one image.
        dense_ms: Median time of the fastest dense version of the whole network, without halve.
        unmasked_ms: Median time of the network compiled by halve without masks: fused, on dense kernels.
        sparse_ms: Median time of the network compiled by halve with masks in all of these layers.
        versions: Versions of halve and of the libraries that affect speed.

    >>> layers = {"conv1": LayerSpeed((64, 64, 1, 1), "64>64 1x1 at 56x56", 0.10, 0.11)}
    >>> layers["conv2"] = LayerSpeed((64, 64, 3, 3), "64>64 3x3 at 56x56", 0.12, 0.07)
    >>> plan = SpeedPlan(layers, "NVIDIA H200", "float16", 256, (3, 224, 224), 0.40, 0.30, 0.25)
    >>> plan.paying
    ['conv2']
    >>> plan.ms({"conv2"}), plan.ms(set()), plan.speedup({"conv2"})
    (0.25, 0.3, 1.6)
    >>> plan.verdict
    'masks save 16.7 % of the time'
    """

    layers: Mapping[str, LayerSpeed]
    device: str
    dtype: str
    batch: int
    image: tuple[int, ...]
    dense_ms: float
    unmasked_ms: float
    sparse_ms: float
    versions: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> LayerSpeed:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def faster(self) -> list[str]:
        """Layers that are faster sparse."""
        return [name for name, layer in self.items() if layer.faster]

    @property
    def paying(self) -> list[str]:
        """Layers worth a mask: they are faster sparse, and save enough for the weights that masks drop.

        Layers that save less than half as much per weight as all of them do on average are left out, those that save
        least first, as long as they bring no more than the last 5 % of what masks save. Layers that save equally much
        per weight are left out together or not at all.
        """
        faster = self.faster
        total, weights = sum(self[name].saved_ms for name in faster), sum(self[name].weights for name in faster)
        per_weight = {name: float(f"{self[name].saved_ms / self[name].weights:.9g}") for name in faster}  # but rounding
        left_out: list[str] = []
        given_up = 0.0
        for rate, names in groupby(sorted(faster, key=per_weight.__getitem__), per_weight.__getitem__):
            alike = list(names)
            given_up += sum(self[name].saved_ms for name in alike)
            if given_up > LAST * total or rate * weights >= 0.5 * total:
                break
            left_out += alike
        return [name for name in faster if name not in left_out]

    def ms(self, masked: Collection[str]) -> float:
        """Estimated time of the network with masks in these layers only.

        Leaving a layer dense costs what its sparse kernel saves, in proportion: times of single layers do not add up to
        that of the network. With all layers masked that are faster sparse it is `sparse_ms`, with none `unmasked_ms`.
        """
        faster = self.faster
        total = sum(self[name].saved_ms for name in faster)
        if not total:
            return self.unmasked_ms
        kept = sum(self[name].saved_ms for name in faster if name in masked)
        return round(self.unmasked_ms + (self.sparse_ms - self.unmasked_ms) * kept / total, 6)

    def speedup(self, masked: Collection[str]) -> float:
        """Estimated speed of the network with masks in these layers only, relative to the dense network."""
        return self.dense_ms / self.ms(masked)

    def estimate(self, masked: Collection[str]) -> dict[str, Any]:
        """The estimated time of the network with masks in these layers only, and what it holds for, as JSON values."""
        speed = {"ms": self.ms(masked), "speedup": round(self.speedup(masked), 4), "dense_ms": self.dense_ms}
        return speed | {"device": self.device, "dtype": self.dtype, "batch": self.batch}

    @property
    def times(self) -> dict[str, float]:
        """The times of the whole network, by name."""
        return {"dense_ms": self.dense_ms, "unmasked_ms": self.unmasked_ms, "sparse_ms": self.sparse_ms}

    @property
    def saved(self) -> float:
        """The share of the network's time that masks save; the rest of the speed-up needs no masks."""
        return max(0.0, 1 - self.sparse_ms / self.unmasked_ms) if self.faster else 0.0

    @property
    def pays(self) -> bool:
        """Whether masks make the network faster than it is without them, beyond what timings vary by."""
        return self.saved > NOISE

    @property
    def verdict(self) -> str:
        """What masks save, in words."""
        if self.pays:
            return f"masks save {100 * self.saved:.1f} % of the time"
        slower = self.sparse_ms / self.unmasked_ms - 1
        if not self.faster:
            what = "no layer is faster sparse"
        elif slower >= 0.0005:  # 0.1 % as it is printed
            what = f"masks make the network {100 * slower:.1f} % slower"
        else:
            what = f"masks save {100 * self.saved:.1f} % of the time"
        return (
            f"{what}: not worth masking here; halve.compile without masks takes {self.unmasked_ms:.3f} ms and keeps "
            f"all weights"
        )

    def reason(self, name: str) -> str | None:
        """Why a mask in this layer would not pay, in a few words; None if it would."""
        layer = self.get(name)
        if layer is None:
            return "not timed"
        if layer.sparse_ms is None or layer.dense_ms is None:
            return "no sparse kernel"
        if not layer.faster:
            return "not faster sparse"
        return None if name in self.paying else "saves too little for its weights"

    def why_not(self, name: str) -> str | None:
        """Why a mask in this layer would not pay, with its times and where they were measured; None if it would."""
        reason, layer = self.reason(name), self.get(name)
        if reason is None:
            return None
        times = ""
        if layer is not None and layer.sparse_ms is not None and layer.dense_ms is not None:
            times = f": {layer.sparse_ms:.4f} ms, dense {layer.dense_ms:.4f} ms"
        return f"{reason}{times} on {self.device}, {self.dtype}, batch {self.batch}"

    def answer(self, name: str) -> str:
        """Whether a mask in this layer pays, as a table cell."""
        reason = self.reason(name)
        return "yes" if reason is None else f"no: {reason}"

    def check_network(self, weights: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `OptionError` if the plan belongs to another network, whose layers have these weights."""
        if missing := [name for name in self if name not in weights]:
            raise OptionError(f"the plan is of another network: this one has no layer {listed(missing)}; measure again")
        for name, layer in self.items():
            if layer.weight != weights[name]:
                raise OptionError(
                    f"the plan is of another network: layer {name} has a weight of shape {weights[name]}, "
                    f"in the plan {layer.weight}; measure again"
                )

    def check_target(self, here: Collection[str], target: str | None) -> None:
        """Raise `OptionError` if the plan was measured on another machine than this one or the target.

        Args:
            here: Names of this machine's devices.
            target: Part of the name of the device that the masks are for, such as "H200".
        """
        if target is None and _without_threads(self.device) not in map(_without_threads, here):
            raise OptionError(
                f"the plan was measured on {self.device}, this machine has {listed(here)}; "
                f"if the masks are for that machine, pass target={self.device!r}, otherwise measure again"
            )
        if target is not None and target.lower() not in self.device.lower():
            raise OptionError(f"the plan was measured on {self.device}, not on the target {target!r}; measure again")

    @property
    def description(self) -> str:
        """One line that tells plans apart."""
        digest = hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]
        return f"{self.device}, {self.dtype}, batch {self.batch}, {digest}"

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, plain: Any) -> "SpeedPlan":
        """A plan from JSON values. Raises `ValueError` if they are no plan, `FileError` for another version."""
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise ValueError("not a plan of 'halve measure'")
        if plain.get("version") != VERSION:
            version = f"a plan of version {plain.get('version')!r}, and this halve reads version {VERSION}"
            raise FileError(f"{version}: measure again with 'halve measure'")
        try:
            layers = {_text(name): _layer(layer) for name, layer in plain["layers"].items()}
            dense, unmasked, sparse = (_time(plain[key]) for key in ("dense_ms", "unmasked_ms", "sparse_ms"))
            return cls(
                layers,
                _text(plain["device"]),
                _text(plain["dtype"]),
                int(plain["batch"]),
                tuple(map(int, plain["image"])),
                dense,
                unmasked,
                sparse,
                {_text(name): _text(version) for name, version in plain["versions"].items()},
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"a damaged plan: {error!r}") from error

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the plan as JSON. A file that is no plan is replaced only with `force`."""
        path = Path(path)
        if path.exists() and not force and not is_plan(path):
            raise FileError(
                f"cannot write {path}: the file exists and is not a plan of 'halve measure'; choose another name, or "
                f"pass force=True"
            )
        write_atomically(path, (json.dumps(self.as_json(), indent=1) + "\n").encode())

    @property
    def _title(self) -> str:
        return (
            f"{self.device}, {self.dtype}, batch {self.batch}: masks pay in {len(self.paying)} of {len(self)} "
            f"layers; {self.summary}"
        )

    @property
    def summary(self) -> str:
        """The times of the network and what masks save, in one line."""
        times = (
            f"{self.dense_ms:.3f} ms dense, compiled {self.unmasked_ms:.3f} without masks, {self.sparse_ms:.3f} with"
        )
        return f"network {times}; {self.verdict}"

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return table(self._title, ("layer", "shape", ">dense ms", ">sparse ms", "mask pays"), map(self._row, self))

    def __str__(self) -> str:
        rows = [("layer", "shape", "dense ms", "sparse ms", "mask pays"), *map(self._row, self)]
        return "\n".join([self._title, *aligned(rows)])

    def _row(self, name: str) -> tuple[str, ...]:
        layer = self[name]
        times = ("-" if time is None else f"{time:.4f}" for time in (layer.dense_ms, layer.sparse_ms))
        return (name, layer.shape, *times, self.answer(name))


def load_plan(path: str | Path) -> SpeedPlan:
    """Read a plan that `SpeedPlan.save` wrote.

    >>> import tempfile
    >>> plan = SpeedPlan({}, "NVIDIA H200", "float16", 256, (3, 224, 224), 1.0, 1.0, 1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plan.save(f"{folder}/h200.json")
    ...     load_plan(f"{folder}/h200.json") == plan
    True
    """
    path = Path(path)
    try:
        return SpeedPlan.from_json(_read(path))
    except FileError as error:
        raise FileError(f"cannot read {path}: {error}") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not a plan of 'halve measure': {error}") from error


def plan_of(given: SpeedPlan | str | Path) -> SpeedPlan:
    """The plan that was given, or that of the file that was. Raises `OptionError` for anything else."""
    if isinstance(given, SpeedPlan):
        return given
    if not isinstance(given, str | Path):
        raise OptionError(
            f"plan must be what halve.measure returned, or the file that it was saved to; got {type(given).__name__}"
        )
    return load_plan(given)


def is_plan(path: Path) -> bool:
    """Whether a file says that it is a plan, of whichever version."""
    try:
        found = _read(path)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def _read(path: Path) -> Any:
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"larger than {_LARGEST >> 20} MiB, so not a plan")
    return json.loads(path.read_bytes())


def _without_threads(device: str) -> str:
    """The name of a device alone: learning may use other threads than inference."""
    return re.sub(r", \d+ threads$", "", device)


def _layer(plain: Mapping[str, Any]) -> LayerSpeed:
    dense, sparse = (None if plain[key] is None else _time(plain[key]) for key in ("dense_ms", "sparse_ms"))
    weight = tuple(map(int, plain["weight"]))
    if min(weight, default=0) < 1:
        raise ValueError(f"{plain['weight']!r} is not the shape of a weight")
    return LayerSpeed(weight, _text(plain["shape"]), dense, sparse)


def _time(value: Any) -> float:
    time = float(value)
    if not 0 < time < 1e9:
        raise ValueError(f"{value!r} is not a time in milliseconds")
    return time


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():  # control characters never reach a terminal
        raise ValueError(f"{value!r} is not printable text")
    return value
