"""Measurements as JSON records. Each record is self-contained: it names network, dtype, hardware and versions."""

import datetime
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from halve.bench.bench import Measurement
from halve.machine import device_name
from halve.version import VERSION

OPTIONAL = (
    "images_per_second",
    "memory_bytes",
    "energy_mj_per_image",
    "error",
    "note",
    "round_ms",
)  # omitted if unknown


def records(
    measurements: Iterable[Measurement], network: str, dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """One record per measurement.

    >>> [record] = records([Measurement(2, "eager", 4.0, 3.5, 5.0)], "net", torch.float32, torch.device("cpu"))
    >>> record["network"], record["system"], record["median_ms"], record["images_per_second"]
    ('net', 'eager', 4.0, 500.0)
    """
    found = []
    for one in measurements:
        record: dict[str, Any] = _context(network, one.batch, dtype, device) | {
            "system": one.system,
            "median_ms": _rounded(one.median_ms, 5),
            "p10_ms": _rounded(one.p10_ms, 5),
            "p90_ms": _rounded(one.p90_ms, 5),
        }
        more = {
            "images_per_second": _rounded(one.images_per_second, 1),
            "memory_bytes": one.memory_bytes,
            "energy_mj_per_image": _rounded(one.energy_mj_per_image, 4),
            "error": one.error,
            "note": one.note,
            "round_ms": [_rounded(ms, 5) for ms in one.round_ms] or None,
        }
        found.append(record | {key: value for key, value in more.items() if value is not None})
    return found


def layer_records(
    measurements: Iterable[Measurement], network: str, dtype: torch.dtype, device: torch.device
) -> list[dict[str, Any]]:
    """One record per layer of each measured plan: layer, shape, kernel, times, reason."""
    return [
        _context(network, one.batch, dtype, device) | {key: _rounded(value, 5) for key, value in asdict(entry).items()}
        for one in measurements
        for entry in one.plan
    ]


def _context(network: str, batch: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The fields that every record starts with."""
    return {
        "network": network,
        "batch": batch,
        "dtype": _dtype_name(dtype),
        "hardware": device_name(device),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def versions() -> dict[str, str]:
    """The versions of halve and of the libraries that affect speed."""
    found = {"halve": VERSION, "torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    return {name: str(version) for name, version in found.items() if version}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rounded(value: Any, digits: int) -> Any:
    return round(value, digits) if isinstance(value, float) else value
