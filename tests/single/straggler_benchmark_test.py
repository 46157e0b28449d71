"""The numbers of the suite stragglers, worked out by hand from made-up measurements."""

import time

import pytest

from gba_tf import straggler_benchmark
from gba_tf.straggler_benchmark import ALL_REDUCE, GBA, Cell, Measurement

# 1 / 1.0 + 3 / 0.1 = 31 gradients per second.
CELL = Cell(slow_factor=10.0, compute_seconds=0.1, num_workers=4)


def measurement(seconds, applied, dropped=0, other_cores=0.0):
    return Measurement(seconds, applied, dropped, cores_used=0.5, other_cores=other_cores)


def summary(cell=CELL, other_cores=0.0):
    return straggler_benchmark.summarize(
        cell,
        {
            # 64 examples per gradient: 240, 320 and 256 per second.
            ALL_REDUCE: [measurement(8.0, 30), measurement(4.0, 20), measurement(5.0, 20)],
            # 1920, 1280 and 1600 per second; ratios 8, 4 and 6.25.
            GBA: [
                measurement(8.0, 240, 10, other_cores),
                measurement(8.0, 160, 40, other_cores),
                measurement(8.0, 200, 0, other_cores),
            ],
        },
    )


def result(slow_factor, share, ratio):
    return {"slow_factor": slow_factor, "share_of_ideal": {GBA: share}, "ratio": ratio}


@pytest.mark.parametrize(
    ("slow_factor", "gradients_per_second"), [(1, 40.0), (2, 35.0), (5, 32.0), (10, 31.0)]
)
def test_the_ideal_is_the_sum_of_what_the_workers_do_alone(slow_factor, gradients_per_second):
    cell = Cell(slow_factor, 0.1, 4)
    assert cell.gradients_per_second == pytest.approx(gradients_per_second)
    assert cell.ideal == pytest.approx(gradients_per_second * 64)


def test_all_reduce_is_measured_for_whole_steps_of_the_slowest_worker():
    # Warm-up: 2 gradients of 1 s and 10 of 0.1 s.
    request = CELL.request(ALL_REDUCE, seconds=7.5)
    assert (request["warm_up_steps"], request["steps"]) == (3, 8)
    assert request["slow_factor"] == 10.0


def test_the_other_modes_have_more_steps_than_they_can_take():
    # 31 per second for 3 s of warm-up, 7 s, 2 s until the next updates and 1 s in case the clock is
    # late; and 4 for each worker.
    assert CELL.request(GBA, seconds=7.0)["steps"] == 403 + 16
    assert CELL.request(GBA, seconds=7.0)["warm_up_seconds"] == pytest.approx(3.0)
    # At the pace of the slowest one, but the others may be 4 ahead: 4 per second, 4 x (4 + 4).
    assert CELL.request("hop_bs", seconds=7.0)["steps"] == 52 + 32


def test_the_slow_worker_has_six_gradients_in_a_measurement():
    assert CELL.request(GBA, seconds=1.0)["seconds"] == pytest.approx(6.0)
    assert CELL.request(ALL_REDUCE, seconds=1.0)["steps"] == 6
    assert Cell(1.0, 0.1, 4).request(GBA, seconds=1.0)["seconds"] == 1.0


@pytest.mark.parametrize(
    ("mode", "gradients"), [(ALL_REDUCE, 4), (GBA, 4), ("bsp", 4), ("hop_bs", 4), ("hop_bw", 3)]
)
def test_gradients_of_all_modes_have_as_many_examples(mode, gradients):
    assert straggler_benchmark.global_batch_size(mode, num_workers=4) == gradients * 64


def test_speeds_are_medians_of_what_was_applied():
    medians = summary()["examples_per_second"]
    assert medians == pytest.approx({ALL_REDUCE: 256.0, GBA: 1600.0})
    # Of 31 x 64 = 1984.
    assert summary()["share_of_ideal"] == pytest.approx({ALL_REDUCE: 256 / 1984, GBA: 1600 / 1984})
    # 10 / 250, 40 / 200 and 0.
    assert summary()["dropped"] == pytest.approx({ALL_REDUCE: 0.0, GBA: 0.04})


def test_ratios_are_taken_between_neighbours():
    assert summary()["ratio"] == pytest.approx(6.25)
    assert summary()["ratio_range"] == pytest.approx([4.0, 8.0])


def test_without_all_reduce_there_is_no_ratio_and_no_floor_for_it():
    alone = straggler_benchmark.summarize(CELL, {GBA: [measurement(1.0, 30)]})
    assert "ratio" not in alone
    assert [check["floor"] for check in straggler_benchmark.floors([alone])] == ["gba / ideal"]
    others = straggler_benchmark.summarize(CELL, {"bsp": [measurement(1.0, 30)]})
    assert straggler_benchmark.floors([others]) == []


def test_floors_are_checked_where_they_apply():
    checks = straggler_benchmark.floors(
        [result(1, 0.93, 0.94), result(2, 0.9, 1.8), result(5, 0.899, 2.4), result(10, 0.95, 2.3)]
    )
    assert [tuple(check.values()) for check in checks] == [
        ("gba / ideal", 1, 0.9, 0.93, True),
        ("gba / ideal", 2, 0.9, 0.9, True),
        ("gba / ideal", 5, 0.9, 0.899, False),
        ("gba / ideal", 10, 0.9, 0.95, True),
        ("gba / multi_worker_mirrored", 1, 0.95, 0.94, False),
        ("gba / multi_worker_mirrored", 5, 2.4, 2.4, True),
        ("gba / multi_worker_mirrored", 10, 2.4, 2.3, False),
    ]
    lines = straggler_benchmark.render_floors(checks).splitlines()
    assert lines[1].split() == ["gba", "/", "ideal", "1x", "0.90", "0.930", "met"]
    assert lines[3].split() == ["gba", "/", "ideal", "5x", "0.90", "0.899", "MISSED"]


def test_the_tables_show_one_line_for_each_factor():
    speed = straggler_benchmark.render_speed([summary()]).splitlines()
    assert speed[-1].split() == [
        *("10x", "1,984", "256", "1,600", "80.6%", "6.25", "(4.00", "..", "8.00)")
    ]
    costs = straggler_benchmark.render_costs([summary()]).splitlines()
    assert costs[2].split() == ["10x", "too", "late", "0.0%", "4.0%"]
    assert costs[3].split() == ["10x", "cores", "used", "0.50", "0.50"]


@pytest.mark.parametrize(("other_cores", "warned"), [(0.05, False), (0.7, True)])
def test_a_machine_that_is_busy_with_other_programs_is_pointed_out(other_cores, warned):
    alone = {GBA: [measurement(1.0, 30, other_cores=other_cores)]}
    text = straggler_benchmark.render_speed([straggler_benchmark.summarize(CELL, alone)])
    assert ("they used up to 0.70 cores" in text) == warned


def test_the_time_of_the_machine_holds_that_of_this_process():
    before = straggler_benchmark.busy_seconds()
    used = time.process_time()
    while time.process_time() - used < 0.3:
        pass
    assert straggler_benchmark.busy_seconds() - before >= 0.25


def test_the_plot_has_a_line_for_each_mode_and_the_ideal(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plots" / "speed.svg"
    results = [summary(Cell(factor, 0.1, 4)) for factor in (1, 5)]
    straggler_benchmark.write_plot(results, path)
    drawing = path.read_text()
    # matplotlib notes every text that it draws as paths.
    for text in ("ideal, sum(B / t)", ALL_REDUCE, GBA, "1x", "5x", "examples per second"):
        assert f"<!-- {text} -->" in drawing
    assert "<!-- 4 workers, 100 ms per gradient of 64 examples -->" in drawing
