"""Would more rows help: the law is found again from its own points, and noise gets no forecast."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from inlay.errors import BadConfig, BadData, Diverged
from inlay.explore.learning_curve import (
    HARDLY,
    HELPS,
    NOTHING,
    CurvePoint,
    check_curve,
    check_picture,
    describe_curve,
    draw_learning_curve,
    fit_curve,
    make_curve_runs,
    read_points,
)
from inlay.settings import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import Result

SIZES = (50, 100, 200, 400, 800, 1600)


def points_of(law, noise=0.0, seed=0, draws=3):
    generator = np.random.default_rng(seed)
    return [
        CurvePoint(size, draw, float(law(size) + noise * generator.normal()), f"{size}-{draw}")
        for size in SIZES
        for draw in range(draws)
    ]


@pytest.fixture
def task(toy_task):
    made = toy_task(num_rows=64)
    return dataclasses.replace(made, train=made.train.take(np.arange(1600) % 64))


def test_the_law_is_found_from_its_own_points_and_foretells_more_rows(task):
    def law(rows):
        return 1 - (0.05 + 1.5 * rows**-0.5)

    curve = fit_curve(task, points_of(law))
    assert (curve.floor, curve.scale, curve.exponent) == pytest.approx((0.05, 1.5, 0.5), rel=0.02)
    assert [each.num_rows for each in curve.forecasts] == [3200, 6400]
    for each in curve.forecasts:
        assert each.score == pytest.approx(law(each.num_rows), abs=1e-4)
        assert each.gain == pytest.approx(law(each.num_rows) - law(1600), abs=1e-4)
    assert curve.verdict == HELPS
    assert describe_curve(curve).startswith("More rows would help: with 3,200 rows, twice as many, dev accuracy is")
    assert "More rows would help" in repr(curve)
    assert curve._repr_html_().count("forecast, ") == 2


def test_nine_of_ten_intervals_hold_the_true_score(task):
    def law(rows):
        return 1 - (0.05 + 1.5 * rows**-0.5)

    held = 0
    for seed in range(30):
        curve = fit_curve(task, points_of(law, 0.005, seed))
        held += curve.forecasts[0].low <= law(3200) <= curve.forecasts[0].high
    assert held >= 24, "of 30 intervals of 90%"


def test_an_error_that_falls_is_read_the_same_way(toy_task):
    task = toy_task(kind="regress", num_rows=1600)
    curve = fit_curve(task, points_of(lambda rows: 2 + 30 * rows**-0.5, 0.01))
    first = curve.forecasts[0]
    assert first.score == pytest.approx(2 + 30 * 3200**-0.5, abs=0.05)
    assert first.low < first.score < first.high
    assert first.gain > 0, "less is better"


def test_a_flat_curve_says_that_more_rows_hardly_help_and_noise_says_nothing(task):
    flat = fit_curve(task, points_of(lambda rows: 0.9, 0.0005))
    assert flat.verdict == HARDLY
    assert "hardly" in describe_curve(flat)
    wild = fit_curve(task, points_of(lambda rows: 0.7, 0.1))
    assert (wild.verdict, wild.forecasts) == (NOTHING, ())
    assert "scatter" in describe_curve(wild)
    few = fit_curve(task, [point for point in points_of(lambda rows: 0.9) if point.num_rows < 400])
    assert few.verdict == NOTHING
    assert "only 3 sizes" in describe_curve(few)


def test_too_few_rows_or_sizes_are_refused(toy_task):
    with pytest.raises(BadData, match="40 training rows are too few"):
        check_curve(toy_task(num_rows=40), 6)
    with pytest.raises(BadConfig, match="3 sizes are too few"):
        check_curve(toy_task(num_rows=400), 3)
    sizes = check_curve(toy_task(num_rows=400), 6)
    assert (sizes[0], sizes[-1], len(sizes)) == (16, 400, 6)


def test_shares_of_one_draw_lie_in_each_other_with_the_classes_shares_and_one_dev_set(toy_task, tiny_bert, tmp_path):
    task = toy_task(num_rows=300)
    config = RunConfig(method=MethodConfig(size=8), train=TrainConfig(epochs=1, lr=1e-3, max_length=16))
    made = make_curve_runs(task, config, tiny_bert, Store(tmp_path), num_sizes=5, num_draws=2)
    assert [size for size, _, _ in made] == [*check_curve(task, 5)] * 2
    assert len({run.id for _, _, run in made}) == 10
    assert all(run.task.dev is task.dev for _, _, run in made)
    first = [run.task.train for _, draw, run in made if draw == 0]
    for small, large in itertools.pairwise(first):
        assert set(small.lines) <= set(large.lines)
        assert abs(small.targets.mean() - task.train.targets.mean()) < 0.05
    assert set(first[0].lines) != set(next(run for _, draw, run in made if draw == 1).task.train.lines)
    results = [
        Result(run.id, "diverged" if number else "finished", 1, 0.5, [], 1.0, 0)
        for number, (_, _, run) in enumerate(made)
    ]
    assert len(read_points(made, results)) == 1
    with pytest.raises(Diverged, match="all 10 runs diverged"):
        read_points(made, [dataclasses.replace(result, status="diverged") for result in results])


def test_a_picture_is_svg_or_png_and_the_same_each_time(task, tmp_path):
    curve = fit_curve(task, points_of(lambda rows: 1 - rows**-0.4, 0.003))
    drawn = draw_learning_curve(curve)
    assert drawn.startswith(b"<?xml")
    assert drawn == draw_learning_curve(curve)
    assert draw_learning_curve(curve, ".png").startswith(b"\x89PNG")
    with pytest.raises(BadConfig, match=r"`curve\.gif` does not end in \.svg or \.png"):
        check_picture(tmp_path.__class__("curve.gif"))
