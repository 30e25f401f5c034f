import time

import pytest
import torch

from halve.bench.energy import energy_meter


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_counts_its_energy_upwards():
    meter = energy_meter(torch.device("cuda", 0))
    if meter is None:
        pytest.skip("this GPU has no energy counter")
    before = meter()
    time.sleep(0.5)
    assert meter() > before
