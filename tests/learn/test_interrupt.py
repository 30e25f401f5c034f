import signal
import threading

import pytest

from halve.learn.interrupt import deferred_interrupt


def test_the_first_press_waits_and_the_second_does_not():
    with deferred_interrupt() as pressed:
        assert not pressed()
        signal.raise_signal(signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handler_of_before_comes_back_also_after_an_error():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), deferred_interrupt():
        _ = 1 / (signal.getsignal(signal.SIGINT) is before)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone():
    seen = []

    def work():
        with deferred_interrupt() as pressed:
            seen.append((pressed(), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
