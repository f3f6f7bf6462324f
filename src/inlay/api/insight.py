"""Functions that examine a task: explain answers, forecast more rows, pick rows to label, detect drift, report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from inlay import explore, pipeline, reports, terminal
from inlay.api.arguments import find_config, load, open_backbone, open_store, open_trained_on
from inlay.data import InputRow, RowsGiven, Task
from inlay.errors import BadData, InlayError, speaking_python
from inlay.explore import DriftReport, Explanation, LearningCurve, PickedRows, PickSettings, VersionReader
from inlay.model import Backbone
from inlay.reports import TaskReport
from inlay.settings import DataConfig, DataSettings, FitSettings, RunConfig, TaskSettings, from_tree
from inlay.store import Store

_MOST_READ = 20_000
Texts = str | Path | Sequence[str | tuple[str, str]]


@speaking_python()
def explain(
    task: str,
    text: str,
    pair: str | None = None,
    *,
    by: str = "occlusion",
    label: str | None = None,
    nearest: int = 3,
    data: str | Path | Task | None = None,
    format: str = "auto",
    header: bool | None = None,
    backbone: str | Backbone | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> Explanation:
    """Explain an answer by the words that moved it, and the training rows nearest to it, as `inlay explain` does.

    `task` answers `text`, or `text` and `pair`. `by` is `occlusion` (each word left out in turn) or `gradients`
    (integrated through the task's slot). `label` asks about another label than the answer's. `nearest` training rows
    are read from the file that the task was trained on, or from `data`, a file (of that `format`, with a `header` or
    not) or the task itself. `backbone`, `store`, `device` and `progress` are those of `evaluate`.

    >>> found = inlay.explain("mood", "a good film", nearest=0)
    >>> [word.text for word in found.words]
    ['a', 'good', 'film']
    """
    with terminal.silenced(not progress):
        kept, reader = _open(task, backbone, store, device)
        found = explore.explain_answer(reader, text, pair, by=by, label=label)
        if not nearest:
            return found
        try:
            known: dict[str, Any] = {"format": format, "header": header}
            trained = explore.find_training_rows(reader.version, reader.manifest, kept, _source(data), **known)
        except InlayError as error:
            if data is not None:
                raise
            return dataclasses.replace(found, notes=(*found.notes, f"no nearest training rows: {error.message}"))
        row = reader.make_split([text], None if pair is None else [pair])
        with terminal.Meter("reading the training rows", len(trained.train)) as meter:
            near = explore.find_nearest(reader, row, trained, nearest, lambda n: meter.advance(n, "training rows"))
        return dataclasses.replace(found, nearest=near)


@speaking_python()
def learn_curve(
    data: RowsGiven,
    task: str | None = None,
    *,
    num_sizes: int = 6,
    num_draws: int = 3,
    backbone: str | Backbone | None = None,
    dev: RowsGiven | None = None,
    preset: str | None = None,
    config: RunConfig | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
    fit: FitSettings | None = None,
    progress: bool = True,
    **settings: Unpack[TaskSettings],
) -> LearningCurve:
    """Forecast the gain from more rows, by training on parts of the rows, as `inlay learn-curve` does.

    Trains `num_draws` runs on each of `num_sizes` shares, together as one cohort, and fits a power law. `data`, `task`,
    `backbone`, `dev`, `preset`, `config`, `store`, `device`, `fit`, `progress` and `settings` are those of `train`.
    Nothing is published; finished runs are read back.

    >>> labelled = (texts * 8, ["yes", "no"] * 160)
    >>> curve = inlay.learn_curve(labelled, "mood", num_sizes=4, num_draws=2, **QUICK)
    >>> len(curve.points), curve.verdict in ("helps", "may help", "hardly", "nothing")
    (8, True)
    """
    opened = open_store(store)
    with terminal.silenced(not progress):
        pipeline.check_device_name(device)
        asked = find_config(data, task, backbone, config, preset, opened, settings)
        own = {item.name: getattr(asked.data, item.name) for item in dataclasses.fields(DataConfig)}
        read = load(data, asked.task, dev, None, own)
        explore.check_curve(read, num_sizes)
        frozen = open_backbone(backbone or asked.backbone, device)
        made = explore.make_curve_runs(read, asked, frozen, opened, num_sizes=num_sizes, num_draws=num_draws)
        runs = [run for _, _, run in made]
        results = pipeline.fit_runs(runs, frozen, opened.root / "runs", fit or FitSettings())
        pipeline.write_brief_reports(runs, results, frozen, opened.root / "runs", reports.OF_A_SHARE)
        return explore.fit_curve(read, explore.read_points(made, results))


@speaking_python()
def pick(
    task: str,
    pool: Texts,
    *,
    count: int = 20,
    by: str = "margin",
    data: str | Path | Task | None = None,
    backbone: str | Backbone | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
    **settings: Unpack[DataSettings],
) -> PickedRows:
    """Pick texts that are worth labelling, because the task is unsure of them and they differ, as `inlay pick` does.

    `pool` is a file, or texts (or pairs of texts), from which `task` picks `count`. `by` is `margin` or `entropy`.
    Texts that the task was trained on are left out, if `data` or the file they came from can be read. `backbone`,
    `store`, `device` and `progress` are those of `explain`, `settings` (`format`, `header`, `text` …) of `load_task`.

    >>> found = inlay.pick("mood", ["good film", "bad film", "one two three"], count=2)
    >>> len(found.rows)
    2
    """
    with terminal.silenced(not progress), terminal.Meter("reading") as meter:
        kept, reader = _open(task, backbone, store, device)
        try:
            train = explore.find_training_rows(reader.version, reader.manifest, kept, _source(data)).train
        except InlayError:
            if data is not None:
                raise
            train = None
        options = PickSettings(count, by, lambda number: meter.advance(number, "rows"))
        return explore.pick_rows(reader, _read_texts(pool, settings, reader), options, train)


@speaking_python()
def drift(
    task: str,
    new: Texts,
    *,
    data: str | Path | Task | None = None,
    backbone: str | Backbone | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
    **settings: Unpack[DataSettings],
) -> DriftReport:
    """Tell whether new texts look like those a task was trained on, as `inlay drift` does.

    `new` is a file, or texts (or pairs of texts). The rows that `task` was trained on are read from `data` (a file, or
    the task itself), by default from the file they came from. `backbone`, `store`, `device` and `progress` are those of
    `explain`, `settings` (`format`, `header`, `text` …) of `load_task`.

    >>> inlay.drift("mood", ["good film", "bad film"], data="gone.csv")
    Traceback (most recent call last):
    inlay.errors.Missing: the training rows of `mood@1` cannot be read: ...
    """
    with terminal.silenced(not progress), terminal.Meter("comparing") as meter:
        kept, reader = _open(task, backbone, store, device)
        train = explore.find_training_rows(reader.version, reader.manifest, kept, _source(data)).train
        rows = explore.split_of(_read_texts(new, settings, reader))
        return explore.find_drift(reader, rows, train, on_rows=lambda number: meter.advance(number, "rows"))


@speaking_python()
def report(
    task: str,
    *,
    html: str | Path | None = None,
    card: str | Path | None = None,
    rows: bool = True,
    data: str | Path | Task | None = None,
    format: str = "auto",
    header: bool | None = None,
    backbone: str | Backbone | None = None,
    store: Store | str | Path | None = None,
    device: str = "auto",
    progress: bool = True,
) -> TaskReport:
    """Report on a `task`: its data, scores with intervals, mistakes, cost and use, as `inlay report` does.

    `html` and `card` are the files for the report and the model card; the result returns both too, as `to_html()` and
    `to_markdown()`. `rows=False` leaves out the rows it got wrong. The rows it was trained on are read from `data` (a
    file of that `format`, with a `header` or not, or the task itself), by default from the file they came from.
    `backbone`, `store`, `device` and `progress` are those of `evaluate`.

    >>> found = inlay.report("mood", data=task, progress=False)
    >>> found.main.num_errors <= 8, found.main_scores.side
    (True, 'dev')
    """
    with terminal.silenced(not progress):
        kept, reader = _open(task, backbone, store, device)
        known: dict[str, Any] = {"format": format, "header": header}
        trained_on = explore.find_training_rows(reader.version, reader.manifest, kept, _source(data), **known)
        found = reports.report_version(kept, reader.version, trained_on, reader.backbone, shows_rows=rows)
        reports.write_reports(found, None if html is None else Path(html), None if card is None else Path(card))
        return found


def _open(
    task: str, backbone: str | Backbone | None, store: Store | str | Path | None, device: str
) -> tuple[Store, VersionReader]:
    kept = open_store(store)
    return kept, VersionReader(kept.resolve(task), open_trained_on(task, backbone, kept, device), kept)


def _source(data: str | Path | Task | None) -> str | Task | None:
    return data if data is None or isinstance(data, Task) else str(data)


def _read_texts(given: Texts, settings: Mapping[str, Any], reader: VersionReader) -> list[InputRow]:
    """Return the rows of a file, read with these settings, or texts and pairs as rows, counted from 1."""
    config = from_tree(DataConfig, settings, "data.")
    if isinstance(given, str | Path):
        joined = reader.manifest.extra.get("joined_text")
        return explore.draw_rows(given, config, most=_MOST_READ, joined=joined)[0]
    hint = "give a file, or a list of texts or of pairs `(text, text)`"
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise BadData(f"`{given!r:.80}` holds no texts", hint)
    rows = []
    for line, item in enumerate(given, 1):
        pair = (item, None) if isinstance(item, str) else item
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise BadData(f"`{item!r:.80}`, item {line} of the list, is no text", hint)
        rows.append(InputRow(line, *pair))
    return rows
