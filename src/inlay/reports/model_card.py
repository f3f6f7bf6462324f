"""The report on a task as a model card in Markdown, for exported weights. It never has the texts of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from inlay.reports.markup import clean
from inlay.reports.snippets import LOCAL_SERVICE, write_command, write_curl, write_library
from inlay.reports.task_report import TaskReport
from inlay.reports.wording import capitalize_first, duration, metric_words, percent, plural, show_bytes, show_score

_MOST_LABELS = 50
_SPECIAL = re.compile(r"([\\`*_\[\]!|~])")
_LINKS = re.compile(r"(?i)\b(https?:|ftp:|www|mailto:)(?=[/.\w])")


def write_card(report: TaskReport) -> str:
    """Return the model card of a report."""
    parts = [
        *(_write_head(report), f"# {escape_markdown(report.reference)}", _summarise(report)),
        *("## How to use it", *_show_use(report)),
        *("## What it was trained on", *_describe_data(report)),
        *("## Scores", *_list_scores(report)),
        *("## How it was trained", _list_costs(report)),
        *("## Limits", _list_limits(report)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _write_head(report: TaskReport) -> str:
    """Return the header that model hubs read: YAML, with texts written as JSON, which YAML can read."""
    from inlay.data import KINDS

    main = report.main_scores
    value = main.metrics.get(report.metric, (None,))[0]
    lines = [
        "---",
        "library_name: inlay",
        f"pipeline_tag: {KINDS[report.kind].hub_task}",
        f"base_model: {json.dumps(str(report.backbone['name']))}",
        f"tags: [inlay, adapter, {json.dumps(report.kind)}]",
        f"metrics: [{json.dumps(report.metric)}]",
    ]
    if value is not None:
        result = {
            "task": {"type": KINDS[report.kind].hub_task},
            "dataset": {"name": report.name, "type": "other", "split": main.side},
            "metrics": [{"type": report.metric, "value": round(value, 4)}],
        }
        lines.append(f"model-index: {json.dumps([{'name': report.reference, 'results': [result]}])}")
    return "\n".join([*lines, "---"])


def _summarise(report: TaskReport) -> str:
    main = report.main_scores
    value, low, high = main.metrics.get(report.metric, (None, None, None))
    interval = (
        "" if low is None else f" (95% interval {show_score(low, report.metric)} to {show_score(high, report.metric)})"
    )
    what = f"kind `{report.kind}`"
    if report.labels:
        labels = ", ".join(map(escape_markdown, report.labels[:_MOST_LABELS]))
        left = len(report.labels) - _MOST_LABELS
        what += f", {plural(len(report.labels), 'label')}: {labels}" + (f" and {left} more" if left > 0 else "")
    scored = f"{capitalize_first(metric_words(report.metric))}: **{show_score(value, report.metric)}**{interval}"
    base = (
        f"A task of {what}. It is an adapter for the frozen backbone {escape_markdown(str(report.backbone['name']))}."
    )
    return f"{base}\n\n{scored}, on {plural(main.num_rows, main.side + ' row')}."


def _show_use(report: TaskReport) -> list[str]:
    if not report.digest:
        return ["This run is not in the store. Training with its settings reads it back and publishes it."]
    text, pair = "a text", "the second text" if report.has_pairs else None
    return [
        f"```sh\n{write_command(report.name, text, pair)}\n```",
        f"```python\n{write_library(report.name, text, pair)}\n```",
        "From a service (`inlay serve`):",
        f"```sh\n{write_curl(LOCAL_SERVICE, report.name, text, pair, needs_key=False)}\n```",
    ]


def _describe_data(report: TaskReport) -> list[str]:
    rows = [
        [side.side, f"{side.num_rows:,}", f"{side.median_words:,}", f"{side.long_words:,}"] for side in report.sides
    ]
    parts = [draw_markdown_table(["side", "rows", "words, median", "95% have at most"], rows)]
    labels = list(dict.fromkeys(label for side in report.sides for label in side.labels))[:_MOST_LABELS]
    if labels:
        counts = [[label, *(f"{side.labels.get(label, 0):,}" for side in report.sides)] for label in labels]
        parts.append(draw_markdown_table(["label", *(side.side for side in report.sides)], counts))
    return [*parts, f"Digest of the rows: `{report.data_digest}`"]


def _list_scores(report: TaskReport) -> list[str]:
    names = list(dict.fromkeys(name for side in report.scores for name in side.metrics))
    rows = []
    for name in names:
        cells = [metric_words(name)]
        for side in report.scores:
            value, low, high = side.metrics.get(name, (None, None, None))
            bounds = "" if low is None else f" ({show_score(low, name)} to {show_score(high, name)})"
            cells.append(show_score(value, name) + bounds)
        rows.append(cells)
    heads = ["metric", *(f"{side.side}, {plural(side.num_rows, 'row')} (95% interval)" for side in report.scores)]
    parts = [draw_markdown_table(heads, rows)]
    if report.main is not None and report.main.about["labels"]:
        scores = [
            [item["label"], *(percent(item[name]) for name in ("precision", "recall", "f1")), f"{item['support']:,}"]
            for item in report.main.about["labels"][:_MOST_LABELS]
        ]
        parts.append(
            draw_markdown_table([f"label ({report.main.side} rows)", "precision", "recall", "F1", "rows"], scores)
        )
    if report.main is None:
        parts.append(escape_markdown(report.left_out))
    return parts


def _list_costs(report: TaskReport) -> str:
    facts, method = report.training, report.method
    size = "" if method.get("size") is None else f" {method['size']}"
    lines = [f"method {method.get('name')}{size}, {report.num_parameters:,} trained parameters"]
    if report.size_bytes is not None:
        lines.append(f"{show_bytes(report.size_bytes)} on disk")
    if facts.seconds is not None:
        lines.append(f"trained in {duration(facts.seconds)}")
    if facts.history:
        lines.append(f"{facts.history[-1]['epoch']} epochs, the best is {facts.best_epoch}")
    if report.digest:
        lines.append(f"digest of the version: `{report.digest}`")
    return "\n".join(f"- {line}" for line in lines)


def _list_limits(report: TaskReport) -> str:
    lines = ["Dev rows chose the best epoch: scores on them are a little too good."]
    if all(side.side != "test" for side in report.scores):
        lines.append("There were no test rows: no score here is of rows that training never looked at.")
    if report.main is not None:
        weak = [item["label"] for item in report.main.about["labels"] if item["support"] < 10]
        if weak:
            shown = ", ".join(map(escape_markdown, weak[:10]))
            judge = f"Fewer than ten {report.main.side} rows judge"
            lines.append(f"{judge} {plural(len(weak), 'label')}, such as {shown}.")
    lines.append("The scores hold for texts like those it was trained on, and not for others (see `inlay drift`).")
    lines.append("Whoever publishes it should say here what it may be used for, and what not.")
    return "\n".join(f"- {line}" for line in lines)


def draw_markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [heads, ["---"] * len(heads), *([escape_markdown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape_markdown(text: str) -> str:
    """Return a text as Markdown that shows exactly this text, as hubs render HTML and links in Markdown."""
    return _LINKS.sub("\\1&#8203;", _SPECIAL.sub(r"\\\1", clean(" ".join(text.split()))))
