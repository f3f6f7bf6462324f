"""The report on a task: of every kind, with the scores that formulas give; its page and card only say things."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from inlay.data import KINDS, load_task
from inlay.reports import report_version, write_reports
from inlay.settings import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish
from toys import make_toy_answers, make_toy_pairs, make_toy_tags, make_toy_task, make_toy_texts

HOSTILE = "</table><script>alert(1)</script> [a](http://evil.example) | `x` \x00"
TASKS = {
    "classify": make_toy_pairs,
    "multilabel": lambda: make_toy_task(kind="multilabel", num_labels=3),
    "regress": lambda: make_toy_task(kind="regress"),
    "ordinal": lambda: dataclasses.replace(make_toy_task(num_labels=3), kind="ordinal", metric="quadratic_kappa"),
    "tag": make_toy_tags,
    "span": make_toy_answers,
    "text": make_toy_texts,
}


def test_every_kind_is_reported_here():
    assert TASKS.keys() == KINDS.keys()


class Elements(HTMLParser):
    """All elements of a page, and a failure where one is not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.found]


def train(task, backbone, root: Path, **settings):
    store = Store(root)
    known = {"lr": 1e-2, "num_epochs": 2, "batch_size": 16, "max_length": 40} | settings
    known["epochs"] = known.pop("num_epochs")
    config = RunConfig(method=MethodConfig("pfeiffer", 4), train=TrainConfig(**known), task=task.name)
    run = make_run(task, config, backbone, store)
    (result,) = fit([run], backbone, store.root / "runs")
    return store, publish(run, result, backbone, store)


@pytest.mark.parametrize("kind", TASKS)
def test_every_kind_of_task_gets_a_page_and_a_card(kind, backbone_of, tmp_path):
    task = TASKS[kind]()
    assert task.kind == kind
    backbone = backbone_of("t5" if kind == "text" else "bert")
    store, version = train(task, backbone, tmp_path / "home")
    report = report_version(store, version, task, backbone)
    scores = report.main_scores
    value, low, high = scores.metrics[report.metric]
    assert scores.side == "dev"
    assert value == pytest.approx(store.manifest(version).metrics["dev"][report.metric], nan_ok=True)
    assert low <= high
    page = Elements(report.to_html())
    assert page.names.count("h1") == 1
    assert page.names.count("script") == 0
    assert ("svg" in page.names) or kind == "text"
    assert [each.side for each in report.details] == ["dev"]
    assert len(report.main.points) == (len(task.dev) if KINDS[kind].is_number else 0)
    assert (report.main.about["confusion"] is not None) == KINDS[kind].targets.is_one_label
    assert len(report.training.history) >= 2
    assert report.to_markdown().startswith("---\nlibrary_name: inlay\n")
    json.dumps(report.to_json(), allow_nan=False)


def test_the_numbers_are_those_of_the_rows(backbone_of, tmp_path):
    path = tmp_path / "mail.csv"
    words = {"ham": "home late cat", "spam": "free win prize"}
    lines = [f"{text} {number} {number % 7},{label}" for number in range(40) for label, text in words.items()]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    task = load_task(DataConfig(source=str(path), test_share=0.2), "mail")
    store, version = train(task, backbone_of("bert"), tmp_path / "home")
    report = report_version(store, version, task, backbone_of("bert"))
    assert report.main_scores.side == "test"
    assert [side.num_rows for side in report.sides] == [len(task.train), len(task.dev), len(task.test)]
    train_labels = np.bincount(task.train.targets)
    assert report.sides[0].labels == {"ham": train_labels[0], "spam": train_labels[1]}
    assert report.sides[0].median_words == 5
    assert [each.side for each in report.details] == ["test", "dev"], "what tells most comes first"
    for details, rows in zip(report.details, (task.test, task.dev), strict=True):
        counts = np.array(details.about["confusion"]["counts"])
        assert counts.sum() == len(rows)
        assert details.num_errors == counts.sum() - np.trace(counts)
        confidences = [row["confidence"] for row in details.unsure]
        assert confidences == sorted(confidences)
        assert {row["text"] for row in details.unsure} <= set(rows.texts)
    page = report.to_html()
    assert page.index("Test rows by their right label") < page.index("Dev rows by their right label")
    assert page.count("The same of the dev rows") >= 3
    assert "| label (test rows) |" in report.to_markdown()
    card = report.to_markdown()
    assert "accuracy" in card
    assert not any(line.split(",")[0] in card for line in lines), "a card has no row"
    assert any(line.split(",")[0] in report.to_html() for line in lines)
    without = report_version(store, version, task, backbone_of("bert"), shows_rows=False)
    assert not any(line.split(",")[0] in without.to_html() + json.dumps(without.to_json()) for line in lines)
    assert without.training.notes == task.notes


def test_what_comes_from_data_is_only_text(backbone_of, tmp_path):
    task = make_toy_task()
    labels = (HOSTILE, "plain")
    texts = [f"{text} <img src=x onerror=alert(1)>" for text in task.dev.texts]
    notes = ("found `<b>`", HOSTILE)
    task = dataclasses.replace(task, labels=labels, notes=notes, dev=dataclasses.replace(task.dev, texts=texts))
    store, version = train(task, backbone_of("bert"), tmp_path / "home")
    report = report_version(store, version, task, backbone_of("bert"))
    page, card = tmp_path / "page.html", tmp_path / "card.md"
    write_reports(report, page, card)
    elements = Elements(page.read_text(encoding="utf8"))
    assert {"script", "img", "b", "link", "iframe"}.isdisjoint(elements.names)
    assert HOSTILE.replace("\x00", "\N{REPLACEMENT CHARACTER}") in elements.texts
    targets = [value for _, attributes in elements.found for key, value in attributes.items() if key in ("src", "href")]
    assert all(target.startswith("#") for target in targets)
    assert "url(" not in page.read_text(encoding="utf8")
    said = card.read_text(encoding="utf8")
    body = said.partition("\n---\n")[2]
    assert "<" not in body
    assert not re.search(r"(?<!\\)\]\(", body)
    assert "http://evil" not in body
    for table in re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_page_can_be_read_by_everybody(backbone_of, tmp_path):
    """Every table and picture has words of its own, and headings follow one another."""
    task = make_toy_task(num_labels=3)
    store, version = train(task, backbone_of("bert"), tmp_path / "home")
    page = report_version(store, version, task, backbone_of("bert")).to_html()
    elements = Elements(page)
    assert '<html lang="en">' in page
    assert page.count("<caption") == page.count("<table")
    assert all(attributes["aria-label"] for name, attributes in elements.found if name == "svg")
    assert all("scope" in attributes for name, attributes in elements.found if name == "th")
    levels = [int(name[1]) for name in elements.names if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    anchors = {attributes["href"][1:] for name, attributes in elements.found if name == "a"}
    assert anchors <= set(ids)
    assert "prefers-color-scheme: dark" in page
    assert 'content="width=device-width, initial-scale=1"' in page
