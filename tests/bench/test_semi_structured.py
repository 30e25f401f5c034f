import pytest
import torch
from torch import nn

import halve
from halve.bench.semi_structured import replace_layers_
from halve.errors import EngineError, EngineWarning


def test_the_error_says_why_a_layer_cannot_be_semi_structured():
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    with pytest.warns(EngineWarning):
        fast = halve.compile(model, halve.prune(model), torch.randn(1, 8, 6, 6))
    with pytest.raises(EngineError, match="found none; 0 failed: "):
        replace_layers_(fast, (torch.randn(1, 8, 6, 6),))
