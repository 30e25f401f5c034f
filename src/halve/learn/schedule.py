"""What changes from step to step of a run."""

from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

Number = TypeVar("Number", float, Tensor)


class Pace(NamedTuple, Generic[Number]):
    """Plain numbers, or tensors that a recorded step reads."""

    temperature: Number
    noise: Number
    guidance: Number  # how much features and scores count beside probabilities
    lr: float
