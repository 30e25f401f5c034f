"""The forms of a network for some input shapes: with joined layers, or compiled by Inductor."""

from typing import Any

from torch import Tensor, nn

from halve.engine.compiled_body import Run


class Bodies(dict[Any, Run]):
    """Forms of a network by input shape: layers joined, or compiled. Copies of a network have none yet."""

    def tensors(self) -> list[Tensor]:
        """The tensors of all forms, which they may share with the network."""
        modules = (form if isinstance(form, nn.Module) else getattr(form, "module", None) for form in self.values())
        return [x for module in modules if module is not None for x in (*module.parameters(), *module.buffers())]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bodies":
        return Bodies()

    def __reduce__(self) -> Any:
        return Bodies, ()
