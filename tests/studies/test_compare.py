"""Every study has its figures, drawn from what there is."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import synthetic

from inlay.errors import UnknownName
from inlay.studies.judge.bounds import MeanWithError
from inlay.studies.judge.extra_data import forgotten, read_ablations, read_spans, read_steps
from inlay.studies.judge.published import read_published
from inlay.studies.judge.row_differences import find_gaps
from inlay.studies.judge.row_specs import name_column
from inlay.studies.judge.scored_study import planned_keys, score_study
from inlay.studies.report import chart, curves, figures, tradeoff
from inlay.studies.report.chart import draw_series, legend, marks_for, new_figure, paper_style, tell_lone
from inlay.studies.report.figures import difference_lines, draw_figures, draw_spans, growth
from inlay.studies.report.tradeoff import common_tasks, draw_percentiles, percentiles

PUBLISHED = Path(__file__).parents[2] / "studies" / "published"
NAMES = {
    "tradeoff": ["tradeoff", "tradeoff-tasks"],
    "sharing": ["sharing-glue", "sharing-extra"],
    "stream": ["stream", "stream-forgetting"],
}


@pytest.fixture
def unfinished(monkeypatch):
    """What lines are drawn in, neither laid out nor written, which takes the most of the time."""
    kept = lambda figure, name, caption: SimpleNamespace(figure=figure, caption=caption)  # noqa: E731
    monkeypatch.setattr(chart, "finish", kept)


def scored_of(name: str, records=None, **more):
    study, made = synthetic.STUDIES[name]()
    study = dataclasses.replace(study, **more)
    return score_study(study, made if records is None else records, read_published(PUBLISHED, study.published))


@pytest.mark.parametrize("name", synthetic.STUDIES)
def test_every_study_has_its_figures_as_svg_and_png(name):
    drawings = draw_figures(scored_of(name))
    assert [drawing.name for drawing in drawings] == NAMES.get(name, [name])
    for drawing in drawings:
        assert ElementTree.fromstring(drawing.svg).tag.endswith("svg")
        assert drawing.png.startswith(b"\x89PNG")
        assert drawing.caption


@pytest.mark.parametrize("name", synthetic.STUDIES)
def test_a_study_that_has_just_begun_draws_what_it_can(name):
    study, records = synthetic.STUDIES[name]()
    for some in ([], [record for record in records if record.task == study.tasks[0]][:4]):
        for drawing in draw_figures(scored_of(name, some)):
            ElementTree.fromstring(drawing.svg)


def test_the_same_records_give_the_same_bytes():
    first, second = (draw_figures(scored_of("uva"))[0] for _ in range(2))
    assert first.svg == second.svg
    assert first.png == second.png


def test_a_kind_of_figure_may_be_asked_for_and_an_unknown_one_is_refused():
    report = synthetic.squad()[0].report
    bars, pie = (scored_of("squad", report=dataclasses.replace(report, figures=(kind,))) for kind in ("bars", "pie"))
    assert [item.name for item in draw_figures(bars)] == ["squad"]
    with pytest.raises(UnknownName, match="pie"):
        draw_figures(pie)


def test_percentiles_are_over_tasks_of_the_difference_to_full_fine_tuning():
    scored = scored_of("tradeoff")
    assert common_tasks(scored) == list(scored.tasks)
    band = percentiles(scored, "adapters", scored.tasks)[6]
    full, row = scored.rows["full"], scored.rows["adapters-64"]
    gaps = sorted(row[task].estimate.mean - full[task].estimate.mean for task in scored.tasks)
    assert len(gaps) == 6
    # Of six sorted values the 20th percentile is the second, the 80th the fifth, the median between the middle two.
    assert (band.low, band.middle, band.high) == pytest.approx((gaps[1], (gaps[2] + gaps[3]) / 2, gaps[4]))
    assert band.parameters == row["glue/rte"].trained_parameters


@pytest.mark.usefixtures("unfinished")
def test_a_point_with_fewer_tasks_is_left_out_of_the_percentiles():
    _, records = synthetic.tradeoff()
    some = [record for record in records if not (record.arm == "adapters-8" and record.task == "glue/rte")]
    scored = scored_of("tradeoff", some)
    assert len(common_tasks(scored)) == 6
    bands = percentiles(scored, "adapters", common_tasks(scored))
    assert [band is None for band in bands] == [number == 3 for number in range(10)], "the line breaks there"
    assert "as they were not run on all of these tasks: adapters (8)." in draw_percentiles(scored).caption


@pytest.mark.usefixtures("unfinished")
def test_curves_of_all_kinds_are_over_the_same_tasks():
    _, records = synthetic.tradeoff()
    # Of the top layers only MNLI: one task for all would be left, so these are left out.
    few = scored_of("tradeoff", [item for item in records if item.arm[:3] != "top" or item.task == "glue/mnli"])
    assert len(common_tasks(few)) == 6
    assert set(percentiles(few, "top", common_tasks(few))) == {None}
    assert "not run on all of these tasks: top 1 layer, top 2 layers" in draw_percentiles(few).caption
    # All but RTE: the other five are common to all.
    most = scored_of("tradeoff", [item for item in records if item.arm[:3] != "top" or item.task != "glue/rte"])
    assert "glue/rte" not in common_tasks(most)
    for kind in ("adapters", "top", "norms"):
        assert {band.num_tasks for band in percentiles(most, kind, common_tasks(most))} == {5}
    caption = draw_percentiles(most).caption
    assert "over 5 tasks (CoLA, SST-2, MRPC, STS-B, MNLI-m)" in caption
    assert "Left out, as rows lack them: RTE." in caption


def lines_of(axes) -> list[list[float]]:
    """The x values of the lines that lead through points."""
    return [list(line.get_xdata()) for line in axes.get_lines() if len(line.get_xdata()) > 1]


def test_a_line_breaks_where_a_planned_point_is_missing():
    mark = marks_for(["adapters"])["adapters"]
    with paper_style("test"):
        axes = new_figure(4, 3).add_subplot()
        draw_series(
            axes, [(1, MeanWithError(3.0, 0.1)), (2, MeanWithError(4.0)), None, (4, MeanWithError(5.0, 0.1))], mark
        )
    assert lines_of(axes) == [[1, 2]]
    points = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert [list(point.get_xdata()) for point in points if point.get_markeredgecolor() == mark.colour] == [[2]], "pale"


@pytest.mark.usefixtures("unfinished")
def test_planned_points_are_those_of_the_study_file():
    study, records = synthetic.init()
    grid = tuple({"init_std": scale, "lr": 3e-4} for scale in (1e-7, 1e-3, 1e-2, 1e-1, 1.0))
    arm = dataclasses.replace(study.arms["adapters-64"], grid=grid)
    some = [item for item in records if item.axes["init_std"] in (1e-7, 1e-3, 0.1, 1.0)]
    drawn = curves.draw_init(scored_of("init", some, arms={"adapters-64": arm}))
    assert lines_of(drawn.figure.axes[0])[:2] == [[1e-7, 1e-3], [0.1, 1.0]]
    study, records = synthetic.squad()
    no_64 = scored_of("squad", [item for item in records if item.arm != "adapters-64"])
    assert planned_keys(no_64, "adapters") == [f"adapters-{size}" for size in (2, 8, 64, 256)]
    named = scored_of("squad", [dataclasses.replace(item, arm=item.arm.replace("-64", "-small")) for item in records])
    assert planned_keys(named, "adapters") == [f"adapters-{size}" for size in (2, 8, 64, 256)], "no number"
    drawn = tradeoff.draw_panels(no_64)
    counts = [synthetic.adapter_parameters(size) for size in (2, 8)]
    assert counts in lines_of(drawn.figure.axes[0])


@pytest.mark.usefixtures("unfinished")
def test_no_marker_of_the_init_figure_is_clipped():
    heights = []
    for axes in curves.draw_init(scored_of("init")).figure.axes:
        low, high = axes.get_ylim()
        heights.append(high - low)
        reach = 2.5 / 72 / 2.0 * (high - low)  # half a marker of 5 points, in a panel of at least two inches
        assert axes.dataLim.y1 + reach <= high
        assert axes.dataLim.y0 - reach >= low
    assert heights[0] == pytest.approx(heights[1])


def test_the_published_mean_in_a_figure_is_that_of_the_published_tasks_above_it():
    """Two backbones were published: tasks and mean are of the same one, which the sentences are about too."""
    scored = scored_of("multitask")
    keys = [key for key in scored.rows if key != scored.reference]
    *tasks, (_, _, means) = difference_lines(scored, keys, scored.reference)
    assert means
    for key, mean in means.items():
        of_tasks = [published[key] for _, _, published in tasks]
        assert mean == pytest.approx(sum(of_tasks) / len(of_tasks))
        assert mean == pytest.approx(find_gaps(scored, key).published)


def learnt(records, steps=800):
    """Joint records with a curve of four scores, of which the last is the record's."""
    return [
        dataclasses.replace(
            item,
            curve=[[epoch, item.dev[item.metric] - 0.1 * (4 - epoch)] for epoch in range(1, 5)],
            config=item.config | {"joint": {"steps": steps}, "train": item.config["train"] | {"epochs": 4}},
        )
        for item in records
    ]


@pytest.mark.usefixtures("unfinished")
def test_learning_is_drawn_of_the_runs_of_several_tasks_at_their_chosen_settings():
    _, records = synthetic.multitask()
    worse = [_with_large_steps(item) for item in records if item.arm == "hyperformer"]
    scored = scored_of("multitask", learnt(records + worse))
    figure = curves.draw_learning(scored).figure
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [*(f"{name_column(task, scored.metric(task))}" for task in scored.tasks), "mean of 6 tasks"]
    rows = [key for key in scored.rows if key != "single-adapters"]
    for axes, tasks in zip(figure.axes, [*([task] for task in scored.tasks), scored.tasks], strict=True):
        assert lines_of(axes) == [[200, 400, 600, 800]] * len(rows), "steps, not epochs"
        lines = [line for line in axes.get_lines() if len(line.get_xdata()) > 1]
        for key, line in zip(rows, lines, strict=True):
            last = numpy.mean([scored.rows[key][task].estimate.mean for task in tasks])
            assert line.get_ydata() == pytest.approx([last - 30, last - 20, last - 10, last]), key


def _with_large_steps(item):
    """The same at another learning rate, another run that comes out worse."""
    joint, lr = item.extra["joint"], {"lr": 1.0}
    return dataclasses.replace(
        item,
        id=f"x{item.id}",
        axes=lr,
        dev={item.metric: 0.1},
        config=item.config | {"train": item.config["train"] | lr},
        extra=item.extra | {"joint": joint | {"run": f"x{joint['run']}"}},
    )


@pytest.mark.usefixtures("unfinished")
def test_learning_is_not_drawn_where_there_is_one_score_or_none():
    _, records = synthetic.multitask()
    assert curves.draw_learning(scored_of("multitask", records)) is None, "no steps are known"
    ends = [dataclasses.replace(item, curve=item.curve[-1:]) for item in learnt(records)]
    assert curves.draw_learning(scored_of("multitask", ends)) is None
    lost = [dataclasses.replace(item, curve=[[1, None], *item.curve[1:]]) for item in learnt(records)]
    (first, *_) = curves.draw_learning(scored_of("multitask", lost)).figure.axes
    assert lines_of(first)[0] == [400, 600, 800]
    (first, *_) = curves.draw_learning(scored_of("multitask", learnt(records, steps=801))).figure.axes
    assert lines_of(first)[0] == [201, 402, 603, 801], "the last part is the shorter one"


@pytest.mark.usefixtures("unfinished")
def test_figures_say_which_points_are_of_one_seed():
    _, records = synthetic.sizes()
    one = [item for item in records if item.seed == 0]
    assert "one seed" not in curves.draw_sizes(scored_of("sizes")).caption
    assert "All (pale) are of one seed" in curves.draw_sizes(scored_of("sizes", one)).caption
    assert tell_lone([MeanWithError(1.0), MeanWithError(1.0, 0.1)]).startswith(" Pale: of one seed")


def test_the_heat_map_has_the_first_ablated_layer_on_y_and_the_last_on_x():
    study, records = synthetic.ablation(num_layers=4)
    item = next(found for found in read_ablations(records, study.tasks) if found.task == "glue/mnli")
    with paper_style("test"):
        axes = new_figure(4, 4).add_subplot()
        values = numpy.asarray(draw_spans(axes, item, 60.0).get_array().filled(numpy.nan))
        assert axes.yaxis_inverted()  # the first layer at the top, all removed at the top right
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("last ablated layer", "first ablated layer")
    spans = [record.extra["spans"] for record in records if record.task == "glue/mnli"]
    lost = numpy.mean([(found["whole"] - found["1-3"]) / found["whole"] for found in spans])
    assert values[1, 3] == pytest.approx(100 * lost)
    assert numpy.isnan(values[3, 1])


def test_spans_are_read_however_json_has_them():
    assert read_spans({"0-11": 0.37, "none": 0.84}) == {(0, 11): 0.37, None: 0.84}
    assert read_spans([[0, 11, 0.37]]) == {(0, 11): 0.37}


def test_the_ablation_is_that_of_the_setting_best_on_dev():
    bench = synthetic.Bench("ablation")
    for lr, whole in {1e-4: 0.8, 1e-3: 0.7}.items():
        for seed in range(2):
            spans = {"none": whole, "0-0": whole - 0.1}
            extra = {"spans": spans}
            bench.add("adapters-64", "glue/cola", whole, metric="accuracy", axes={"lr": lr}, seed=seed, extra=extra)
    (item,) = read_ablations(bench.records, ["glue/cola"])
    assert item.whole == pytest.approx({0: 80.0, 1: 80.0})
    assert item.decrease(0, 0).mean == pytest.approx(10.0)


def test_a_repeat_on_other_hardware_counts_once_in_ablations_and_steps():
    study, records = synthetic.ablation(num_layers=2)
    again = [
        dataclasses.replace(item, hardware="CPU", extra={"spans": dict.fromkeys(item.extra["spans"], 0.5)})
        for item in records
        if item.seed == 0
    ]
    for task in study.tasks:
        before, after = (
            next(found for found in read_ablations(some, study.tasks) if found.task == task)
            for some in (records, records + again)
        )
        assert after.whole[0] == pytest.approx((before.whole[0] + 50) / 2)
        assert after.spans[0, 1][0] == pytest.approx((before.spans[0, 1][0] + 50) / 2)
        assert after.spans[0, 1][1] == before.spans[0, 1][1]
    study, records = synthetic.stream()
    own = [record for record in records if record.arm == "sequence"]
    twins = [dataclasses.replace(item, hardware="CPU") for item in own if item.seed == 0]
    for once, twice in zip(read_steps(own, study.tasks), read_steps(own + twins, study.tasks), strict=True):
        assert once.scores == twice.scores


def test_growth_is_a_network_a_task_or_one_backbone_and_its_parts():
    study, _ = synthetic.stream()
    lines = growth(scored_of("stream"), study.tasks)
    assert lines["full"] == [1, 2, 3, 4, 5]
    share = 2_419_202 / synthetic.BACKBONE
    assert lines["adapters-64"] == pytest.approx([1 + share * count for count in range(1, 6)])
    assert "sequence" not in lines


def test_what_is_forgotten_is_the_score_when_learnt_less_the_last():
    study, records = synthetic.stream()
    lost = forgotten(read_steps([record for record in records if record.arm == "sequence"], study.tasks))
    assert lost["glue/cola"] == pytest.approx(48.0)  # twelve points a step, four steps
    assert study.tasks[-1] not in lost


def test_embeddings_are_drawn_beside_what_training_added_where_their_start_is_known(monkeypatch):
    kept = lambda figure, name, caption: SimpleNamespace(figure=figure, caption=caption)  # noqa: E731
    monkeypatch.setattr(chart, "finish", kept)
    monkeypatch.setattr(chart, "hold_labels", lambda axes, points: None)  # which takes the most of the time
    _, records = synthetic.embeddings()
    bare = [dataclasses.replace(item, extra={**item.extra, "embedding_start": None}) for item in records]
    for given, num_rows in ((records, 2), (bare, 1)):
        drawing = figures.draw_embeddings(scored_of("embeddings", given))
        titles = [axes.get_title() for axes in drawing.figure.axes]
        assert len(titles) == 3 * num_rows
        assert [title.startswith("moved by") for title in titles] == [False] * 3 + [True] * 3 * (num_rows - 1)
        assert ("what training added" in drawing.caption) is (num_rows == 2)


def test_rows_of_a_figure_never_share_a_mark():
    keys = ["full", "adapters", "adapters-64", "none", "top", *(f"arm{number}" for number in range(5))]
    marks = marks_for(keys)
    assert len({(mark.colour, mark.shape) for mark in marks.values()}) == len(keys)


def test_a_legend_is_as_wide_as_its_figure_at_most():
    names = ["mean", "mean, published (BERT-large, 8 tasks)", "CoLA", "MRPC", "RTE", "MNLI-m", "SST-2", "one seed"]
    with paper_style("test"):
        figure = new_figure(6.6, 3)
        figure.add_subplot()
        legend(figure, [(name, marks_for(["full"])["full"], False) for name in names])
        figure.canvas.draw()
        box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
