import gc

import pytest
import torch

from halve.cuda_graphs import autotuned_cudnn, record

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("before", [False, True])
def test_cudnn_is_left_as_it_was_also_after_an_error(before, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    with autotuned_cudnn():
        assert torch.backends.cudnn.benchmark
    with pytest.raises(ValueError, match="stop"), autotuned_cudnn():
        raise ValueError("stop")
    assert torch.backends.cudnn.benchmark is before


@pytest.mark.gpu
@needs_gpu
def test_a_recording_repeats_the_call_without_running_it_again():
    device, calls = torch.device("cuda", 0), []
    x = torch.ones(4, device=device)

    def run():
        calls.append(gc.isenabled())
        return x * 2

    graph, result = record(run, device, warmups=2)
    assert calls == [True, True, False]  # freeing memory would break the recording
    assert gc.isenabled()
    x.fill_(3)
    graph.replay()
    assert result.tolist() == [6.0] * 4
    assert len(calls) == 3
