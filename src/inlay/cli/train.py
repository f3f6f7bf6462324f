"""`inlay train`: trains a task on data and publishes a version."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import flags, screen
from inlay.cli.cross_validation_output import describe_report, keep_label_errors, print_label_errors
from inlay.cli.lazy_packages import data, pipeline, training
from inlay.cli.screen import numbers
from inlay.settings import FitSettings
from inlay.store import Store

_FEW_DEV = 20  # dev rows below which one row is more than five points
NameOption = Annotated[str | None, typer.Option("--name", help="publish under this name; default: the task's name")]
PublishOption = Annotated[bool, typer.Option("--publish/--no-publish", help="publish the result in the store")]
ProbesOption = Annotated[
    str,
    typer.Option(
        "--probes",
        metavar="rows|hashed|none",
        help="what the version keeps for `inlay verify`: a few dev rows, only their hashes, or nothing",
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume/--restart", help="continue a stopped run, or start it again")]
ReportOption = Annotated[
    bool, typer.Option("--report/--no-report", help="write a report and a model card into the run's folder")
]
FoldsOption = Annotated[
    int | None,
    typer.Option(
        "--folds", metavar="K", min=2, help="cross-validate first: train K times, each time scoring the rows left out"
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="5m",
        help="time to spend: values for settings left open are tried beside the usual ones, and the best continues",
    ),
]


@flags.command_options(flags.RunFlags(), fit=(*flags.MEMORY, "spread"))
def train(
    run: flags.RunOptions,
    effort: FitSettings,
    budget: BudgetOption = None,
    show_examples: Annotated[int, typer.Option("--show-examples", metavar="N", help="print N encoded rows first")] = 0,
    folds: FoldsOption = None,
    publish: PublishOption = True,
    probes: ProbesOption = "rows",
    name: NameOption = None,
    resume: ResumeOption = True,
    report: ReportOption = True,
    log: flags.LogOption = None,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Train a task on a frozen backbone and publish it.

    Shows what was inferred from the data, trains, and prints the scores. A finished run is not trained again; a stopped
    one continues where it was. With --folds the same training is first cross-validated on all rows except test rows,
    which estimates the score better than a few dev rows. With --budget several candidates train together, the worse
    half is dropped again and again, and the best one is trained to the end.
    """
    training.check_probes(probes)
    pipeline.check_trackers(log or ())
    spend = pipeline.read_budget(budget, folds)
    opened = Store(store)
    asked = run.resolve(opened)
    ready = pipeline.prepare(asked, opened, device, name)
    pipeline.describe_run(ready.run, ready.backbone)
    examples = _show_examples(ready, show_examples, as_json=json)
    fit = dataclasses.replace(effort, restart=not resume)
    # the command that lists rows that may be labelled wrongly: `inlay baseline` with the options about the data
    of_data = {key: value for key, value in run.flags.items() if key.startswith("data.")}
    lister = shlex.join(["inlay", "baseline", *dataclasses.replace(run, preset=None, flags=of_data).words()])
    options = pipeline.TrainOptions(
        name, publish, probes, folds, fit, lister, writes_report=report, trackers=tuple(log or ())
    )
    finished = pipeline.train_and_publish(ready, asked, options, spend)
    if finished is None:  # the first process reports
        return
    errors = None if finished.validated is None else finished.validated.label_errors
    file = keep_label_errors(errors, Path(finished.about["folder"]))
    if json:
        budgeted = {} if spend is None else {"budget": spend.to_json()}
        screen.emit_json({**finished.to_json(), "examples": examples, **budgeted})
    else:
        screen.log()
        if spend is not None:
            _print_budget(spend)
        print_report(finished, store)
        if errors is not None:
            print_label_errors(errors, "the fold that left the row out", file)


def _print_budget(spent: pipeline.Budget) -> None:
    """Print the result of each candidate, and the time spent."""
    rows = []
    for index, item in enumerate(spent.candidates):
        values = ["-" if value is None else f"{value:g}" for value in item["values"].values()]
        end = item["message"] or "at its own end"
        ends = (screen.score(item["dev_metric"]), str(item["best_epoch"]), f"{end} *" if index == 0 else end)
        rows.append([*values, *ends])
    screen.emit_table([*numbers(*pipeline.COLUMNS.values(), f"dev {spent.metric}", "epoch"), "end"], rows)
    text = f"{screen.duration(spent.spent)} of {screen.duration(spent.seconds)}"
    if spent.seconds_before:
        text += f", of which {screen.duration(spent.seconds_before)} before it was stopped"
    if spent.was_finished:
        text = f"{screen.duration(spent.seconds)}, spent before"
    screen.emit()
    screen.emit_pairs({"budget": f"{text}; * is the candidate below"})
    screen.emit()


def _show_examples(ready: training.PreparedRun, num_rows: int, *, as_json: bool) -> list[dict[str, Any]]:
    """Print the first encoded training rows, to check the data by eye; return them as data."""
    if num_rows <= 0:
        return []
    task, tokenizer = ready.run.task, ready.backbone.tokenizer
    rows = task.train.take(range(min(num_rows, len(task.train))))
    encoded = data.encode_split(tokenizer, rows, ready.run.reading)
    examples = data.describe(tokenizer, encoded, rows.targets, task.labels, num_rows)
    for number, example in enumerate([] if as_json else examples, start=1):
        screen.emit(f"example {number} of {len(examples)} (line {rows.lines[int(encoded.owners[number - 1])]})")
        parts: dict[str, Sequence[Any]]
        parts = {"tokens": example.tokens, "ids": example.ids, "segments": example.segments or []}
        screen.emit_pairs({key: " ".join(map(str, values)) for key, values in parts.items()} | {"label": example.label})
        screen.emit()
    return [example.to_json() for example in examples]


def print_report(finished: pipeline.TrainReport, store: Path | None) -> None:
    """Print the report on a trained run, and the command that uses it."""
    ready, report = finished.ready, finished.about
    print_metrics(report["metrics"], report["metric"])
    screen.emit()
    pairs = {}
    if report["probe"] is not None and (ready.run.num_steps or ready.run.config.train.contrast):
        scores = ", ".join(f"{split} {screen.score(value)}" for split, value in report["probe"].items())
        pairs["probe"] = (
            f"{scores}: {report['metric']} of a linear model on the frozen backbone, where training started"
        )
    pairs["trained"] = f"{screen.duration(report['seconds'])}, best epoch {report['best_epoch']}"
    num_dev = len(ready.run.task.dev)
    if num_dev < _FEW_DEV and "folds" not in report:
        few = screen.count(num_dev, "dev row")
        pairs["few rows"] = f"{few} say little: `inlay train --folds 5` scores every row by a model that did not see it"
    if "folds" in report:
        pairs["folds"] = describe_report(report["folds"], ready.run.task)
    if (rising := report["still_rising"]) is not None:
        took = screen.duration(rising["seconds"])
        pairs["rising"] = f"the dev score was still rising: `--epochs {rising['epochs']}` would take about {took}"
    if report["reference"] is not None:
        name = report["reference"].partition("@")[0]
        pairs["published"] = f"{report['reference']} ({screen.size(report['size_bytes'])})"
        is_latest = report["latest"] in (None, report["reference"])
        if not is_latest:
            pairs["as before"] = f"`{name}` still means {report['latest']}, which was published after this one"
        if report["best"] not in (None, report["reference"]):
            means = f", `{name}` the new one" if is_latest else ""
            pairs["better"] = f"{report['best']}, on the same dev rows: `{name}@best` is that one{means}"
    pairs["run"] = report["folder"]
    pairs |= {name: report[name] for name in ("curve", "report") if report[name] is not None}
    if report["reference"] is not None:
        second = ' --pair "the second text"' if ready.run.task.train.pairs is not None else ""
        asked = name if is_latest else report["reference"]
        pairs["next"] = screen.repeat_store(f'`inlay predict {asked} "a text"{second}`', store).strip("`")
    screen.emit_pairs(pairs)


def print_metrics(metrics: Mapping[str, Mapping[str, float]], first: str) -> None:
    """Print a line per split, the task's own metric first: `test  accuracy 0.9892  f1 0.9600`."""
    width = max(map(len, metrics), default=0)
    for split, values in metrics.items():
        names = sorted(values, key=lambda name: name != first)
        scores = "  ".join(f"{name} {screen.score(values[name])}" for name in names)
        screen.emit(f"{split.ljust(width)}  {scores}")
