"""Runs of certify.py, divided into tasks for one or more processes."""

import datetime
import functools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from certify_flips import Flips
from certify_records import Records, refuse_other_conditions, summary, up_to_date
from certify_runs import RUNS
from certify_statements import KeepsClass, OfImages
from certify_subjects import Pair, subject

import halve
from halve.certify.digests import digest_of_bounds, digest_of_masks
from halve.certify.proofs import at_once
from halve.version import VERSION


@dataclass(frozen=True)
class Task:
    """Some images of a run, to be proven or attacked, possibly in another process."""

    name: str
    folder: Path
    device: str
    limit: float
    images: tuple[int, ...]
    attacked: dict[str, Any] | None = None

    def outcomes(self) -> list[dict[str, Any]]:
        """The outcome for each image; for an attack, the one that is known with what the attack found."""
        statement = RUNS[self.name]
        pair = pair_of(statement.network, self.folder, self.device, self.limit)
        images = pair.subject.images[list(self.images)].double().to(self.device)
        if self.attacked is not None:
            assert isinstance(statement, KeepsClass)
            return [self.attacked | statement.attack(pair, images[0], self.attacked)]
        assert isinstance(statement, OfImages)
        found = statement.prove(pair, images)
        return [{"index": index} | outcome for index, outcome in zip(self.images, found, strict=True)]


@functools.cache
def pair_of(network: str, folder: Path, device: str, limit: float) -> Pair:
    """The networks of a subject, opened once in a process."""
    return Pair(subject(network, folder), device, limit)


def _outcomes(task: Task) -> tuple[Task, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    return task, task.outcomes()


def completed(tasks: Sequence[Task], processes: int, deadline: float) -> Iterator[tuple[Task, list[dict[str, Any]]]]:
    """Tasks with their outcomes, as they finish; what is not finished by the deadline is dropped."""
    if processes == 1:
        for task in tasks:
            if time.monotonic() > deadline:
                return
            yield _outcomes(task)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # ends what still runs when it is left
        results = pool.imap_unordered(_outcomes, tasks)
        for _ in tasks:
            left = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            try:
                yield results.next(left)
            except multiprocessing.TimeoutError:
                return


@dataclass(frozen=True)
class Runner:
    """Where and how long to run."""

    folder: Path
    records: Records
    device: str
    processes: int
    seconds: float
    image_seconds: float

    def execute(self, names: Sequence[str]) -> None:
        """Continue runs until they are done or the time is up."""
        self._work(names, self._open_images)

    def attack(self, names: Sequence[str]) -> None:
        """Attack the images of runs that were proven or not, in their records."""
        self._work(names, self._open_attacks)

    def _work(self, names: Sequence[str], tasks_of: Callable[[str, dict[str, Any]], list[Task]]) -> None:
        started, tasks, records = time.monotonic(), [], {}
        for name in names:
            records[name] = self._record(name)
            tasks += tasks_of(name, records[name])
        for count, (task, outcomes) in enumerate(completed(tasks, self.processes, started + self.seconds), 1):
            record = records[task.name]
            found = {one["index"]: one for one in (*record["per_image"], *outcomes)}
            del record["per_image"]
            record |= summary(task.name, [found[index] for index in sorted(found)])
            self.records.save(record)
            shown = json.dumps(outcomes[-1])
            print(f"{count} of {len(tasks)}, {time.monotonic() - started:.0f} s: {task.name} {shown}", flush=True)

    def flips(self, name: str, assets: Path) -> None:
        """Count flips, all at once."""
        statement = RUNS[name]
        assert isinstance(statement, Flips)
        masks, found = statement.count(name, assets, self.folder, self.device)
        self.records.save(self._context(name, masks) | found)

    def _record(self, name: str) -> dict[str, Any]:
        """The record of a run, with the images that are finished."""
        before = self.records.load().get(name, {})
        fresh = self._context(name, self._pair(name).subject.masks)
        return before if up_to_date(before, fresh) else fresh | {"per_image": []}

    def _open_images(self, name: str, record: dict[str, Any]) -> list[Task]:
        statement, pair = RUNS[name], self._pair(name)
        assert isinstance(statement, OfImages)
        refuse_other_conditions(name, record, self._context(name, pair.subject.masks))
        done, wanted, counted = {one["index"] for one in record["per_image"]}, [], 0
        for index, agree in enumerate(pair.agree()):
            if counted == statement.images:
                break
            counted += agree or statement.disagreeing
            wanted += [] if index in done else [index]
        group = at_once(pair.network("masked"), torch.device(self.device))
        return [self._task(name, wanted[at : at + group]) for at in range(0, len(wanted), group)]

    def _open_attacks(self, name: str, record: dict[str, Any]) -> list[Task]:
        if not record["per_image"]:
            raise SystemExit(f"there is no record of {name} with these masks and bounds")
        return [
            self._task(name, [one["index"]], one)
            for one in record["per_image"]
            if one["agree"] and "attacked" not in one and "attack_radius" not in one
        ]

    def _task(self, name: str, images: Sequence[int], attacked: dict[str, Any] | None = None) -> Task:
        return Task(name, self.folder, self.device, self.image_seconds, tuple(images), attacked)

    def _pair(self, name: str) -> Pair:
        return pair_of(RUNS[name].network, self.folder, self.device, self.image_seconds)

    def _context(self, name: str, masks: halve.MaskSet) -> dict[str, Any]:
        """What a new record says of the run, besides its outcomes."""
        statement = RUNS[name]
        many = f", {self.processes} processes at a time" if self.processes > 1 else ""
        return {
            "run": name,
            **statement.about(),
            "masks": digest_of_masks(masks),
            "bounds": digest_of_bounds(*statement.sources),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else f"CPU, 1 thread{many}",
            "image_seconds": None if math.isinf(self.image_seconds) else self.image_seconds,
            "versions": {"halve": VERSION, "torch": str(torch.__version__)},
            "date": str(datetime.date.today()),
        }
