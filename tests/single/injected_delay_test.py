"""--inject_delay says what it takes, and takes nothing else."""

import pytest

from gba_tf.injected_delay import InjectedDelay


def test_a_worker_a_factor_and_the_global_steps():
    assert InjectedDelay.parse("worker:1:8:200:600") == InjectedDelay(1, 8.0, 200, 600)
    assert InjectedDelay.parse("worker:0:1.5:0:1") == InjectedDelay(0, 1.5, 0, 1)


@pytest.mark.parametrize(
    "text", ["", "worker", "1:8:200:600", "ps:1:8:200:600", "worker:1:8:200", "worker:a:8:2:6"]
)
def test_another_form_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="INDEX:FACTOR:FROM_STEP:TO_STEP, such as worker:1:8:200"):
        InjectedDelay.parse(text)


@pytest.mark.parametrize("text", ["worker:-1:8:2:6", "worker:1:0.5:2:6", "worker:1:inf:2:6"])
def test_an_index_or_a_factor_out_of_range_is_refused(text):
    with pytest.raises(ValueError, match="an index of 0 or more and a factor of 1 or more"):
        InjectedDelay.parse(text)


@pytest.mark.parametrize("text", ["worker:1:8:-2:6", "worker:1:8:6:6", "worker:1:8:7:6"])
def test_steps_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="FROM_STEP of 0 or more and TO_STEP above it"):
        InjectedDelay.parse(text)


def test_a_worker_that_is_not_there_is_refused():
    delay = InjectedDelay.parse("worker:4:8:200:600")
    delay.check(num_workers=5)
    with pytest.raises(ValueError, match="one of the 4 workers, 0 to 3, found 4"):
        delay.check(num_workers=4)
