"""Calls of a network that Inductor compiled, without the checks of Dynamo."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

Run = Callable[..., Any]


class CompiledBody:
    """A network that Inductor compiled for inputs of one shape and memory format.

    Dynamo checks all modules and weights on each call, which takes longer than many layers. Here they are constants, so
    calls on the CPU run the code of Inductor itself, with nothing in between. Whatever else Dynamo would compile for
    again goes through its checks: another number of threads, autocast, subclasses of tensors.
    """

    def __init__(self, checked: Run, code: "CompiledCode | None" = None, module: nn.Module | None = None) -> None:
        """Make it callable.

        Args:
            checked: the network as Dynamo calls it.
            code: what Inductor made of it. Default: always go through Dynamo's checks.
            module: owns the weights. Default: none.
        """
        self._checked, self._code, self.module = checked, code, module
        self._threads = torch.get_num_threads()

    def __call__(self, *inputs: Tensor) -> Any:
        if self._code is not None and self._as_compiled(inputs):
            return self._code(inputs)
        with torch.inference_mode(False), torch.no_grad():  # Dynamo compiles again for tensors of inference mode
            return self._checked(*(x.clone() if x.is_inference() else x for x in inputs))

    def _as_compiled(self, inputs: tuple[Tensor, ...]) -> bool:
        plain = all(type(x) is Tensor and not x.is_neg() for x in inputs)
        return plain and torch.get_num_threads() == self._threads and not torch.is_autocast_enabled("cpu")


class CompiledCode:
    """What Inductor made of the one graph of a network: a function of its inputs and weights, without their names.

    Which of its arguments are the inputs, and which of its results is which output, is known from the first call. An
    output may also be one of the inputs.
    """

    def __init__(self, function: Run, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        self._function, self._arguments, self._results = function, list(arguments), list(results)

    def bind(self, inputs: tuple[Tensor, ...], outputs: Any) -> bool:
        """Learn from the first call; returns whether that is enough to call the function."""
        leaves, self._structure = pytree.tree_flatten(outputs)
        self._inputs = [_place(x, self._arguments) for x in inputs]
        self._outputs = [_place(y, [*self._results, *inputs]) for y in leaves]
        self._is_only_result = isinstance(outputs, Tensor) and len(self._results) == 1 and self._outputs == [0]
        self._results.clear()
        for place in filter(lambda place: place >= 0, self._inputs):
            self._arguments[place] = None
        tensors = all(x is None or isinstance(x, Tensor) for x in self._arguments)
        return tensors and -1 not in (*self._inputs, *self._outputs)

    def __call__(self, inputs: tuple[Tensor, ...]) -> Any:
        arguments = self._arguments.copy()
        for place, x in zip(self._inputs, inputs, strict=True):
            arguments[place] = x
        results = self._function(*arguments)
        if self._is_only_result:
            return results[0]
        available = [*results, *inputs]
        return pytree.tree_unflatten([available[place] for place in self._outputs], self._structure)


def _place(tensor: Any, among: Sequence[Any]) -> int:
    """Where a tensor is; -1 if it is not there."""
    return next((place for place, other in enumerate(among) if other is tensor), -1)
