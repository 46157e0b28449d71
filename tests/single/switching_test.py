"""The rule of `--strategy=auto` on traces of real runs, and its numbers by hand.

The traces were recorded on two busy cores: DeepFM on MovieLens-100K, 4 workers of which one was
slowed down (worker 1), windows of 20 updates.
"""

import json

import pytest

from gba_tf import switching
from gba_tf.switching import ALL_REDUCE, DEFAULT_EFFICIENCY, GBA, SwitchRule, Window, next_mode

# Microseconds per example of each worker.
QUIET = [
    (24.7, 16.5, 22.8, 18.8),
    (22.3, 17.9, 23.9, 24.0),
    (21.6, 20.9, 20.7, 25.2),
    (20.7, 20.3, 22.3, 20.5),
    (20.4, 22.2, 20.7, 26.5),
    (20.2, 16.8, 15.6, 21.3),
    (18.8, 18.3, 20.2, 20.9),
    (50.1, 23.7, 17.3, 15.0),
    (23.0, 24.4, 20.8, 22.2),
    (38.3, 26.5, 25.3, 21.9),
    (23.5, 22.3, 21.9, 17.7),
    (20.3, 17.8, 15.1, 17.4),
    (28.4, 19.1, 19.9, 19.0),
    (21.9, 21.3, 28.6, 23.8),
    (18.1, 19.4, 16.7, 22.8),
    (21.9, 15.9, 18.2, 28.3),
    (17.9, 29.4, 16.4, 20.4),
]
TWICE_AS_SLOW = [
    (16.1, 46.9, 17.2, 15.5),
    (20.0, 37.5, 18.8, 19.7),
    (23.1, 35.8, 16.8, 22.4),
    (21.9, 44.4, 24.0, 28.9),
    (14.4, 33.9, 16.5, 25.3),
    (12.5, 33.1, 14.8, 18.1),
    (14.2, 31.8, 14.1, 19.4),
    (13.5, 32.3, 18.0, 25.8),
    (17.4, 56.6, 22.7, 20.7),
    (34.6, 40.2, 22.2, 29.8),
    (24.4, 47.3, 21.2, 37.8),
]
FIVE_TIMES_AS_SLOW = [
    (28.7, 96.5, 21.5, 41.5),
    (25.0, 95.2, 19.3, 25.9),
    (25.5, 100.1, 25.4, 34.6),
    (27.6, 83.6, 18.9, 27.6),
    (27.9, 75.5, 15.2, 24.9),
    (25.7, 112.6, 16.7, 30.0),
    (21.2, 94.1, 20.9, 23.8),
    (23.6, 96.0, 18.0, 23.0),
    (28.4, 88.0, 19.8, 39.6),
]
# Under gba, with the efficiency that was measured by then: two cores for six processes.
GBA_EIGHT_TIMES_AS_SLOW = [
    (63.2, 443.7, 63.7, 68.4, 0.401),
    (62.4, 373.0, 48.4, 61.6, 0.396),
    (65.7, 507.2, 84.0, 63.2, 0.390),
    (72.5, 507.2, 64.2, 87.5, 0.379),
    (220.4, 507.9, 77.9, 63.4, 0.387),
    (90.0, 510.1, 79.3, 98.5, 0.395),
    (43.2, 384.9, 59.3, 104.3, 0.393),
    (62.4, 842.8, 80.5, 112.5, 0.416),
    (113.1, 727.6, 93.5, 80.8, 0.428),
    (78.0, 405.5, 90.7, 125.6, 0.438),
    (66.4, 1151.2, 86.2, 145.1, 0.402),
    (89.8, 670.0, 96.0, 149.6, 0.401),
    (98.7, 455.6, 132.5, 91.1, 0.417),
    (87.2, 327.6, 109.1, 124.8, 0.414),
    (141.2, 388.1, 133.0, 80.1, 0.434),
    (86.3, 590.1, 80.5, 86.1, 0.412),
    (79.6, 651.9, 94.8, 85.8, 0.406),
    (74.0, 453.5, 217.3, 78.4, 0.410),
]
GBA_QUIET = [
    (100.2, 94.4, 79.4, 80.2, 0.401),
    (77.5, 75.9, 75.5, 76.0, 0.388),
    (69.7, 88.9, 54.5, 133.6, 0.391),
    (83.9, 101.3, 114.0, 86.2, 0.400),
]


def windows(trace, first_second=1000.0):
    """One window per second."""
    return [
        Window(
            stay_seconds=first_second + second,
            seconds_per_example=tuple(1e-6 * microseconds for microseconds in row[:4]),
            efficiency=row[4] if len(row) > 4 else DEFAULT_EFFICIENCY,
        )
        for second, row in enumerate(trace)
    ]


def first_switch(mode, trace, rule=None, first_second=1000.0):
    """The number of windows after which the rule leaves the mode; None if it does not."""
    all_windows = windows(trace, first_second)
    for number in range(1, len(all_windows) + 1):
        if next_mode(rule or SwitchRule(), mode, all_windows[:number]) != mode:
            return number
    return None


def test_the_speeds_by_hand():
    window = Window(60.0, (0.001, 0.002, 0.004, 0.008), efficiency=0.8)
    assert window.all_reduce_speed == pytest.approx(4 / 0.008)
    assert window.gba_speed == pytest.approx(0.8 * (1000 + 500 + 250 + 125))
    assert window.ratio == pytest.approx(1500 / 500)
    assert window.describe() == (
        "workers take 1,000, 2,000, 4,000, 8,000 us per example: all-reduce 500 examples/s, gba"
        " 1,500 (efficiency 0.80), ratio 3.00"
    )
    assert json.loads(json.dumps(window.to_json())) == {
        "ratio": pytest.approx(3.0),
        "efficiency": 0.8,
        "seconds_per_example": [0.001, 0.002, 0.004, 0.008],
        "all_reduce_examples_per_second": pytest.approx(500),
        "gba_examples_per_second": pytest.approx(1500),
    }


@pytest.mark.parametrize("factor, ratio", [(1, 0.9), (2, 0.9 * 7 / 4), (5, 3.6), (8, 0.9 * 25 / 4)])
def test_one_slow_worker_of_four(factor, ratio):
    # mean(max(t) / t) = (3 * factor + 1) / 4
    window = Window(60.0, (1.0, 1.0 * factor, 1.0, 1.0))
    assert window.ratio == pytest.approx(ratio)


def test_the_noise_of_a_quiet_cluster_does_not_switch():
    assert any(window.ratio > 1.5 for window in windows(QUIET)), "the rule is put to the test"
    assert first_switch(ALL_REDUCE, QUIET) is None


def test_a_worker_that_is_five_times_as_slow_switches_as_soon_as_that_is_sure():
    assert all(window.ratio > 1.5 * 1.5 for window in windows(FIVE_TIMES_AS_SLOW))
    assert first_switch(ALL_REDUCE, QUIET + FIVE_TIMES_AS_SLOW) == len(QUIET) + 3


def test_a_worker_that_is_twice_as_slow_is_at_the_edge():
    ratios = [window.ratio for window in windows(TWICE_AS_SLOW)]
    assert sum(ratios) / len(ratios) == pytest.approx(1.5, rel=0.1)
    # Three in a row above the threshold: windows 5, 6 and 7.
    assert [ratio >= 1.5 for ratio in ratios[:8]] == [1, 1, 0, 0, 1, 1, 1, 0]
    assert first_switch(ALL_REDUCE, TWICE_AS_SLOW) == 7


def test_gba_is_kept_while_a_worker_is_slow_and_left_when_it_is_not():
    assert first_switch(GBA, GBA_EIGHT_TIMES_AS_SLOW) is None
    slow = len(GBA_EIGHT_TIMES_AS_SLOW)
    assert first_switch(GBA, GBA_EIGHT_TIMES_AS_SLOW + GBA_QUIET) == slow + 3


def test_a_window_that_does_not_agree_starts_the_count_anew():
    slow, fast = FIVE_TIMES_AS_SLOW[:2], QUIET[:1]
    assert first_switch(ALL_REDUCE, slow + fast + slow + fast + slow) is None
    assert first_switch(ALL_REDUCE, slow + fast + slow + slow) == 6
    assert first_switch(ALL_REDUCE, FIVE_TIMES_AS_SLOW, SwitchRule(windows=1)) == 1
    assert first_switch(ALL_REDUCE, FIVE_TIMES_AS_SLOW, SwitchRule(windows=5)) == 5


def test_between_the_thresholds_each_mode_is_kept():
    # Ratio 0.9 * 1.5 = 1.35, between 1.5 * 0.8 and 1.5.
    trace = [(10.0, 10.0, 20.0, 20.0)] * 9
    assert windows(trace)[0].ratio == pytest.approx(1.35)
    assert first_switch(ALL_REDUCE, trace) is None
    assert first_switch(GBA, trace) is None
    assert first_switch(ALL_REDUCE, trace, SwitchRule(threshold=1.3)) == 3
    assert first_switch(GBA, trace, SwitchRule(hysteresis=0.05)) == 3


def test_a_mode_is_not_left_before_the_minimum_stay():
    # The windows end at 55, 56, ... seconds; the sixth is the first one after 60.
    assert first_switch(ALL_REDUCE, FIVE_TIMES_AS_SLOW, first_second=55.0) == 6
    assert first_switch(GBA, GBA_QUIET, SwitchRule(minimum_stay_seconds=4.0), 1.0) == 4
    assert first_switch(GBA, GBA_QUIET, SwitchRule(minimum_stay_seconds=0.0), 1.0) == 3


def test_the_efficiency_is_a_running_mean_of_what_was_reached():
    # 1 / 0.001 + 1 / 0.004 = 1250 examples/s at best.
    seconds = (0.001, 0.004)
    assert switching.measured_efficiency(0.9, 1000.0, seconds) == pytest.approx(
        0.9 + 0.3 * (0.8 - 0.9)
    )
    assert switching.measured_efficiency(0.9, 2000.0, seconds) == pytest.approx(
        0.9 + 0.3 * (1.0 - 0.9)
    ), "more than all of it is noise"


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("threshold", 0.0, "switch_threshold: expected a positive number, found 0.0"),
        ("threshold", float("nan"), "switch_threshold: expected a positive number, found nan"),
        ("windows", 0, "switch_windows: expected at least 1, found 0"),
        ("hysteresis", 1.0, "switch_hysteresis: expected a number from 0 to below 1, found 1.0"),
        ("minimum_stay_seconds", -1.0, "switch_minimum_stay: expected seconds of 0 or more"),
    ],
)
def test_settings_out_of_range_are_refused(field, value, expected):
    with pytest.raises(ValueError, match=expected):
        SwitchRule(**{field: value})
