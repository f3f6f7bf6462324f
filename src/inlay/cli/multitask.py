"""`inlay multitask`: trains several tasks as one run, and publishes each as an ordinary task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import flags, screen
from inlay.cli.lazy_packages import data, model, pipeline, reports, training
from inlay.cli.plan import describe_times, describe_totals
from inlay.cli.screen import numbers
from inlay.cli.train import PublishOption, ReportOption, ResumeOption
from inlay.errors import BadConfig, Diverged, InlayError, Unsupported
from inlay.settings import FitSettings, MethodConfig, RunConfig, find_preset, read_toml
from inlay.store import Store

_METHOD = "hyperformer++"
_TASKS = typer.Argument(metavar="DATA…", help="data of each task, as for `inlay train`, or NAME=DATA")
_OF_ONE_TASK = {"dev": "FILE", "test": "FILE", "labels": "A,B"}
"""settings of one task's rows, which have no flag here, and their values: hints say how to give them"""
_DRY = typer.Option("--dry-run", help="show the cost, and train nothing")


@flags.command_options(
    flags.RunFlags(
        panels=("Rows", "Method", "Tasks", "Training"),
        without=("start",),
        shared=("backbone", "preset", "config", "assignments"),
        defaults={"method.name": _METHOD},
    ),
    fit=("max_cohort", *flags.MEMORY, "spread"),
)
def multitask(
    run: flags.RunOptions,
    effort: FitSettings,
    data: Annotated[list[str] | None, _TASKS] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds", metavar="N", min=1, help="runs to train as a cohort, with seeds counted up from --seed"
        ),
    ] = 1,
    dry_run: Annotated[bool, _DRY] = False,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="with --dry-run: time a few steps, or only count")
    ] = True,
    on: flags.OnOption = None,
    ray_cpus: flags.RayCpusOption = 1,
    ray_gpus: flags.RayGpusOption = 0,
    publish: PublishOption = True,
    resume: ResumeOption = True,
    report: ReportOption = True,
    device: flags.DeviceOption = "auto",
    store: flags.StoreOption = None,
    json: flags.JsonOption = False,
) -> None:
    """Train several tasks as one run that shares parameters, and publish each.

    With hyperformer++, the default, a hypernetwork generates the adapters of all tasks. Other methods are hyperformer,
    mahabadi-multi (an adapter for each task, shared norms), full-multi (one fine-tuned backbone) and pal-published (a
    fine-tuned backbone with projected attention for each task). The best epoch is the one with the best mean dev score
    over the tasks. Every task is published as an ordinary one.

    Settings of rows apply to all tasks; `--set data.NAME.KEY=VALUE`, or `[data.NAME]` in the file of --config, applies
    to one. With --from-run, a new task starts from a finished run: `--trained task` then trains only its embedding and
    head, with the hypernetwork as it is and a default learning rate of its own.
    """
    cluster = None if on is None else pipeline.parse_cluster(on, ray_cpus, ray_gpus)
    ready = _prepare(run, data or (), Store(store), device, seeds)
    if dry_run:
        _forecast(ready, effort, measured=measure, as_json=json)
        return
    settings = dataclasses.replace(effort, restart=not resume, draw_curves=True)
    results = pipeline.fit_runs(ready.runs, ready.backbone, ready.runs_folder, settings, cluster=cluster)
    if not screen.is_main_process():  # the first process has the last word
        return
    best = max(results, key=lambda result: -2.0 if result.dev_metric is None else result.dev_metric)
    if not best.tensors:
        raise Diverged(f"run `{best.run_id}` {best.message}", "try a smaller `--lr`, such as a third of it")
    chosen = next(item for item in ready.runs if item.id == best.run_id)
    if report:
        others = [item for item in ready.runs if item.id != best.run_id]
        pipeline.write_brief_reports(others, results, ready.backbone, ready.runs_folder)
    found = _publish_tasks(chosen, best, ready, publish=publish, writes_report=report)
    found["seeds"] = [{"run": result.run_id, "mean": result.dev_metric} for result in results]
    screen.emit_json(found) if json else print_report(found)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """Runs of the same tasks, ready to be trained."""

    runs: list[training.JointRun]
    backbone: model.Backbone
    store: Store

    @property
    def runs_folder(self) -> Path:
        """The folder that has a folder for each run."""
        return self.store.run_folder(self.runs[0].id).parent


def _find_config(run: flags.RunOptions, store: Store) -> RunConfig:
    """Return the settings; if the run starts from another, they override that run's method and backbone."""
    named = dataclasses.replace(run, task="multitask")
    config = named.resolve(base=RunConfig(method=MethodConfig(_METHOD)))
    if config.joint.start is None:
        return config
    folder = training.find_run(config.joint.start, store)
    source = read_toml(folder / "config.toml")
    config = named.resolve(base=RunConfig(method=source.method, backbone=source.backbone))
    return dataclasses.replace(config, joint=dataclasses.replace(config.joint, start=folder.name))


def _prepare(run: flags.RunOptions, data: Sequence[str], store: Store, device: str, seeds: int) -> _Ready:
    # 1. check the settings of all tasks before any rows are read
    pipeline.check_device_name(device)
    named = [_read_name(item) for item in data]
    run = dataclasses.replace(run, tasks=[name for name, _ in named])
    config = _find_config(run, store)
    if not named:
        raise BadConfig("no task to train", "name the data of each: `inlay multitask glue/cola glue/rte`")
    for name in run.tasks:
        store.check_name(name)
    known: dict[str, str] = {}
    for name, source in named:
        if name in known:
            raise BadConfig(
                f"task `{name}` is named twice: for `{known[name]}` and for `{source}`",
                f"give each a name of its own: `{name}-2={source}`",
            )
        known[name] = source
    config.joint.check_tasks(run.tasks)
    configs = []
    for name, source in named:
        common = dataclasses.replace(config, task=name, data=dataclasses.replace(config.data, source=source))
        configs.append(run.resolve_rows(common, name))
    # 2. read the rows, load the backbone, and find the run that this one starts from
    tasks = [_load_part(each) for each in configs]
    backbone = pipeline.open_backbone(config.backbone, device)
    _check_preset(run, config, backbone)
    start = training.Start()
    if config.joint.start is not None:
        start = training.start_from(training.find_run(config.joint.start, store), config, tasks)
    # 3. make a run for every seed
    sources = [each.data for each in configs]
    runs = []
    for seed in range(config.train.seed, config.train.seed + seeds):
        seeded = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
        runs.append(training.make_joint_run(tasks, seeded, backbone, start=start, data=sources))
    _describe(runs[0], backbone, seeds)
    return _Ready(runs, backbone, store)


def _check_preset(run: flags.RunOptions, config: RunConfig, backbone: model.Backbone) -> None:
    """Refuse a preset for encoders on a seq2seq backbone, if the preset chose the pooling and not the user."""
    if run.preset is None or not backbone.is_seq2seq:
        return
    pooling = find_preset(run.preset).settings.get("train.pooling")
    if pooling is not None and pooling == config.train.pooling and "train.pooling" not in run.flags:
        raise Unsupported(
            f"preset `{run.preset}` is for encoders (its pooling is `{pooling}`), but the backbone "
            f"`{backbone.name}` generates text",
            "leave out `--preset`, or use an encoder, such as `--backbone minilm`",
        )


def _load_part(config: RunConfig) -> data.Task:
    """Read the data of one of several tasks; errors name the task."""
    try:
        return pipeline.load_task(config)
    except InlayError as error:
        same = error.of(config.task)
        for option, value in _OF_ONE_TASK.items():
            same.hint = same.hint and same.hint.replace(f"`--{option}`", f"`--set data.{config.task}.{option}={value}`")
        raise same from None


def _read_name(item: str) -> tuple[str, str]:
    """Split `NAME=DATA` into the task's name and its data; without NAME the task is named after the data."""
    name, equals, source = item.partition("=")
    is_named = bool(equals) and "/" not in name and not Path(item).exists()
    return (name, source) if is_named else (pipeline.name_of(item), item)


def _describe(run: training.JointRun, backbone: model.Backbone, seeds: int) -> None:
    for text in dict.fromkeys((*run.start.notes, *(note for part in run.parts for note in part.notes))):
        screen.detail(text)
    items, method, joint = run.layout(backbone.anatomy), run.config.method, run.config.joint
    shared = sum(item.num_parameters for item in items if item.is_shared)
    trained = sum(item.num_parameters for item in items)
    shared_text = f"{screen.count(shared)} of them shared by {screen.count(len(run.parts), 'task')}"
    if joint.trained == "task":
        trained, shared_text = trained - shared, f"with {screen.count(shared)} shared ones frozen"
    screen.detail(
        f"method: {screen.name_method(method.name, method.size)} trains {screen.count(trained)} parameters, "
        f"{screen.share(trained, backbone.num_parameters)} of the backbone's, {shared_text}"
    )
    drawn = f"temperature {joint.temperature:g}" if joint.sampling == "temperature" else joint.sampling
    screen.detail(
        f"training: {screen.count(run.num_steps, 'step')} of {run.config.train.batch_size} rows, {joint.batches}, "
        f"tasks drawn by {drawn}, lr {run.config.train.lr:g}, {screen.count(seeds, 'seed')}, on {backbone.device}"
    )


def _forecast(ready: _Ready, effort: FitSettings, *, measured: bool, as_json: bool) -> None:
    """Print the cost of a run: its tasks with their shares of steps and parameters, then time and memory."""
    made, num_seeds = training.count_joint(ready.runs[0], ready.backbone), len(ready.runs)
    if not as_json:
        _print_counts(made)
    if measured:
        with screen.working("measuring a few steps"):
            made = training.plan_joint(ready.runs[0], ready.backbone, checkpointing=effort.checkpointing)
    if as_json:
        screen.emit_json({**made.to_json(), "num_seeds": num_seeds})
        return
    screen.emit()
    if made.seconds is None or made.memory_bytes is None:
        screen.emit_pairs({"time": "not measured", "memory": "not measured"})
        return
    each = "" if num_seeds == 1 else f" for each of {num_seeds} seeds"
    screen.emit_pairs(
        {
            "time": f"about {screen.duration(made.seconds)}{each}, from a measured step",
            "memory": f"about {screen.size(made.memory_bytes)}{each}",
        }
    )


def _print_counts(made: training.JointPlan) -> None:
    screen.log()
    rows = [
        [
            *(task.name, task.kind, task.metric, screen.count(task.num_train), screen.count(task.num_dev)),
            *(f"{100 * task.drawn_share:.1f}%", screen.count(task.own_parameters)),
        ]
        for task in made.tasks
    ]
    columns = numbers("train rows", "dev rows", "drawn", "parameters")
    screen.emit_table(["task", "kind", "metric", *columns], rows)
    screen.emit()
    part = screen.share(made.trained_parameters, made.backbone_parameters)
    kept = f"{screen.count(made.shared_parameters)} shared by all tasks" + (", frozen" if made.is_shared_frozen else "")
    screen.emit_pairs(
        {
            "trained": f"{screen.count(made.trained_parameters)} parameters, {part} of the backbone's; {kept}",
            **describe_totals(made.totals),
            **describe_times(made.totals),
            "steps": f"{screen.count(made.num_steps)} of {made.batch_size} rows",
            "run": made.run_id,
        }
    )


def _publish_tasks(
    run: training.JointRun, result: training.Result, ready: _Ready, *, publish: bool, writes_report: bool
) -> dict[str, Any]:
    trained = training.materialize(run, result, ready.backbone)
    tasks = [finish_task(item, ready.backbone, ready.store, publish=publish) for item in trained]
    page = _write_report(run, result, ready, list(zip(trained, tasks, strict=True))) if writes_report else None
    tested = [(item["test"] or {}).get(item["metric"]) for item in tasks]
    known = [score for score in tested if score is not None]
    return {
        "run": run.id,
        "method": run.config.method.name,
        "status": result.status,
        "best_epoch": result.best_epoch,
        "mean": next(line["dev"]["mean"] for line in result.history if line["epoch"] == result.best_epoch),
        # The mean over the tasks, each by its own metric; None unless all tasks have a test score.
        "test_mean": sum(known) / len(known) if known and len(known) == len(tested) else None,
        "seconds": result.seconds,
        "folder": str(ready.runs_folder / run.id),
        "report": None if page is None else str(page),
        "tasks": tasks,
    }


def _write_report(
    run: training.JointRun,
    result: training.Result,
    ready: _Ready,
    finished: Sequence[tuple[training.Trained, dict[str, Any]]],
) -> Path | None:
    """Write the report on the run and on each of its tasks; if that fails, print why."""
    parts = []
    for item, task in finished:
        version = None if task["reference"] is None else ready.store.resolve(task["reference"])
        parts.append(reports.PublishedPart(item, version, task["test"]))
    prepared = training.PreparedRun(finished[0][0].run, ready.backbone, ready.store)
    try:
        with screen.working("writing the reports"):
            return reports.write_joint_report(run, result, parts, prepared)
    except InlayError as error:
        screen.detail(f"no report was written: {error.message}")
        return None


def finish_task(item: training.Trained, backbone: model.Backbone, store: Store, *, publish: bool) -> dict[str, Any]:
    """Publish one task of a trained run if `publish`, and return its report as data."""
    rows = item.run.task.test
    has_test = rows is not None and rows.targets is not None
    if publish:
        tested = "scoring the test rows and " if has_test else ""
        text = f"publishing {item.run.name}: {tested}answering the probes"
    else:
        text = f"{item.run.name}: scoring the test rows"
    with screen.working(text) if publish or has_test else nullcontext():
        return training.report_task(item, backbone, store, publishes=publish)


def print_report(report: dict[str, Any]) -> None:
    """Print the scores of the tasks of a run, and the run's folder."""
    screen.log()
    splits = ["dev", "test"] if any(item["test"] for item in report["tasks"]) else ["dev"]
    rows = [
        [
            *(item["task"], item["metric"]),
            *(screen.score((item[split] or {}).get(item["metric"])) for split in splits),
            item["reference"] or "–",
        ]
        for item in report["tasks"]
    ]
    screen.emit_table(["task", "metric", *numbers(*splits), "published"], rows)
    screen.emit()
    pairs = {"run": report["folder"]}
    if "mean" in report:
        mean, test = screen.score(report["mean"]), report["test_mean"]
        trained = f"{screen.duration(report['seconds'])}, best epoch {report['best_epoch']}"
        mean = mean if test is None else f"{mean} on dev, {screen.score(test)} on test"
        pairs = {"mean": mean, "trained": trained, **pairs}
    if report.get("report"):
        pairs["report"] = report["report"]
    screen.emit_pairs(pairs)
