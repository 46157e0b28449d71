"""Keras' own callbacks that save, stop and go on, with variables split over parameter servers."""

import numpy as np
import pytest
import tensorflow as tf

keras = tf.keras
callbacks = tf.keras.callbacks

NUM_ROWS, NUM_IDS, LOCAL_BATCH, STEPS = 11, 3, 4, 8
OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "legacy Adam": lambda: keras.optimizers.legacy.Adam(0.1),
}


class Interrupt(callbacks.Callback):
    """Ends training before the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def plain_model(optimizer, seed):
    initializer = keras.initializers.RandomNormal(seed=seed)
    model = keras.Sequential(
        [
            keras.layers.Embedding(
                NUM_ROWS, 4, embeddings_initializer=initializer, input_length=NUM_IDS
            ),
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer=initializer),
        ]
    )
    model.build([None, NUM_IDS])
    model.compile(optimizer, loss="mse")
    return model


@pytest.fixture
def make_model(cluster):
    """make_model(optimizer name, seed): on a new strategy."""

    def make(name, seed=0):
        strategy = cluster.strategy(
            1,
            3,
            global_batch_size=4 * LOCAL_BATCH,
            local_batch_size=LOCAL_BATCH,
            variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2),
        )
        with strategy.scope():
            return plain_model(OPTIMIZERS[name](), seed)

    return make


def fit(model, *with_callbacks, epochs=4):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, NUM_ROWS, (STEPS * LOCAL_BATCH, NUM_IDS))
    labels = rng.normal(size=(STEPS * LOCAL_BATCH, 1))
    dataset = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(LOCAL_BATCH)
    return model.fit(
        dataset, steps_per_epoch=STEPS, epochs=epochs, verbose=0, callbacks=list(with_callbacks)
    )


def weights_of(model):
    return [weight.numpy() for weight in model.weights]


def test_backup_and_restore_goes_on_after_the_last_whole_epoch(make_model, tmp_path):
    expected = make_model("Adam")
    fit(expected)
    expected = weights_of(expected)
    with pytest.raises(KeyboardInterrupt):
        fit(make_model("Adam"), callbacks.BackupAndRestore(str(tmp_path)), Interrupt())
    model = make_model("Adam", seed=1)
    assert fit(model, callbacks.BackupAndRestore(str(tmp_path))).epoch == [2, 3]
    for found, value in zip(weights_of(model), expected, strict=True):
        assert np.array_equal(found, value)
    assert int(model.optimizer.iterations) == 4 * STEPS // 4


def test_backup_and_restore_refuses_to_lose_the_slots_of_legacy_optimizers(make_model, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(make_model("legacy Adam"), callbacks.BackupAndRestore(str(tmp_path)), Interrupt())
    model = make_model("legacy Adam", seed=1)
    with pytest.raises(RuntimeError, match="before the slots of .*embeddings/part_0.* start anew"):
        fit(model, callbacks.BackupAndRestore(str(tmp_path)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_model_checkpoint_saves_every_epoch_for_one_process(name, make_model, tmp_path):
    model = make_model(name)
    path = str(tmp_path / "epoch-{epoch}")
    fit(model, callbacks.ModelCheckpoint(path, save_weights_only=True), epochs=2)
    plain = plain_model(OPTIMIZERS[name](), seed=1)
    plain.load_weights(path.format(epoch=2))
    ids = np.arange(NUM_IDS)[None, :]
    assert np.array_equal(plain(ids), model(ids))
    assert int(plain.optimizer.iterations) == 2 * STEPS // 4


def test_early_stopping_restores_the_best_weights(make_model):
    model = make_model("Adam")
    # Nothing is an improvement by 1e9, so that the first epoch stays the best one.
    stopping = callbacks.EarlyStopping("loss", patience=1, min_delta=1e9, restore_best_weights=True)
    first = []
    remember = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: first or first.extend(weights_of(model))
    )
    assert fit(model, remember, stopping).epoch == [0, 1]
    for found, value in zip(weights_of(model), first, strict=True):
        assert np.array_equal(found, value)
