import contextlib
import copy
import pickle

import pytest
import torch

from halve.engine import recorded
from halve.engine.recorded import Recordings, shapes_of


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Record on a CPU: calls run once, and there is nothing to replay."""

    def record(run, device, **options):
        return "graph", run()

    monkeypatch.setattr(recorded, "record", record)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for name in ("synchronize", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)


def test_inputs_can_be_replaced_outside_of_inference_mode(without_a_gpu):
    recordings, x = Recordings(), torch.zeros(2, 3)
    with torch.inference_mode():
        recordings.record(lambda x: x + 1, (x,))
    _, [held], outputs, _ = recordings.of((x,))
    held.copy_(torch.ones(2, 3))
    assert not outputs.is_inference()


def test_the_pool_of_a_recording_that_failed_is_not_used_again(without_a_gpu):
    recordings, x = Recordings(), torch.zeros(2, 3)
    recordings.record(torch.sin, (x,))
    first = recordings.pool
    recordings.record(torch.sin, (x[:1],))
    assert recordings.pool is first  # shared
    with pytest.raises(ZeroDivisionError):
        recordings.record(lambda x: 1 / 0, (x,))
    recordings.record(torch.sin, (x,))
    assert recordings.pool is not first


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_others_are_recorded_after_one_that_failed():
    recordings, x = Recordings(), torch.randn(2, 3, device="cuda")
    recordings.record(torch.sin, (x,))
    with pytest.raises(RuntimeError):
        recordings.record(lambda x: x.sum().item(), (x[0],))
    recordings.record(torch.sin, (x[:1],))
    for given in (x, x[:1]):
        assert torch.equal(recordings.replay((given,)), torch.sin(given))


def test_copies_make_recordings_of_their_own():
    recordings = Recordings()
    recordings.known[((2, 4, 8, 8),)] = ("graph", (), None, ())
    for other in (copy.deepcopy(recordings), pickle.loads(pickle.dumps(recordings))):
        assert not other.known
        assert other.lock is not recordings.lock


def test_recordings_are_found_by_the_shapes_of_all_inputs():
    recordings, recording = Recordings(), ("graph", (), None, ())
    recordings.known[shapes_of((torch.zeros(2, 3), torch.zeros(4)))] = recording
    assert recordings.of((torch.ones(2, 3), torch.ones(4))) is recording
    assert recordings.of((torch.ones(2, 3),)) is None
    assert recordings.of((torch.ones(3, 3), torch.ones(4))) is None
