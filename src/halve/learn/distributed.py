"""One process or several: what processes under torchrun share, through Accelerate."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from halve.errors import OptionError, listed

T = TypeVar("T")


class Processes:
    """This process among those of a torchrun, or a single one. Accelerate is imported only if needed."""

    def __init__(
        self, device: torch.device, trackers: Sequence[Any] = (), project: str | os.PathLike[str] | None = None
    ) -> None:
        self.rank, self.count, self.device = 0, 1, device
        self._accelerator: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 or trackers:
            from accelerate import Accelerator

            # mixed_precision="no": the learner casts to bf16 itself, the same with and without Accelerate
            self._accelerator = Accelerator(
                cpu=device.type == "cpu", mixed_precision="no", log_with=_checked(trackers) or None, project_dir=project
            )
            self.rank, self.count = self._accelerator.process_index, self._accelerator.num_processes
            self.device = self._accelerator.device if self.count > 1 else device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def wrap(self, learner: nn.Module) -> nn.Module:
        """The learner, wrapped in DDP if there are several processes."""
        return self._accelerator.prepare_model(learner) if self.count > 1 else learner

    def broadcast(self, value: T) -> T:
        """The main process's value, on all processes."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        shared: list[T] = broadcast_object_list([value])
        return shared[0]

    def start_trackers(self, config: Mapping[str, Any]) -> None:
        """Start the trackers with the settings of the run."""
        if self._accelerator is not None and self._accelerator.log_with:
            plain = {
                key: value if isinstance(value, int | float | str | bool) else str(value)
                for key, value in config.items()
            }
            self._accelerator.init_trackers("halve", config=plain)

    def track(self, values: Mapping[str, float], step: int) -> None:
        """Log values of a step to the trackers."""
        if self._accelerator is not None and self._accelerator.log_with:
            self._accelerator.log(dict(values), step=step)

    def stop_trackers(self) -> None:
        """Finish the trackers."""
        if self._accelerator is not None and self._accelerator.log_with:
            self._accelerator.end_training()


def _checked(trackers: str | Sequence[Any]) -> list[Any]:
    """The trackers as a list. Accelerate ignores those that are not installed."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

    given = [trackers] if isinstance(trackers, str | GeneralTracker) else trackers
    if not isinstance(given, Sequence):
        raise OptionError(f"trackers must be a list of names such as 'tensorboard', got {trackers!r}")
    installed = ["all", *map(str, get_available_trackers())]
    for tracker in given:
        if isinstance(tracker, GeneralTracker) or tracker in installed:
            continue
        if tracker in LOGGER_TYPE_TO_CLASS:
            raise OptionError(f"tracker {tracker!r} is not installed: pip install {tracker}")
        raise OptionError(f"unknown tracker {tracker!r}; known are {listed(LOGGER_TYPE_TO_CLASS, most=99)}")
    return list(given)
