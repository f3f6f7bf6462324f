"""Studies, their records and what was published, brought together and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inlay.errors import UnknownName
from inlay.settings.trees import read_tree
from inlay.studies.judge.coverage import split_planned
from inlay.studies.judge.published import Published, read_published
from inlay.studies.judge.scores import network_of
from inlay.studies.report.report import Chapter, Group, group_records, make_report, write_report
from inlay.studies.run.records import read_study as read_results
from inlay.studies.run.records import short_name
from inlay.studies.spec.differences import list_differences
from inlay.studies.spec.study import Study, read_study, study_folders

# The order of a report: the papers' main tables first, then the studies of several tasks as one run.
ORDER = (
    "glue", "extra", "tradeoff", "squad", "ablation", "init", "sizes", "extensions", "sharing", "stream", "methods",
    "features", "uva", "multitask", "fewshot", "lowresource", "hyper-ablation", "embeddings",
)  # fmt: skip


def draw_report(paths: Sequence[Path], results: Path, backbone: str | None = None) -> Path:
    """Write one report of the studies of these files over what lies under `results`; returns the page's path.

    The report of a single study lies in its own folder of results, with its figures; that of several beside their
    folders, and their figures in them, in the order of the papers. That of one `backbone` has the studies with records
    of it, and its name in its own.
    """
    name = "report" if backbone is None else f"report-{short_name(backbone)}"
    chapters = [gather_chapter(path, results, backbone) for path in order_studies(paths)]
    if backbone is not None:
        chapters = [chapter for chapter in chapters if chapter.records or any(chapter.left_out.values())]
        if not chapters:
            held = {short_name(item.backbone) for path in paths for item in read_results(results, path.stem)}
            raise UnknownName(f"backbone of the results in `{results}`", short_name(backbone), sorted(held))
    if len(paths) == 1:
        report = make_report(chapters, chapters[0].study.title)
        return write_report(report.beside(chapters[0].study.name), results / chapters[0].study.name, name)[0]
    return write_report(make_report(chapters), results, name)[0]


def order_studies(paths: Sequence[Path]) -> list[Path]:
    """Studies in the order of a report; a user's own come last, by name."""
    known = {name: number for number, name in enumerate(ORDER)}
    return sorted(paths, key=lambda path: (known.get(path.stem, len(known)), path.stem))


def gather_chapter(path: Path, results: Path, backbone: str | None = None) -> Chapter:
    """A study's file and its records, each group of which is held against the study as its profile has it.

    A study of one's own may have no profile `paper`: it is then its own first one, and differs from nothing.
    """
    found = read_results(results, path.stem)
    records = [item for item in found if backbone is None or short_name(item.backbone) == short_name(backbone)]
    profiles = read_tree(path).get("profiles", {})
    paper = read_study(path, "paper" if "paper" in profiles else next(iter(profiles), "paper"))
    found_groups = group_records(records)
    variants = {group: read_study(path, group[1], group[0]) for group in found_groups}
    groups, others = {}, {}
    for group, own in found_groups.items():
        groups[group], others[group] = split_planned(
            variants[group], own, _find_old_runs(variants[group], group, results)
        )
    return Chapter(
        study=paper,
        records=[record for own in groups.values() for record in own],
        left_out=others,
        published=_find_published(path, paper.published),
        variants=variants,
        differences={
            group: list_differences(study, paper, groups[group]) if "paper" in profiles else []
            for group, study in variants.items()
        },
    )


def _find_old_runs(study: Study, group: Group, results: Path) -> set[str]:
    """The runs of the studies that a study's arms go on from, of settings that those have not."""
    found: set[str] = set()
    for name, source in study.sources.items():
        kept, others = split_planned(source, group_records(read_results(results, name)).get(group, []))
        found |= {network_of(record) for record in others} - {network_of(record) for record in kept}
    return found


def _find_published(path: Path, name: str) -> Published:
    """The published values beside a study's file, or those of the repository's own studies."""
    folders = [folder / "published" for folder in (path.parent, *study_folders())]
    found = next((folder for folder in folders if (folder / f"{name}.toml").is_file()), folders[-1])
    return read_published(found, name)
