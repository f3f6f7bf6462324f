"""The cells of the fleet's bench, its picture, and the check beside the engine's own process."""

from __future__ import annotations

import dataclasses
import json
import operator

import fleet
import pytest
import report
from fleet_cell import Cell, ServiceTimes
from fleet_check import StallWatch, count_spreads, summarise
from fleet_replica import fit_times
from fleet_simulator import Fleet

from inlay.service.engine.placement import count_engines


@pytest.fixture(scope="module")
def replica():
    return json.loads((report.ROOT / "results" / "fleet" / "replica.json").read_text(encoding="utf8"))


def test_every_cell_can_be_simulated_and_drawn(replica, tmp_path):
    cells = {name: fleet.make_cell(replica, dict(settings), 0.01) for name, settings in fleet.plan_cells().items()}
    for cell in cells.values():
        assert cell.num_rows >= 100
        assert cell.rows_per_s > 0
    part = fleet.simulate(cells["slots 64 bounded"])
    assert part["replicas_per_1000_rows_s"] == pytest.approx(
        1000 / (0.6 * fleet.describe(replica)["capacity_rows_per_s"]), rel=0.01
    )
    parts = {name: part | {"num_replicas": cell.num_replicas} for name, cell in cells.items()}
    parts["scale 10 rendezvous"] = part | {"is_overloaded": True}
    fleet.draw({"parts": parts}, tmp_path / "fleet.json")
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
    assert "replicas" in (tmp_path / "fleet.svg").read_text(encoding="utf8")


def test_equal_loads_cost_the_same_whatever_the_batch_time(replica):
    cells = [fleet.make_cell(replica, {"target_ms": target_ms, "load": 0.5}, 0.01) for target_ms in (15, 240)]
    assert cells[0].rows_per_s == cells[1].rows_per_s
    assert cells[0].find_budget() < cells[1].find_budget()


def test_the_times_of_batches_are_found_again():
    times = ServiceTimes(pass_s=0.006, token_s=0.0002, row_s=0.0003, task_s=0.0005)
    shapes = [(1, 20, 1), (1, 60, 1), (4, 150, 1), (4, 140, 4), (8, 300, 2), (16, 600, 16), (16, 500, 1)]
    samples = [(*shape, times.batch_s(shape[0], shape[1], shape[2])) for shape in shapes]
    found = ServiceTimes(**fit_times(samples))
    for shape in ((2, 90, 1), (10, 400, 10)):
        assert found.batch_s(*shape) == pytest.approx(times.batch_s(*shape), rel=1e-6)


def test_a_stall_of_the_machine_shows_in_the_replicas_time(monkeypatch):
    clock = iter([0.0, 0.005, 1.0, 1.015, 2.0, 2.505])  # on time, 10 ms late, half a second late
    watch = StallWatch()
    monkeypatch.setattr("fleet_check.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("fleet_check.time.sleep", lambda seconds: None)
    with pytest.raises(StopIteration):
        watch._watch()
    assert watch.describe(10.0) == {"p50_ms": 1.0, "p99_ms": pytest.approx(49.02), "most_ms": 50.0}


def test_in_slow_motion_a_client_remembers_fewer_rows_and_spreads_tasks_as_if_it_did():
    plan = Fleet(Cell(ServiceTimes(0.01, 0.0), 100.0, "helped", 8, num_tasks=256, num_rows=4000))
    wanted = [count_engines(float(plan.popularity[task]), 8) for task in plan.tasks.tolist()]
    num_wrong = [sum(map(operator.ne, count_spreads(plan, slow), wanted)) for slow in (1.0, 50.0)]
    assert num_wrong[1] > 2 * num_wrong[0]


def test_errors_of_the_check_are_those_of_its_percentiles():
    checks = [
        {"measured_ms": [10, 20, 100], "simulated_ms": [11, 20, 80]},
        {"measured_ms": [10, 20, 100], "simulated_ms": [10, 20, 100]},
    ]
    found = summarise(checks)
    assert found["p50_mean"] == pytest.approx(0.05)
    assert found["p99_most"] == pytest.approx(0.2)


def test_more_loaders_shorten_the_wait_for_versions_that_are_far_away(replica):
    cell = fleet.make_cell(replica, {"num_replicas": 10, "far_s": 0.3, "placement": "two-choices"}, 0.1)
    few, many = (Fleet(dataclasses.replace(cell, num_loaders=number)).run().summarise()["p99_ms"] for number in (1, 32))
    assert many < 0.5 * few
