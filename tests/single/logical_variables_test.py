"""The table of variables against what tf.train.Checkpoint writes."""

import pytest
import tensorflow as tf

import gba_tf  # noqa: F401  Makes tf.keras tf-keras.
from gba_tf import logical_variables, optimizer_hooks
from gba_tf.logical_variables import LogicalVariable

keras = tf.keras


class WithOwnMetric(keras.Model):
    """Has a metric as an attribute, and a layer within a list."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
        self.mean = keras.metrics.Mean()

    def call(self, inputs):
        return self.parts[1](self.parts[0](inputs))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(1.0, 2, 0.5)),
        lambda: keras.optimizers.SGD(1.0, momentum=0.5, use_ema=True),
        lambda: keras.optimizers.legacy.Adam(1.0),
        lambda: keras.mixed_precision.LossScaleOptimizer(keras.optimizers.legacy.SGD(1.0, 0.5)),
    ],
)
def test_keys_shapes_and_dtypes_are_those_of_the_checkpoint(make_optimizer, tmp_path):
    model = WithOwnMetric()
    model(tf.zeros([2, 4]))
    model.compile(make_optimizer())
    optimizer_hooks.build(model.optimizer, model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    found = {
        entry["key"]: (entry["shape"], entry["dtype"])
        for entry in (v.described() for v in logical_variables.of(checkpoint))
    }
    reader = tf.train.load_checkpoint(checkpoint.write(str(tmp_path / "variables")))
    dtypes = reader.get_variable_to_dtype_map()
    expected = {
        key: (shape, dtypes[key].name)
        for key, shape in reader.get_variable_to_shape_map().items()
        if dtypes[key] != tf.string and "/mean/" not in key and not key.startswith("save_counter")
    }
    assert found == expected
    assert list(found)[0] == "model/parts/0/kernel/.ATTRIBUTES/VARIABLE_VALUE"


def test_a_variable_in_shards_is_one_with_the_first_rows_of_each():
    shards = [tf.Variable(tf.zeros([n, 2]), name=f"w/part_{i}") for i, n in enumerate((3, 2, 2))]
    sharded = tf.__internal__.distribute.ShardedVariable(shards)
    variable = LogicalVariable("model/w", sharded)
    assert variable.described() == {
        "key": "model/w",
        "name": "w",
        "shape": [7, 2],
        "dtype": "float32",
    }
    assert [first for first, _ in variable.parts] == [0, 3, 5]
    assert [part is shard for (_, part), shard in zip(variable.parts, shards, strict=True)]
    assert variable.num_bytes == 7 * 2 * 4
