"""The measurements behind the recipe of `inlay train` (training/recipe/recipe.py): other settings, same draws.

    python bench/defaults.py --data-root DIR [--sizes 50,200] [--sets glue/cola,…] [--variants recipe,…] [--jobs N]
    python bench/defaults.py --report

Each variant is a run with a few settings, on the draws of bench/quality.py, scored on the same test rows. All variants
of a draw are trained as one cohort, and several processes share the draws (and a GPU, if there is one). What is
measured lies in results/defaults/VARIANT.jsonl, a line for each set, size and draw; what has a line is not measured
again. `--report` writes results/defaults/report.md from these lines alone.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from quality import FOLDER, _numbers, _words, append_record, find_source, make_record
from quality_draws import SETS, SIZES, Draw, list_draws
from quality_report import Record, read_records
from quality_systems import Found
from report import ROOT, describe_hardware, find_commit, say

RESULTS = ROOT / "results" / "defaults"
PROBE = "probe"
"""not a run: what `inlay baseline` fits"""
ROUNDING = 0.005
"""largest difference of features that bf16 explains"""
MANY_ROWS = 1000
"""from here on only variants that may win are trained"""


@dataclass(frozen=True)
class Variant:
    """Settings of `make_run`, and the draws they are for."""

    settings: dict[str, Any]
    singles_only: bool = False
    """for classes of single texts"""
    fewest: int = 0
    most: int = 1_000_000
    """training rows"""

    def suits(self, draw: Draw) -> bool:
        """Whether it is trained on a draw."""
        if self.singles_only and (draw.kind != "classify" or _has_pairs(draw)):
            return False
        return self.fewest <= draw.num_train <= self.most


def _contrast(steps: int, blend: float, lr: float = 1e-3, **others: Any) -> Variant:
    settings = {"lr": lr, "head_start": "probe", "contrast": steps, "blend": blend, "epochs": 0, "keep": "late"}
    return Variant({**settings, **others}, singles_only=True, most=MANY_ROWS - 1)


def _train_after(steps: int, blend: float, lr: float, epochs: int) -> Variant:
    settings = {"lr": lr, "head_start": "probe", "contrast": steps, "blend": blend, "epochs": epochs, "keep": "late"}
    return Variant(settings, singles_only=True, fewest=200)


def _from_probe(lr: float, epochs: int, keep: str = "late") -> Variant:
    return Variant({"lr": lr, "epochs": epochs, "head_start": "probe", "keep": keep})


VARIANTS: dict[str, Variant] = {
    "recipe": Variant({}),
    **{
        f"fresh-{lr:g}-{epochs}": Variant({"lr": lr, "epochs": epochs, "head_start": "fresh"}, most=most)
        for lr, epochs, most in (
            (5e-4, 10, MANY_ROWS - 1),
            (1e-3, 10, 10_000),
            (2e-3, 10, 10_000),
            (4e-3, 10, MANY_ROWS - 1),
            (1e-3, 30, MANY_ROWS - 1),
            (2e-3, 30, MANY_ROWS - 1),
        )
    },
    **{
        f"probe-{lr:g}-{epochs}": _from_probe(lr, epochs)
        for lr, epochs in ((2.5e-4, 10), (5e-4, 5), (5e-4, 10), (1e-3, 5), (1e-3, 10))
    },
    "probe-0.0005-10-best": _from_probe(5e-4, 10, keep="best"),
    "probe-0.002-10": _from_probe(2e-3, 10),
    **{f"contrast-100-{blend:g}": _contrast(100, blend) for blend in (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)},
    "contrast-50-0.6": _contrast(50, 0.6),
    "contrast-200-0.6": _contrast(200, 0.6),
    "contrast-100-0.6-at-2e-3": _contrast(100, 0.6, 2e-3),
    "contrast-150-0.6-only": replace(_contrast(150, 0.6), fewest=MANY_ROWS, most=MANY_ROWS),
    "contrast-150-0.6-train-0.00025-5": _train_after(150, 0.6, 2.5e-4, 5),
    "contrast-150-0.6-train-0.0005-5": _train_after(150, 0.6, 5e-4, 5),
    "contrast-150-0.3-train-0.0005-5": _train_after(150, 0.3, 5e-4, 5),
    "contrast-150-0.6-train-0.001-5": _train_after(150, 0.6, 1e-3, 5),
    "contrast-150-0.6-train-0.001-10": _train_after(150, 0.6, 1e-3, 10),
}


def _has_pairs(draw: Draw) -> bool:
    with draw.train.open(encoding="utf8") as file:
        return file.readline().count(",") > 1


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of the GLUE and extra sets")
    parser.add_argument("--sets", type=_words, default=SETS)
    parser.add_argument("--sizes", type=_numbers, default=SIZES)
    parser.add_argument("--draws", type=_numbers, default=(0,))
    parser.add_argument("--variants", type=_words, default=tuple(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--backbone", default="minilm", help="name or folder")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with its own draws")
    parser.add_argument("--most-words", type=float, help="leave out sets whose rows have more words in the mean")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for draws")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="what is measured, where the checkout has no .git")
    options = parser.parse_args(words)
    if not options.report:
        if options.data_root is None:
            sys.exit("where are the sets? give `--data-root DIR`, or `--report` for what was measured before")
        measure_all(options)
    print(write_report(read_records(options.results), options.results))


def plan(options: argparse.Namespace) -> Iterator[tuple[Draw, list[str]]]:
    """What is missing: draws with the names of their variants, the cheapest first."""
    known = {record.key for record in read_records(options.results)}
    draws = [draw for name in options.sets for draw in list_draws(name, options.data_root, options.folder / "draws")]
    for draw in sorted(draws, key=lambda draw: (1 + draw.draw) * draw.num_train * min(draw.num_words, 100)):
        if draw.size not in options.sizes or draw.draw not in options.draws:
            continue
        if options.most_words is not None and draw.num_words > options.most_words:
            continue
        names = [name for name in options.variants if VARIANTS[name].suits(draw) and (*draw.cell, name) not in known]
        if names:
            yield draw, names


def measure_all(options: argparse.Namespace) -> None:
    """Measure what is missing."""
    commit = options.commit or find_commit().removesuffix("-dirty")
    head = {"commit": commit, "source": find_source(), "hardware": describe_hardware()}
    work, began = list(plan(options)), time.monotonic()
    say(f"{len(work)} draws to be measured")
    late = None if options.minutes is None else time.time() + 60 * options.minutes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        options.jobs, mp_context=spawn, initializer=_begin, initargs=(options.backbone, late)
    ) as pool:
        waiting = {pool.submit(measure_draw, draw, names): draw for draw, names in work}
        for number, done in enumerate(as_completed(waiting), start=1):
            draw = waiting[done]
            if done.exception() is not None:
                say(f"{draw.set} {draw.size}-{draw.draw}: {type(done.exception()).__name__}: {done.exception()}")
                continue
            for name, found in done.result().items():
                append_record(options.results, make_record(name, draw, found, head))
            shown = ", ".join(
                f"{name} {found.score:.1f}" for name, found in list(done.result().items())[:3] if found.score
            )
            seconds = time.monotonic() - began
            say(f"{number}/{len(work)} {draw.set} {draw.size}-{draw.draw} after {seconds:.0f} s: {shown}")


_backbone: Any = None
_late: float | None = None


def _begin(name: str, late: float | None) -> None:
    import torch

    from inlay import load_backbone

    global _backbone, _late
    torch.set_num_threads(1)
    _backbone, _late = load_backbone(name), late
    _fit_once()


def _fit_once() -> None:
    """Let runs that begin from the same vectors, up to rounding, share the fit of their first head."""
    from inlay.training.recipe import head_start

    fit, known = head_start.fit_calibrated, []

    def fit_or_recall(task: Any, vectors: np.ndarray, **options: Any) -> Any:
        for digest, others, found in known:
            if digest == task.digest and others.shape == vectors.shape and np.abs(others - vectors).max() < ROUNDING:
                return found
        found = fit(task, vectors, **options)
        known[:] = [*known[-1:], (task.digest, vectors, found)]
        return found

    head_start.fit_calibrated = fit_or_recall


def measure_draw(draw: Draw, names: Sequence[str]) -> dict[str, Found]:
    """Train all variants of a draw as one cohort; the score of each on the test rows. Nothing if it is too late."""
    import inlay
    from inlay.training import DIVERGED, FitSettings, fit_probe, score_split

    if _late is not None and time.time() > _late:
        return {}
    began = time.monotonic()
    task = inlay.load_task(draw.train, name="draw", test=str(draw.test))
    assert task.test is not None
    # 1. the linear probe, and what is known of the rows without training
    probe = fit_probe(task, _backbone)
    tried = max(max(found.values()) for found in probe.tried.values())
    known = {"probe_cv": tried, "probe_dev": probe.metrics["dev"][draw.metric], "majority": _majority(draw)}
    # 2. all variants at once
    runs = {name: inlay.make_run(task, _backbone, **VARIANTS[name].settings) for name in names}
    by_id = {run.id: run for run in runs.values()}
    with tempfile.TemporaryDirectory() as folder:
        settings = FitSettings(draw_curves=False, keep_last=False, threads=1, max_cohort=32)
        results = dict(
            zip(by_id, inlay.fit(list(by_id.values()), _backbone, inlay.Store(folder), settings), strict=True)
        )
    # 3. the score of each on the test rows
    found = {PROBE: Found("ok", round(100 * probe.metrics["test"][draw.metric], 3), 0.0, 0.0, 0.0, settings=known)}
    for name, run in runs.items():
        result = results[run.id]
        if result.status == DIVERGED or not result.tensors:
            found[name] = Found("error", None, 0.0, 0.0, 0.0, message="diverged")
            continue
        value = 100 * score_split(run, result, _backbone, task.test)[draw.metric]
        train = run.config.train
        settings = {"lr": train.lr, "epochs": train.num_epochs, "contrast": train.contrast, "blend": train.blend,
                    "best_epoch": result.best_epoch, "dev": result.dev_metric}  # fmt: skip
        found[name] = Found("ok", round(value, 3), 0.0, round(time.monotonic() - began, 1), 0.0, settings=settings)
    return found


def _majority(draw: Draw) -> float | None:
    """The share of the commonest label among the training rows; None for numbers."""
    if draw.kind != "classify":
        return None
    with draw.train.open(encoding="utf8", newline="") as file:
        counts = Counter(row["label"] for row in csv.DictReader(file))
    return max(counts.values()) / sum(counts.values())


def write_report(records: Sequence[Record], folder: Path) -> str:
    """A table for each size: every set a row, every variant a column, and the mean over the sets that all have."""
    lines = ["# What the recipe was chosen by", "", "Scores on test rows × 100, means over the draws of a set."]
    former = sorted({record.system for record in records} - {PROBE, *VARIANTS})
    order = [PROBE, *former, *VARIANTS]
    for size in sorted({record.size for record in records}):
        own = [record for record in records if record.size == size and record.score is not None]
        names = [name for name in order if any(record.system == name for record in own)]
        sets = sorted({record.set for record in own})
        scores = {
            (name, one): float(np.mean(found))
            for name in names
            for one in sets
            if (found := [record.score for record in own if (record.system, record.set) == (name, one)])
        }
        lines += ["", f"## {size:,} rows", ""]
        lines += ["| variant | sets | mean | beside the probe | worst beside the probe |", "|---" * 5 + "|"]
        for name in names:
            shared = [one for one in sets if (name, one) in scores]
            mean = np.mean([scores[name, one] for one in shared])
            beside = {one: scores[name, one] - scores[PROBE, one] for one in shared if (PROBE, one) in scores}
            worst = min(beside, key=beside.__getitem__, default="")
            shown = f"{beside[worst]:+.1f} {worst}" if worst else ""
            gain = _mean(list(beside.values()))
            lines.append(f"| {name} | {len(shared)} | {mean:.1f} | {gain:+.1f} ({len(beside)}) | {shown} |")
    text = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text, encoding="utf8")
    return text


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


if __name__ == "__main__":
    main()
