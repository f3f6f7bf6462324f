"""Tables say what was measured beside what was published, over the same columns, and name what is missing."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from pathlib import Path

import pytest
import synthetic

from inlay.studies.judge.bounds import MeanWithError, estimate, show
from inlay.studies.judge.claims import judge_claims
from inlay.studies.judge.coverage import list_missing
from inlay.studies.judge.published import Published, read_published
from inlay.studies.judge.row_differences import describe_ends, find_gaps, pair
from inlay.studies.judge.row_specs import find_number, list_rows, name_task
from inlay.studies.judge.scored_study import mean_tasks, score_study
from inlay.studies.report.tables import other_metric_tables, score_tables, settings_table, study_tables

PUBLISHED = Path(__file__).parents[2] / "studies" / "published"


def scored_of(name: str, records=None):
    study, made = synthetic.STUDIES[name]()
    return score_study(study, made if records is None else records, read_published(PUBLISHED, study.published))


def line_of(table, name: str) -> dict[str, str]:
    line = next(line for line in table.lines if line[0] == name)
    return dict(zip(table.columns, line, strict=True))


def test_the_published_mean_is_over_our_columns_not_the_printed_total():
    (table,) = score_tables(scored_of("glue"))
    printed = [60.5, 94.9, 89.3, 87.6, 86.7, 70.1]  # CoLA, SST-2, MRPC, STS-B, MNLI-m, RTE of BERT-large, full
    assert line_of(table, "BERT-large, full, published")["mean of 6"] == f"{statistics.fmean(printed):.1f}"
    assert line_of(table, "BERT-large, full, published")["WNLI (accuracy)"] == "–"
    ours = line_of(table, "adapters (64), published")
    own = statistics.fmean([56.9, 94.2, 89.6, 87.3, 85.3, 68.8])
    assert ours["less full fine-tuning"] == f"−{statistics.fmean(printed) - own:.1f}"


def test_wnli_has_a_column_and_is_not_in_the_mean():
    scored = scored_of("glue")
    assert "glue/wnli" in scored.tasks
    assert "glue/wnli" not in mean_tasks(scored)
    (table,) = score_tables(scored)
    assert "not in the mean: WNLI" in table.notes


def test_wnli_is_not_in_shares_and_totals_and_a_published_total_says_how_many_tasks_it_is_of():
    _, records = synthetic.glue()
    wide = [
        dataclasses.replace(record, trained_parameters=record.trained_parameters * 9) if record.task == "glue/wnli"
        else record
        for record in records
    ]  # fmt: skip
    (table,) = score_tables(scored_of("glue", wide))
    own = line_of(table, "adapters (64)")
    share = synthetic.adapter_parameters(64) / synthetic.BACKBONE
    assert own["% of backbone"] == f"{100 * share:.2f}"
    assert own["total, 6 tasks"] == f"{1 + 6 * share:.2f}×"
    assert own["trained"] == "2.42M"
    assert line_of(table, "BERT-large, full, published")["total, 6 tasks"] == "9× (9 tasks)"
    assert "not in trained parameters, their share and total: WNLI" in table.notes


def test_a_row_without_a_backbone_counts_none_in_its_total():
    scored = scored_of("extra")
    table = score_tables(scored)[0]
    total = next(line for line in table.lines if line[0] == "total, 13 tasks")
    whole = dict(zip(table.columns, total, strict=True))
    assert whole["TF-IDF, no transformer"] == f"{13 * 29_388 / synthetic.BACKBONE:.2f}×" == "0.00×"
    assert whole["`none` (not shared)"] == "1.36×"


def test_our_difference_stands_over_the_tasks_of_the_published_one():
    scored = scored_of("tradeoff")
    (table,) = score_tables(scored)
    mnli, full = (scored.rows[key]["glue/mnli"].scores for key in ("adapters-64", "full"))
    alone = show(estimate(mnli[seed] - full[seed] for seed in full), signed=True)
    found = line_of(table, "adapters (64)")
    assert found["less full fine-tuning, MNLI-m"] == alone
    one = line_of(table, "adapters (1)")
    assert one["less full fine-tuning, MNLI-m"] != one["less full fine-tuning"]
    printed = line_of(table, "adapters, m = 64, published")
    assert (printed["less full fine-tuning"], printed["less full fine-tuning, MNLI-m"]) == ("–", "−0.7")
    gaps = find_gaps(scored, "adapters-64")
    assert (show(gaps.ours.estimate, signed=True), gaps.over) == (alone, "MNLI-m")
    extra = scored_of("extra")
    gaps = find_gaps(extra, "none")
    assert gaps.over == "9 tasks"
    assert len(gaps.ours.by_task) == 9
    table = score_tables(extra)[0]
    line = next(line for line in table.lines if line[0] == "less full fine-tuning, 9 published")
    cells = dict(zip(table.columns, line, strict=True))
    assert cells["`none` (not shared)"] == show(gaps.ours.estimate, signed=True)
    assert cells["`none` (TF-Adapter-BERT), published"] == show(gaps.published, signed=True)


def test_differences_are_over_the_tasks_that_all_rows_have():
    _, records = synthetic.tradeoff()
    some = [record for record in records if not record.arm.startswith("top") or record.task == "glue/mnli"]
    scored = scored_of("tradeoff", some)
    (table,) = score_tables(scored)
    assert "less full fine-tuning" not in table.columns, "of one row over one task, of another over six"
    found = line_of(table, "adapters (64)")
    assert found["less full fine-tuning, MNLI-m"] == show(
        pair(scored.rows["adapters-64"], scored.rows["full"], ["glue/mnli"]).estimate, signed=True
    )
    none = [record for record in some if record.arm != "full" or record.task == "glue/rte"]
    (table,) = score_tables(scored_of("tradeoff", none))
    assert not any(column.startswith("less") for column in table.columns)
    assert "less full fine-tuning: not shown, as no task is in all rows" in table.notes


def test_differences_say_how_many_pairs_they_are_of():
    (table,) = score_tables(scored_of("glue"))
    # Two seeds of full fine-tuning, six tasks; WNLI is not averaged.
    assert line_of(table, "adapters (64)")["pairs"] == "12"
    assert line_of(table, "full fine-tuning")["pairs"] == "–"


def test_best_size_per_task_is_chosen_among_all_sizes_and_one_size_is_a_row_of_its_own():
    scored = scored_of("glue")
    assert list(scored.rows) == ["full", "adapters", "adapters-64"]
    assert scored.label("adapters") == "adapters (8–256)"
    for task in scored.tasks:
        assert scored.rows["adapters"][task].estimate.mean >= scored.rows["adapters-64"][task].estimate.mean
        assert scored.rows["adapters-64"][task].setting["size"] == 64


def test_the_best_of_a_single_size_is_shown_once():
    study, records = synthetic.glue()
    only = [record for record in records if record.axes.get("size") in (None, 64)]
    assert [row.key for row in list_rows(study, only)] == ["full", "adapters-64"]


def test_rows_are_found_by_what_was_trained_whatever_an_arm_is_called():
    bench, tasks = synthetic.Bench("tradeoff"), ["glue/rte"]
    methods = {
        "a": {"name": "houlsby", "size": 64},
        "b": {"name": "top", "layers": "-3:"},
        "c": {"name": "norms"},
        "d": {"name": "full"},
        "adapters-8": {"name": "pfeiffer", "size": 8},  # called as if it were Houlsby's, and is not
        "e": {"name": "houlsby"},
    }
    for arm, method in methods.items():
        axes = {"size": 16} if arm == "e" else {}
        bench.add(arm, tasks[0], 0.7, axes=axes, config={"method": {**method, **axes}, "train": {}})
    study = synthetic.study("tradeoff", tasks, {arm: arm for arm in methods})
    rows = {row.key: row for row in list_rows(study, bench.records)}
    assert {key: row.records[0].arm for key, row in rows.items()} == {
        "full": "d", "adapters-16": "e", "adapters-64": "a", "top-3": "b", "norms": "c", "adapters-8": "adapters-8",
    }  # fmt: skip
    assert [(rows[key].series, rows[key].number) for key in ("adapters-64", "top-3", "norms", "adapters-8")] == [
        ("adapters", 64), ("top", 3), ("norms", None), ("", None),
    ]  # fmt: skip
    assert rows["top-3"].label == "top 3 layers"
    assert find_number(study, rows["top-3"].records[0], "layers") == 3


def test_arms_of_one_kind_that_are_not_merged_keep_rows_of_their_own():
    bench = synthetic.Bench("methods")
    for arm in ("full", "full-slow"):
        bench.add(arm, "glue/rte", 0.7)
    study = synthetic.study("methods", ["glue/rte"], {"full": "full", "full-slow": "full, slow"})
    assert [row.key for row in list_rows(study, bench.records)] == ["full", "full-slow"]


def test_many_tasks_become_lines():
    table = next(table for table in score_tables(scored_of("extra")))
    assert table.columns[1] == "TF-IDF, no transformer"
    names = [line[0] for line in table.lines]
    assert "airline (accuracy)" in names
    assert "mean of 13" in names
    assert "mean of 9 published" in names


def test_means_of_other_tasks_stand_apart_and_only_their_differences_compare():
    tables = score_tables(scored_of("extra"))
    found = line_of(tables[-1], "adapters (64)")
    assert found["published, mean of its 17 tasks"] == "73.3"
    assert found["less full fine-tuning, published"] == "−0.4"


def test_glue_and_additional_tasks_have_tables_of_their_own():
    titles = [table.title for table in score_tables(scored_of("sharing"))]
    assert titles == ["glue, dev scores, settings chosen on dev", "extra, dev scores, settings chosen on dev"]


def test_accuracy_is_reported_where_the_paper_reports_it():
    bench = synthetic.Bench("uva")
    bench.add("full", "glue/cola", 0.5, dev={"accuracy": 0.8})
    study = synthetic.study("uva", ["glue/cola"], {"full": "full"})
    (table,) = score_tables(score_study(study, bench.records, read_published(PUBLISHED, "uva")))
    assert line_of(table, "full fine-tuning")["CoLA (accuracy)"] == "80.0"
    assert line_of(table, "BERT (full), published")["CoLA (accuracy)"] == "82.7"


def test_a_published_metric_may_be_anothers_on_some_tasks():
    bench = synthetic.Bench("features")
    for seed in range(2):
        bench.add("full", "glue/mrpc", 0.9, dev={"accuracy": 0.8}, seed=seed)
        bench.add("full", "glue/stsb", 0.8, dev={"pearson": 0.85}, seed=seed)
        bench.add("full", "glue/sst2", 0.9, seed=seed)
    study = synthetic.study("features", ["glue/sst2", "glue/mrpc", "glue/stsb"], {"full": "full fine-tuning"})
    scored = score_study(study, bench.records, read_published(PUBLISHED, "features"))
    table = score_tables(scored)[0]
    assert line_of(table, "full fine-tuning")["MRPC (accuracy)"] == "80.0 ± 0.0"
    assert line_of(table, "full fine-tuning")["STS-B (Pearson)"] == "85.0 ± 0.0"
    assert line_of(table, "BERT-base, fine-tuning, published")["MRPC (accuracy)"] == "84.8"
    assert other_metric_tables(scored) == []


def test_a_column_in_another_metric_than_ours_stands_beside_the_same_runs_in_that_metric():
    bench = synthetic.Bench("methods")
    for arm in ("full", "adapters-64"):
        bench.add(arm, "glue/mrpc", 0.9, dev={"accuracy": 0.85})
    study = synthetic.study("methods", ["glue/mrpc"], {"full": "full", "adapters-64": "adapters (64)"})
    (table,) = other_metric_tables(score_study(study, bench.records, read_published(PUBLISHED, "methods")))
    assert table.columns == ("", "MRPC (accuracy)")
    assert table.lines == (("adapters (64)", "85.0"), ("adapter-bert, published", "85.8"))
    assert table.published == {1}
    for name in ("glue", "multitask", "uva", "extra"):
        assert other_metric_tables(scored_of(name)) == [], name


def test_a_group_without_labelled_test_rows_says_dev_above_its_table():
    study, records = synthetic.sharing()
    tested = [dataclasses.replace(item, test=item.dev) if item.task.startswith("extra/") else item for item in records]
    scored = score_study(dataclasses.replace(study, report_on="test"), tested, Published(""))
    titles = [table.title for table in score_tables(scored)]
    assert titles == ["glue, dev scores, settings chosen on dev", "extra, test scores, settings chosen on dev"]


def test_a_task_without_labelled_test_rows_is_shown_on_dev_and_said_so():
    bench = synthetic.Bench("extra")
    bench.add("full", "extra/airline", 0.8, test={"accuracy": 0.6})
    bench.add("full", "glue/rte", 0.7)
    study = synthetic.study("extra", ["extra/airline", "glue/rte"], {"full": "full"}, report_on="test")
    scored = score_study(study, bench.records, Published(""))
    assert scored.rows["full"]["extra/airline"].estimate.mean == pytest.approx(60)
    assert scored.rows["full"]["glue/rte"].estimate.mean == pytest.approx(70)
    (table,) = score_tables(scored)
    assert "no labelled test rows, so dev: RTE" in table.notes


def test_a_half_done_study_has_a_table_and_names_what_is_missing():
    study, records = synthetic.glue()
    some = [record for record in records if record.task in ("glue/cola", "glue/rte") and record.arm == "adapters"]
    some += [record for record in records if record.task == "glue/rte" and record.arm == "full"]
    some[0] = dataclasses.replace(some[0], status="diverged")
    (table,) = score_tables(scored_of("glue", some))
    assert line_of(table, "full fine-tuning")["CoLA (Matthews)"] == "–"
    missing = list_missing(study, some)
    assert any("full on CoLA, SST-2, MRPC" in text for text in missing)
    assert any(text.startswith("1 run diverged: adapters on CoLA") for text in missing)
    assert list_missing(study, records) == []


def test_a_study_without_a_finished_run_has_no_table():
    _, records = synthetic.glue()
    none = [dataclasses.replace(record, status="failed") for record in records[:3]]
    assert study_tables(scored_of("glue", none)) == []
    assert study_tables(scored_of("ablation", [])) == []


def test_the_ablation_table_is_what_is_left_and_what_is_lost():
    _, records = synthetic.ablation()
    (table,) = study_tables(scored_of("ablation"))
    spans = [record.extra["spans"] for record in records if record.task == "glue/cola"]
    found = line_of(table, "CoLA")
    assert found["all removed"].startswith(f"{100 * statistics.fmean(item['0-11'] for item in spans):.1f}")
    lost = statistics.fmean(100 * (item["whole"] - item["11-11"]) for item in spans)
    assert found["lost: costliest single layer"].startswith(f"{lost:.1f}")
    assert found["all removed, published"] == "69.0"
    assert found["majority class"] == "69.1"


def test_numbers_are_written_with_a_true_minus_and_their_error():
    assert show(MeanWithError(-0.25, 0.1, 3), signed=True) == "−0.2 ± 0.1"
    assert show(MeanWithError(86.24)) == "86.2"
    assert show(None) == "–"
    assert name_task("extra/political-bias") == "political bias"


def test_what_was_chosen_is_shown_for_every_row_and_task():
    table = settings_table(scored_of("glue"))
    assert line_of(table, "adapters (64)")["RTE"] == "lr 3e-4, size 64"
    assert line_of(table, "adapters (8–256)")["of"] == "6"


def test_the_average_over_all_printed_columns_stands_beside_the_mean_over_tasks():
    scored = scored_of("multitask")
    first, average = study_tables(scored)
    printed = [53.96, 90.59, 84.24, 88.81, 87.73, 87.26, 80.69, 71.01]  # of HyperFormer++-small, without QQP and QNLI
    line = line_of(average, "HyperFormer++-small (multi), published")
    assert line["avg of 8"] == f"{statistics.fmean(printed):.1f}"
    once = [53.96, 90.59, 88.81, 87.26, 71.01, 80.69]
    assert line_of(first, "HyperFormer++-small (multi), published")["mean of 6"] == f"{statistics.fmean(once):.1f}"
    cells = scored.rows["hyperformer++"]
    ours = [statistics.fmean(cells[task].by_metric[metric].values()) for task, metric in [
        ("glue/cola", "matthews"), ("glue/sst2", "accuracy"), ("glue/mrpc", "accuracy"), ("glue/mrpc", "f1"),
        ("glue/stsb", "pearson"), ("glue/stsb", "spearman"), ("glue/mnli", "accuracy"), ("glue/rte", "accuracy"),
    ]]  # fmt: skip
    assert line_of(average, "hyperformer++")["avg of 8"].split(" ±")[0] == f"{statistics.fmean(ours):.1f}"


def test_our_average_of_the_published_kind_stands_beside_the_published_ablation():
    scored = scored_of("hyper-ablation")
    table = next(table for table in study_tables(scored) if table.title == "means beside the published")
    columns = [
        ("glue/cola", "matthews"), ("glue/sst2", "accuracy"), ("glue/mrpc", "accuracy"), ("glue/mrpc", "f1"),
        ("glue/stsb", "pearson"), ("glue/stsb", "spearman"), ("glue/mnli", "accuracy"), ("glue/rte", "accuracy"),
    ]  # fmt: skip
    by_seed = {
        key: [statistics.fmean(row[task].by_metric[metric][seed] for task, metric in columns) for seed in range(3)]
        for key, row in scored.rows.items()
    }
    whole = line_of(table, "hyperformer")
    assert whole["ours, avg of 8 columns"] == show(estimate(by_seed["hyperformer"]))
    assert whole["published, mean of its eleven GLUE columns"] == "82.5"
    part = line_of(table, "without-blocks")
    gaps = [ours - theirs for ours, theirs in zip(by_seed["without-blocks"], by_seed["hyperformer"], strict=True)]
    assert part["less hyperformer"] == show(estimate(gaps), signed=True)
    assert part["less hyperformer, published"] == f"−{82.47 - 68.37:.1f}"
    assert any("ours lacks QQP, QNLI" in note for note in table.notes)


def test_an_average_over_all_published_columns_lacks_none():
    study, records = synthetic.hyper_ablation()
    more = []
    for record in (record for record in records if record.task == "glue/sst2"):
        for task, dev in {"glue/qqp": {"accuracy": 0.9, "f1": 0.8}, "glue/qnli": {"accuracy": 0.85}}.items():
            metric = next(iter(dev))
            more.append(dataclasses.replace(record, id=f"{record.id}-{task}", task=task, metric=metric, dev=dev))
    study = dataclasses.replace(study, tasks=(*study.tasks, "glue/qqp", "glue/qnli"))
    scored = score_study(study, [*records, *more], read_published(PUBLISHED, study.published))
    table = next(table for table in study_tables(scored) if table.title == "means beside the published")
    assert "ours, avg of 11 columns" in table.columns
    assert not any("lacks" in note for note in table.notes)


def test_what_tasks_share_counts_once_in_the_total():
    table = study_tables(scored_of("multitask"))[0]
    assert line_of(table, "multi-full")["total, 6 tasks"] == "1.00×"
    assert line_of(table, "multi-full")["% of backbone"] == f"{100 / 6:.2f}"
    whole = 1 + 28_000_000 / synthetic.BACKBONE
    assert line_of(table, "hyperformer")["total, 6 tasks"] == f"{whole:.2f}×"


def test_a_run_of_several_tasks_has_one_setting_for_all_of_them():
    study, records = synthetic.multitask()
    other = [
        dataclasses.replace(
            item, id=f"other{item.id}", axes={"lr": 1.0}, config={"method": {}, "train": {"lr": 1.0}},
            dev={**item.dev, item.metric: item.dev[item.metric] + (0.1 if item.task == "glue/rte" else -0.1)},
        )
        for item in records
    ]  # fmt: skip
    scored = score_study(study, [*records, *other], Published(""))
    for key, row in scored.rows.items():
        if key != "single-adapters":
            assert {str(cell.setting) for cell in row.values()} == {"{}"}, "better on RTE alone is not better"
        assert {cell.num_settings for cell in row.values()} == {2}
    alone = scored.rows["single-adapters"]
    assert [task for task, cell in alone.items() if cell.setting == {"lr": 1.0}] == ["glue/rte"]


def test_one_network_through_a_sequence_is_one_network_under_one_setting():
    study, records = synthetic.stream()
    records = [item for item in records if item.arm == "sequence"]
    order = list(study.tasks)
    runs = []
    for lr, gain in ((1e-4, 0.0), (1e-3, -0.1)):  # the second is better on RTE alone
        for item in records:
            better = {item.metric: item.dev[item.metric] + (0.1 if gain and item.task == "glue/rte" else gain)}
            name, config = f"{lr}{item.seed}-{order.index(item.task)}", {"method": {}, "train": {"lr": lr}}
            extra = {**item.extra, "sequence": order}
            known = {"id": name, "axes": {"lr": lr}, "config": config, "dev": item.dev | better, "extra": extra}
            runs.append(dataclasses.replace(item, **known))
    scored = score_study(study, runs, Published(""))
    assert {cell.setting["lr"] for cell in scored.rows["sequence"].values()} == {1e-4}
    table = score_tables(scored)[0]
    share = (synthetic.BACKBONE - 590_592) / synthetic.BACKBONE
    assert line_of(table, "one network, fine-tuned in turn")[f"total, {len(order)} tasks"] == f"{share:.2f}×"
    assert "once for all tasks of a row: they are one sequence" in study_tables(scored)[0].notes[0]


def test_a_table_says_for_which_rows_settings_are_chosen_for_all_tasks_at_once():
    mixed = study_tables(scored_of("multitask"))[0].notes[0]
    joint = "adapters-multi, hyperformer, hyperformer++, multi-full"
    assert f"once for all tasks where they are one run ({joint}), else for each task" in mixed
    assert "once for all tasks of a row" in study_tables(scored_of("hyper-ablation"))[0].notes[0]
    assert "settings are chosen for each task on dev" in study_tables(scored_of("glue"))[0].notes[0]


def _tried(best: dict[str, float], rates=(1e-4, 3e-4), arm="adapters-64", **more):
    """The rows of a study in which each task was best with one of the rates."""
    study, bench = synthetic.study("glue", tuple(best), {arm: "adapters"}), synthetic.Bench("glue")
    for task, rate in best.items():
        for lr in rates:
            for seed in range(2):
                bench.add(arm, task, 0.8 if lr == rate else 0.7, axes={"lr": lr}, seed=seed, **more)
    return score_study(study, bench.records, Published(""))


SIX = ("glue/rte", "glue/mrpc", "glue/cola", "glue/stsb", "glue/sst2", "glue/mnli")


def test_rates_at_an_end_of_those_tried_are_named_where_tasks_agree_beyond_chance():
    ends = describe_ends(_tried(dict.fromkeys(SIX, 3e-4)), ["adapters-64"])
    assert ends == ["the best learning rate is the greatest that was tried: adapters (64) (all tasks)"]
    ends = describe_ends(_tried(dict.fromkeys(SIX, 1e-4)), ["adapters-64"])
    assert ends == ["the best learning rate is the least that was tried: adapters (64) (all tasks)"]
    five = _tried(dict.fromkeys(SIX, 3e-4) | {"glue/rte": 1e-4})
    assert describe_ends(five, ["adapters-64"]) == [], "five of six of two rates are so by chance once in nine times"
    assert describe_ends(five, ["adapters-64"], SIX[1:]) != [], "all of those that a claim is about"
    assert describe_ends(_tried(dict.fromkeys(SIX[:4], 3e-4)), ["adapters-64"]) == [], "four of four: once in sixteen"
    wnli = dict.fromkeys((*SIX[:4], "glue/wnli"), 3e-4)
    assert describe_ends(_tried(wnli), ["adapters-64"]) == [], "it counts in no mean"
    assert describe_ends(_tried(dict.fromkeys(SIX[:3], 3e-4), (1e-5, 1e-4, 3e-4)), ["adapters-64"]) != []
    assert describe_ends(_tried(dict.fromkeys(SIX, 3e-4), (3e-4,)), ["adapters-64"]) == [], "nothing else was tried"
    middle = _tried(dict.fromkeys(SIX, 3e-4), (1e-4, 3e-4, 1e-3))
    assert describe_ends(middle, ["adapters-64"]) == []
    assert not settings_table(middle).notes
    assert "greatest" in settings_table(_tried(dict.fromkeys(SIX, 3e-4))).notes[0]


def test_one_choice_for_all_tasks_of_a_run_is_no_agreement_of_several():
    joint = {"extra": {"joint": {"tasks": list(SIX), "run": "a"}}, "arm": "hyperformer"}
    scored = _tried(dict.fromkeys(SIX, 3e-4), **joint)
    assert describe_ends(scored, ["hyperformer"]) == []
    assert {cell.rates for cell in scored.rows["hyperformer"].values()} == {(1e-4, 3e-4)}


def test_a_claim_says_where_rates_of_its_rows_are_at_an_end():
    study = synthetic.study("tradeoff", SIX, {"norms": "norms", "full": "full"})
    bench = synthetic.Bench("tradeoff")
    for arm, best in (("norms", 3e-3), ("full", 1e-5)):
        for task, lr, seed in itertools.product(SIX, (1e-5, 3e-3), range(2)):
            bench.add(arm, task, 0.6 + 0.1 * (lr == best) + 0.001 * seed, axes={"lr": lr}, seed=seed)
    found = judge_claims(synthetic.CLAIMS, {"tradeoff": score_study(study, bench.records, Published(""))})
    sentence = next(item.verdict.sentence for item in found if item.claim.name == "norms-worse")
    assert "greatest that was tried: layer norms only (all tasks)" in sentence
    assert "least that was tried: full fine-tuning (all tasks)" in sentence
