"""How long layers and the network take, from whichever of halve's files has it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halve.engine.plan import Plan
from halve.errors import FileError
from halve.report.files import json_of, mapping, number, words
from halve.select.speed_plan import FORMAT, SpeedPlan

_KINDS = "a plan of 'halve measure --out', a result of 'halve bench --out' or of 'halve compile --json'"
_DENSE = ("best_dense", "compile_freezing")  # the faster one is what speed-ups are relative to


@dataclass(frozen=True)
class LayerTime:
    """Milliseconds of a layer with its fastest dense and its fastest sparse kernel, and what it runs on."""

    dense_ms: float | None
    sparse_ms: float | None
    kernel: str = ""
    runs_sparse: bool | None = None  # None if no kernel was chosen
    reason: str = ""


@dataclass(frozen=True)
class NetworkTime:
    """Milliseconds of the network at one batch size, dense and by halve."""

    batch: int
    dense_ms: float
    ms: float
    baseline: str

    @property
    def speedup(self) -> float:
        return self.dense_ms / self.ms


@dataclass(frozen=True)
class Timings:
    """What a plan or a benchmark says.

    Args:
        where: Device and dtype.
        batch: The batch size of the layers' times.
        layers: Times by layer.
        networks: Times of the network by ascending batch size; empty if it was not timed.
        estimated: Whether the network's times are estimates from those of its layers.
        plan: The plan of `halve.measure`, which estimates times for any masks.
    """

    where: str
    batch: int | None
    layers: Mapping[str, LayerTime]
    networks: Sequence[NetworkTime] = ()
    estimated: bool = False
    plan: SpeedPlan | None = field(default=None, repr=False)

    @property
    def headline(self) -> NetworkTime | None:
        """The network at the batch size of the layers' times, or else at the largest."""
        here = [one for one in self.networks if one.batch == self.batch]
        return here[0] if here else self.networks[-1] if self.networks else None


def timings_of(given: Any, masked: Collection[str]) -> Timings:
    """Read times.

    Args:
        given: A plan of `halve.measure` or of a compiled network, a list of measurements of `halve.bench`, or a file.
        masked: The masked layers.
    """
    plain = json_of(_records(given), _KINDS)
    if isinstance(plain, Mapping):
        if plain.get("format") == FORMAT:
            return _from_speed_plan(plain, given, masked)
        if {"measurements", "layers"} <= plain.keys():
            return _from_bench(plain)
        compiled = plain.get("plan") if isinstance(plain.get("plan"), Mapping) else plain
        if isinstance(compiled, Mapping) and {"batches", "uncompiled"} <= compiled.keys():
            return _from_compiled(compiled)
    name = f"{given} is" if isinstance(given, str) or hasattr(given, "__fspath__") else "plan="
    raise FileError(f"{name} not {_KINDS}")


def _records(given: Any) -> Any:
    """Measurements of `halve.bench` as the records that the command writes."""
    if not isinstance(given, list):
        return given
    rows = [
        {"batch": one.batch, "layer": entry.layer, **{key: getattr(entry, key) for key in _ENTRY}}
        for one in given
        for entry in one.plan
    ]
    return {
        "measurements": [
            {"batch": one.batch, "system": one.system, "median_ms": one.median_ms, "hardware": ""} for one in given
        ],
        "layers": rows,
    }


_ENTRY = ("kernel", "sparse", "dense_ms", "sparse_ms", "reason")


def _from_speed_plan(plain: Any, given: Any, masked: Collection[str]) -> Timings:
    try:
        plan = given if isinstance(given, SpeedPlan) else SpeedPlan.from_json(plain)
    except ValueError as error:
        raise FileError(f"{given} is not a plan of 'halve measure': {error}") from error
    layers = {
        name: LayerTime(layer.dense_ms, layer.sparse_ms, runs_sparse=layer.faster and name in masked)
        for name, layer in plan.items()
    }
    network = NetworkTime(plan.batch, plan.dense_ms, plan.ms(masked), "best dense")
    return Timings(f"{plan.device}, {plan.dtype}", plan.batch, layers, (network,), estimated=True, plan=plan)


def _from_bench(plain: Mapping[str, Any]) -> Timings:
    measured: dict[int, dict[str, float]] = {}
    where = ""
    for record in _list(plain["measurements"]):
        time, batch = number(record.get("median_ms")), number(record.get("batch"))
        if time and time > 0 and batch and batch >= 1:
            measured.setdefault(int(batch), {})[words(record.get("system"))] = time
        where = where or ", ".join(filter(None, (words(record.get("hardware")), words(record.get("dtype")))))
    networks = []
    for batch, systems in sorted(measured.items()):
        dense = {system: systems[system] for system in _DENSE if system in systems}
        if dense and "halve" in systems:
            baseline = min(dense, key=dense.__getitem__)
            networks.append(NetworkTime(batch, dense[baseline], systems["halve"], baseline))
    rows = _list(plain["layers"])
    largest = max((int(size) for row in rows if (size := number(row.get("batch")))), default=None)
    layers = {words(row.get("layer")): _entry(row) for row in rows if number(row.get("batch")) == largest}
    return Timings(where, largest, layers, networks)


def _from_compiled(plain: Mapping[str, Any]) -> Timings:
    try:
        plan = Plan.from_json(dict(plain))
        largest = max(plan.batches, default=None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"the plan of a compiled network is damaged: {error!r}") from error
    rows = [] if largest is None else plan.batches[largest]
    return Timings("", largest, {row.layer: _entry(vars(row)) for row in rows})


def _entry(row: Mapping[str, Any]) -> LayerTime:
    return LayerTime(
        number(row.get("dense_ms")),
        number(row.get("sparse_ms")),
        words(row.get("kernel")),
        row.get("sparse") is True,
        words(row.get("reason")),
    )


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [mapping(item) for item in value] if isinstance(value, list) else []
