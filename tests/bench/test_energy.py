import time

import pytest
import torch

from halve.bench.energy import meter_of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_counts_its_energy_upwards():
    meter = meter_of(torch.device("cuda", 0))
    if meter is None:
        pytest.skip("this GPU does not tell")
    before = meter()
    time.sleep(0.5)
    assert meter() > before
