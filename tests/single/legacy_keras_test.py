"""Each case in a process of its own: which Keras tf.keras is, is settled once per process."""

import os
import subprocess
import sys

import pytest

REQUIRE = "from gba_tf import legacy_keras; legacy_keras.require()"


def last_line(program, **environment):
    clean = {key: value for key, value in os.environ.items() if key != "TF_USE_LEGACY_KERAS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


@pytest.mark.parametrize("before", ["", "import tensorflow; ", "import keras; "])
def test_importing_gba_tf_first_gives_keras_2(before):
    program = f"{before}{REQUIRE}; import tensorflow as tf; print(tf.keras.Model.__module__)"
    assert last_line(program).startswith("tf_keras.")


def test_keras_3_that_is_loaded_already_is_refused():
    program = f"import tensorflow as tf; tf.keras.Model; {REQUIRE}"
    text = last_line(program)
    assert text.startswith("ImportError: gba_tf: expected tf.keras to be tf-keras (Keras 2), found")
    assert "keras 3." in text
    assert "Put `import gba_tf` before the first use of tensorflow.keras" in text


def test_an_environment_that_asks_for_keras_3_is_refused():
    text = last_line(REQUIRE, TF_USE_LEGACY_KERAS="0")
    assert (
        "expected TF_USE_LEGACY_KERAS=1 in the environment, found TF_USE_LEGACY_KERAS='0'" in text
    )
