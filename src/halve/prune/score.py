"""What a score is: a number for each weight of each layer; the higher, the more it matters to keep the weight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from halve.batches import Forward, Progress
from halve.select.select import Choice

ScoreFunction = Callable[[str, Tensor], Tensor]  # a user's score: layer name, weight -> scores of the weight's shape


@dataclass(frozen=True)
class ScoreInputs:
    """What scores are computed from."""

    model: nn.Module
    choices: Sequence[Choice]  # the masked layers
    weights: Mapping[str, Tensor]
    data: Any = None
    recalibrated: bool = False  # whether BatchNorm statistics will be measured again with the masks applied
    seed: int = 0
    forward: Forward | None = None
    progress: Progress | None = None


class LayerScores(NamedTuple):
    """Scores by layer name, in the shape of the weights, and how many images they were measured on."""

    by_layer: dict[str, Tensor]
    images: int = 0


@dataclass(frozen=True)
class Score:
    """A score with all that its users need to know of it.

    Args:
        name: What users pass as `score=`.
        description: One line for help texts.
        compute: Computes the scores of all layers.
        needs_data: Whether it measures on images.
        whole_masks: Whether it returns whole masks, 1 for kept and 0 for removed, instead of a score for each weight.
        search_score: The score that channel orders are searched by; None for the score itself.
        search_power: The power of it that blocks should keep the most of.
    """

    name: str
    description: str
    compute: Callable[[ScoreInputs], LayerScores]
    needs_data: bool = False
    whole_masks: bool = False
    search_score: "Score | None" = None
    search_power: int = 1

    def for_search(self, found: LayerScores) -> dict[str, Tensor]:
        """What a search for channel orders should keep the most of, from the scores that `compute` returned."""
        if self.search_power == 1:
            return found.by_layer
        return {name: value**self.search_power for name, value in found.by_layer.items()}
