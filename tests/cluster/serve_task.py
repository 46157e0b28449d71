"""A worker or parameter server of a test's cluster: serves until it is stopped.

The chief is the pytest process, which no TF_CONFIG describes: the task of that name only waits.
Arguments are op libraries of the test, loaded besides that of gba_tf.
"""

import json
import os
import sys
import time


def main() -> None:
    tf_config = json.loads(os.environ["TF_CONFIG"])
    job, index = tf_config["task"]["type"], tf_config["task"]["index"]
    while job == "chief":
        time.sleep(3600)

    import tensorflow as tf

    from gba_tf.ops import library

    library.load()
    for path in sys.argv[1:]:
        tf.load_op_library(path)
    server = tf.distribute.Server(
        tf_config["cluster"],
        job_name=job,
        task_index=index,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(
            inter_op_parallelism_threads=4, intra_op_parallelism_threads=1
        ),
    )
    print("serving", flush=True)
    server.join()


if __name__ == "__main__":
    main()
