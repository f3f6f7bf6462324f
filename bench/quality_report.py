"""What the lines of `bench/quality.py` come to: tables, checks and a picture, from records alone.

Means are compared on the same sets and draws only. Each set counts once in a mean: first the mean of its draws.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import say, write_whole

from inlay.studies.judge.bounds import MeanWithError
from inlay.studies.report.chart import (
    ADAPTERS,
    INK,
    NORMS,
    PALE_INK,
    PLUM,
    TUNED,
    Mark,
    draw_series,
    finish,
    legend,
    new_figure,
    paper_style,
)

ORDER = ("inlay", "probe", "tfidf", "setfit", "full", "full-5e-5", "best")
NAMES = {
    "inlay": "Inlay, no options",
    "probe": "linear probe",
    "tfidf": "TF-IDF",
    "setfit": "SetFit",
    "full": "full fine-tuning",
    "full-5e-5": "full, 5e-5",
    "best": "Inlay, best known afterwards",
}
MARKS = {
    "inlay": Mark(ADAPTERS, "o"),
    "probe": Mark(TUNED, "s"),
    "tfidf": Mark(PALE_INK, "X"),
    "setfit": Mark(NORMS, "^"),
    "full": Mark(INK, "D"),
    "full-5e-5": Mark(INK, "d"),
    "best": Mark(PLUM, "P"),
}
OURS, RIVALS = "inlay", ("probe", "tfidf", "setfit", "full", "full-5e-5")
MOST_BELOW_PROBE, LEAST_TEST_ROWS = 0.5, 200
MOST_BELOW_BEST = 1.0
STSB = ("glue/stsb", 1000, 84.0)
MOST_OF_SETFIT = 0.25

Cell = tuple[str, int, int]
"""set, size and draw"""


@dataclass(frozen=True)
class Record:
    """What the report reads of a line."""

    set: str
    size: int
    draw: int
    system: str
    status: str
    score: float | None
    metric: str
    cpu_s: float
    num_train: int
    num_test: int
    digest: str
    source: str
    commit: str = ""
    date: str = ""
    gpu: str | None = None
    """of the score: its name; the CPU seconds of a run on it say nothing about those without one"""
    cost_s: float | None = None
    """CPU seconds of the newest run without a GPU, if there is one"""

    @property
    def cell(self) -> Cell:
        return self.set, self.size, self.draw

    @property
    def key(self) -> tuple[str, int, int, str]:
        return (*self.cell, self.system)


@dataclass(frozen=True)
class Check:
    """Whether something the goal asks for is so; None: it is not measured yet."""

    what: str
    passes: bool | None
    found: str


def read_records(folder: Path) -> list[Record]:
    """The newest record of each set, size, draw and system; of a cell only those of the same rows.

    What it costs is said by the newest one that had no GPU.
    """
    newest: dict[tuple[str, int, int, str], tuple[str, Record]] = {}
    costs: dict[tuple[str, int, int, str], tuple[str, float]] = {}
    names = Record.__dataclass_fields__.keys() - {"gpu", "cost_s"}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf8").splitlines():
            said = json.loads(line)
            record = Record(**{name: said[name] for name in names}, gpu=said.get("hardware", {}).get("gpu"))
            if record.key not in newest or said["date"] >= newest[record.key][0]:
                newest[record.key] = (said["date"], record)
            if record.gpu is None and record.status in ("ok", "timeout"):
                costs[record.key] = max(costs.get(record.key, ("", 0.0)), (said["date"], record.cpu_s))
    rows: dict[Cell, tuple[str, str]] = {}
    for date, record in newest.values():
        rows[record.cell] = max(rows.get(record.cell, ("", "")), (date, record.digest))
    kept = [
        replace(record, cost_s=costs[record.key][1] if record.key in costs else None)
        for _, record in newest.values()
        if rows[record.cell][1] == record.digest
    ]
    if len(kept) < len(newest):
        say(f"{len(newest) - len(kept)} records are of other rows than the newest of their cell: left out")
    return kept


class Scores:
    """The records that have a score, by cell and system."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = {record.key: record for record in records if record.score is not None}
        self.sizes = sorted({record.size for record in self.records.values()})
        found = {record.system for record in self.records.values()}
        self.systems = [name for name in ORDER if name in found]

    def cells(self, size: int, systems: Sequence[str], sets: Iterable[str] | None = None) -> list[Cell]:
        """The cells of a size that all of these systems have."""
        own = {name: {key[:3] for key in self.records if key[1] == size and key[3] == name} for name in systems}
        common = set.intersection(*own.values()) if own else set()
        return sorted(cell for cell in common if sets is None or cell[0] in sets)

    def are_enough(self, size: int, system: str, other: str) -> bool:
        """Whether a third of the sets that another system has at a size have this one too; a mean of fewer misleads."""
        both, all_sets = ({cell[0] for cell in self.cells(size, own)} for own in ((system, other), (other,)))
        return 3 * len(both) >= len(all_sets)

    def mean(self, system: str, cells: Sequence[Cell]) -> float:
        """The mean over the sets of the means over their draws."""
        return _mean_of_sets({cell: self.score(system, cell) for cell in cells})

    def timed_cells(self, size: int, system: str) -> list[Cell]:
        """The cells of a system that say what it costs on processors alone."""
        return [cell for cell in self.cells(size, (system,)) if self.records[(*cell, system)].cost_s]

    def mean_cpu(self, system: str, cells: Sequence[Cell]) -> float:
        return _mean_of_sets({cell: self.records[(*cell, system)].cost_s or 0.0 for cell in cells})

    def score(self, system: str, cell: Cell) -> float:
        value = self.records[(*cell, system)].score
        assert value is not None
        return value


def _mean_of_sets(values: Mapping[Cell, float]) -> float:
    by_set: dict[str, list[float]] = {}
    for cell, value in values.items():
        by_set.setdefault(cell[0], []).append(value)
    return statistics.fmean(statistics.fmean(own) for own in by_set.values())


def make_checks(records: Sequence[Record]) -> list[Check]:
    """What the goal asks for, each passed, failed or open."""
    scores = Scores(records)
    return [
        *_check_first(scores),
        _check_probe(scores),
        *_check_best(scores),
        _check_stsb(scores),
        *_check_cpu(records),
    ]


def _check_first(scores: Scores) -> list[Check]:
    """Beside each rival on what both have; the first only if it is not below any of them."""
    checks = []
    for size in scores.sizes:
        parts, is_first = [], True
        for rival in RIVALS:
            cells = scores.cells(size, (OURS, rival))
            if not cells:
                continue
            ours, theirs = scores.mean(OURS, cells), scores.mean(rival, cells)
            is_first = is_first and ours >= theirs
            parts.append(f"{ours:.1f} to {NAMES[rival]} {theirs:.1f} ({_count_sets(cells)})")
        what = f"first on the mean at {size:,} rows"
        checks.append(Check(what, is_first if parts else None, "; ".join(parts) or "not measured"))
    return checks


def _check_probe(scores: Scores) -> Check:
    """Never much below the linear probe, on sets whose test rows can tell."""
    below = []
    num = 0
    for size in scores.sizes:
        cells = scores.cells(size, (OURS, "probe"))
        for name in sorted({cell[0] for cell in cells}):
            own = [cell for cell in cells if cell[0] == name]
            if min(scores.records[(*cell, OURS)].num_test for cell in own) < LEAST_TEST_ROWS:
                continue
            num += 1
            difference = scores.mean(OURS, own) - scores.mean("probe", own)
            if difference < -MOST_BELOW_PROBE:
                below.append((difference, f"{name} at {size:,} by {-difference:.1f}"))
    what = f"never more than {MOST_BELOW_PROBE} points below the probe on a set of {LEAST_TEST_ROWS} test rows or more"
    if not num:
        return Check(what, None, "not measured")
    shown = "; ".join(text for _, text in sorted(below))
    return Check(what, not below, f"{len(below)} of {num} sets and sizes{': ' if below else ''}{shown}")


def _check_best(scores: Scores) -> list[Check]:
    """Near the best settings known afterwards, of which the defaults are one."""
    checks = []
    for size in scores.sizes:
        cells = scores.cells(size, (OURS, "best"))
        what = f"within {MOST_BELOW_BEST:g} point of the best settings known afterwards at {size:,} rows"
        if not cells or not scores.are_enough(size, "best", OURS):
            checks.append(Check(what, None, f"only {_count_sets(cells)}" if cells else "not measured"))
            continue
        best = _mean_of_sets({cell: max(scores.score(OURS, cell), scores.score("best", cell)) for cell in cells})
        ours = scores.mean(OURS, cells)
        checks.append(Check(what, best - ours <= MOST_BELOW_BEST, f"{ours:.1f} to {best:.1f} ({_count_sets(cells)})"))
    return checks


def _check_stsb(scores: Scores) -> Check:
    name, size, least = STSB
    cells = [cell for cell in scores.cells(size, (OURS,)) if cell[0] == name]
    what = f"STS-B with {size:,} rows at {least:g} Spearman or more"
    if not cells:
        return Check(what, None, "not measured")
    value = scores.mean(OURS, cells)
    return Check(what, value >= least, f"{value:.1f}, {len(cells)} draws")


def _check_cpu(records: Sequence[Record]) -> list[Check]:
    """CPU seconds beside SetFit's; one that ran out of time took at least its limit."""
    spent = {record.key: record.cost_s for record in records if record.cost_s is not None}
    checks = []
    for size in sorted({record.size for record in records if record.system == "setfit"}):
        cells = [key[:3] for key in spent if key[1] == size and key[3] == "setfit" and (*key[:3], OURS) in spent]
        what = f"at most a quarter of SetFit's CPU time at {size:,} rows"
        if not cells:
            checks.append(Check(what, None, "not measured"))
            continue
        ours, theirs = (sum(spent[(*cell, system)] for cell in cells) for system in (OURS, "setfit"))
        seconds = f"{ours / len(cells):.0f} s to {theirs / len(cells):.0f} s"
        found = f"{seconds}, {ours / theirs:.2f} of it ({_count_sets(cells)})"
        checks.append(Check(what, ours <= MOST_OF_SETFIT * theirs, found))
    return checks


def _count_sets(cells: Sequence[Cell]) -> str:
    num_sets = len({cell[0] for cell in cells})
    return f"{num_sets} {'set' if num_sets == 1 else 'sets'}, {len(cells)} {'draw' if len(cells) == 1 else 'draws'}"


def write_report(records: Sequence[Record], folder: Path) -> str:
    """Write report.md and the picture beside the records; the report."""
    scores = Scores(records)
    if not scores.records:
        return "nothing is measured yet"
    text = "\n".join(
        [
            "# Quality: `inlay train FILE` with no options, beside others",
            "",
            "Written by `python bench/quality.py --report` from the lines in this folder; bench/quality.py says what "
            "is measured and how. Scores are each set's own metric × 100 on test rows.",
            "",
            *_render_checks(make_checks(records), _list_commits([one for one in records if one.system == OURS])),
            *_render_means(scores),
            *_render_pairs(scores),
            *_render_cpu(scores),
            *_render_commits(records),
            *_render_failures(records),
            *_render_sets(scores),
        ]
    )
    write_whole(folder / "report.md", text)
    drawing = draw_picture(scores)
    if drawing is not None:
        (folder / "quality.svg").write_bytes(drawing.svg)
        (folder / "quality.png").write_bytes(drawing.png)
    return text


def _render_checks(checks: Sequence[Check], commits: Sequence[str]) -> list[str]:
    words = {True: "pass", False: "**fail**", None: "open"}
    rows = [[check.what, words[check.passes], check.found] for check in checks]
    told = f"They are of Inlay at {', '.join(commits)}." if commits else "Inlay is not among what was measured."
    return ["## Checks", "", told, "", *_table(["what is asked for", "", "found"], rows), ""]


def _render_means(scores: Scores) -> list[str]:
    """For every size the systems that share cells: all it has, then without the dearer ones, which have fewer."""
    rows = []
    for size in scores.sizes:
        there = [name for name in scores.systems if scores.cells(size, (name,))]
        shown_cells: list[list[Cell]] = []
        for gone in (set(), {"setfit"}, {"setfit", "full", "full-5e-5"}, {"setfit", "full", "full-5e-5", "best"}):
            systems = [name for name in there if name not in gone]
            cells = scores.cells(size, systems)
            if not cells or cells in shown_cells:
                continue
            shown_cells.append(cells)
            means = {name: scores.mean(name, cells) for name in systems}
            first = max((value for name, value in means.items() if name != "best"), default=100.0)
            own = [scores.records[(*cell, OURS)] for cell in cells if OURS in systems]
            shown = [_bold(means.get(name), first) for name in scores.systems]
            rows.append([f"{size:,}", _count_sets(cells), *shown, ", ".join(_list_commits(own))])
    heads = ["rows", "on", *(NAMES[name] for name in scores.systems), "Inlay's commit"]
    told = (
        "Each row has the systems that were measured on the same sets and draws; the first but for `best` is bold. "
        "Several commits in a row: its sets were not all measured with one recipe."
    )
    return [
        "## Means",
        "",
        told,
        "",
        *_table(heads, rows),
        "",
        "![Mean scores by rows, and CPU seconds](quality.svg)",
        "",
    ]


def _render_pairs(scores: Scores) -> list[str]:
    rows = []
    for rival in [name for name in scores.systems if name != OURS]:
        for size in scores.sizes:
            cells = scores.cells(size, (OURS, rival))
            if cells:
                ours, theirs = scores.mean(OURS, cells), scores.mean(rival, cells)
                rows.append(
                    [
                        NAMES[rival],
                        f"{size:,}",
                        _count_sets(cells),
                        f"{ours:.1f}",
                        f"{theirs:.1f}",
                        f"{ours - theirs:+.1f}",
                    ]
                )
    if not rows:
        return []
    return ["## Inlay beside each", "", *_table(["beside", "rows", "on", "Inlay", "it", "difference"], rows), ""]


def _render_cpu(scores: Scores) -> list[str]:
    """Each system on all that it has: the numbers of sets are not the same."""
    rows = []
    for size in scores.sizes:
        shown = []
        for name in scores.systems:
            cells = scores.timed_cells(size, name)
            shown.append(f"{scores.mean_cpu(name, cells):.0f} ({len({cell[0] for cell in cells})})" if cells else "")
        rows.append([f"{size:,}", *shown])
    told = (
        "Mean CPU seconds of a whole process with one thread (imports, loading, training, test rows), and on how many "
        "sets. Probe and TF-IDF are one process, which both columns show. `best` is the whole grid."
    )
    return ["## CPU seconds", "", told, "", *_table(["rows", *(NAMES[name] for name in scores.systems)], rows), ""]


def _list_commits(records: Iterable[Record]) -> list[str]:
    """The commits of records, the newest first."""
    newest: dict[str, str] = {}
    for record in records:
        short = record.commit[:7]
        newest[short] = max(newest.get(short, ""), record.date)
    return sorted(newest, key=lambda commit: newest[commit], reverse=True)


def _render_commits(records: Sequence[Record]) -> list[str]:
    """Which code was measured when and where, and on how much."""
    rows = []
    kinds = sorted(
        {(record.gpu or "", record.system) for record in records}, key=lambda kind: (ORDER.index(kind[1]), kind[0])
    )
    for gpu, name in kinds:
        own = [record for record in records if (record.gpu or "", record.system) == (gpu, name)]
        for commit in _list_commits(own):
            here = [record for record in own if record.commit[:7] == commit]
            days = sorted({record.date[:10] for record in here})
            sizes = ", ".join(f"{size:,}" for size in sorted({record.size for record in here}))
            rows.append(
                [
                    NAMES[name],
                    commit,
                    " to ".join(dict.fromkeys((days[0], days[-1]))),
                    gpu or "processors",
                    sizes,
                    str(len(here)),
                ]
            )
    heads = ["system", "commit", "date", "on", "rows", "lines"]
    return ["## What was measured when", "", *_table(heads, rows), ""]


def _render_failures(records: Sequence[Record]) -> list[str]:
    failed = [record for record in records if record.status != "ok"]
    if not failed:
        return []
    rows = [
        [NAMES[one.system], one.set, f"{one.size:,}", str(one.draw), one.status, f"{one.cpu_s:.0f}"] for one in failed
    ]
    return ["## Without a score", "", *_table(["system", "set", "rows", "draw", "why", "CPU s"], rows), ""]


def _render_sets(scores: Scores) -> list[str]:
    """Each set by itself; a system's mean over the draws that it has, with their number where it is not the most."""
    lines = ["## Sets", "", "Means over draws; in brackets how many, where some system has more.", ""]
    for size in scores.sizes:
        rows = []
        own = [record for record in scores.records.values() if record.size == size]
        for name in sorted({record.set for record in own}):
            here = [record for record in own if record.set == name]
            most = len({record.draw for record in here})
            rows_test = sorted({record.num_test for record in here})
            shown = [_mean_of_draws([one for one in here if one.system == system], most) for system in scores.systems]
            tests = f"{rows_test[0]:,}" if len(rows_test) == 1 else f"{rows_test[0]:,}–{rows_test[-1]:,}"
            rows.append([name, here[0].metric, tests, *shown])
        heads = ["set", "metric", "test rows", *(NAMES[name] for name in scores.systems)]
        lines += [f"### {size:,} rows", "", *_table(heads, rows), ""]
    return lines


def _mean_of_draws(records: Sequence[Record], most: int) -> str:
    values = [record.score for record in records if record.score is not None]
    if not values:
        return ""
    return f"{statistics.fmean(values):.1f}" + (f" ({len(values)})" if len(values) < most else "")


def _bold(value: float | None, first: float) -> str:
    if value is None:
        return ""
    return f"**{value:.1f}**" if value == first else f"{value:.1f}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]


def draw_picture(scores: Scores) -> Any:
    """Mean scores less the linear probe's by rows, and CPU seconds; each system on what it shares with the probe."""
    base = "probe"
    if base not in scores.systems:
        return None
    with paper_style("quality"):
        figure = new_figure(6.6, 3.2)
        left, right = figure.subplots(1, 2)
        for name in scores.systems:
            _draw_system(left, right, scores, name, MARKS[name])
        left.set_ylabel("points above the linear probe")
        right.set_ylabel("CPU seconds")
        right.set_yscale("log")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xticks(scores.sizes, [f"{size:,}" for size in scores.sizes])
            axes.set_xlabel("training rows")
            axes.minorticks_off()
        legend(figure, [(NAMES[name], MARKS[name], False) for name in scores.systems])
        return finish(figure, "quality", "Mean scores less the linear probe's, and CPU seconds, by training rows.")


def _draw_system(left: Any, right: Any, scores: Scores, name: str, mark: Mark) -> None:
    base = "probe"
    differences, costs = [], []
    for size in scores.sizes:
        shared, own = scores.cells(size, (base, name)), scores.timed_cells(size, name)
        if shared and scores.are_enough(size, name, base):
            value = scores.mean(name, shared) - scores.mean(base, shared)
            differences.append((float(size), MeanWithError(value, 0.0)))
        if own:
            costs.append((float(size), MeanWithError(scores.mean_cpu(name, own), 0.0)))
    draw_series(left, differences, mark)
    draw_series(right, costs, mark)
