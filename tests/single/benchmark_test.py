"""The numbers of the benchmark, worked out by hand from made-up measurements."""

import os
import time

import pytest

from gba_tf import benchmarking
from gba_tf.benchmarking import CEILING, GBA, PARAMETER_SERVER, Cell, Measurement

CELL = Cell("Adagrad", 512, 10)


def measurement(seconds, steps=100, updates=25, **cpu_seconds):
    return Measurement(steps, seconds, updates, cpu_seconds or {"process": seconds})


def summary():
    return benchmarking.summarize(
        CELL,
        {
            # 512 * 100 = 51,200 examples each.
            GBA: [
                measurement(2.0, **{"chief": 0.5, "worker-0": 1.0, "worker-1": 1.0, "ps-0": 1.0}),
                measurement(4.0, **{"chief": 0.5, "worker-0": 1.5, "worker-1": 1.0, "ps-0": 1.5}),
                measurement(2.5, **{"chief": 0.5, "worker-0": 1.0, "worker-1": 1.0, "ps-0": 1.0}),
            ],
            PARAMETER_SERVER: [
                measurement(2.0, **{"chief": 1.0, "worker-0": 1.0, "worker-1": 1.0, "ps-0": 1.0}),
                measurement(8.0, **{"chief": 1.0, "worker-0": 2.0, "worker-1": 2.0, "ps-0": 2.0}),
                measurement(4.0, **{"chief": 1.0, "worker-0": 1.0, "worker-1": 1.0, "ps-0": 1.0}),
            ],
            CEILING: [measurement(1.0), measurement(2.0), measurement(1.0)],
        },
        cores=2,
    )


def test_measurements_take_turns():
    order = []

    def measure(mode):
        order.append(mode)
        return measurement(float(len(order)))

    measured = benchmarking.measure_in_turn(["a", "b", "c"], 3, measure)
    assert order == list("abcabcabc")
    assert [m.seconds for m in measured["b"]] == [2.0, 5.0, 8.0]


@pytest.mark.parametrize(("local_batch_size", "expected"), [(512, 400), (1024, 200), (2048, 100)])
def test_every_cell_trains_on_as_many_examples(local_batch_size, expected):
    cells = [Cell("Adam", batch, spe) for batch in (512, 1024, 2048) for spe in (1, 10)]
    cell = Cell("Adam", local_batch_size, 1)
    assert benchmarking.steps_per_measurement(cell, cells, steps=400, num_workers=2) == expected


def test_every_worker_runs_whole_executions():
    cells = [Cell("Adam", 512, 1), Cell("Adam", 2048, 10)]
    # 70 / 4 = 17.5 steps, in units of 2 workers x 10 steps.
    assert benchmarking.steps_per_measurement(cells[1], cells, steps=70, num_workers=2) == 20
    # 2 / 4 = 0.5: at least one unit.
    assert benchmarking.steps_per_measurement(cells[1], cells, steps=2, num_workers=2) == 20
    # 70 / 20 = 3.5 units; an even number of them.
    assert benchmarking.steps_per_measurement(cells[0], cells, steps=70, num_workers=2) == 80


def test_speeds_are_medians_and_the_ceiling_is_that_of_all_cores():
    # 51,200 examples in 2.0, 4.0, 2.5 s; in 2, 8, 4 s; in 1, 2, 1 s on one of two cores.
    assert summary()["examples_per_second"] == {
        GBA: 20480.0,
        PARAMETER_SERVER: 12800.0,
        CEILING: 102400.0,
    }


def test_ratios_are_taken_between_neighbours():
    result = summary()
    # 2/2, 8/4 and 4/2.5; the ratio of the medians is another one, also by chance 1.6.
    assert result["ratio"] == pytest.approx(1.6)
    assert result["ratio_range"] == pytest.approx([1.0, 2.0])
    # 1/2/2, 2/4/2 and 1/2.5/2; 1/2/2, 2/8/2 and 1/4/2.
    assert result["share_of_ceiling"] == pytest.approx({GBA: 0.25, PARAMETER_SERVER: 0.125})


def test_cpu_seconds_are_added_up_by_job_for_1000_steps():
    result = summary()
    # 300 steps in all: chief 1.5, workers 3.5 + 3.0, ps 3.5 s.
    assert result["cpu_seconds_per_1000_steps"][GBA] == pytest.approx(
        {"chief": 5.0, "worker": 65 / 3, "ps": 35 / 3}
    )
    assert result["cpu_seconds_per_1000_steps"][CEILING] == pytest.approx({"process": 40 / 3})
    # 11.5 CPU seconds in 8.5 seconds.
    assert result["cores_used"][GBA] == pytest.approx(11.5 / 8.5)


def test_the_tables_show_one_line_for_each_cell_and_mode():
    results = [summary()]
    speed = benchmarking.render_speed(results).splitlines()
    assert speed[2].split() == [
        *("Adagrad", "512", "10", "20,480", "12,800", "102,400"),
        *("1.60", "(1.00", "..", "2.00)", "25%", "12%"),
    ]
    cpu = benchmarking.render_cpu(results).splitlines()
    assert cpu[3].split() == [
        *("Adagrad", "512", "10", "gba", "5.00", "21.67", "11.67", "38.33", "1.30", "35%", "1.35")
    ]
    assert cpu[4].split()[3:] == [
        *("parameter_server", "10.00", "26.67", "13.33", "50.00", "27%", "1.07")
    ]
    assert cpu[5].split()[3:] == ["ceiling", "13.33", "1.00"]


@pytest.mark.parametrize(("cpu_seconds", "warned"), [(0.95, False), (0.5, True)])
def test_a_machine_that_is_busy_with_other_programs_is_pointed_out(cpu_seconds, warned):
    runs = {GBA: [measurement(1.0)], PARAMETER_SERVER: [measurement(1.0)]}
    runs[CEILING] = [measurement(1.0, process=cpu_seconds)]
    text = benchmarking.render_speed([benchmarking.summarize(CELL, runs, cores=2)])
    assert ("got 0.50 of its core" in text) == warned


def test_cpu_seconds_are_those_of_the_process():
    before = benchmarking.cpu_seconds(os.getpid())
    used = time.process_time()
    while time.process_time() - used < 0.3:
        pass
    assert 0.25 <= benchmarking.cpu_seconds(os.getpid()) - before
    assert benchmarking.cpu_seconds(os.getpid()) <= time.process_time() + 0.02


def test_the_machine_is_described():
    facts = benchmarking.machine_facts()
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert len(facts["load_before"]) == 3
    assert facts["tensorflow"].startswith("2.")
    assert facts["cpu_model"]
