"""One function for each command, which does what `inlay COMMAND` does: same recipe, same defaults, same run ids.

Notes and progress go to stderr; `progress=False` prints none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from inlay import exchange, explore, pipeline, terminal, training
from inlay.api.arguments import (
    find_config,
    load,
    open_backbone,
    open_store,
    open_trained_on,
    prepare,
    require_report,
)
from inlay.api.steps import Engine
from inlay.data import RowsGiven
from inlay.errors import BadConfig, BadData, UnknownName, speaking_python
from inlay.model import Backbone
from inlay.notebook import show_metrics
from inlay.pipeline import EvaluationReport, SweepReport, TrainReport
from inlay.serving import Request
from inlay.settings import DataConfig, DataSettings, FitSettings, RunConfig, TaskSettings, from_tree, split_settings
from inlay.store import Store, Version

EXPORTS = ("inlay", "adapterhub", "peft", "onnx")


@speaking_python()
def train(
    data: RowsGiven,
    task: str | None = None,
    *,
    backbone: str | Backbone | None = None,
    dev: RowsGiven | None = None,
    test: RowsGiven | None = None,
    preset: str | None = None,
    config: RunConfig | None = None,
    budget: str | None = None,
    folds: int | None = None,
    publish: bool = True,
    probes: str = "rows",
    report: bool = True,
    log: Sequence[str] = (),
    store: Store | str | Path | None = None,
    device: str = "auto",
    fit: FitSettings | None = None,
    progress: bool = True,
    **settings: Unpack[TaskSettings],
) -> TrainReport:
    """Train a task on a frozen backbone and publish it, as `inlay train` does.

    `data` is a file or another name of data, a DataFrame, a list of dicts, a dict of columns, `(X, y)` or a
    `datasets.Dataset`; `dev` and `test` are given in the same ways; without `dev`, dev rows are split off. `task` names
    the task; by default it is named after its file. `backbone` is a name or a loaded backbone. `settings` are those of
    `DataConfig`, `MethodConfig` and `TrainConfig` by name; they override `preset` (a published recipe), which overrides
    `config`. `budget` (`"5m"`) tries candidates for that long; `folds` cross-validates first. `publish=False` leaves
    the store as it is, and `probes` says what the version keeps of dev rows: `rows`, `hashed` or `none`. `report`
    writes a report and a model card into the run's folder; `log=["tensorboard", "mlflow"]` logs every epoch there too.
    `store` is a folder, `device` is `cpu` or `cuda`, and `fit` says how memory is used; `progress=False` prints no
    progress.

    A finished run is read back, and a stopped one continues.

    >>> inlay.train(rows, "new", **QUICK)
    TrainReport(new@1: dev accuracy ..., ... s)
    """
    spend = pipeline.read_budget(budget, folds)
    training.check_probes(probes)
    pipeline.check_trackers(log)
    opened = open_store(store)
    with terminal.silenced(not progress):
        asked = find_config(data, task, backbone, config, preset, opened, settings)
        ready = prepare(asked, opened, device, backbone, data, dev, test)
        pipeline.describe_run(ready.run, ready.backbone)
        how: dict[str, Any] = {"lister": "inlay.baseline(…)", "writes_report": report, "trackers": tuple(log)}
        options = pipeline.TrainOptions(None, publish, probes, folds, fit or FitSettings(), **how)
        return require_report(pipeline.train_and_publish(ready, asked, options, spend))


@speaking_python()
def sweep(
    data: RowsGiven,
    grid: Mapping[str, Sequence[Any]],
    task: str | None = None,
    *,
    seeds: int = 1,
    backbone: str | Backbone | None = None,
    dev: RowsGiven | None = None,
    test: RowsGiven | None = None,
    preset: str | None = None,
    config: RunConfig | None = None,
    publish: bool = True,
    report: bool = True,
    on: str | None = None,
    log: Sequence[str] = (),
    store: Store | str | Path | None = None,
    device: str = "auto",
    fit: FitSettings | None = None,
    progress: bool = True,
    **settings: Unpack[TaskSettings],
) -> SweepReport:
    """Train every combination of settings as one cohort and publish the best, as `inlay sweep` does.

    `grid` has the values of each setting: `{"lr": [3e-4, 1e-3], "size": [8, 64]}`. Each is trained `seeds` times.
    `on="ray"` trains on the machines of a Ray cluster, `on="ray://HOST:10001"` of another one. `data`, `task`,
    `backbone`, `dev`, `test`, `preset`, `config`, `publish`, `report`, `log`, `store`, `device`, `fit`, `progress` and
    `settings` are those of `train`.

    >>> inlay.sweep(rows, {"lr": [1e-3, 1e-2]}, "new", **QUICK)
    SweepReport(2 runs, best TrainReport(new@1: ...))
    """
    pipeline.check_trackers(log, on_cluster=on is not None)
    opened = open_store(store)
    with terminal.silenced(not progress):
        asked = find_config(data, task, backbone, config, preset, opened, settings)
        axes: dict[str, Sequence[Any]] = {}
        for name, values in grid.items():
            section, key = next((section, key) for section, own in split_settings({name: None}).items() for key in own)
            axes[f"{section}.{key}"] = values
        points = explore.make_grid(asked, axes, seeds)  # refuses impossible values before anything is read
        cluster = None if on is None else pipeline.parse_cluster(on)
        how: dict[str, Any] = {"cluster": cluster, "trackers": tuple(log), "writes_report": report}
        options = pipeline.TrainOptions(publishes=publish, fit=fit or FitSettings(), **how)
        first = prepare(points[0], opened, device, backbone, data, dev, test)
        return require_report(pipeline.sweep_and_publish(axes, points, options, lambda _: first))


@speaking_python()
def evaluate(
    task: str,
    data: RowsGiven,
    *,
    backbone: str | Backbone | None = None,
    precision: str = "auto",
    min_confidence: float | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
    **settings: Unpack[DataSettings],
) -> EvaluationReport:
    """Score a published task on labelled rows, as `inlay evaluate` does.

    `task` is `"mail"`, `"mail@3"` or `"mail@best"`; `data` and `settings` are those of `load_task`. With
    `min_confidence` only answers as sure as that count; with `precision="int8"` the report says what that changes.
    `backbone` is by default the one that the task was trained on. `store`, `device` and `progress` are those of
    `train`.

    >>> inlay.evaluate("mood", rows, progress=False).metrics["accuracy"] > 0.5
    True
    """
    read = from_tree(DataConfig, settings, "data.")
    how: dict[str, Any] = {"device": device, "precision": precision, "min_confidence": min_confidence}
    with terminal.silenced(not progress):
        return pipeline.evaluate(task, data, open_store(store), read, backbone=backbone, **how)


@speaking_python()
def predict(
    task: str,
    texts: str | tuple[str, str] | Sequence[str | tuple[str, str] | Request],
    *,
    backbone: str | Backbone | None = None,
    min_confidence: float | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
) -> Any:
    """Answer one text, or several in order, with a published task: return one answer, or a list of them.

    `task` is `"mail"`, `"mail@3"` or `"mail@best"`. `texts` are texts, pairs of texts, or requests, which name their
    own task. An answer less sure than `min_confidence` is withheld. A text that cannot be answered has an `error` in
    its answer; for a single text it is raised. `backbone`, `store` and `device` are those of `evaluate`. For many
    calls, use an `Engine`.

    >>> inlay.predict("mood", "good film").outcome.label
    'yes'
    >>> [answer.outcome.label for answer in inlay.predict("mood", ["good film", "bad film"])]
    ['yes', 'no']
    """
    is_one = isinstance(texts, str | tuple)
    given: Sequence[Any] = texts if not is_one and isinstance(texts, Iterable) else [texts]
    requests = []
    for item in given:
        if not isinstance(item, Request):
            if not isinstance(item, str | tuple | list):
                raise BadData(f"`{item!r:.80}` is no text", "give a text, a pair `(text, text)`, or a list of them")
            text, pair = (item, None) if isinstance(item, str) else item
            item = Request(task, text, pair, min_confidence)
        requests.append(item)
    opened = open_store(store)
    frozen = open_trained_on(task, backbone, opened, device)
    answers = Engine(frozen, opened, num_slots=max(1, len({item.task for item in requests}))).predict(requests)
    if is_one and answers[0].error is not None:
        raise answers[0].error
    return answers[0] if is_one else answers


@speaking_python()
def suggest(
    data: RowsGiven,
    *,
    among: Sequence[str] | None = None,
    num_rows: int = explore.SuggestSettings.num_rows,
    backbone: str | Backbone | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
    **settings: Unpack[DataSettings],
) -> explore.Suggestions:
    """Rank the store's tasks as starting points for new data, as `inlay suggest` does; nothing is trained.

    It uses at most `num_rows` rows of `data`, read with `settings` of `DataConfig`. `among` names the tasks to rank, by
    default all on `backbone`. `store`, `device` and `progress` are those of `train`. Start from the best one with
    `train(data, start=[found.ranked[0].reference])`.

    >>> new = rows.head(30).assign(text="so " + rows["text"])  # a task on the same rows would be no fair start
    >>> found = inlay.suggest(new, backbone=backbone, progress=False)
    >>> [item.reference for item in found.ranked]
    ['mood@1']
    """
    opened = open_store(store)
    with terminal.silenced(not progress), terminal.Meter("looking") as meter:
        read = load(data, "new", settings=settings)
        options = explore.SuggestSettings(num_rows, on_rows=lambda number: meter.advance(number, "rows"))
        return explore.suggest(read, open_backbone(backbone, device), opened, among, options)


@dataclass(frozen=True)
class BaselineReport:
    """The scores of cheap models: `tfidf`, and `probe`, a linear model on the backbone's frozen vectors.

    >>> report = inlay.baseline(rows, probe=False, progress=False)
    >>> sorted(report.metrics)
    ['tfidf dev']
    """

    tfidf: explore.Baseline
    probe: training.ProbeResult | None = None

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Scores of each model and side (`tfidf dev`, `probe test`) by metric."""
        models = {"tfidf": self.tfidf} | ({} if self.probe is None else {"probe": self.probe})
        return {f"{name} {side}": own for name, model in models.items() for side, own in model.metrics.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the report as data."""
        return dataclasses.asdict(self.tfidf) | ({} if self.probe is None else {"probe": self.probe.to_json()})

    def __repr__(self) -> str:
        metric = self.tfidf.metric
        shown = [f"{name} {metric} {terminal.score(own[metric])}" for name, own in self.metrics.items()]
        return f"BaselineReport({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return show_metrics(f"baselines of {self.tfidf.task}", {"rows": self.tfidf.num_train}, self.metrics)


@speaking_python()
def baseline(
    data: RowsGiven,
    task: str = "task",
    *,
    chars: bool = False,
    probe: bool = True,
    backbone: str | Backbone | None = None,
    dev: RowsGiven | None = None,
    test: RowsGiven | None = None,
    device: str = "auto",
    progress: bool = True,
    **settings: Unpack[DataSettings],
) -> BaselineReport:
    """Score cheap models on the rows that `train` would read, with the same metrics, as `inlay baseline` does.

    The first counts words (with `chars` also n-grams of letters). The second, the `probe`, is a linear model on the
    vectors of `backbone`, which also finds rows that may be labelled wrongly: `report.probe.label_errors`. `data`,
    `task`, `dev`, `test`, `device`, `progress` and `settings` are those of `train`.

    >>> inlay.baseline(rows, probe=False, progress=False)
    BaselineReport(tfidf dev accuracy 1.0000)
    """
    with terminal.silenced(not progress), terminal.Meter("fitting") as meter:
        read = load(data, task, dev, test, settings)
        found = explore.fit_baseline(read, chars=chars, on_fit=meter.update)
        if not probe:
            return BaselineReport(found)
        frozen = open_backbone(backbone, device)
        return BaselineReport(found, training.fit_probe(read, frozen, on_rows=lambda n: meter.advance(n, "texts")))


@speaking_python()
def plan(
    data: RowsGiven,
    task: str | None = None,
    *,
    measure: bool = True,
    backbone: str | Backbone | None = None,
    dev: RowsGiven | None = None,
    test: RowsGiven | None = None,
    preset: str | None = None,
    config: RunConfig | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
    **settings: Unpack[TaskSettings],
) -> training.RunPlan:
    """Estimate the cost of `train` with the same arguments, compared with full fine-tuning, as `inlay plan` does.

    Parameters and bytes follow from shapes; with `measure`, time and memory are measured in a few steps. `data`,
    `task`, `backbone`, `dev`, `test`, `preset`, `config`, `store`, `device`, `progress` and `settings` are those of
    `train`.

    >>> found = inlay.plan(rows, "mood", measure=False, **QUICK)
    >>> found.inlay.trained_parameters < found.full.trained_parameters
    True
    """
    opened = open_store(store)
    with terminal.silenced(not progress):
        if not isinstance(data, str | Path):
            task = task or "task"  # nothing is kept, so rows in memory need no name
        asked = find_config(data, task, backbone, config, preset, opened, settings)
        ready = prepare(asked, opened, device, backbone, data, dev, test)
        return (training.make_plan if measure else training.count_plan)(ready.run, ready.backbone)


@speaking_python()
def export(
    task: str | Sequence[str],
    path: str | Path,
    *,
    format: str = "inlay",
    backbone: str | Backbone | None = None,
    store: Store | str | Path | None = None,
) -> Path:
    """Write a version as a file for another store, or as a folder for another library, as `inlay export` does.

    `task` is `"mail"`, `"mail@3"` or `"mail@best"`; for ONNX it may be several. `path` is the file or folder to
    write. `format` is `inlay`, `adapterhub`, `peft` or `onnx`. `backbone` and `store` are those of `evaluate`.

    >>> inlay.export("mood", folder / "mood.inlay").name
    'mood.inlay'
    """
    references = [task] if isinstance(task, str) else list(task)
    if format not in EXPORTS:
        raise UnknownName("format", format, EXPORTS)
    if len(references) != 1 and format != "onnx":
        raise BadConfig(f"`{format}` is a format of one version", 'export one at a time, or use `format="onnx"`')
    opened, target = open_store(store), Path(path)
    if format == "inlay":
        return opened.export(references[0], target)
    frozen = open_trained_on(references[0], backbone, opened, "cpu")
    if format == "onnx":
        return exchange.export_onnx(opened, references, frozen, target).folder
    exchange.export_folder(references[0], opened, frozen, format, target)
    return target


@speaking_python()
def import_(
    path: str | Path,
    *,
    name: str | None = None,
    backbone: str | Backbone | None = None,
    labels: Sequence[str] | None = None,
    kind: str | None = None,
    max_length: int | None = None,
    store: Store | str | Path | None = None,
) -> Version:
    """Add a file that `export` wrote, or a folder of AdapterHub or PEFT, to the store, as `inlay import` does.

    `path` is the file or folder, `name` the task's name here. `backbone` is by default the one that the file names, if
    you have named it before. `labels`, `kind` and `max_length` are for folders that do not say them. `store` is a
    folder.

    >>> inlay.import_(folder / "mood.inlay", name="copy").reference
    'copy@1'
    """
    opened, source = open_store(store), Path(path)

    def open_named(stored: str) -> Backbone:
        if isinstance(backbone, Backbone):
            return backbone
        return pipeline.open_once(backbone or pipeline.find_stored(stored, opened), "cpu")

    if source.is_dir():
        options = exchange.ImportOptions(name, None if labels is None else tuple(labels), kind, max_length)
        named = "" if backbone else exchange.named_backbone(source)
        return exchange.import_folder(source, open_named(named), opened, options).version
    for option, value in (("labels", labels), ("kind", kind), ("max_length", max_length)):
        if value is not None:
            raise BadConfig(f"`{option}` is for folders; a file contains it", f"leave out `{option}`")
    return exchange.import_file(source, name, opened, open_named)
