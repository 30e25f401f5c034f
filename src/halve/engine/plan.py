"""Plans: which kernel each layer of a network uses at each batch size, and why."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from halve.markup import table, text
from halve.text import aligned, formatted_bytes

COLUMNS = ("layer", "shape", "kernel", "ms", "dense ms", "our dense ms", "sparse ms", "reason")
_NOTABLE_SECONDS = 10.0  # that were lost: fewer are not printed


@dataclass(frozen=True)
class Entry:
    """The kernel of one layer for one input size. Times are None if not measured, or if there is no such kernel."""

    layer: str
    shape: str
    kernel: str
    sparse: bool
    time_ms: float | None
    dense_ms: float | None  # the fastest library kernel
    our_dense_ms: float | None  # our fastest kernel on dense weights: the baseline that isolates the effect of sparsity
    sparse_ms: float | None
    reason: str

    def cells(self) -> tuple[str, ...]:
        """The entry as table cells, one per column in `COLUMNS`."""
        times = (self.time_ms, self.dense_ms, self.our_dense_ms, self.sparse_ms)
        words = ("" if time is None else f"{time:.4f}" for time in times)
        return (self.layer, self.shape, self.kernel, *words, self.reason)


@dataclass(frozen=True)
class PlannedJoin:
    """Two layers that run in one kernel (see `join.py`)."""

    layer: str
    other: str
    family: str
    variant: str


@dataclass
class Plan:
    """Which kernel each layer uses at each batch size. Prints as a table.

    `uncompiled` lists what falls back to eager, and why. `dense` says why no layer runs sparse, if none can. `inductor`
    has the batch sizes at which Inductor compiles what lies between the layers, and the seconds that compiling took.
    `lost_seconds` is how long it has compiled at other batch sizes, without a faster result. `joins` has the layers
    that run in one kernel, by batch size. `code_bytes` is the size of the machine code that was emitted for this CPU,
    counted once where layers share it; 0 on GPUs. Neither it nor `lost_seconds` is part of files.

    >>> entry = Entry("fc", "4>2 at 1", "mma_sp 64x64", True, 0.004, 0.006, 0.005, 0.004, "fastest")
    >>> print(Plan({1: [entry]}, {}))
    batch 1, 1 of 1 layers sparse
    layer | shape    | kernel       | ms     | dense ms | our dense ms | sparse ms | reason
    fc    | 4>2 at 1 | mma_sp 64x64 | 0.0040 | 0.0060   | 0.0050       | 0.0040    | fastest
    """

    batches: dict[int, list[Entry]]
    uncompiled: dict[str, str]
    dense: str | None = None
    inductor: dict[int, float] = field(default_factory=dict)
    joins: dict[int, list[PlannedJoin]] = field(default_factory=dict)
    code_bytes: int = 0
    lost_seconds: float = 0.0

    def __iter__(self) -> Iterator[Entry]:
        return (entry for entries in self.batches.values() for entry in entries)

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "batches": {str(size): [asdict(e) for e in table] for size, table in self.batches.items()},
            "uncompiled": self.uncompiled,
            "dense": self.dense,
            "inductor": {str(size): seconds for size, seconds in self.inductor.items()},
            "joins": {str(size): [asdict(join) for join in joins] for size, joins in self.joins.items()},
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Plan":
        batches = {int(size): [Entry(**entry) for entry in table] for size, table in plain["batches"].items()}
        return cls(
            batches,
            dict(plain["uncompiled"]),
            plain["dense"],
            {int(size): seconds for size, seconds in plain["inductor"].items()},
            {int(size): [PlannedJoin(**join) for join in joins] for size, joins in plain["joins"].items()},
        )

    def rest(self, batch: int) -> str:
        """What the table's title says about the operations between the layers."""
        return f", the rest compiled by Inductor in {self.inductor[batch]:.0f} s" if batch in self.inductor else ""

    def notes(self) -> list[str]:
        """What there is to say beside the tables."""
        found = [f"machine code: {formatted_bytes(self.code_bytes)}"] if self.code_bytes else []
        if self.lost_seconds >= _NOTABLE_SECONDS:
            found.append(f"Inductor compiled for {self.lost_seconds:.0f} s without a faster result")
        return found

    def _repr_html_(self) -> str:
        """A table for each batch size, for notebooks."""
        heads = [f">{head}" if head.endswith("ms") else head for head in COLUMNS]
        tables = [
            table(
                f"batch {batch}, {sum(entry.sparse for entry in entries)} of {len(entries)} layers sparse"
                f"{self.rest(batch)}",
                heads,
                [entry.cells() for entry in entries],
            )
            for batch, entries in self.batches.items()
        ]
        if self.dense is not None:
            tables.insert(0, f"<p>all layers dense: {text(self.dense)}</p>")
        if self.uncompiled:
            tables.append(table("not compiled", ("name", "reason"), list(self.uncompiled.items())))
        return "".join([*tables, *(f"<p>{text(note)}</p>" for note in self.notes())])

    def __str__(self) -> str:
        lines = [] if self.dense is None else [f"all layers dense: {self.dense}"]
        for batch, entries in self.batches.items():
            sparse = sum(entry.sparse for entry in entries)
            lines.append(f"batch {batch}, {sparse} of {len(entries)} layers sparse{self.rest(batch)}")
            rows = [COLUMNS, *(entry.cells() for entry in entries)]
            lines += aligned(rows)
        lines += [*self.notes(), *(f"{name}: {reason}" for name, reason in self.uncompiled.items())]
        return "\n".join(lines)
