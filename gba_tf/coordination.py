"""What GBA adds to a ClusterCoordinator: it hears of dead workers and looks at every step."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from gba_tf import direct_updates
from gba_tf.apply import UpdateGroup

_POLL_SECONDS = 0.1


def report_dead_workers(coordinator, give_up: Callable[[int], None]) -> None:
    """Calls give_up(task index) as soon as the coordinator finds a worker dead."""
    handler = coordinator._cluster.failure_handler
    wait_on_failure = handler.wait_on_failure

    @contextlib.contextmanager
    @functools.wraps(wait_on_failure)
    def wait_and_report(on_failure_fn=None, worker_device_name="(unknown)", **kwargs):
        def on_failure(error):
            task = tf.DeviceSpec.from_string(worker_device_name).task
            logging.warning("Worker %s died; its token is given up.", worker_device_name)
            try:
                give_up(task)
            except tf.errors.OpError as give_up_error:
                logging.error("Could not give up the token of worker %d: %s", task, give_up_error)
            if on_failure_fn is not None:
                on_failure_fn(error)

        with wait_on_failure(
            on_failure_fn=on_failure, worker_device_name=worker_device_name, **kwargs
        ):
            yield

    handler.wait_on_failure = wait_and_report


def report_idle_workers(
    coordinator, join: Callable[[int], None], leave: Callable[[int], None]
) -> None:
    """Calls leave(task index) when a worker has nothing to do, join(task index) when it has again.

    Workers that wait for the slowest one must not wait for one that was given no more steps, such
    as at the end of an epoch. All workers count as idle in the beginning.
    """
    workers = coordinator._cluster.workers
    idle = {worker.worker_index for worker in workers}
    queue = coordinator._cluster.closure_queue
    get = queue.get

    def get_and_report(timeout=None, tag=None):
        closure = get(timeout=0, tag=tag)
        if closure is None:
            # Asked first and then waited for: between a look at the queue and the waiting, another
            # worker may have taken the last step.
            if tag not in idle:
                idle.add(tag)
                _report(leave, tag)
            closure = get(timeout=timeout, tag=tag)
        return closure

    queue.get = get_and_report
    for worker in workers:
        # Not when the queue hands out a step: the threads of the workers have asked it already.
        worker._process_closure = _joining(worker._process_closure, worker.worker_index, idle, join)


def _joining(process_closure, worker_task: int, idle: set[int], join: Callable[[int], None]):
    @functools.wraps(process_closure)
    def join_and_process(closure):
        if worker_task in idle:
            idle.discard(worker_task)
            _report(join, worker_task)
        process_closure(closure)

    return join_and_process


def _report(call: Callable[[int], None], worker_task: int) -> None:
    try:
        call(worker_task)
    except tf.errors.OpError as error:
        # A parameter server does not answer: the step itself will say so.
        logging.warning("Could not report what worker %d does: %s", worker_task, error)


def limit_schedule(coordinator, max_steps: int) -> None:
    """Lets whoever schedules a step wait while so many have not been begun, unless one has failed.

    The queue's own limit is not for that: a worker that dies puts its step back, which waits for
    room as well, and if all die at once, nobody makes any.

    Args:
      coordinator: The ClusterCoordinator.
      max_steps: 1 or more.
    """
    queue = coordinator._cluster.closure_queue
    put = queue.put

    def has_room() -> bool:
        is_failed = queue._error is not None or not queue._should_process_closures
        return is_failed or queue._queue.qsize() < max_steps

    def await_room_and_put(closure, tag=None):
        if tag is None:
            with queue._queue_lock:
                # A failure does not notify.
                while not queue._queue_free_slot_condition.wait_for(has_room, _POLL_SECONDS):
                    pass
        put(closure, tag=tag)

    queue.put = await_room_and_put


def check_steps(coordinator, guarded: dict[int, tf.Variable]) -> None:
    """Refuses steps that change variables outside strategy.run, when they are scheduled.

    Args:
      coordinator: The ClusterCoordinator.
      guarded: See direct_updates.refuse.
    """
    queue = coordinator._cluster.closure_queue
    put = queue.put
    checked = weakref.WeakSet()

    def check_and_put(closure, tag=None):
        function = getattr(closure, "_concrete_function", None)
        if tag is None and function is not None and function not in checked:
            direct_updates.refuse(function.graph, guarded)
            checked.add(function)
        put(closure, tag=tag)

    queue.put = check_and_put


def refuse_mixed_steps(
    coordinator, mode: str, groups_of: Callable[[object], tuple[UpdateGroup, ...]]
) -> None:
    """Refuses to schedule steps of several update groups at the same time.

    Each group has a token server, which lets a worker wait for the others. A worker that waits in
    one group for a worker that waits in another would do so for ever.

    Args:
      coordinator: The ClusterCoordinator.
      mode: Where workers wait; for the message.
      groups_of: The concrete function of a step -> the groups that it takes tokens of.
    """
    queue = coordinator._cluster.closure_queue
    put = queue.put
    known = weakref.WeakKeyDictionary()
    latest_group = None
    lock = threading.Lock()

    def check_and_put(closure, tag=None):
        nonlocal latest_group
        function = getattr(closure, "_concrete_function", None)
        groups = ()
        if tag is None and function is not None:
            groups = known.get(function)
            if groups is None:
                groups = known[function] = groups_of(function)
        if not groups:  # It trains nothing.
            put(closure, tag=tag)
            return
        if len(groups) > 1:
            raise _mixed_steps(mode, "one step", groups)
        with lock:  # From the look at the queue until the step is in it.
            [group] = groups
            if latest_group not in (None, group) and not queue.done():
                raise _mixed_steps(mode, "steps that are scheduled together", (latest_group, group))
            latest_group = group
            put(closure, tag=tag)

    queue.put = check_and_put


def _mixed_steps(mode: str, where: str, groups: tuple[UpdateGroup, ...]) -> NotImplementedError:
    found = "; ".join(
        f"{type(group.optimizers[0]).__name__} for"
        f" {[variable.name for variable in group.trained_variables[:3]]}, in all"
        f" {len(group.trained_variables)}"
        for group in groups
    )
    return NotImplementedError(
        f"{mode}: expected {where} to train one set of variables, by one strategy.run(), found"
        f" several: {found}. Workers would wait for each other, each in another set, for ever."
        " Compute all gradients in one strategy.run(); or, to train one set after the other, call"
        " join() of the coordinator in between; or use gba or bsp, where nobody waits."
    )
