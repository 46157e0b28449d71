"""One task of supervisor_test: a supervisor whose processes do as the test says, no TensorFlow.

The arguments are the model_dir and the seconds after which a task is gone. Each process leaves
MODEL_DIR/ran/TASK-SEGMENT-PROCESS_ID. The one that leads waits for MODEL_DIR/then-SEGMENT, whose
text is the next mode, or the text of an error.
"""

import pathlib
import sys
import time

from gba_tf import switching
from gba_tf.cluster_config import ClusterConfig
from gba_tf.signs_of_life import report_failure
from gba_tf.supervisor import Supervisor
from gba_tf.switch_files import FINISHED, Segment, SwitchFiles

MODEL_DIR = pathlib.Path(sys.argv[1])
CONFIG = ClusterConfig.from_env()
FILES = SwitchFiles(MODEL_DIR)
LEADERS = {switching.GBA: "chief 0", switching.ALL_REDUCE: "worker 0"}


def train(segment: Segment) -> None:
    (MODEL_DIR / "ran" / f"{CONFIG.task_name}-{segment.number}-{process_id()}").touch()
    if CONFIG.task_name == LEADERS[segment.mode]:
        lead(segment)
    elif segment.mode == switching.ALL_REDUCE:
        while FILES.segment(segment.number + 1) is None:
            time.sleep(0.01)
    else:
        time.sleep(3600)


def lead(segment: Segment) -> None:
    order = MODEL_DIR / f"then-{segment.number}"
    while not order.exists():
        time.sleep(0.01)
    text = order.read_text()
    if text not in (*switching.MODES, FINISHED):
        raise ValueError(f"{text}\nand more")
    switch = {"from": segment.mode, "to": text} if text != FINISHED else None
    FILES.write_segment(
        Segment(segment.number + 1, text, efficiency=0.5, switch=switch, run_id=segment.run_id)
    )


def first_mode() -> str:
    if (MODEL_DIR / "damaged").exists():
        raise ValueError("the checkpoint is damaged")
    return switching.ALL_REDUCE


def process_id() -> str:
    return pathlib.Path("/proc/self").readlink().name


if (MODEL_DIR / f"{CONFIG.task_name} has no data").exists():
    report_failure(CONFIG, MODEL_DIR, "no data", seconds=60)
    sys.exit(2)
sys.exit(
    Supervisor(
        CONFIG,
        MODEL_DIR,
        first_mode,
        resume=True,
        train=train,
        gone_seconds=float(sys.argv[2]),
    ).run()
)
