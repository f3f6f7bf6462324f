"""`inlay train`: data and settings in, a published version out."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import flags, screen
from inlay.cli.backbone import check_device_name, open_backbone
from inlay.cli.budget import read_budget
from inlay.cli.folds import cross_validate, describe_report
from inlay.cli.progress import fit_runs
from inlay.cli.rooms import data, model, training
from inlay.settings import FitSettings, MethodConfig, RunConfig
from inlay.store import Store

NameOption = Annotated[str | None, typer.Option("--name", help="publish under this name; default: the task's")]
PublishOption = Annotated[bool, typer.Option("--publish/--no-publish", help="put the result in the store")]
ProbesOption = Annotated[
    str,
    typer.Option(
        "--probes",
        metavar="rows|hashed|none",
        help="keep a few dev rows in the version to prove it, only hashes of them, or nothing",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume/--restart", help="go on where a stopped run left off, or begin it anew")
]
FoldsOption = Annotated[
    int | None,
    typer.Option("--folds", metavar="K", min=2, help="cross-validate too: train K times, score the rows left out"),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="5m",
        help="spend this long: settings that were left open are tried beside the usual ones, and the best goes on",
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
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Train a task on a frozen backbone and publish it.

    Shows what was inferred from the data, trains, and prints the score. A run that was finished before is not trained
    again; one that was stopped goes on where it was. With --folds the same training is first cross-validated on all
    rows that are no test rows, which tells more than a few dev rows. With --budget several candidates train together,
    the worst are halved away, and the best goes on alone.
    """
    training.check_probes(probes)
    spend = read_budget(budget, folds)
    opened = flags.open_store(store)
    asked = run.resolve(opened)
    ready = prepare(asked, opened, device, name)
    describe_run(ready.run, ready.backbone)
    examples = _show_examples(ready, show_examples, as_json=json)
    settings = dataclasses.replace(effort, restart=not resume)
    validated = None if folds is None else cross_validate(ready, folds, settings)
    if spend is None:
        was_finished = ready.is_finished
        result = fit_runs([ready.run], ready.backbone, ready.runs_folder, settings)[0]
    else:
        ready, result, was_finished = spend.train(ready, asked, settings)
    if not screen.is_main_process():  # the first process reports
        return
    ready = dataclasses.replace(ready, probes=probes)
    scores = None if validated is None else validated.scores
    report = finish_run(ready, result, name, publish=publish, folds=scores)
    folder = ready.runs_folder / result.run_id
    is_balanced = ready.run.config.train.class_weights == "balanced"
    found = data.describe_unpredicted(ready.run.task, result.unpredicted, is_balanced=is_balanced)
    if validated is not None:
        report |= validated.keep(folder)  # it lists the rows that may be labelled wrongly
    else:
        found += _describe_suspects(result, run)
    for note in found:
        screen.detail(note)
    if json:
        notes = [*ready.run.task.notes, *ready.run.start.notes, *ready.run.notes, *found]
        more = {"was_finished": was_finished, "notes": notes, "examples": examples}
        more |= {} if spend is None else {"budget": spend.to_json()}
        screen.emit_json({**report, **more})
    else:
        screen.log()
        if spend is not None:
            spend.put()
        put_report(ready, report, store)
        if validated is not None:
            validated.put_label_errors(folder)


def prepare(config: RunConfig, store: Store, device: str, name: str | None = None) -> training.PreparedRun:
    """Read the data, load the backbone and resolve every setting; report what was found."""
    store.check_name(name or config.task)
    check_device_name(device)
    task = load_task(config)
    model.resolve_method(config.method)  # an unknown name is refused before the backbone is loaded
    backbone = open_backbone(config.backbone, device)
    has_copy = model.find_method(config.method.name).is_finetuned
    use = "; a copy of its weights is trained for the task" if has_copy else ", frozen"
    screen.detail(f"backbone: {backbone.name}, {screen.count(backbone.num_parameters)} parameters{use}")
    return training.PreparedRun(training.make_run(task, config, backbone, store), backbone, store)


def load_task(config: RunConfig) -> data.Task:
    """Read the data, and report what was found."""
    task = data.load_task(config.data, config.task)
    screen.log(f"task {task.name} from {config.data.source}", "bold")
    for note in task.notes:
        screen.detail(note)
    return task


def describe_run(run: training.Run, backbone: model.Backbone) -> None:
    """Report the parameters that a run adds, and how it is trained."""
    added = run.spec.count_parameters(backbone.anatomy)
    train, method, head = run.config.train, run.config.method, run.spec.head
    for text in (*run.start.notes, *run.notes):
        screen.detail(text)
    part = screen.share(added, backbone.num_parameters)
    usual = dataclasses.asdict(model.resolve_method(MethodConfig(method.name)))
    described = screen.describe_method(dataclasses.asdict(method), usual)
    screen.detail(f"method: {described} adds {screen.count(added)} parameters, {part} of them")
    width = f"windows of at most {run.max_length} tokens" if head.pooling == "tokens" else f"{head.pooling} pooling"
    width += " of each text of a pair (towers)" if head.has_towers else ""
    parts = ["the head begins as a linear probe"] if train.head_start == "probe" else []
    if train.contrast:
        parts.append(f"a contrastive start of {screen.count(train.contrast, 'step')}")
    if train.num_epochs:
        epochs, steps = screen.count(train.num_epochs, "epoch"), screen.count(run.steps_per_epoch, "step")
        parts.append(f"at most {epochs} of {steps}")
    if train.contrast or train.num_epochs:
        parts.append(f"{train.batch_size} rows each, lr {train.lr:g}")
    screen.detail(f"training: {', '.join(parts)}, {width}, on {backbone.device}")


def _describe_suspects(result: training.Result, given: flags.RunOptions) -> list[str]:
    """Return a note that some rows may be labelled wrongly, with the command that lists them."""
    of_rows = {key: value for key, value in given.flags.items() if key.startswith("data.")}
    words = dataclasses.replace(given, preset=None, flags=of_rows).words()
    suspects = next(iter(result.history), {}).get("suspects", {})
    return data.describe_suspects(suspects, shlex.join(["inlay", "baseline", *words]))


def _show_examples(ready: training.PreparedRun, num_rows: int, *, as_json: bool) -> list[dict[str, Any]]:
    """Show the first encoded training rows, so that people can check their data; return them as data."""
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


def finish_run(
    ready: training.PreparedRun,
    result: training.Result,
    name: str | None,
    *,
    publish: bool,
    folds: training.FoldScores | None = None,
) -> dict[str, Any]:
    """Publish a trained run, if asked for, and return its report as data."""
    training.check_trained(result)
    version = None
    if publish:
        tested = "scoring the test rows and " if ready.run.task.test is not None else ""
        with screen.working(f"publishing: {tested}answering the probes"):
            version = training.publish_result(ready, result, name=name, folds=folds)
    return training.report_run(ready, result, version)


def put_report(ready: training.PreparedRun, report: Mapping[str, Any], store: Path | None) -> None:
    """Print the report on a trained run, with the command to use it next."""
    put_metrics(report["metrics"], report["metric"])
    screen.emit()
    pairs = {}
    if report["probe"] is not None and (ready.run.num_steps or ready.run.config.train.contrast):
        scores = ", ".join(f"{split} {screen.score(value)}" for split, value in report["probe"].items())
        pairs["probe"] = f"{scores}: {report['metric']} of a linear model on the frozen backbone, where it began"
    pairs["trained"] = f"{screen.duration(report['seconds'])}, best epoch {report['best_epoch']}"
    if "folds" in report:
        pairs["folds"] = describe_report(report["folds"], ready.run.task)
    if (rising := report["still_rising"]) is not None:
        took = screen.duration(rising["seconds"])
        pairs["rising"] = f"dev was still rising: `--epochs {rising['epochs']}` would take about {took}"
    if report["reference"] is not None:
        name = report["reference"].partition("@")[0]
        pairs["published"] = f"{report['reference']} ({screen.size(report['size_bytes'])})"
        if report["best"] not in (None, report["reference"]):
            pairs["better"] = f"{report['best']}, on the same dev rows: `{name}@best` means it, `{name}` the new one"
    pairs |= {"run": report["folder"], **({} if report["curve"] is None else {"curve": report["curve"]})}
    if report["reference"] is not None:
        where = "" if store is None else f" --store {shlex.quote(str(store))}"
        second = ' --pair "the second text"' if ready.run.task.train.pairs is not None else ""
        pairs["next"] = f'inlay predict {name} "a text"{second}{where}'
    screen.emit_pairs(pairs)


def put_metrics(metrics: Mapping[str, Mapping[str, float]], first: str) -> None:
    """Print a line per split, the task's own metric first: `test  accuracy 0.9892  f1 0.9600`."""
    width = max(map(len, metrics), default=0)
    for split, values in metrics.items():
        names = sorted(values, key=lambda name: name != first)
        scores = "  ".join(f"{name} {screen.score(values[name])}" for name in names)
        screen.emit(f"{split.ljust(width)}  {scores}")
