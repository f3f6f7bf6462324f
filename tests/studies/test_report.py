"""The report is one page that needs nothing else, and says the same as its Markdown."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import synthetic

from inlay.studies.judge.published import read_published
from inlay.studies.report import report as report_module
from inlay.studies.report.page import Folded, Heading, Points, Text, write_html, write_markdown
from inlay.studies.report.report import (
    Chapter,
    StudyReport,
    draw_report,
    gather_chapter,
    group_records,
    make_report,
    order_studies,
    write_report,
)
from inlay.studies.report.tables import ReportTable
from inlay.studies.run.records import append_records, results_file
from inlay.studies.spec.study import read_study

PUBLISHED = Path(__file__).parents[2] / "studies" / "published"


@pytest.fixture(scope="module")
def report():
    glue, records = synthetic.glue()
    small = [dataclasses.replace(item, backbone="/b/minilm", backbone_parameters=22_000_000) for item in records[:8]]
    uva, more = synthetic.uva()
    notes = {("mpnet-base", "device"): ["3 seeds instead of 5"]}
    chapters = [
        Chapter(
            dataclasses.replace(glue, notes=("QQP is not at hand",)),
            [*small, *records],
            read_published(PUBLISHED, "glue"),
            differences=notes,
        ),
        Chapter(uva, more, read_published(PUBLISHED, "uva")),
        Chapter(dataclasses.replace(uva, name="init", published="init", title="Init"), []),
    ]
    return make_report(chapters)


class Tags(HTMLParser):
    """Which tags are open, and what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.references = [], []

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_besides_itself(report):
    tags = Tags()
    tags.feed(report.html)
    assert tags.open == []
    assert all(value.startswith(("data:image/svg+xml;base64,", "#")) for value in tags.references)
    assert "<script" not in report.html
    assert "url(" not in report.html
    assert report.html.count("<img ") == len(report.figures)


def test_files_are_written_and_the_markdown_leads_to_them(report, tmp_path):
    paths = write_report(report, tmp_path)
    assert tmp_path / "report.html" in paths
    linked = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", report.markdown)
    assert linked
    assert len(linked) == len(report.figures)
    for link in linked:
        assert (tmp_path / link).read_bytes().startswith(b"<?xml")
        assert (tmp_path / link).with_suffix(".png").exists()
    assert (tmp_path / "glue" / "mpnet-base-device-glue.svg").exists()


def test_backbones_and_profiles_are_never_mixed_and_the_largest_comes_first(report):
    first, second = (report.markdown.index(f"### {name}, profile device") for name in ("mpnet-base", "minilm"))
    assert first < second
    bench = synthetic.Bench("glue")
    records = [bench.add("full", "glue/rte", 0.7, profile=profile) for profile in ("tiny", "paper")]
    assert list(group_records(records)) == [("mpnet-base", "paper"), ("mpnet-base", "tiny")]


def test_studies_come_in_the_order_of_the_papers_and_ones_own_last(tmp_path):
    own = [tmp_path / "beside.toml", tmp_path / "aside.toml"]
    for path in own:
        path.write_text('title = "mine"')
    paths = [*(PUBLISHED.parent).glob("*.toml"), *own]
    found = [path.stem for path in order_studies(sorted(paths))]
    assert found == [*synthetic.STUDIES, "drop", "aside", "beside"]


def _run_all(study):
    """A record of every run that a study plans."""
    bench = synthetic.Bench(study.name)
    return [
        bench.add(arm.name, task, 0.7, axes=dict(point.axes), seed=seed, config=dataclasses.asdict(point.config))
        for arm, task, point in study.points()
        for seed in range(arm.seeds)
    ]


def test_records_of_settings_that_a_study_no_longer_has_are_left_out_and_counted(tmp_path):
    path = PUBLISHED.parent / "uva.toml"
    records = _run_all(read_study(path, "device", "mpnet-base"))
    old = [
        dataclasses.replace(item, id=f"old{item.id}", dev={**item.dev, item.metric: 0.999}, config=longer)
        for item in records
        if item.arm == records[0].arm
        for longer in ({**item.config, "train": {**item.config["train"], "batch_size": 7}},)
    ]
    file = results_file(tmp_path, "uva", "mpnet-base", "device")
    append_records(file, [*records, *old])
    text = make_report([gather_chapter(path, tmp_path)]).markdown
    assert "99.9" not in text
    assert f"{len(old)} records of settings that the study's file has not: {old[0].arm}" in text
    file.unlink()
    append_records(file, old)
    text = make_report([gather_chapter(path, tmp_path)]).markdown
    assert "99.9" not in text
    assert "Not run yet" in text
    assert f"mpnet-base, profile device: {len(old)} records of settings" in text
    assert draw_report([path], tmp_path, "mpnet-base").is_file()


def test_a_report_may_be_of_one_backbone(tmp_path, monkeypatch):
    records = _run_all(read_study(PUBLISHED.parent / "uva.toml", "device", "minilm"))
    small = [dataclasses.replace(item, id=f"small{item.id}", backbone="/b/minilm") for item in records]
    append_records(results_file(tmp_path, "uva", "mpnet-base", "device"), records)
    append_records(results_file(tmp_path, "uva", "minilm", "device"), small)
    path = PUBLISHED.parent / "uva.toml"
    assert list(gather_chapter(path, tmp_path).variants) == [("minilm", "device"), ("mpnet-base", "device")]
    assert list(gather_chapter(path, tmp_path, "/elsewhere/minilm").variants) == [("minilm", "device")]
    drawn = []
    made = StudyReport("", "", {})
    monkeypatch.setattr(report_module, "make_report", lambda chapters, *title: drawn.append(chapters) or made)
    page = draw_report([path, PUBLISHED.parent / "glue.toml"], tmp_path, "minilm")
    assert page == tmp_path / "report-minilm.html", "as of several, though one has results"
    assert [(chapter.study.name, len(chapter.records)) for chapter in drawn[0]] == [("uva", len(small))]


def test_it_says_what_differs_what_is_missing_and_what_was_not_run(report):
    assert "**Otherwise than in the paper**\n\n- 3 seeds instead of 5" in report.markdown
    assert "not run: adapters on CoLA" in report.markdown
    assert "## Init" in report.markdown
    assert "> Not run yet." in report.markdown
    assert "QQP is not at hand" in report.markdown
    assert "sentence-tuned backbones were tuned on pair data" in report.markdown


def test_it_says_how_many_rows_were_trained_on_and_what_was_noted_about_them():
    study, records = synthetic.squad()
    noted = [dataclasses.replace(item, num_train=20_000, extra={"notes": ["20,000 of 87,599"]}) for item in records]
    text = make_report([Chapter(study, noted)]).markdown
    assert "Training rows: SQuAD v1.1 20,000." in text
    assert "- SQuAD v1.1: 20,000 of 87,599" in text


def test_samples_that_seeds_drew_are_told_once():
    study, records = synthetic.squad()
    counts = [(4, 100, 2000)[place % 3] for place in range(len(records))]
    drawn = [
        dataclasses.replace(
            item,
            num_train=count,
            extra={"notes": [f"training on {count} of 87599 rows, drawn by the seed {item.seed}"]},
        )
        for item, count in zip(records, counts, strict=True)
    ]
    text = make_report([Chapter(study, drawn)]).markdown
    assert "Training rows: SQuAD v1.1 4 to 2,000." in text
    assert [line for line in text.splitlines() if "drawn by the seed" in line] == [
        "- SQuAD v1.1: training on 4 to 2,000 of 87,599 rows, drawn by the seed"
    ]


def test_every_claim_has_a_verdict_for_every_backbone(report):
    line = next(
        line for line in report.markdown.splitlines() if line.startswith("| adapters within 0.4 points of full")
    )
    assert line.count("|") == 5
    assert line.split("|")[3].strip() in ("confirmed", "not confirmed", "open")


def test_a_claim_of_a_study_that_was_not_run_has_no_verdict():
    study, records = synthetic.glue()
    text = make_report([Chapter(study, records), Chapter(synthetic.stream()[0], [])]).markdown
    line = next(line for line in text.splitlines() if line.startswith("| no earlier task is forgotten"))
    assert line.split("|")[3].strip() == "–"


def test_a_trial_is_said_to_be_one():
    study, records = synthetic.uva()
    tiny = [dataclasses.replace(record, profile="tiny") for record in records]
    trial = make_report([Chapter(study, tiny)]).markdown
    assert "nothing about methods" in trial
    assert "What the papers claim" not in trial
    assert "What agrees" not in trial
    assert "nothing about methods" not in make_report([Chapter(study, records)]).markdown


def test_a_report_of_nothing_is_still_a_report():
    made = make_report([])
    assert "0 studies" in made.markdown
    assert made.figures == {}


def test_text_is_escaped_and_code_is_set_as_code():
    blocks = [Heading(1, "A <b> & `c`"), Text("x < y"), Points(("`a`",)), Folded("more", (Text("inner"),))]
    page = write_html("t", blocks)
    assert "A &lt;b&gt; &amp; <code>c</code>" in page
    assert "x &lt; y" in page
    assert "<summary>more</summary><p>inner</p>" in page
    assert "# A <b> & `c`" in write_markdown(blocks)


def test_published_lines_are_set_apart_in_both():
    table = ReportTable("t", ("", "a"), (("ours", "1"), ("theirs", "2")), ("a note",), frozenset({1}))
    assert "<tr class=published>" in write_html("t", [Heading(1, "t"), table])
    assert "| *theirs* | *2* |" in write_markdown([table])
    assert table.turned().columns == ("", "ours", "theirs")
    assert table.turned().lines == (("a", "1", "2"),)


def test_what_heads_read_is_said_as_runs_came_to_it():
    study, records = synthetic.uva()
    configs = {arm: {"train": {"pooling": pooling}, "data": {"kind": "classify"}} for arm, pooling in
               (("full", "mean"), ("adapters-64", "pooler"))}  # fmt: skip
    pooled = [dataclasses.replace(item, config=configs[item.arm]) for item in records]
    text = make_report([Chapter(study, pooled)]).markdown
    assert "What heads read: the mean of all tokens (full); the backbone's pooler (adapters-64)." in text


def test_a_run_that_two_studies_have_is_counted_once():
    glue, records = synthetic.glue()
    other = dataclasses.replace(glue, name="uva", title="The same runs")
    both = make_report([Chapter(glue, records), Chapter(other, records)])
    hours = 60 * len(records) / 3600  # each took a minute
    assert f"2 studies, {len(records):,} runs ({hours:.1f} hours" in both.markdown
