import threading

import pytest
import torch

from halve.engine.kernels.cpu_sp import threads
from halve.engine.kernels.cpu_sp.packing import pack
from halve.engine.kernels.cpu_sp.program import Program
from halve.engine.operations import Convolution
from tests.engine.kernels.cpu_sp.layers import in_child, random, relative_error, run, weights_of

pytestmark = pytest.mark.cpu_kernels
CONV = Convolution(64, 64, (3, 3), padding=(1, 1), activation="relu")  # large enough for several threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def right():
    tensors, x = weights_of(CONV), random(1, 64, 20, 20)
    return relative_error(run(CONV, tensors, [x]), CONV, tensors, [x]) <= 1e-5


def test_code_runs_on_the_threads_of_pytorch(two_threads, monkeypatch):
    parallel, used = threads._gomp_parallel(), []
    assert parallel is not None

    def counted(worker, argument, count, flags):
        used.append(count)
        parallel(worker, argument, count, flags)

    monkeypatch.setattr(threads, "_gomp_parallel", lambda: counted)
    assert right()
    torch.set_num_threads(1)
    assert right()
    assert used == [2]


def test_without_openmp_one_thread_does_it(two_threads, monkeypatch):
    monkeypatch.setattr(threads, "_gomp_parallel", lambda: None)
    assert right()


def test_a_forked_process_does_not_wait_for_threads_it_does_not_have(two_threads):
    packed, x = pack(weights_of(CONV)["weight"]), random(1, 64, 20, 20)
    ready = Program(CONV, packed, None)
    expected = ready.run(x, None)

    def forked():
        assert threads._forked
        assert torch.equal(ready.run(x, None), expected)
        assert torch.equal(Program(CONV, packed, None).run(x, None), expected)

    assert in_child(forked) == 0
    assert torch.equal(ready.run(x, None), expected)


def test_several_python_threads_at_once(two_threads):
    found = []

    def work():
        for _ in range(5):
            found.append(right())

    started = [threading.Thread(target=work) for _ in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert found == [True] * 20
