"""halve: 2:4 sparsity for trained convolutional networks, without touching their weights.

The public names are those of `halve.public`, imported on first use: PyTorch takes seconds to import, and `halve --help`
needs none of it.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halve.public import *  # noqa: F403
    from halve.public import __all__ as __all__

_ALSO_PACKAGES = ("bench", "certify", "export", "learn", "prune", "report", "select")  # names of public functions


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):  # what Python itself looks for
            raise AttributeError(f"module 'halve' has no attribute {name!r}")
        public = importlib.import_module("halve.public")
        vars(self).update({key: getattr(public, key) for key in ("__all__", *public.__all__)})
        if name not in vars(self):
            raise AttributeError(f"module 'halve' has no attribute {name!r}")
        return vars(self)[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ALSO_PACKAGES or not isinstance(value, ModuleType):  # importing a package sets its name here
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


sys.modules[__name__].__class__ = _Package
