"""Settings that would deadlock or train something else are refused, with what to do."""

import numpy as np
import pytest

from gba_tf import GBAConfig


def test_gradients_per_update_is_g_over_b():
    assert GBAConfig(2048, 512).gradients_per_update == 4
    assert GBAConfig(512, 512).gradients_per_update == 1
    assert GBAConfig(np.int64(96), np.int32(32)).gradients_per_update == 3


def test_the_defaults_are_those_of_synchronous_training():
    config = GBAConfig(8, 4)
    assert (config.staleness_tolerance, config.sparse_divisor) == (4, "gradients_per_update")


@pytest.mark.parametrize("local_batch_size, quotient", [(3, "2.66667"), (16, "0.5"), (5, "1.6")])
def test_g_that_is_no_multiple_of_b_is_refused(local_batch_size, quotient):
    with pytest.raises(ValueError) as caught:
        GBAConfig(8, local_batch_size)
    message = str(caught.value)
    assert "global_batch_size G=8" in message
    assert f"local_batch_size B={local_batch_size}" in message
    assert f"G / B is {quotient}. Choose B as a divisor of G." in message


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 1), "global_batch_size: expected at least 1 examples, found 0"),
        ((8, 0), "local_batch_size: expected at least 1 examples, found 0"),
        ((8, -4), "local_batch_size: expected at least 1 examples, found -4"),
        ((8, 4, -1), "staleness_tolerance: expected at least 0 global steps, found -1"),
        ((8, 4, 4, "rows"), r"sparse_divisor: expected one of .*gradients_with_row.* found 'rows'"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GBAConfig(*arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((8.0, 4), "global_batch_size: expected an integer number of examples, found 8.0 of type"),
        (("8", 4), "global_batch_size: .* found '8' of type str"),
        ((8, True), "local_batch_size: .* found True of type bool"),
        ((8, 4, None), "staleness_tolerance: expected an integer number of global steps"),
    ],
)
def test_values_of_another_type_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        GBAConfig(*arguments)
