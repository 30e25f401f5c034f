import copy

import torch

from halve.engine.bodies import Bodies
from halve.engine.compiled_body import CompiledBody


def test_a_form_runs_at_its_shape_only(compiled_net):
    fast, x = copy.deepcopy(compiled_net[0]), compiled_net[1]
    fast._bodies[(tuple(x.shape),)] = CompiledBody(lambda x: torch.zeros(2))
    assert fast(x).shape == (2,)
    assert fast(x[:1]).shape == (1, 8, 4, 4)
    assert copy.deepcopy(fast)(x).shape == (2, 8, 4, 4)  # copies are not compiled yet
    assert isinstance(copy.deepcopy(fast)._bodies, Bodies)
