"""The report on a run of several tasks: their scores side by side, and the way to the page of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.reports.markup import Html, tag
from inlay.reports.model_card import draw_markdown_table, escape_markdown
from inlay.reports.report_page import draw_table, frame_page
from inlay.reports.wording import duration, metric_words, plural, show_number, show_score


@dataclass(frozen=True)
class JointRow:
    """One task of the run. `link` leads to its own page, if it has one."""

    name: str
    kind: str
    metric: str
    num_train: int
    dev: float | None
    test: float | None
    reference: str = ""
    """the version that it became"""
    link: str = ""


@dataclass(frozen=True)
class JointReport:
    """A report on a run of several tasks. `to_html` is the page, `to_markdown` the model card."""

    run_id: str
    made_at: str
    backbone: str
    method: str
    rows: tuple[JointRow, ...]
    best_epoch: int
    status: str
    seconds: float
    settings: Mapping[str, Any]

    @property
    def _facts(self) -> str:
        took = f"trained in {duration(self.seconds)}, the best epoch is {self.best_epoch} ({self.status})"
        return (
            f"One run of {plural(len(self.rows), 'task')} with {self.method}, on the backbone {self.backbone}; {took}."
        )

    @property
    def _heads(self) -> tuple[str, ...]:
        return ("Task", "Kind", "Metric", "Training rows", "Dev", "Test", "Version")

    def to_html(self) -> str:
        """Return the report as one HTML page."""
        rows = [
            [
                tag("th", {"scope": "row"}, tag("a", {"href": row.link}, row.name) if row.link else row.name),
                *(tag("td", None, each) for each in (row.kind, metric_words(row.metric))),
                tag("td", {"class": "number"}, show_number(row.num_train)),
                *(tag("td", {"class": "number"}, show_score(each, row.metric)) for each in (row.dev, row.test)),
                tag("td", None, row.reference or "–"),
            ]
            for row in self.rows
        ]
        settings = [[tag("th", {"scope": "row"}, name), tag("td", None, str(value))] for name, value in self._settings]
        names = " + ".join(row.name for row in self.rows)
        parts: Sequence[Html] = [
            tag("header", None, tag("h1", None, names), tag("p", {"class": "soft"}, self._facts)),
            tag("section", None, tag("h2", None, "Tasks"), draw_table("Tasks", self._heads, rows, num_words=3)),
            tag("section", None, tag("h2", None, "Settings"), draw_table("Settings", ("", ""), settings, num_words=2)),
        ]
        return frame_page(f"{names}: report", parts)

    def to_markdown(self) -> str:
        """Return the model card. It never has the texts of rows."""
        rows = [
            [row.name, row.kind, row.metric, f"{row.num_train:,}"]
            + [show_score(each, row.metric) for each in (row.dev, row.test)]
            + [row.reference or "–"]
            for row in self.rows
        ]
        title = escape_markdown(" + ".join(row.name for row in self.rows))
        return "\n\n".join([f"# {title}", escape_markdown(self._facts), draw_markdown_table(self._heads, rows)]) + "\n"

    @property
    def _settings(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in self.settings.items() if value is not None]
