"""From TF_CONFIG to a role: what this process does in the cluster, and how it ends.

The same program runs in every task. `serve_if_not_chief` is where the tasks part: the chief goes on
and trains, the others serve it. Under all-reduce it is `serve_if_not_worker`: the workers train,
worker 0 has the place of the chief, and the others only wait. When the chief ends, it tells every
other task by running an op in it (`gba_tf.ops.process`); a chief that is killed cannot, so the
others also watch its address.

TensorFlow is imported by the functions that need it, never by this module.
"""

import atexit
import os
import socket
import sys
import threading
import time
import types
from typing import Any, NoReturn

from gba_tf import task_output
from gba_tf.cluster_config import ClusterConfig, ClusterConfigError, split_address

__all__ = [
    "ClusterConfig",
    "ClusterConfigError",
    "cluster_resolver",
    "end_cluster_at_exit",
    "serve",
    "serve_if_not_chief",
    "serve_if_not_worker",
    "shutdown_cluster",
]

_POLL_SECONDS = 0.1
# The chief hears of a finished shutdown op before the process that ran it is gone.
_REPLY_SECONDS = 0.3
# How long the chief waits for an answer: dead tasks give none. One that never connected to the
# others may be ahead of them, and has to wait until they have started.
_ANSWER_SECONDS = 5.0
_START_SECONDS = 10.0
# The chief is let go first: TensorFlow releases what the chief has on the others while it ends, and
# complains for each piece that it cannot reach; and whoever watches the tasks of a chief that fails
# sees the cause before the effect.
_LEAVING_CHIEF_SECONDS = 3.0


def cluster_resolver(config: ClusterConfig) -> Any:
    """The `tf.distribute.cluster_resolver.ClusterResolver` of a configuration.

    Args:
      config: Of the chief, or of any task but the evaluator.

    Returns:
      A `SimpleClusterResolver` over gRPC, without the evaluator.
    """
    import tensorflow as tf

    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({job: list(tasks) for job, tasks in config.cluster.items()}),
        task_type=config.task_type,
        task_id=config.task_index,
        rpc_layer="grpc",
    )


def serve_if_not_chief(config: ClusterConfig | None, evaluator_returns: bool = False) -> None:
    """Lets the chief (or a program without TF_CONFIG) go on; every other task serves and exits.

    Call it once, before any TensorFlow operation. On the chief it also arranges that the other
    tasks end with it (`end_cluster_at_exit`); calling it again there changes nothing.

    Args:
      config: From `ClusterConfig.from_env()`.
      evaluator_returns: Whether an evaluator goes on as well, with work of its own, instead of
        waiting for the end of training; such an evaluator has to end by itself. Default: False.
    """
    if config is None:
        return
    if config.is_chief:
        end_cluster_at_exit(config)
    elif config.task_type != "evaluator" or not evaluator_returns:
        serve(config)


def serve_if_not_worker(config: ClusterConfig | None) -> None:
    """Under all-reduce, lets the workers (or a program without TF_CONFIG) go on.

    Chief, parameter servers and evaluator step aside: they wait until the training of the workers
    has ended, and exit as in `serve`. Call it once, before any TensorFlow operation. On worker 0 it
    also arranges that they end with it; every worker ends by itself.

    Args:
      config: From `ClusterConfig.for_all_reduce()`.

    Raises:
      ValueError: If the configuration is not one for all-reduce.
    """
    if config is None:
        return
    if not config.all_reduce:
        raise ValueError(
            "serve_if_not_worker: expected a configuration for all-reduce, found one for parameter "
            "servers. Give it ClusterConfig.for_all_reduce()"
        )
    if config.task_type != "worker":
        say(
            f"{config.task_name} steps aside, as the workers train by all-reduce; it ends with "
            f"{config.chief_name} at {config.chief_address}"
        )
        serve(config)
    elif config.is_chief:
        task_output.mark_leader(True)
        end_cluster_at_exit(config)


def serve(
    config: ClusterConfig, chief_grace_seconds: float = 30.0, chief_notice_seconds: float = 30.0
) -> NoReturn:
    """Runs the TensorFlow server of a worker, parameter server or evaluator until training ends.

    The process then exits: with code 0 when the chief ended well; with code 1, saying why, when the
    chief failed or vanished. TensorFlow's server cannot be stopped, so the exit is immediate:
    standard streams are flushed, `atexit` functions do not run.

    Args:
      config: The configuration of this task.
      chief_grace_seconds: How long a chief that was seen before may be away, for example to be
        restarted. Default: 30.
      chief_notice_seconds: How often to say that the chief has not been seen yet. Default: 30.

    Raises:
      ValueError: If this task is the chief.
      RuntimeError: If the server cannot start, for example because its port is taken.
    """
    if config.is_chief:
        raise ValueError(
            f"{config.task_name} is the chief: it trains and does not serve. "
            "Call serve_if_not_chief, which knows the difference"
        )
    from gba_tf.ops import library

    # Under all-reduce it may have been the one that leads, in an earlier process of this task.
    task_output.mark_leader(False)
    # Before the server starts: a chief may send ops of the library at once.
    library.load()
    server = _start_server(config)
    try:
        status = _wait_for_end(config, chief_grace_seconds, chief_notice_seconds)
    except KeyboardInterrupt:
        status = 130
    sys.stdout.flush()
    sys.stderr.flush()
    del server
    os._exit(status)


def shutdown_cluster(
    config: ClusterConfig,
    status: int = 0,
    message: str = "",
    timeout_seconds: float | None = None,
) -> tuple[str, ...]:
    """Ends the other tasks, from the chief, all at once. A repetition does nothing.

    Under all-reduce worker 0 has the place of the chief, and ends those that stepped aside.

    Args:
      config: The configuration of the chief.
      status: Exit code of the other tasks: 0, or 1 if training failed. Default: 0.
      message: The reason, which the other tasks show if `status` is not 0.
      timeout_seconds: How long to wait for an answer; dead tasks give none. Default: 5, but 10 if
        this chief never connected to the others, which may still be starting then.

    Returns:
      The names of the tasks that did not answer, for example ("worker 1",).
    """
    notice = _notice_at_exit or _EndNotice(config)
    return notice.send(status, message, timeout_seconds)


def end_cluster_at_exit(config: ClusterConfig) -> None:
    """Arranges that the other tasks end when this process, the chief, ends.

    They exit with code 0 if the chief ends well, with code 1 if an exception ends it. A chief that
    calls `sys.exit` with a failure should call `shutdown_cluster` with a status first: Python does
    not show the code to functions at exit. Calling this again changes nothing.

    Args:
      config: The configuration of the chief.

    Raises:
      ValueError: If this task is not the chief.
    """
    global _notice_at_exit
    if not config.is_chief:
        raise ValueError(f"expected the chief to end the cluster, found {config.task_name}")
    if _notice_at_exit is not None:
        return
    notice = _notice_at_exit = _EndNotice(config)
    previous_hook = sys.excepthook
    failure = []

    def remember_failure(
        kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
    ) -> None:
        failure.append(f"{kind.__name__}: {error}")
        previous_hook(kind, error, traceback)

    def end_cluster() -> None:
        for task in notice.send(1 if failure else 0, failure[0] if failure else "", None):
            say(f"{task} did not answer when training ended; it is gone or cannot be reached")

    sys.excepthook = remember_failure
    atexit.register(end_cluster)


class _EndNotice:
    """Tells every task that follows the chief, in parallel, that it has to end.

    The threads start here and wait, because Python 3.12 and later starts none during exit.
    """

    def __init__(self, config: ClusterConfig) -> None:
        # Imports and loading, too, have to come before the exit.
        from tensorflow.python.eager import context

        from gba_tf.ops import library

        library.load()
        self._eager_context = context
        self._process_id = os.getpid()
        self._sent = False
        self._go = threading.Event()
        self._status, self._message, self._timeout_seconds = 0, "", 0.0
        self._unreached: set[str] = set()
        self._threads = []
        for task, address in config.followers.items():
            self._unreached.add(task)
            self._threads.append(
                threading.Thread(target=self._tell, args=(task, address), daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def send(self, status: int, message: str, timeout_seconds: float | None) -> tuple[str, ...]:
        """Sends it, once; returns the names of the tasks that did not answer in time."""
        # A forked child of the chief inherits this object, but is not the chief.
        if self._sent or os.getpid() != self._process_id:
            return ()
        self._sent = True
        if timeout_seconds is None:
            connected = self._eager_context.get_server_def() is not None
            timeout_seconds = _ANSWER_SECONDS if connected else _START_SECONDS
        self._status, self._message, self._timeout_seconds = status, message, timeout_seconds
        self._go.set()
        deadline = time.monotonic() + timeout_seconds + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return tuple(sorted(self._unreached))

    def _tell(self, task: str, address: str) -> None:
        import tensorflow as tf

        from gba_tf.ops import process

        self._go.wait()
        # A session of its own to each task, not the eager context of the training: that may never
        # have been connected, may be waiting for a dead task, and has no time limit.
        options = tf.compat.v1.ConfigProto(
            operation_timeout_in_ms=int(self._timeout_seconds * 1000),
            device_filters=["/job:{}/task:{}".format(*task.split())],
        )
        try:
            with tf.Graph().as_default():
                request = process.request_shutdown(self._status, self._message)
                with tf.compat.v1.Session(f"grpc://{address}", config=options) as session:
                    session.run(request)
                    self._unreached.discard(task)
        except tf.errors.OpError:
            pass  # It stays among the unreached.


_notice_at_exit: _EndNotice | None = None


def _start_server(config: ClusterConfig) -> Any:
    import tensorflow as tf

    if config.task_type not in config.cluster:
        # A cluster of its own: in that of the training, everybody would wait for it.
        tasks = {config.task_type: {config.task_index: config.address}}
    else:
        tasks = {job: list(addresses) for job, addresses in config.cluster.items()}
    options = tf.compat.v1.ConfigProto()
    # With fewer threads than peers, ops that wait for a peer can take them all.
    options.inter_op_parallelism_threads = max(os.cpu_count() or 1, config.num_workers + 1)
    try:
        return tf.distribute.Server(
            tf.train.ClusterSpec(tasks),
            job_name=config.task_type,
            task_index=config.task_index,
            protocol="grpc",
            config=options,
        )
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"{config.task_name} cannot listen at {config.address}: {error.message}. Check that "
            "the address belongs to this machine and that no other process uses the port"
        ) from None


def _wait_for_end(
    config: ClusterConfig, chief_grace_seconds: float, chief_notice_seconds: float
) -> int:
    """Blocks until training ends, the chief vanishes or never comes; returns the exit code."""
    from gba_tf.ops import process

    start = last_seen = last_notice = time.monotonic()
    next_look = start
    seen = False
    while True:
        request = process.shutdown_requested()
        if request is not None:
            return _end_as_requested(config, *request)
        now = time.monotonic()
        if now >= next_look:
            next_look = now + min(2.0, chief_grace_seconds / 4, chief_notice_seconds / 4)
            if answers(config.chief_address):
                seen, last_seen = True, now
            elif seen and now - last_seen >= chief_grace_seconds:
                say(
                    f"{config.task_name} ends: {config.chief_name} at {config.chief_address} is "
                    f"gone for {now - last_seen:.0f} s and did not say that training ended"
                )
                return 1
        if not seen and now - last_notice >= chief_notice_seconds:
            last_notice = now
            leader = "chief 0" if "chief" in config.cluster else "worker 0"
            say_missing(config, config.chief_name, leader, config.chief_address, now - start)
        time.sleep(_POLL_SECONDS)


def _end_as_requested(config: ClusterConfig, status: int, message: str) -> int:
    time.sleep(_REPLY_SECONDS)
    if status != 0:
        say(f"{config.task_name} ends because {config.chief_name} failed: {message}")
    # A chief that never listened cannot be seen leaving: one that failed gets the whole time.
    listened = answers(config.chief_address)
    deadline = time.monotonic() + (_LEAVING_CHIEF_SECONDS if listened or status != 0 else 0.0)
    while time.monotonic() < deadline and not (listened and not answers(config.chief_address)):
        time.sleep(_POLL_SECONDS)
    if status != 0:
        time.sleep(_REPLY_SECONDS)
    return status


def say_missing(config: ClusterConfig, name: str, task: str, address: str, seconds: float) -> None:
    """Says that this task waits for another one, in vain so far, and how to start that one.

    Args:
      config: Of this task.
      name: Of the missing one, in a sentence: "the chief".
      task: Its job and index: "chief 0".
      address: Where it is expected.
      seconds: How long this task has waited.
    """
    job, index = task.split()
    say(
        f"{config.task_name} at {config.address} waits for {name}, which has not been seen at "
        f"{address} for {seconds:.0f} s. Start the same program there with "
        f'"task": {{"type": "{job}", "index": {index}}}'
    )


def answers(address: str) -> bool:
    """Whether somebody accepts connections at `address`; waits a second at most."""
    try:
        with socket.create_connection(split_address(address), timeout=1.0):
            return True
    except OSError:
        return False


def say(text: str) -> None:
    """Prints a line on standard error, as a message of this package."""
    print(f"gba_tf: {text}", file=sys.stderr, flush=True)
