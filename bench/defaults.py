"""The measurements behind the recipe of `inlay train` (training/recipe/recipe.py): other settings, same draws.

    python bench/defaults.py --data-root DIR [--sizes 50,200] [--sets glue/cola,…] [--variants contrast-100,…]
    python bench/defaults.py --report

Each variant is `inlay train` with a few settings, on the draws of bench/quality.py, scored on the same test rows. What
is measured lies in results/defaults/VARIANT.jsonl, a line for each set, size and draw; what has a line is not measured
again. `--report` writes results/defaults/report.md from these lines alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from quality import FOLDER, _numbers, _words, append_record, find_source, make_record
from quality_draws import SETS, SIZES, Draw, list_draws
from quality_report import Record, read_records
from quality_systems import ENVIRONMENT, Place, _inlay, _read_train, measure
from report import ROOT, describe_hardware, find_commit, say

RESULTS = ROOT / "results" / "defaults"
STEPS = 300
"""of training, where a variant trains from the probe"""


def _contrast(steps: int, blend: float, rate: str = "1e-3", batch_size: int = 32) -> Callable[[int], list[str]]:
    def words(num_rows: int) -> list[str]:
        chosen: dict[str, object] = {
            "head_start": "probe",
            "contrast": steps,
            "blend": blend,
            "epochs": 0,
            "keep": "late",
        }
        chosen["batch_size"] = batch_size
        return ["--lr", rate, *_settings(chosen)]

    return words


def _from_probe(rate: str) -> Callable[[int], list[str]]:
    def words(num_rows: int) -> list[str]:
        epochs = int(np.clip(-(-STEPS // -(-num_rows // 32)), 3, 30))
        return ["--lr", rate, "--epochs", str(epochs), *_settings({"head_start": "probe", "keep": "late"})]

    return words


def _settings(chosen: dict[str, object]) -> list[str]:
    return [word for name, value in chosen.items() for word in ("--set", f"train.{name}={value}")]


VARIANTS: dict[str, Callable[[int], list[str]]] = {
    "recipe": lambda num_rows: [],
    "former": lambda num_rows: ["--lr", "5e-4", "--epochs", "10"],
    "fresh-2e-3": lambda num_rows: ["--lr", "2e-3", "--epochs", "10"],
    "probe": lambda num_rows: ["--method", "head"],
    "probe-5e-4": _from_probe("5e-4"),
    "probe-1e-3": _from_probe("1e-3"),
    "probe-2e-3": _from_probe("2e-3"),
    "contrast-50": _contrast(50, 0.6),
    "contrast-100": _contrast(100, 0.6),
    "contrast-100-of-16": _contrast(100, 0.6, batch_size=16),
    "contrast-100-whole": _contrast(100, 1.0),
    "contrast-200": _contrast(200, 0.6),
    "contrast-100-5e-4": _contrast(100, 0.6, "5e-4"),
    "contrast-100-2e-3": _contrast(100, 0.6, "2e-3"),
}
"""name -> the words after `inlay train FILE`, by the number of rows"""
OF_SINGLE_CLASSES = tuple(name for name in VARIANTS if name.startswith("contrast"))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of the GLUE and extra sets")
    parser.add_argument("--sets", type=_words, default=SETS)
    parser.add_argument("--sizes", type=_numbers, default=SIZES)
    parser.add_argument("--draws", type=_numbers, default=(0,))
    parser.add_argument("--variants", type=_words, default=tuple(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--most-words", type=float, help="leave out sets whose rows have more words in the mean")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for draws and what is written on the way")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    if not options.report:
        if options.data_root is None:
            sys.exit("where are the sets? give `--data-root DIR`, or `--report` for what was measured before")
        measure_all(options)
    print(write_report(read_records(options.results), options.results))


def measure_all(options: argparse.Namespace) -> None:
    """Measure what is missing, set by set, so that variants can be compared early."""
    known = {record.key for record in read_records(options.results)}
    head = {"commit": find_commit(), "source": find_source(), "hardware": describe_hardware()}
    draws = [draw for name in options.sets for draw in list_draws(name, options.data_root, options.folder / "draws")]
    chosen = [
        draw
        for draw in sorted(draws, key=lambda draw: (draw.draw, draw.num_train * draw.num_words))
        if draw.size in options.sizes and draw.draw in options.draws
        if options.most_words is None or draw.num_words <= options.most_words
    ]
    began = time.monotonic()
    for draw in chosen:
        for name in options.variants:
            if (*draw.cell, name) in known or not _suits(name, draw):
                continue
            if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                say(f"{options.minutes:g} minutes are over")
                return
            place = Place(ENVIRONMENT / "bin" / "python", Path(), options.folder / "scratch-defaults", 1800)
            store = ("--store", place.folder / "store", "--no-publish", "--json")
            done = measure(
                _inlay("train", draw.train, "--test", draw.test, *store, *VARIANTS[name](draw.num_train)), place
            )
            found = replace(_read_train(done, draw), versions={})
            append_record(options.results, make_record(name, draw, found, head))
            shown = found.status if found.score is None else f"{found.score:.2f}"
            say(f"{name} {draw.set} {draw.size}-{draw.draw}: {shown}, {found.cpu_s:.0f} CPU s")


def _suits(variant: str, draw: Draw) -> bool:
    """Whether a variant can be trained on a draw: a contrastive start is for classes of single texts."""
    with draw.train.open(encoding="utf8") as file:
        is_single = file.readline().count(",") == 1
    return variant not in OF_SINGLE_CLASSES or (draw.kind == "classify" and is_single)


def write_report(records: Sequence[Record], folder: Path) -> str:
    """A table for each size: every set a row, every variant a column, and the mean over the sets that all have."""
    lines = ["# What the recipe was chosen by", "", "Scores on test rows, in percent, and CPU seconds of the means."]
    for size in sorted({record.size for record in records}):
        own = [record for record in records if record.size == size and record.status == "ok"]
        names = [name for name in VARIANTS if any(record.system == name for record in own)]
        cells = sorted({(record.set, record.draw) for record in own})
        by_key = {(record.set, record.draw, record.system): record for record in own}
        lines += ["", f"## {size:,} rows", "", "| set | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for cell in cells:
            found = [by_key.get((*cell, name)) for name in names]
            shown = ["" if record is None or record.score is None else f"{record.score:.1f}" for record in found]
            lines.append(f"| {cell[0]}, draw {cell[1]} | " + " | ".join(shown) + " |")
        whole = [cell for cell in cells if all((*cell, name) in by_key for name in names)]
        means = [_mean([by_key[*cell, name].score or 0.0 for cell in whole]) for name in names]
        seconds = [_mean([by_key[*cell, name].cpu_s for cell in whole]) for name in names]
        lines.append(f"| mean of the {len(whole)} that all have | " + " | ".join(f"{m:.1f}" for m in means) + " |")
        lines.append("| CPU seconds | " + " | ".join(f"{s:.0f}" for s in seconds) + " |")
    text = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text, encoding="utf8")
    return text


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


if __name__ == "__main__":
    main()
