"""The records of certify.py: runs of several processes, days and machines are joined, and only if they fit."""

import json
from pathlib import Path
from typing import Any

from certify_runs import RUNS
from certify_statements import OfImages

from halve.masks.storage import write_atomically

SAME = ("masks", "bounds")  # what a run shares with an earlier one that is not outdated
CONDITIONS = ("method", "branches", "gap", "size", "layers", "image_seconds", "device")  # one record states one of each


class Records:
    """The records of all runs, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, dict[str, Any]]:
        """The records so far, by run."""
        return {one["run"]: one for one in json.loads(self._path.read_text())} if self._path.exists() else {}

    def save(self, record: dict[str, Any]) -> None:
        """Write a record; the others stay."""
        records = self.load() | {record["run"]: record}
        ordered = [records[name] for name in RUNS if name in records]
        write_atomically(self._path, f"{json.dumps(ordered, indent=1)}\n".encode())

    def merge(self, others: dict[str, dict[str, Any]]) -> None:
        """Take records from elsewhere: images join those of the same masks and bounds; other records are replaced.

        If the conditions of some images differ, nothing is taken.
        """
        known = self.load()
        joined = {name for name, one in others.items() if "per_image" in one and up_to_date(known.get(name, {}), one)}
        for name in joined:
            refuse_other_conditions(name, known[name], others[name])
        for name, record in others.items():
            if name in joined:
                mine = known[name]
                found = {one["index"]: one for one in (*mine["per_image"], *record["per_image"])}
                images = [found[index] for index in sorted(found)]
                record |= summary(name, images)
            self.save(record)


def summary(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """What a record says of the outcomes for single images; what is long comes last."""
    statement = RUNS[name]
    assert isinstance(statement, OfImages)
    return statement.summary(found) | {"per_image": found}


def up_to_date(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records have the same masks and bounds. Old records do not say which they have."""
    return all(key in other and one.get(key) == other[key] for key in SAME)


def refuse_other_conditions(name: str, known: dict[str, Any], new: dict[str, Any]) -> None:
    """Exit if images of two records cannot be in one: its conditions and its mean time must hold for all of them."""
    told = [
        f"{key} {_stated(known, key)}, not {_stated(new, key)}"
        for key in CONDITIONS
        if _stated(known, key) != _stated(new, key)
    ]
    if told:
        raise SystemExit(
            f"{name} is recorded with {'; '.join(told)}. Images under other conditions need a record of their own: "
            f"choose another file with --out, or remove the record of {name} to start anew"
        )


def _stated(record: dict[str, Any], key: str) -> str:
    """What a record says of a condition. Old records do not say all, so that they are not continued."""
    return repr(record[key]) if key in record else "unknown"
