"""Who schedules steps waits for room; who puts the step of a dead worker back does not."""

import threading
import types

import pytest
from tensorflow.python.distribute.coordinator import cluster_coordinator

from gba_tf import coordination

TIMEOUT_SECONDS = 60
NUM_WORKERS = 2


class Step:
    tag = None

    def mark_cancelled(self):
        pass


class Schedule:
    """TensorFlow's queue, and a thread that schedules steps as the chief does."""

    def __init__(self):
        self.queue = cluster_coordinator._CoordinatedClosureQueue()
        coordinator = types.SimpleNamespace(
            _cluster=types.SimpleNamespace(closure_queue=self.queue)
        )
        coordination.limit_schedule(coordinator, 2 * NUM_WORKERS)
        self.num_scheduled = 0
        self.error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_over = False

    def start(self):
        self._thread.start()

    def end(self):
        self._is_over = True
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive()

    def _run(self):
        try:
            while not self._is_over:
                self.queue.put(Step())
                self.num_scheduled += 1
        except ValueError as error:
            self.error = error


@pytest.fixture
def schedule():
    schedule = Schedule()
    yield schedule
    schedule.queue.stop()


def take_all_places(schedule):
    """Returns the steps that both workers are at, when the chief has scheduled all it may."""
    steps = [schedule.queue.get(timeout=TIMEOUT_SECONDS) for _ in range(NUM_WORKERS)]
    wait_until(lambda: schedule.num_scheduled == 3 * NUM_WORKERS)
    return steps


def wait_until(condition):
    tick = threading.Event()
    for _ in range(100 * TIMEOUT_SECONDS):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("waited in vain")


def test_all_workers_can_put_their_steps_back_at_once_while_the_chief_waits(schedule):
    schedule.start()
    steps = take_all_places(schedule)
    threads = [
        threading.Thread(target=schedule.queue.put_back, args=(step,), daemon=True)
        for step in steps
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive()
    assert schedule.num_scheduled == 3 * NUM_WORKERS, "nothing more is scheduled meanwhile"
    # They live again: 6 steps are there, and the chief goes on when fewer than 4 are left.
    for _ in range(3):
        schedule.queue.get(timeout=TIMEOUT_SECONDS)
    wait_until(lambda: schedule.num_scheduled == 3 * NUM_WORKERS + 1)
    schedule.queue.stop()
    schedule.end()


def test_the_chief_hears_of_a_failure_while_it_waits(schedule):
    schedule.start()
    take_all_places(schedule)
    schedule.queue.mark_failed(ValueError("the step is wrong"))
    schedule.queue.mark_finished()
    wait_until(lambda: schedule.error is not None)
    assert str(schedule.error) == "the step is wrong"
    schedule.end()


def test_the_chief_does_not_wait_for_a_queue_that_has_stopped(schedule):
    schedule.start()
    take_all_places(schedule)
    schedule.queue.stop()
    schedule.end()
