"""The report of all studies: one self-contained page, the same as Markdown, and every figure as SVG and PNG.

Each study is shown for every backbone and profile that has records, complete or not, with lists of what is missing,
what differs from the `paper` profile, and where the numbers come from.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inlay.data import KINDS
from inlay.errors import UnknownName
from inlay.settings import read_tree
from inlay.store import write_atomically
from inlay.studies.judge.bounds import ABSENT
from inlay.studies.judge.claims import JudgedClaim, describe_agreement, judge_claims
from inlay.studies.judge.coverage import Coverage, list_missing, split_planned
from inlay.studies.judge.published import Published, read_published
from inlay.studies.judge.row_specs import name_column, name_task
from inlay.studies.judge.scored_study import ScoredStudy, score_study
from inlay.studies.judge.scores import network_of
from inlay.studies.judge.verdicts import NONE
from inlay.studies.report.chart import Drawing
from inlay.studies.report.figures import draw_figures
from inlay.studies.report.page import Block, Folded, Heading, Picture, Points, Text, write_html, write_markdown
from inlay.studies.report.tables import ReportTable, other_metric_tables, settings_table, study_tables
from inlay.studies.run.records import FINISHED, Record, short_name
from inlay.studies.run.records import read_study as read_results
from inlay.studies.spec.profile_differences import list_differences
from inlay.studies.spec.report_spec import Claim, ReportSpec
from inlay.studies.spec.study import Study, read_study, study_folders

PROFILE_ORDER = ("paper", "longer", "long", "device", "laptop", "tiny")
TRIAL = "tiny"
"""the profile by which no claim is judged"""
_DRAWN = re.compile(r"training on (\d+) of (\d+) rows, drawn by the seed \d+")
CONTAMINATION = (
    "The sentence-tuned backbones were tuned on pair data that includes NLI, question-duplicate and SQuAD pairs, and "
    "flan-T5 on a mixture that includes GLUE tasks, CB and IMDB. Comparisons between methods on one backbone stand; "
    "absolute scores do not show transfer from nothing."
)
RULE = (
    "A claim is confirmed if our estimate keeps it, not confirmed if our estimate breaks it, in both cases only "
    "where such a statement is wrong at most once in twenty times; else it is open. Two things could have come "
    "out otherwise. Seeds: each task has its own variance over seeds, and a mean over tasks has their sum (Welch "
    "and Satterthwaite, Student's t). Rows: a dev set is a sample, so a verdict is about new rows; where the "
    "answers of two runs to the same rows were kept the error of their difference is measured, elsewhere they are"
    " taken as independent, which is too careful rather than too bold; rows themselves are taken as independent "
    "draws, though questions on one paragraph are alike. Epochs are chosen on the same dev rows in all rows of a "
    "table, and not corrected for. Tasks are those named, not a sample. Where one row had more settings to choose"
    " from on these dev rows, a verdict must hold twice: for the difference as chosen, and with equally many (the"
    " expected best of as many). Where one of several rows or tasks would decide, all of them count (Bonferroni)."
    " A claim is open with a single seed, and while planned runs of the rows it compares are missing; – is a "
    "study that was not run there, or not with these rows. In a long column some verdicts are wrong by chance: "
    "those in bold stand together (Holm), with one chance in twenty that any of them is wrong."
)
POOLED = {"cls": "the first token", "pooler": "the backbone's pooler", "mean": "the mean of all tokens"}

Group = tuple[str, str]
"""backbone, profile"""


@dataclass(frozen=True)
class Chapter:
    """A study with its records, to be reported."""

    study: Study
    records: Sequence[Record]
    """the records of all backbones and profiles"""
    published: Published = field(default_factory=lambda: Published(""))
    variants: Mapping[Group, Study] = field(default_factory=dict)
    """the study under each profile on each backbone, where that is not `study`"""
    differences: Mapping[Group, Sequence[str]] = field(default_factory=dict)
    """the differences to the profile `paper`"""
    left_out: Mapping[Group, Sequence[Record]] = field(default_factory=dict)
    """records of settings that the study's file does not have"""


@dataclass(frozen=True)
class StudyReport:
    """A finished report; the keys of `figures` are the paths of their files, without suffix."""

    html: str
    markdown: str
    figures: Mapping[str, Drawing]


def make_report(chapters: Sequence[Chapter], title: str = "Studies") -> StudyReport:
    """Make the report of these studies."""
    scored = {
        (chapter.study.name, group): score_study(chapter.variants.get(group, chapter.study), records, chapter.published)
        for chapter in chapters
        for group, records in group_records(chapter.records).items()
    }
    groups = list(group_records([record for chapter in chapters for record in chapter.records]))
    claims = [claim for chapter in chapters for claim in chapter.study.claims]
    blocks = [Heading(1, title), *_opening(chapters, groups), *_claim_blocks(claims, scored, groups)]
    figures: dict[str, Drawing] = {}
    for chapter in chapters:
        blocks += _chapter_blocks(chapter, scored, figures)
    return StudyReport(write_html(title, blocks), write_markdown(blocks), figures)


def write_report(report: StudyReport, folder: Path, name: str = "report") -> list[Path]:
    """Write `NAME.html`, `NAME.md` and the figures under `folder`; return the paths, the page's first."""
    content = {f"{name}.html": report.html.encode(), f"{name}.md": report.markdown.encode()}
    for path, drawing in report.figures.items():
        content |= {f"{path}.svg": drawing.svg, f"{path}.png": drawing.png}
    for name, data in content.items():
        write_atomically(folder / name, data)
    return [folder / name for name in content]


def group_records(records: Sequence[Record]) -> dict[Group, list[Record]]:
    """Group records by backbone and profile, which no table mixes; long profiles and large backbones first."""
    groups: dict[Group, list[Record]] = {}
    for record in records:
        groups.setdefault((short_name(record.backbone), record.profile), []).append(record)
    known = {name: number for number, name in enumerate(PROFILE_ORDER)}
    order = sorted(
        groups, key=lambda group: (known.get(group[1], len(known)), -groups[group][0].backbone_parameters, group[0])
    )
    return {group: groups[group] for group in order}


def _opening(chapters: Sequence[Chapter], groups: Sequence[Group]) -> Iterator[Block]:
    # Count a run once that several studies share, or several backbones (TF-IDF).
    seconds = {(item.id, item.hardware): item.seconds for chapter in chapters for item in chapter.records}
    names = ", ".join(f"{backbone} (`{profile}`)" for backbone, profile in groups) or "nothing yet"
    hours = sum(seconds.values()) / 3600
    runs = "1 run" if len(seconds) == 1 else f"{len(seconds):,} runs"
    studies = "1 study" if len(chapters) == 1 else f"{len(chapters)} studies"
    yield Text(
        f"{studies}, {runs} ({hours:.1f} hours of training, runs trained together counted each) on {names}. "
        "Settings are chosen on dev, never on test. Scores are in points (× 100), mean ± s.e.m. over seeds; "
        "differences are paired by task and seed. Published values are in italics or hollow."
    )
    yield Text(CONTAMINATION)
    if any(profile == TRIAL for _, profile in groups):
        text = "Some of this was made with the `tiny` profile: it shows that a study runs, and nothing about methods."
        yield Text(text, is_warning=True)


def _claim_blocks(
    claims: Sequence[Claim], scored: Mapping[tuple[str, Group], ScoredStudy], groups: Sequence[Group]
) -> Iterator[Block]:
    groups = [group for group in groups if group[1] != TRIAL]
    if not groups or not claims:
        return
    # 1. the table of verdicts
    judged: dict[Group, list[JudgedClaim]] = {}
    shown: dict[Group, list[str]] = {}
    for group in groups:
        judged[group] = judge_claims(claims, {study: item for (study, other), item in scored.items() if other == group})
        shown[group] = [f"**{item.verdict.status}**" if item.stands else item.verdict.status for item in judged[group]]
    columns = ("claim", "study", *(f"{backbone}, {profile}" for backbone, profile in groups))
    lines = [
        (claim.text, f"`{claim.study}`", *(shown[group][number] for group in groups))
        for number, claim in enumerate(claims)
    ]
    yield Heading(2, "What the papers claim", "claims")
    yield Text(RULE)
    yield ReportTable("", columns, tuple(lines))
    # 2. the numbers behind them
    for group, found in judged.items():
        items = [
            f"{item.claim.text}: {status}. {item.verdict.sentence}"
            for item, status in zip(found, shown[group], strict=True)
            if item.verdict.status != NONE
        ]
        known = {item.claim.study for item in found if item.verdict.status != NONE}
        absent = dict.fromkeys(f"`{item.claim.study}`" for item in found if item.claim.study not in known)
        if absent:
            items.append(f"not run: {', '.join(absent)}")
        yield Folded(f"the numbers, {group[0]} ({group[1]})", (Points(tuple(items)),))


def _chapter_blocks(
    chapter: Chapter, scored: Mapping[tuple[str, Group], ScoredStudy], figures: dict[str, Drawing]
) -> Iterator[Block]:
    study = chapter.study
    yield Heading(2, study.title or study.name, study.name)
    yield Text(f"`inlay study {study.name}`" + (f". Reproduces: {study.source}" if study.source else ""))
    if study.notes:
        yield Points(study.notes)
    groups = group_records(chapter.records)
    if not groups:
        yield Text("Not run yet.", is_warning=True)
    for (backbone, profile), left_out in chapter.left_out.items():
        if left_out and (backbone, profile) not in groups:
            yield Text(f"{backbone}, profile {profile}: {_describe_left_out(left_out)}", is_warning=True)
    for group, records in groups.items():
        yield from _group_blocks(chapter, group, records, scored[study.name, group], figures)
    if chapter.published.tables:
        yield Folded("what was published, and what it means", tuple(_published_blocks(chapter.published)))


def _group_blocks(
    chapter: Chapter, group: Group, records: Sequence[Record], scored: ScoredStudy, figures: dict[str, Drawing]
) -> Iterator[Block]:
    backbone, profile = group
    study = chapter.variants.get(group, chapter.study)
    yield Heading(3, f"{backbone}, profile {profile}")
    yield from study_tables(scored)
    yield from other_metric_tables(scored)
    for drawing in draw_figures(scored):
        path = f"{study.name}/{backbone}-{profile}-{drawing.name}"
        figures[path] = drawing
        yield Picture(drawing, path, f"{backbone}. {drawing.caption}")
    said: list[str] = []
    if profile != TRIAL:
        about = judge_claims(scored.study.claims, {scored.study.name: scored})
        said = [f"{item.claim.text}: {item.verdict.status}. {item.verdict.sentence}" for item in about]
        said += describe_agreement(scored)
    lists = {
        "What agrees and what does not": said,
        "Missing": list_missing(study, records),
        "Left out": [_describe_left_out(others)] if (others := chapter.left_out.get(group)) else [],
        "Otherwise than in the paper": chapter.differences.get(group, ()),
    }
    for title, items in lists.items():
        if items:
            yield Points(tuple(items), title)
    yield Folded(
        "settings chosen, and where the numbers come from", (settings_table(scored), *_origin_blocks(study, records))
    )


def _describe_left_out(records: Sequence[Record]) -> str:
    arms = list(dict.fromkeys(record.arm for record in records))
    more = f" and {len(arms) - 4} more" if len(arms) > 4 else ""
    count = "1 record" if len(records) == 1 else f"{len(records)} records"
    return f"{count} of settings that the study's file has not: {', '.join(arms[:4])}{more}"


def _published_blocks(published: Published) -> Iterator[Block]:
    for table in published.tables:
        derived = list(dict.fromkeys(name for row in table.rows for name in row.printed))
        columns = ("", *(name_column(*column.split(":")) for column in table.columns), *derived)
        lines = []
        for row in table.rows:
            cells = []
            for value, deviation in itertools.zip_longest(row.cells, row.deviations):
                shown = ABSENT if value is None else f"{value:g}"
                cells.append(shown if value is None or deviation is None else f"{shown} (s.d. {deviation:g})")
            cells += [f"{row.printed[name]:g}" if name in row.printed else ABSENT for name in derived]
            lines.append((row.label, *cells))
        title = f"{table.title}. {table.source}. {table.backbone}"
        notes = (f"protocol: {table.protocol}", *table.notes)
        if lines:
            made = ReportTable(title, columns, tuple(lines), notes)
            yield made.turned() if len(columns) > 14 else made
        else:
            yield Points(notes, title)


def _origin_blocks(study: Study, records: Sequence[Record]) -> Iterator[Block]:
    """Yield the section on the data: training rows of each task, notes, and the origin of the numbers."""
    # 1. training rows, and the pooling that heads read, with the arms if it differs between them
    counts: dict[str, set[int]] = {}
    arms: dict[str, dict[str, None]] = {}
    for record in records:
        counts.setdefault(record.task, set()).add(record.num_train)
        kind = record.config.get("data", {}).get("kind")
        if record.pooling in POOLED and kind in KINDS and KINDS[kind].layout == "whole":
            arms.setdefault(POOLED[record.pooling], {})[record.arm] = None
    yield Text(f"Training rows: {', '.join(f'{name_task(task)} {_range(found)}' for task, found in counts.items())}.")
    poolings = list(arms)
    if len(arms) > 1:
        shown = {key: ", ".join(names) if len(names) <= 6 else f"{len(names)} arms" for key, names in arms.items()}
        poolings = [f"{pooling} ({names})" for pooling, names in shown.items()]
    if poolings:
        yield Text("What heads read: " + "; ".join(poolings) + ".")
    # 2. notes, each once; notes on drawn samples are summed up in one line for each task
    noted: dict[str, None] = {}
    drawn: dict[tuple[str, int], set[int]] = {}
    for record in records:
        for note in record.extra.get("notes", ()):
            if sample := _DRAWN.fullmatch(note):
                drawn.setdefault((name_task(record.task), int(sample[2])), set()).add(int(sample[1]))
            else:
                noted[f"{name_task(record.task)}: {note}"] = None
    for (task, whole), numbers in drawn.items():
        noted[f"{task}: training on {_range(numbers)} of {whole:,} rows, drawn by the seed"] = None
    if noted:
        yield Points(tuple(noted), "Noted about the data")
    # 3. where, when and by which versions
    finished = [record for record in records if record.status == FINISHED]
    hardware = ", ".join(sorted({record.hardware for record in records}))
    commits = ", ".join(sorted({record.commit[:7] for record in records if record.commit}))
    versions = sorted({f"{name} {value}" for record in records for name, value in record.versions.items() if value})
    dates = sorted(record.date[:10] for record in records if record.date)
    when = f"{dates[0]} to {dates[-1]}" if dates and dates[0] != dates[-1] else "".join(dates[:1])
    repeats = len(finished) - len({(record.id, record.arm) for record in finished})
    again = f"; {repeats} repeats on other hardware, averaged with their seed" if repeats else ""
    yield Text(
        f"{Coverage(study, records).count}; {len(finished)} of {len(records)} records of a finished run{again}. "
        f"{hardware}; commits {commits}; {', '.join(versions)}; {when}; "
        f"{sum(record.seconds for record in records):,.0f} s of training in all."
    )


def _range(numbers: Collection[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def draw_report(paths: Sequence[Path], results: Path, backbone: str | None = None) -> Path:
    """Write one report of these studies from the records under `results`; return the page's path.

    The report of a single study is written into the study's folder, beside its figures. The report of several studies
    is written into `results`, with figures in the studies' folders. With `backbone`, the report has the studies with
    records of that backbone, and is named after it.
    """
    name = "report" if backbone is None else f"report-{short_name(backbone)}"
    chapters = [gather_chapter(path, results, backbone) for path in order_studies(paths)]
    if backbone is not None:
        chapters = [chapter for chapter in chapters if chapter.records or any(chapter.left_out.values())]
        if not chapters:
            held = {short_name(item.backbone) for path in paths for item in read_results(results, path.stem)}
            raise UnknownName(f"backbone of the results in `{results}`", short_name(backbone), sorted(held))
    if len(paths) == 1:
        study = chapters[0].study
        report = make_report(chapters, study.title)
        prefix = f"{study.name}/"  # paths are relative to the folder of its figures
        figures = {path.removeprefix(prefix): drawing for path, drawing in report.figures.items()}
        report = StudyReport(report.html, report.markdown.replace(f"]({prefix}", "]("), figures)
        return write_report(report, results / study.name, name)[0]
    return write_report(make_report(chapters), results, name)[0]


def order_studies(paths: Sequence[Path]) -> list[Path]:
    """Sort studies by `report.order` of their files; those without it come last, by name."""
    orders = {path: read_tree(path).get("report", {}).get("order", ReportSpec.order) for path in paths}
    return sorted(paths, key=lambda path: (orders[path], path.stem))


def gather_chapter(path: Path, results: Path, backbone: str | None = None) -> Chapter:
    """Read a study's records, and compare each group of them with the study under its profile.

    A user's own study may have no profile `paper`: then its first profile is shown, without differences.
    """
    found = read_results(results, path.stem)
    records = [item for item in found if backbone is None or short_name(item.backbone) == short_name(backbone)]
    profiles = read_tree(path).get("profiles", {})
    paper = read_study(path, "paper" if "paper" in profiles else next(iter(profiles), "paper"))
    # 1. the records of current settings, under each backbone and profile
    kept: list[Record] = []
    variants, left_out, differences = {}, {}, {}
    for group, held in group_records(records).items():
        study = variants[group] = read_study(path, group[1], group[0])
        own, left_out[group] = split_planned(study, held, _find_old_runs(study, group, results))
        kept += own
        differences[group] = list_differences(study, paper, own) if "paper" in profiles else []
    # 2. the published values beside the study's file, or those of the repository's own studies
    folders = [folder / "published" for folder in (path.parent, *study_folders())]
    beside = next((folder for folder in folders if (folder / f"{paper.published}.toml").is_file()), folders[-1])
    return Chapter(paper, kept, read_published(beside, paper.published), variants, differences, left_out)


def _find_old_runs(study: Study, group: Group, results: Path) -> set[str]:
    """Find runs that a study's arms may start from, but with settings that their own studies no longer have."""
    found: set[str] = set()
    for name, source in study.sources.items():
        kept, others = split_planned(source, group_records(read_results(results, name)).get(group, []))
        found |= {network_of(record) for record in others} - {network_of(record) for record in kept}
    return found
