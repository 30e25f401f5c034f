import pytest
import torch
from torch import nn

import halve
from halve.bench.semi_structured import put_in_
from halve.errors import EngineError, EngineWarning


def test_torchs_own_sparsity_says_why_a_layer_does_not_run_on_it():
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    with pytest.warns(EngineWarning):
        fast = halve.compile(model, halve.prune(model), torch.randn(1, 8, 6, 6))
    with pytest.raises(EngineError, match="it can run; not 0: "):
        put_in_(fast, (torch.randn(1, 8, 6, 6),))
