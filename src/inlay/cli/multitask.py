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
from inlay.errors import BadConfig, Diverged, UnknownName
from inlay.fit_settings import FitSettings
from inlay.store import Store

if TYPE_CHECKING:
    from inlay.data import Task
    from inlay.model import Backbone
    from inlay.training.joint import JointRun
    from inlay.training.run import Result, Trained

_METHOD = "hyperformer++"
_TASKS = typer.Argument(metavar="DATA…", help="data of every task, as `inlay train` takes it, or NAME=DATA")


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
    """
    kept = open_store(store)
    config = _find_config(run, kept)
    ready = _prepare(config, data or (), kept, device, seeds)
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
    source = read_toml(_find_run(config.joint.start, store) / "config.toml")
    return named.resolve(base=RunConfig(method=source.method, backbone=source.backbone))


def _prepare(config: RunConfig, data: Sequence[str], store: Store, device: str, seeds: int) -> _Ready:
    check_device_name(device)
    if not data:
        raise BadConfig("no task to train", "name the data of each: `inlay multitask glue/cola glue/rte`")
    named = [_read_name(item) for item in data]
    configs = [
        dataclasses.replace(config, task=name, data=dataclasses.replace(config.data, source=source))
        for name, source in named
    ]
    for name, _ in named:
        store.check_name(name)
    tasks = [load_task(each) for each in configs]
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


def _read_name(item: str) -> tuple[str, str]:
    """`NAME=DATA`, or DATA with the name it gives."""
    name, equals, source = item.partition("=")
    is_named = bool(equals) and "/" not in name and not Path(item).exists()
    return (name, source) if is_named else (name_of(item), item)


def _find_run(run_id: str, store: Store) -> Path:
    folder = store.run_folder(run_id)
    if not (folder / "config.toml").is_file():
        known = [path.parent.parent.name for path in folder.parent.glob("*/tasks/000-*.toml")]
        raise UnknownName("run of several tasks", run_id, known)
    return folder


def _describe(run: JointRun, backbone: Backbone, seeds: int) -> None:
    for text in run.start.notes:
        screen.note(text)
    items, method, joint = run.layout(backbone.anatomy), run.config.method, run.config.joint
    added = sum(item.num_parameters for item in items)
    shared = sum(item.num_parameters for item in items if item.is_shared)
    part = screen.share(added, backbone.num_parameters)
    screen.note(
        f"method: {screen.name_method(method.name, method.size)} trains {screen.count(added)} parameters, {part} of "
        f"the backbone's, {screen.count(shared)} of them shared by {screen.count(len(run.parts), 'task')}"
    )
    drawn = f"temperature {joint.temperature:g}" if joint.sampling == "temperature" else joint.sampling
    screen.note(
        f"training: {screen.count(run.num_steps, 'step')} of {run.config.train.batch_size} rows, {joint.batches}, "
        f"tasks drawn by {drawn}, {screen.count(seeds, 'seed')}, on {backbone.device}"
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
    run: Annotated[str, typer.Argument(metavar="RUN", help="id of a run that `inlay multitask` trained")],
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK…]", help="its tasks; default: all")] = None,
    name: Annotated[str | None, typer.Option("--name", help="publish under this name; for one task")] = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Turn the tasks of a run that shares parameters into ordinary ones, and publish them.

    The weights that a hypernetwork writes for a task become the task's own.
    """
    kept = open_store(store)
    folder = _find_run(run, kept)
    from inlay.training.materialize import materialize as put_down
    from inlay.training.materialize import read_joint, read_parts

    configs = read_parts(folder)
    known = [config.task for config in configs]
    for wanted in tasks or ():
        if wanted not in known:
            raise UnknownName("task of the run", wanted, known)
    if name is not None and len(tasks or known) != 1:
        raise BadConfig(
            f"`--name {name}` for {len(tasks or known)} tasks", "name one task: `inlay materialize RUN TASK`"
        )
    check_device_name(device)
    read: list[Task] = [load_task(config) for config in configs]
    backbone = open_backbone(configs[0].backbone, device)
    joint, result = read_joint(folder, read, backbone)
    chosen = [item for item in put_down(joint, result, backbone) if item.run.name in (tasks or known)]
    if name is not None:
        kept.check_name(name)
        chosen = [dataclasses.replace(item, run=_renamed(item, name)) for item in chosen]
    report = {"run": joint.id, "folder": str(folder)}
    report["tasks"] = [_publish(item, backbone, kept, publish=True) for item in chosen]  # type: ignore[assignment]
    screen.put_json(report) if json else _put_report(report)


def _renamed(item: Trained, name: str) -> Any:
    return dataclasses.replace(item.run, task=dataclasses.replace(item.run.task, name=name))
