"""What a run of `learn` is made of, before its first step: what learns, what identifies it, what its masks record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from halve.learn.distributed import Processes
from halve.learn.form import Form
from halve.learn.held_back import Split
from halve.learn.identity import identity_of_data, identity_of_layers, identity_of_model
from halve.learn.initialization import ChannelOrders, Inputs, Layers
from halve.learn.learner import Learner
from halve.learn.moving import MovingStatistics
from halve.learn.norms import Norms
from halve.learn.objective import resolve_objective
from halve.learn.sampling import Sampler
from halve.learn.settings import Settings
from halve.learn.stream import BatchStream
from halve.masks.mask import MaskSet
from halve.masks.recipe import origin_of, with_digests, with_fingerprint
from halve.select.select import SelectOptions, plain_options


@dataclass(frozen=True)
class Run:
    """A run, as it is known before its first step.

    Args:
        inputs: The model, the data to learn from, and how to run one on the other.
        layers: The layers that are masked.
        orders: Their channel orders.
        settings: How to learn.
        split: The data, and the images held back from it.
        stream: The batches of this process.
        processes: This process among others.
        form: What the network runs in.
    """

    inputs: Inputs
    layers: Layers
    orders: ChannelOrders
    settings: Settings
    split: Split
    stream: BatchStream
    processes: Processes
    form: Form

    def learner(self, frozen: nn.Module, sampler: Sampler, blocks: list[str]) -> Learner:
        """What learns.

        Args:
            frozen: A copy of the model that does not train.
            sampler: The logits to start from.
            blocks: Modules whose features are compared.
        """
        settings, forward = self.settings, self.inputs.forward
        start = settings.start if isinstance(settings.start, MaskSet) else MaskSet({})
        return Learner(
            frozen,
            sampler,
            resolve_objective(settings.objective, settings.match),
            blocks,
            norms=Norms(frozen, start.corrections, learned=settings.norms == "learn"),
            statistics=MovingStatistics(frozen, start.statistics, moving=settings.norms == "track"),
            forward=forward,
            dense=settings.objective != "task",
            hard=settings.hard,
            seed=settings.seed,
            rank=self.processes.rank,
            autocast=self.form.autocast,
            augment=settings.augment and settings.objective == "distill" and forward is None,
        )

    def identity(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What tells runs apart: what must be the same to resume a run, and what should be."""
        certain, likely = identity_of_data(self.split, self.stream, self.settings.seed)
        identity = {
            "settings": self.settings.described(),
            "layers": identity_of_layers(self.orders.choices(self.layers)),
            "model": identity_of_model(self.inputs.model),
            "precision": self.form.precision,
            "data": certain,
            "processes": self.processes.count,
        }
        return identity, {"data": likely}

    def recipe(self, preset: str | None, blocks: list[str], selection: SelectOptions) -> dict[str, Any]:
        """What masks record of the run."""
        return {
            "method": "learn",
            **self.settings.described(),
            "preset": preset,
            "precision": self.form.precision,
            "blocks": blocks,
            "selection": plain_options(selection),
            "not_masked": dict(self.layers.not_masked),
            **self.orders.recipe(),
            **origin_of(self.inputs.model),
        }

    def complete(self, found: MaskSet, recipe: Mapping[str, Any]) -> MaskSet:
        """The masks with fingerprints of their weights, channel orders, a recipe, and digests of the model."""
        masks = {
            choice.name: with_fingerprint(found[choice.name], self.layers.weights[choice.name], choice.shared_with)
            for choice in self.orders.choices(self.layers)
        }
        made = MaskSet(masks, found.statistics, recipe, self.orders.moves, corrections=found.corrections)
        return with_digests(made, self.inputs.model)
