import copy
import pickle

import torch

from halve.engine.recorded import Recordings, shapes_of


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
