import gc

import pytest
import torch

from halve.cuda_graphs import autotuned_cudnn, record


def test_cudnn_is_tuned_for_as_long_as_asked():
    before = torch.backends.cudnn.benchmark
    with autotuned_cudnn():
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
    with pytest.raises(ZeroDivisionError), autotuned_cudnn():
        raise ZeroDivisionError
    assert torch.backends.cudnn.benchmark == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestRecording:
    device = torch.device("cuda", 0)

    def test_a_recording_computes_what_the_call_computes(self):
        x = torch.randn(64, 64, device="cuda")
        graph, result = record(lambda: x @ x + 1, self.device, warmups=2)
        x.copy_(torch.eye(64))
        graph.replay()
        assert torch.equal(result, torch.eye(64, device="cuda") + 1)
        assert gc.isenabled()

    def test_a_recording_owns_its_workspaces(self):
        a = torch.randn(512, 8192, device="cuda").half()
        graph, result = record(lambda: a @ a.T, self.device)
        graph.replay()
        expected = result.clone()
        torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does before it records
        torch.cuda.empty_cache()
        others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(256)]  # takes what was freed
        for _ in range(20):
            graph.replay()
        assert torch.equal(result, expected)
        assert all(bool((other == 7.0).all()) for other in others)

    def test_a_failing_call_leaves_nothing_behind(self):
        def fails():
            torch.randn(4, device="cuda").sum().item()  # a synchronization, which aborts the recording

        with pytest.raises(RuntimeError):
            record(fails, self.device, warmups=0)
        assert gc.isenabled()
        torch.cuda.synchronize()
        assert float(torch.ones(3, device="cuda").sum()) == 3.0
        assert torch.randn(3, device="cuda").isfinite().all()

    def test_memory_is_returned_after_a_failing_call(self):
        for pool in (None, torch.cuda.graph_pool_handle()):
            with pytest.raises(RuntimeError):
                record(lambda: torch.ones(1 << 20, device="cuda").sum().item(), self.device, warmups=0, pool=pool)
            other = torch.cuda.Stream()
            x = torch.ones(1 << 26, dtype=torch.uint8, device="cuda")
            x.record_stream(other)  # is only freed while nothing is recorded
            before = torch.cuda.memory_reserved()
            del x
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() <= before - (1 << 26)
            graph, y = record(lambda: torch.ones(3, device="cuda") + 1, self.device)
            graph.replay()
            assert y.tolist() == [2.0] * 3
