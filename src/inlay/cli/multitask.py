"""`inlay multitask` and `inlay materialize`: several tasks trained as one run, and each made an ordinary one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.backbones import check_device_name, open_backbone
from inlay.cli.effort import MEMORY, fit_options
from inlay.cli.options import DeviceOption, JsonOption, RunOptions, StoreOption, name_of, open_store, run_options
from inlay.cli.screen import Column
from inlay.cli.train import PublishOption, ResumeOption, fit_runs, load_task
from inlay.config import MethodConfig, RunConfig
from inlay.errors import BadConfig, Diverged, InlayError, UnknownName
from inlay.fit_settings import FitSettings
from inlay.store import Store

if TYPE_CHECKING:
    from inlay.data import Task
    from inlay.model import Backbone
    from inlay.training.joint import JointRun
    from inlay.training.run import Result, Trained

_METHOD = "hyperformer++"
_TASKS = typer.Argument(metavar="DATA…", help="data of every task, as `inlay train` takes it, or NAME=DATA")
_PARTS = typer.Argument(
    metavar="[TASK…]", help="its tasks, or TASK=DATA where the rows lie elsewhere now; default: all"
)
_DRY = typer.Option("--dry-run", help="tell what it would take, and train nothing")


@run_options(
    panels=("Rows", "Method", "Tasks", "Training"),
    without=("start",),
    shared=("backbone", "preset", "config", "set_"),
    defaults={"method.name": _METHOD},
)
@fit_options("max_cohort", *MEMORY, "spread")
def multitask(
    run: RunOptions,
    effort: FitSettings,
    data: Annotated[list[str] | None, _TASKS] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=1, help="runs, seeds counted up, as a cohort")] = 1,
    dry_run: Annotated[bool, _DRY] = False,
    publish: PublishOption = True,
    resume: ResumeOption = True,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Train several tasks as one run that shares parameters, and publish each.

    With hyperformer++, the default, a hypernetwork writes the adapters of all tasks; other methods are hyperformer,
    mahabadi-multi (an adapter for every task, norms shared), full-multi (one fine-tuned backbone) and pal-published
    (projected attention for every task beside it). The best epoch is that of the best mean over the tasks. Every task
    is published as an ordinary one.

    Settings of rows are those of all tasks; `--set data.NAME.KEY=VALUE`, or `[data.NAME]` of --config, are those of
    one. A new task goes on from a run with --from-run: `--trained task` trains nothing but its embedding (and its head)
    on the hypernetwork as it is, and has a learning rate of its own.
    """
    kept = open_store(store)
    ready = _prepare(run, data or (), kept, device, seeds)
    if dry_run:
        _forecast(ready, effort, as_json=json)
        return
    settings = dataclasses.replace(effort, restart=not resume, draw_curves=True)
    results = fit_runs(ready.runs, ready, settings)
    if not screen.is_heard():  # the first process has the last word
        return
    best = max(results, key=lambda result: -2.0 if result.dev_metric is None else result.dev_metric)
    if not best.tensors:
        raise Diverged(f"run `{best.run_id}` {best.message}", "try a smaller `--lr`, such as a third of it")
    chosen = next(item for item in ready.runs if item.id == best.run_id)
    report = _put_down(chosen, best, ready, publish=publish)
    report["seeds"] = [{"run": result.run_id, "mean": result.dev_metric} for result in results]
    screen.put_json(report) if json else _put_report(report)


@dataclasses.dataclass(frozen=True)
class _Ready:
    """Runs of the same tasks, ready to be trained."""

    runs: list[JointRun]
    backbone: Backbone
    store: Store

    @property
    def runs_folder(self) -> Path:
        """Where the folders of all runs are."""
        return self.store.run_folder(self.runs[0].id).parent


def _find_config(run: RunOptions, store: Store) -> RunConfig:
    """The settings, over the method and the backbone of the run that this one starts from, if it starts from one."""
    from inlay.config import read_toml

    named = dataclasses.replace(run, task="multitask")
    config = named.resolve(base=RunConfig(method=MethodConfig(_METHOD)))
    if config.joint.start is None:
        return config
    folder = _find_run(config.joint.start, store)
    source = read_toml(folder / "config.toml")
    config = named.resolve(base=RunConfig(method=source.method, backbone=source.backbone))
    return dataclasses.replace(config, joint=dataclasses.replace(config.joint, start=folder.name))


def _prepare(run: RunOptions, data: Sequence[str], store: Store, device: str, seeds: int) -> _Ready:
    check_device_name(device)
    named = [_read_name(item) for item in data]
    run = dataclasses.replace(run, tasks=[name for name, _ in named])
    config = _find_config(run, store)
    if not named:
        raise BadConfig("no task to train", "name the data of each: `inlay multitask glue/cola glue/rte`")
    for name in run.tasks:
        store.check_name(name)
    configs = [
        run.resolve_rows(
            dataclasses.replace(config, task=name, data=dataclasses.replace(config.data, source=source)), name
        )
        for name, source in named
    ]
    tasks = [_load_part(each) for each in configs]
    from inlay.training.joint import make_joint_run
    from inlay.training.materialize import start_from
    from inlay.training.start import Start

    backbone = open_backbone(config.backbone, device)
    start = Start()
    if config.joint.start is not None:
        start = start_from(_find_run(config.joint.start, store), config, tasks)
    first = config.train.seed
    grid = [
        dataclasses.replace(config, train=dataclasses.replace(config.train, seed=first + number))
        for number in range(seeds)
    ]
    sources = [each.data for each in configs]
    runs = [make_joint_run(tasks, each, backbone, start=start, data=sources) for each in grid]
    _describe(runs[0], backbone, seeds)
    return _Ready(runs, backbone, store)


def _load_part(config: RunConfig) -> Task:
    """Read the data of one task of several, whose name every refusal has."""
    try:
        return load_task(config)
    except InlayError as error:
        raise error.of(config.task) from None


def _read_name(item: str) -> tuple[str, str]:
    """`NAME=DATA`, or DATA with the name it gives."""
    name, equals, source = item.partition("=")
    is_named = bool(equals) and "/" not in name and not Path(item).exists()
    return (name, source) if is_named else (name_of(item), item)


def _find_run(name: str, store: Store) -> Path:
    """The folder of a run of several tasks, by its id or by a task that it was published as."""
    folder = store.run_folder(name)
    if not (folder / "config.toml").is_file() and (found := _find_origin(name, store)):
        folder = store.run_folder(found)
    if not (folder / "config.toml").is_file():
        from inlay.training.materialize import find_joint_runs

        raise UnknownName("run of several tasks", name, find_joint_runs(folder.parent))
    return folder


def _find_origin(name: str, store: Store) -> str | None:
    """The run of several tasks that a version came from; nothing if it came from none, or is none."""
    try:
        manifest = store.manifest(store.resolve(name))
    except InlayError:
        return None
    return manifest.extra.get("joint", {}).get("run")


def _describe(run: JointRun, backbone: Backbone, seeds: int) -> None:
    for text in run.start.notes:
        screen.note(text)
    items, method, joint = run.layout(backbone.anatomy), run.config.method, run.config.joint
    shared = sum(item.num_parameters for item in items if item.is_shared)
    trained = sum(item.num_parameters for item in items)
    beside = f"{screen.count(shared)} of them shared by {screen.count(len(run.parts), 'task')}"
    if joint.trained == "task":
        trained, beside = trained - shared, f"on {screen.count(shared)} that stay as they are"
    screen.note(
        f"method: {screen.name_method(method.name, method.size)} trains {screen.count(trained)} parameters, "
        f"{screen.share(trained, backbone.num_parameters)} of the backbone's, {beside}"
    )
    drawn = f"temperature {joint.temperature:g}" if joint.sampling == "temperature" else joint.sampling
    screen.note(
        f"training: {screen.count(run.num_steps, 'step')} of {run.config.train.batch_size} rows, {joint.batches}, "
        f"tasks drawn by {drawn}, lr {run.config.train.lr:g}, {screen.count(seeds, 'seed')}, on {backbone.device}"
    )


def _forecast(ready: _Ready, effort: FitSettings, *, as_json: bool) -> None:
    """Put what a run would take: its tasks, how often each is drawn, parameters, time and memory."""
    from inlay.training.plan import plan_joint

    with screen.working("measuring a few steps"):
        made = plan_joint(ready.runs[0], ready.backbone, checkpointing=effort.checkpointing)
    num_seeds = len(ready.runs)
    if as_json:
        screen.put_json({**dataclasses.asdict(made), "num_seeds": num_seeds})
        return
    screen.say()
    names = ("train rows", "dev rows", "drawn", "parameters")
    rows = [
        [
            *(task.name, task.kind, task.metric, screen.count(task.num_train), screen.count(task.num_dev)),
            *(f"{100 * task.drawn_share:.1f}%", screen.count(task.own_parameters)),
        ]
        for task in made.tasks
    ]
    columns = [Column("task"), Column("kind"), Column("metric"), *(Column(name, is_number=True) for name in names)]
    screen.put_table(columns, rows)
    screen.put()
    each = "" if num_seeds == 1 else f" for each of {num_seeds} seeds"
    part = screen.share(made.trained_parameters, made.backbone_parameters)
    kept = f"{screen.count(made.shared_parameters)} shared by all tasks" + (", frozen" if made.is_shared_frozen else "")
    screen.put_pairs(
        {
            "trained": f"{screen.count(made.trained_parameters)} parameters, {part} of the backbone's; {kept}",
            "steps": f"{screen.count(made.num_steps)} of {made.batch_size} rows",
            "time": f"about {screen.duration(made.seconds)}{each}, from a measured step",
            "memory": f"about {screen.size(made.memory_bytes)}{each}",
            "run": made.run_id,
        }
    )


def _put_down(run: JointRun, result: Result, ready: _Ready, *, publish: bool) -> dict[str, Any]:
    """Every task made an ordinary one and published, as data."""
    from inlay.training.materialize import materialize

    trained = materialize(run, result, ready.backbone)
    mean = next(line["dev"]["mean"] for line in result.history if line["epoch"] == result.best_epoch)
    return {
        "run": run.id,
        "method": run.config.method.name,
        "status": result.status,
        "best_epoch": result.best_epoch,
        "mean": mean,
        "seconds": result.seconds,
        "folder": str(ready.runs_folder / run.id),
        "tasks": [_publish(item, ready.backbone, ready.store, publish=publish) for item in trained],
    }


def _publish(item: Trained, backbone: Backbone, store: Store, *, publish: bool) -> dict[str, Any]:
    from inlay.training import publish as publish_task

    reference = None
    if publish:
        with screen.working(f"publishing {item.run.name}: answering the probes"):
            reference = publish_task(item.run, item.result, backbone, store).reference
    return {
        "task": item.run.name,
        "metric": item.run.metric,
        "dev": item.result.dev_metrics,
        "reference": reference,
        "num_parameters": item.spec.count_parameters(backbone.anatomy),
    }


def _put_report(report: dict[str, Any]) -> None:
    screen.say()
    rows = [
        [item["task"], item["metric"], screen.score(item["dev"].get(item["metric"])), item["reference"] or "–"]
        for item in report["tasks"]
    ]
    screen.put_table([Column("task"), Column("metric"), Column("dev", is_number=True), Column("published")], rows)
    screen.put()
    pairs = {"run": report["folder"]}
    if "mean" in report:
        trained = f"{screen.duration(report['seconds'])}, best epoch {report['best_epoch']}"
        pairs = {"mean": screen.score(report["mean"]), "trained": trained, **pairs}
    screen.put_pairs(pairs)


def materialize(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id of a run that `inlay multitask` trained, or its task")],
    tasks: Annotated[list[str] | None, _PARTS] = None,
    name: Annotated[str | None, typer.Option("--name", help="publish under this name; for one task")] = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Turn the tasks of a run that shares parameters into ordinary ones, and publish them.

    The weights that a hypernetwork writes for a task become the task's own. The rows of these tasks are read again, for
    the probes and the test scores; those of the run's other tasks need not be there any more.
    """
    kept = open_store(store)
    folder = _find_run(run, kept)
    from inlay.training.materialize import read_materialized, read_parts

    chosen = _choose_parts(read_parts(folder), tasks or ())
    if name is not None:
        kept.check_name(name)
        if len(chosen) != 1:
            raise BadConfig(f"`--name {name}` for {len(chosen)} tasks", "name one task: `inlay materialize RUN TASK`")
    check_device_name(device)
    read = [_load_part(config) for config in chosen]
    backbone = open_backbone(chosen[0].backbone, device)
    made = read_materialized(folder, read, backbone)
    if name is not None:
        made = [dataclasses.replace(item, run=_renamed(item, name)) for item in made]
    report: dict[str, Any] = {"run": folder.name, "folder": str(folder)}
    report["tasks"] = [_publish(item, backbone, kept, publish=True) for item in made]
    screen.put_json(report) if json else _put_report(report)


def _choose_parts(configs: Sequence[RunConfig], wanted: Sequence[str]) -> list[RunConfig]:
    """The settings of these tasks of a run, each once, with the data that is named for it: `TASK=DATA`."""
    known = {config.task: config for config in configs}
    found = {} if wanted else known
    for item in wanted:
        name, _, source = item.partition("=")
        if name not in known:
            raise UnknownName("task of the run", name, known)
        data = known[name].data
        found[name] = dataclasses.replace(known[name], data=dataclasses.replace(data, source=source or data.source))
    return list(found.values())


def _renamed(item: Trained, name: str) -> Any:
    return dataclasses.replace(item.run, task=dataclasses.replace(item.run.task, name=name))
