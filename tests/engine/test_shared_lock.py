import copy
import pickle
import threading
import time

from halve.engine.shared_lock import SharedLock


def test_calls_run_side_by_side_and_planning_alone():
    lock, inside, together, seen = SharedLock(), [], threading.Barrier(3, timeout=20), []

    def call():
        with lock.shared():
            together.wait()  # all three are inside at once
            inside.append(1)
            time.sleep(0.05)
            inside.pop()

    def plan():
        with lock.alone():
            seen.append(len(inside))
            time.sleep(0.02)
            seen.append(len(inside))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    planner = threading.Thread(target=plan)
    planner.start()
    for thread in (*threads, planner):
        thread.join(20)
    assert seen == [0, 0]


def test_planning_goes_before_new_calls_and_may_call():
    lock, order = SharedLock(), []
    first = lock.shared()
    first.__enter__()

    def plan():
        with lock.alone(), lock.shared(), lock.alone():
            order.append("planned")

    def call():
        with lock.shared():
            order.append("called")

    planner, caller = threading.Thread(target=plan), threading.Thread(target=call)
    planner.start()
    while not lock._waiting:
        time.sleep(0.001)
    caller.start()
    time.sleep(0.05)
    assert order == []
    first.__exit__(None, None, None)
    planner.join(20)
    caller.join(20)
    assert order == ["planned", "called"]


def test_copies_have_a_lock_of_their_own():
    lock = SharedLock()
    with lock.alone():
        for other in (copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
            with other.alone():
                pass
