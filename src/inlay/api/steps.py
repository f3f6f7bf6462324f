"""Training and answering step by step: tasks, runs, results, versions, answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Unpack

from inlay import pipeline, serving, training
from inlay.api.arguments import lay_settings, load
from inlay.data import RowsGiven, Task
from inlay.errors import BadConfig, speaking_python
from inlay.model import Backbone
from inlay.serving import Answer, Check, Request
from inlay.settings import (
    DataConfig,
    DataSettings,
    FitSettings,
    JointConfig,
    JointRunSettings,
    MethodConfig,
    RunConfig,
    RunSettings,
    from_tree,
    overlay,
    split_settings,
)
from inlay.store import Store, Version
from inlay.training import Emit, JointRun, Result, Run, Start, Trained, ignore


@speaking_python()
def load_task(
    data: RowsGiven,
    *,
    name: str,
    dev: RowsGiven | None = None,
    test: RowsGiven | None = None,
    **settings: Unpack[DataSettings],
) -> Task:
    """Return a task from a file, a folder, `glue/NAME`, `extra/NAME`, `hub:NAME`, or from rows in memory.

    `data`, `dev` and `test` are given as for `train`; without `dev`, dev rows are split off. `name` is the task's name.
    `settings` are those of `DataConfig`: `text`, `pair`, `label`, `kind`, `dev_share`, `test_share` …

    >>> inlay.load_task(rows, name="mood", dev_share=0.2)
    Task(mood: classify, 2 labels, 32 train, 8 dev)
    """
    return load(data, name, dev, test, settings)


@speaking_python()
def make_run(
    task: Task,
    backbone: Backbone,
    config: RunConfig | None = None,
    *,
    preset: str | None = None,
    store: Store | None = None,
    **settings: Unpack[RunSettings],
) -> Run:
    """Return a run of `task` on `backbone`, with `settings` of the method and of training: `size=64, epochs=3` …

    Among the settings, `method` is the method's name, and `start` names the tasks of `store` to start from, whose
    method the run then has. They override `preset`, a published recipe, which overrides `config`. An unknown setting is
    an error that names the nearest one.

    >>> inlay.make_run(task, backbone, size=8, lr=1e-3, epochs=1)
    Run(mood: houlsby 8, lr 0.001, seed 0, id ...)
    """
    store = store or Store()
    tree = split_settings(settings)
    return training.make_run(task, lay_settings(tree, config, preset, store), backbone, store)


@speaking_python()
def make_joint_run(
    tasks: Sequence[Task],
    backbone: Backbone,
    config: RunConfig | None = None,
    *,
    store: Store | None = None,
    **settings: Unpack[JointRunSettings],
) -> JointRun:
    """Return a run of several `tasks` on `backbone` that share parameters, by default with `hyperformer++`.

    `settings` are those of the method, of training and of `JointConfig` by name; they override `config`: `size=12,
    batches="mixed", steps=500` … Among them, `start` names a finished run of `store` to start from, whose method this
    run then has. Train it with `fit`, turn its tasks into ordinary ones with `materialize`, and publish those.

    >>> inlay.make_joint_run([task, other], backbone, size=4, steps=2)
    JointRun(mood + other: hyperformer++ 4, lr ..., seed 0, id ...)
    """
    store = store or Store()
    tree = split_settings(settings, {"joint": JointConfig})
    folder = store.run_folder(tree["joint"]["start"]) if tree["joint"].get("start") else None
    if config is None:
        config = RunConfig(method=MethodConfig("hyperformer++"))
        config = config if folder is None else dataclasses.replace(config, method=training.read_method(folder))
    config = overlay(config, tree)
    start = Start() if folder is None else training.start_from(folder, config, tasks)
    return training.make_joint_run(tasks, config, backbone, start=start)


@speaking_python()
def fit(
    runs: Sequence[Run | JointRun],
    backbone: Backbone,
    store: Store | None = None,
    settings: FitSettings | None = None,
    emit: Emit = ignore,
    *,
    report: bool = True,
) -> list[Result]:
    """Train `runs` on `backbone` together, each in its own slot; finished ones are read back, stopped ones continue.

    Their folders are in `store`. `settings` say how memory is used. `emit` is called with every event
    (`inlay.training.events`): steps, scored epochs, finished runs. `report` writes a short report and a model card into
    each run's folder.

    >>> inlay.fit([run], backbone)
    [Result(... finished, dev ... at epoch ... of 8, ... s)]
    """
    folder = (store or Store()).root / "runs"
    results = training.fit(runs, backbone, folder, settings or FitSettings(), emit)
    if report:
        pipeline.write_brief_reports(runs, results, backbone, folder)
    return results


@speaking_python()
def materialize(run: JointRun, result: Result, backbone: Backbone) -> list[Trained]:
    """Return each task of a finished `run` as an ordinary one: `publish(item.run, item.result, backbone)`.

    `result` is what `fit` returned for the run on this `backbone`.

    >>> joint = inlay.make_joint_run([task, other], backbone, size=4, steps=2, epochs=1, batch_size=8)
    >>> [item.run.name for item in inlay.materialize(joint, *inlay.fit([joint], backbone), backbone)]
    ['mood', 'other']
    """
    if result.run_id != run.id:
        raise BadConfig(
            f"the result is that of run `{result.run_id}`, not of `{run.id}`",
            "give a run with the result that `fit` returned for it",
        )
    return training.materialize(run, result, backbone)


@speaking_python()
def publish(
    run: Run | JointRun,
    result: Result,
    backbone: Backbone,
    store: Store | None = None,
    name: str | None = None,
    *,
    probes: str = "rows",
) -> Version:
    """Add the best weights of a `run` to the `store` as an immutable version, with probes that prove it later.

    `result` is what `fit` returned for the run on this `backbone`; `name` is by default the task's. Probes are a few
    dev rows, word for word; `probes="hashed"` keeps hashes of them, and `"none"` nothing.

    >>> inlay.publish(run, result, backbone, name="other").reference
    'other@1'
    """
    if isinstance(run, JointRun):
        raise BadConfig(
            f"a run of several tasks (`{', '.join(part.name for part in run.parts)}`) is published task by task",
            "`for item in materialize(run, result, backbone): publish(item.run, item.result, backbone)`",
        )
    return training.publish(run, result, backbone, store or Store(), name, probes=probes)


class Engine(serving.Engine):
    """Answers requests for any mix of the store's tasks on one `backbone`.

    It keeps up to `num_slots` versions of `store` ready; `precision="int8"` is faster on a CPU, but answers drift. On a
    GPU it compiles its forward pass once it has had enough to answer; `is_compiled=True` does so from the first request
    on, and `is_compiled=False` never.

    >>> engine = inlay.Engine(backbone)
    >>> engine.predict([inlay.Request("mood", "good film")])
    [Answer(mood@1: yes, 0...)]
    """

    def __init__(
        self,
        backbone: Backbone,
        store: Store | None = None,
        *,
        num_slots: int = 64,
        precision: str = "auto",
        is_compiled: bool | None = None,
    ) -> None:
        super().__init__(backbone, store or Store(), num_slots=num_slots, precision=precision, is_compiled=is_compiled)

    def predict(self, requests: Sequence[Request], resolved: Any = None) -> list[Answer]:
        """Answer requests for any mix of tasks, in order; a bad request affects no other."""
        answers = super().predict(requests, resolved)
        for answer in answers:
            if answer.error is not None:
                answer.error.speak_python()
        return answers


@speaking_python()
def verify(
    backbone: Backbone,
    store: Store | None = None,
    rows: RowsGiven | None = None,
    **settings: Unpack[DataSettings],
) -> list[Check]:
    """Prove that every version of the `store` trained on `backbone` answers as published, bit for bit where possible.

    `rows` are those that a task with hashed probes was trained on; they and their `settings` are given as for
    `load_task`.

    >>> [check.stands for check in inlay.verify(backbone)]
    [True]
    """
    store = store or Store()
    damaged: list[Check] = []
    versions = [
        info.version
        for task in store.ledger(lambda version, error: damaged.append(Check(version, problem=str(error))))
        for info in task.versions
        if info.summary.backbone["fingerprint"] == backbone.fingerprint
    ]
    read = from_tree(DataConfig, settings, "data.")
    given = [] if rows is None else pipeline.read_probe_rows(store, versions, rows, read)
    return damaged + serving.verify(versions, backbone, store, rows=given)
