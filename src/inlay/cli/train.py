"""`inlay train`: data and settings in, a published version out."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from inlay.cli import screen
from inlay.cli.backbone import check_device_name, open_backbone
from inlay.cli.flags import (
    MEMORY,
    DeviceOption,
    JsonOption,
    RunFlags,
    RunOptions,
    StoreOption,
    command_options,
    open_store,
)
from inlay.errors import Diverged, UnknownName
from inlay.settings.fit_settings import FitSettings
from inlay.store import Store, Version

if TYPE_CHECKING:
    from inlay.cli.folds import Validated
    from inlay.data import Task
    from inlay.model import Backbone
    from inlay.settings.run_config import RunConfig
    from inlay.training import Result, Run
    from inlay.training.recipe.halving import Referee
    from inlay.training.run.joint import AnyRun

NameOption = Annotated[str | None, typer.Option("--name", help="publish under this name; default: the task's")]
PublishOption = Annotated[bool, typer.Option("--publish/--no-publish", help="put the result in the store")]
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


class Ready(Protocol):
    """Where runs are trained, and on what."""

    @property
    def backbone(self) -> Backbone: ...

    @property
    def runs_folder(self) -> Path: ...


@dataclass(frozen=True)
class Prepared:
    """A run ready to be trained."""

    run: Run
    backbone: Backbone
    store: Store
    own_folder: Path | None = None
    """where its folder is, if not among those of all runs"""

    @property
    def runs_folder(self) -> Path:
        """Where the folders of all runs are."""
        return self.own_folder or self.store.run_folder(self.run.id).parent


@command_options(RunFlags(), fit=(*MEMORY, "spread"))
def train(
    run: RunOptions,
    effort: FitSettings,
    budget: BudgetOption = None,
    show_examples: Annotated[int, typer.Option("--show-examples", metavar="N", help="print N encoded rows first")] = 0,
    folds: FoldsOption = None,
    publish: PublishOption = True,
    name: NameOption = None,
    resume: ResumeOption = True,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Train a task on a frozen backbone and publish it.

    Shows what was inferred from the data, trains, and prints the score. A run that was finished before is not trained
    again; one that was stopped goes on where it was. With --folds the same training is first cross-validated on all
    rows that are no test rows, which tells more than a few dev rows. With --budget several candidates train together,
    the worst are halved away, and the best goes on alone.
    """
    from inlay.cli.budget import read_budget

    spend = read_budget(budget, folds)
    kept = open_store(store)
    asked = run.resolve(kept)
    ready = prepare(asked, kept, device, name)
    describe_run(ready.run, ready.backbone)
    examples = _show_examples(ready, show_examples, as_json=json)
    effort = dataclasses.replace(effort, restart=not resume)
    validated = None if folds is None else _cross_validate(ready, folds, effort)
    if spend is None:
        was_finished = is_finished(ready.run, ready)
        result = fit_runs([ready.run], ready, effort)[0]
    else:
        ready, result, was_finished = spend.train(ready, asked, effort)
    if not screen.is_main_process():  # the first process has the last word
        return
    if not result.tensors or result.status == "diverged":
        raise Diverged(f"run `{result.run_id}` {result.message}", "try a smaller `--lr`, such as a third of it")
    version = publish_run(ready, result, name, validated) if publish else None
    report, folder = report_run(ready, result, version), ready.runs_folder / result.run_id
    report |= {} if validated is None else validated.keep(folder)
    found = _describe_result(ready.run, result)
    found += [] if validated is not None else _describe_suspects(result, run)  # folds list them
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


def prepare(config: RunConfig, store: Store, device: str, name: str | None = None) -> Prepared:
    """Read the data, load the backbone and resolve every setting, saying what was found."""
    store.check_name(name or config.task)
    check_device_name(device)
    task = load_task(config)
    from inlay.model.bank.methods import find_method, resolve_method
    from inlay.training import make_run

    resolve_method(config.method)  # a name that is in no table is refused before the backbone is loaded
    backbone = open_backbone(config.backbone, device)
    has_copy = find_method(config.method.name).is_finetuned
    use = "; a copy of its weights is trained for the task" if has_copy else ", frozen"
    screen.detail(f"backbone: {backbone.name}, {screen.count(backbone.num_parameters)} parameters{use}")
    return Prepared(make_run(task, config, backbone, store), backbone, store)


def load_task(config: RunConfig) -> Task:
    """Read the data, saying what was found."""
    from inlay import data

    task = data.load_task(config.data, config.task)
    screen.log(f"task {task.name} from {config.data.source}", "bold")
    for note in task.notes:
        screen.detail(note)
    return task


def describe_run(run: Run, backbone: Backbone) -> None:
    """Say which parameters a run adds, and how it is trained."""
    from inlay.model.bank.methods import resolve_method
    from inlay.settings.run_config import MethodConfig

    added = run.spec.count_parameters(backbone.anatomy)
    train, method, head = run.config.train, run.config.method, run.spec.head
    for text in (*run.start.notes, *run.notes):
        screen.detail(text)
    part = screen.share(added, backbone.num_parameters)
    usual = dataclasses.asdict(resolve_method(MethodConfig(method.name)))
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


def _cross_validate(ready: Prepared, num_folds: int, settings: FitSettings) -> Validated | None:
    from inlay.cli.folds import cross_validate  # which stands on this module

    return cross_validate(ready, num_folds, settings)


def _describe_result(run: Run, result: Result) -> list[str]:
    """What is odd about what a run came to."""
    from inlay.data.findings import describe_unpredicted

    is_balanced = run.config.train.class_weights == "balanced"
    return describe_unpredicted(run.task, result.unpredicted, is_balanced=is_balanced)


def _describe_suspects(result: Result, given: RunOptions) -> list[str]:
    """That some rows may be labelled wrongly, and the command that lists them, with what was said about the data."""
    from inlay.data.findings import describe_suspects

    flags = {key: value for key, value in given.flags.items() if key.startswith("data.")}
    words = dataclasses.replace(given, preset=None, flags=flags).words()
    suspects = next(iter(result.history), {}).get("suspects", {})
    return describe_suspects(suspects, shlex.join(["inlay", "baseline", *words]))


def _show_examples(ready: Prepared, num_rows: int, *, as_json: bool) -> list[dict[str, Any]]:
    """The first encoded training rows, as people check their data."""
    if num_rows <= 0:
        return []
    from inlay.data.encode import describe
    from inlay.data.windows import encode_split

    task, tokenizer = ready.run.task, ready.backbone.tokenizer
    rows = task.train.take(range(min(num_rows, len(task.train))))
    encoded = encode_split(tokenizer, rows, ready.run.reading)
    examples = describe(tokenizer, encoded, rows.targets, task.labels, num_rows)
    for number, example in enumerate([] if as_json else examples, start=1):
        screen.emit(f"example {number} of {len(examples)} (line {rows.lines[int(encoded.owners[number - 1])]})")
        parts: dict[str, Sequence[Any]] = {"tokens": example.tokens, "ids": example.ids}
        parts |= {"segments": example.segments or []}
        screen.emit_pairs({key: " ".join(map(str, values)) for key, values in parts.items()} | {"label": example.label})
        screen.emit()
    return [example.to_json() for example in examples]


def fit_runs(
    runs: Sequence[AnyRun], ready: Ready, settings: FitSettings, referee: Referee | None = None
) -> list[Result]:
    """The results of the runs; those that are not finished yet are trained, with progress."""
    from inlay.cli.progress import ScreenWatcher
    from inlay.training import fit
    from inlay.training.cohort.cohort import Watcher

    if all(is_finished(run, ready) for run in runs):
        many = f"run {runs[0].id} was" if len(runs) == 1 else f"all {len(runs)} runs were"
        screen.log(f"{many} finished before: not trained again", "yellow")
        return fit(runs, ready.backbone, ready.runs_folder, settings)
    with _explained(), screen.Meter("training") as meter:
        watch = ScreenWatcher(meter, num_runs=len(runs)) if screen.is_main_process() else Watcher()
        return fit(runs, ready.backbone, ready.runs_folder, settings, watch, referee=referee)


def is_finished(run: AnyRun, ready: Ready) -> bool:
    """Whether a run was trained to its end before."""
    from inlay.training.run.run import read_result

    return read_result(ready.runs_folder / run.id) is not None


@contextmanager
def _explained() -> Iterator[None]:
    """Say how to go on after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped, and saved: the same command goes on from there") from None


def publish_run(ready: Prepared, result: Result, name: str | None, validated: Validated | None = None) -> Version:
    """Put a run's best weights in the store, with what its cross-validation came to, if there was one."""
    from inlay.training import publish

    tested = "scoring the test rows and " if ready.run.task.test is not None else ""
    with screen.working(f"publishing: {tested}answering the probes"):
        folds = None if validated is None else validated.scores
        return publish(ready.run, result, ready.backbone, ready.store, name, folds=folds)


def report_run(ready: Prepared, result: Result, version: Version | None) -> dict[str, Any]:
    """Everything a trained run came to, as data."""
    task = ready.run.task
    metrics = {"dev": result.dev_metrics}
    if version is not None:
        metrics = ready.store.manifest(version).metrics
    elif task.test is not None and task.test.targets is not None:
        from inlay.training.evaluate import score_split

        metrics["test"] = score_split(ready.run, result, ready.backbone, task.test)
    from inlay.training.recipe.rising import find_rising

    rising = find_rising(result.history, task.metric, len(task.dev))
    folder = ready.runs_folder / result.run_id
    infos = [] if version is None else ready.store.versions(version.name)
    return {
        "task": task.name,
        "reference": None if version is None else version.reference,
        "best": None if version is None else _find_best(ready.store, version),
        "digest": None if version is None else version.digest,
        "size_bytes": next((info.size_bytes for info in infos if info.version == version), None),
        "run": result.run_id,
        "status": result.status,
        "kind": task.kind,
        "labels": list(task.labels),
        "metric": task.metric,
        "metrics": metrics,
        "best_epoch": result.best_epoch,
        "probe": _score_probe(ready, result, metrics),
        "still_rising": None if rising is None else dataclasses.asdict(rising),
        "num_parameters": ready.run.spec.count_parameters(ready.backbone.anatomy),
        "backbone_parameters": ready.backbone.num_parameters,
        "seconds": result.seconds,
        "folder": str(folder),
        "curve": str(folder / "curve.png") if (folder / "curve.png").is_file() else None,  # of many runs, none is drawn
    }


def _score_probe(ready: Prepared, result: Result, metrics: Mapping[str, Any]) -> dict[str, float] | None:
    """Split -> score of the linear probe that the run began with; None where it began with a fresh head."""
    first, metric = next(iter(result.history), {}), ready.run.task.metric
    if first.get("stage") != "probe":
        return None
    from inlay.training.evaluate import score_probe
    from inlay.training.run.run import read_probe_head

    found = {"dev": first["dev"][metric]}
    head, test = read_probe_head(ready.runs_folder / result.run_id), ready.run.task.test
    if head and "test" in metrics and test is not None:
        found["test"] = score_probe(ready.run, head, ready.backbone, test)[metric]
    return found


def _find_best(store: Store, version: Version) -> str | None:
    """The version of the task that is best on these dev rows; None where they cannot be compared."""
    try:
        return store.resolve(f"{version.name}@best").reference
    except UnknownName:
        return None


def put_report(ready: Prepared, report: Mapping[str, Any], store: Path | None) -> None:
    """What a trained run came to, for people, with the command to use it next."""
    put_metrics(report["metrics"], report["metric"])
    screen.emit()
    pairs = {}
    if report["probe"] is not None and (ready.run.num_steps or ready.run.config.train.contrast):
        scores = ", ".join(f"{split} {screen.score(value)}" for split, value in report["probe"].items())
        pairs["probe"] = f"{scores}: {report['metric']} of a linear model on the frozen backbone, where it began"
    pairs["trained"] = f"{screen.duration(report['seconds'])}, best epoch {report['best_epoch']}"
    if "folds" in report:
        from inlay.cli.folds import describe_report

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
    """A line per split, the task's own metric first: `test  accuracy 0.9892  f1 0.9600`."""
    width = max(map(len, metrics), default=0)
    for split, values in metrics.items():
        names = sorted(values, key=lambda name: name != first)
        scores = "  ".join(f"{name} {screen.score(values[name])}" for name in names)
        screen.emit(f"{split.ljust(width)}  {scores}")
