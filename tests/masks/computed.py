"""Everything in PyTorch that computes a layer's weight from other tensors."""

import warnings

import pytest
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def old_spectral_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.spectral_norm(module)


def pruned(module):
    return prune.l1_unstructured(module, "weight", 0.3)


def pruned_twice(module):
    return prune.random_unstructured(pruned(module), "weight", 0.3)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def doubled(module):
    parametrize.register_parametrization(module, "weight", Doubled())
    return module


WRAPPERS = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    doubled,
    old_weight_norm,
    old_spectral_norm,
    pruned,
    pruned_twice,
]


wrapped = pytest.mark.parametrize(
    "wrap", WRAPPERS, ids=lambda wrap: f"{wrap.__module__.rpartition('.')[2]}.{wrap.__name__}"
)
