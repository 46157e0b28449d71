"""What GBA adds to a ClusterCoordinator: it hears of dead workers and looks at every step."""

import contextlib
import functools
import weakref
from collections.abc import Callable

import tensorflow as tf
from absl import logging

from gba_tf import direct_updates


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
