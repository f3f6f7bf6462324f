"""How much of a contrastive start to keep, and how strong its head: every choice scored, with folds and without.

    python bench/contrast_choice.py --data-root DIR [--sizes 50,200] [--draws 0,1,2] [--jobs N] [--folds 3]
    python bench/contrast_choice.py --report

For each draw of a set of single texts the slot is trained as `inlay train` does, on all training rows and once without
each fold of them. Then, for each share of its change and each strength of the linear model, a line of
results/defaults/contrast-choice/runs.jsonl has the score on test rows and the loss on the rows left out. `--report`
says what each rule that could choose among them would have come to.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from defaults import RESULTS as DEFAULTS
from defaults import _begin, _has_pairs
from quality import FOLDER, _numbers, _words
from quality_draws import SETS, Draw, list_draws
from report import describe_hardware, find_commit, say

SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
"""of the contrastive start's change; 0 is the linear probe"""
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
RESULTS = DEFAULTS / "contrast-choice"
FILE = "runs.jsonl"
HEATS = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
"""temperatures at which rows left out are judged: what is known counts, and not how sure the answers are"""
Line = Mapping[str, Any]
Choice = tuple[int, int]
"""positions of a share and a strength"""
Rule = Callable[[Line], Choice]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of the GLUE and extra sets")
    parser.add_argument("--sets", type=_words, default=SETS)
    parser.add_argument("--sizes", type=_numbers, default=(50, 200))
    parser.add_argument("--draws", type=_numbers, default=(0, 1, 2))
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--backbone", default="minilm", help="name or folder")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for draws")
    parser.add_argument("--report", action="store_true", help="measure nothing, write what the rules come to")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="what is measured, where the checkout has no .git")
    options = parser.parse_args(words)
    if not options.report:
        if options.data_root is None:
            sys.exit("where are the sets? give `--data-root DIR`, or `--report` for what was measured before")
        measure_all(options)
    text = make_report(_read_lines(options.results))
    (options.results / "report.md").write_text(text, encoding="utf8")
    print(text)


def _read_lines(folder: Path) -> list[Line]:
    path = folder / FILE
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()] if path.is_file() else []


def measure_all(options: argparse.Namespace) -> None:
    """Measure the draws that have no line yet, the cheapest first."""
    head = {"commit": options.commit or find_commit(), "hardware": describe_hardware()}
    options.results.mkdir(parents=True, exist_ok=True)
    known = {(line["set"], line["size"], line["draw"]) for line in _read_lines(options.results)}
    draws = [draw for name in options.sets for draw in list_draws(name, options.data_root, options.folder / "draws")]
    work = [
        draw
        for draw in sorted(draws, key=lambda draw: (draw.draw, draw.num_train * min(draw.num_words, 100)))
        if draw.size in options.sizes and draw.draw in options.draws
        if draw.kind == "classify" and not _has_pairs(draw) and draw.cell not in known
    ]
    late = None if options.minutes is None else time.time() + 60 * options.minutes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        options.jobs, mp_context=spawn, initializer=_begin, initargs=(options.backbone, late)
    ) as pool:
        waiting = {pool.submit(measure_draw, draw, options.folds, late): draw for draw in work}
        for number, done in enumerate(as_completed(waiting), start=1):
            draw = waiting[done]
            if done.exception() is not None:
                say(f"{draw.set} {draw.size}-{draw.draw}: {type(done.exception()).__name__}: {done.exception()}")
                continue
            if found := done.result():
                with (options.results / FILE).open("a", encoding="utf8") as file:
                    file.write(
                        json.dumps({"set": draw.set, "size": draw.size, "draw": draw.draw} | found | head) + "\n"
                    )
            say(f"{number}/{len(work)} {draw.set} {draw.size}-{draw.draw}")


def measure_draw(draw: Draw, num_folds: int, late: float | None) -> dict[str, Any]:
    """Train the slot on all rows and without each fold, as one cohort; what each head comes to."""
    import defaults

    import inlay
    from inlay.data import score_all
    from inlay.model import Bank, infer_vectors
    from inlay.training import FitSettings
    from inlay.training.cohort import cohort as room
    from inlay.training.recipe.linear import choose_strength, cross_validate, fit_raw
    from inlay.training.recipe.recipe import CONTRAST_STEPS

    if late is not None and time.time() > late:
        return {}
    backbone = defaults._backbone
    task = inlay.load_task(draw.train, name="draw", test=str(draw.test))
    assert task.test is not None
    num_rows, num_labels = len(task.train), len(task.labels)
    num_dev = len(task.dev)
    known = np.flatnonzero(task.test.targets < num_labels)
    steps = next(steps for most, steps in CONTRAST_STEPS if num_rows <= most)
    common = {"lr": 1e-3, "epochs": 0, "head_start": "probe", "keep": "late", "contrast": steps, "blend": 1.0}
    folds = np.random.default_rng(1).permutation(num_rows) % num_folds
    tasks = [task.with_sides({"dev": task.dev.join(task.test.take(known))}, "")]
    for fold in range(num_folds):
        inside, outside = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        tasks.append(task.with_sides({"train": task.train.take(inside), "dev": task.train.take(outside)}, ""))
    runs = [inlay.make_run(one, backbone, **common) for one in tasks]
    found: dict[str, dict[float, tuple[np.ndarray, np.ndarray]]] = {}

    def capture(cohort: Any, member: Any) -> None:
        """In place of fitting a head: the vectors of training and dev rows for each share of the change."""
        if member.progress.stage == room.CONTRAST:
            before, spec = cohort.bank.read(member.slot), member.run.spec
            fresh = Bank(backbone, 1)
            fresh.initialise(0, spec, member.run.config.train.seed)
            start, own = fresh.read(0), {}
            for share in SHARES:
                mixed = {name: start[name] + share * (end - start[name]) for name, end in before.items()}
                cohort.bank.put(member.slot, spec, mixed)
                train = infer_vectors(cohort.bank, member.rows(range(len(member.train))), token_budget=16_384)
                own[share] = train, infer_vectors(cohort.bank, member.dev_rows(), token_budget=16_384)
            cohort.bank.put(member.slot, spec, before)
            found[member.run.id] = own
        cohort.optimizer.reset(member.slot, member.run.config.train)

    plain, room.Cohort._fit_head = room.Cohort._fit_head, capture
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = FitSettings(draw_curves=False, keep_last=False, threads=1)
            inlay.fit(runs, backbone, inlay.Store(folder), settings)
    finally:
        room.Cohort._fit_head = plain
    shape = (len(SHARES), len(STRENGTHS))
    left_out, scores = np.zeros((*shape, num_rows, num_labels)), np.zeros(shape)
    inner = []
    """the strength that cross-validation on a share's own vectors takes"""
    answers = task.test.targets[known]
    for number, (run, one) in enumerate(zip(runs, tasks, strict=True)):
        targets = one.train.targets
        for row, share in enumerate(SHARES):
            vectors, others = found[run.id][share]
            if number == 0:
                tried = cross_validate(task.kind, task.metric, vectors, targets, num_labels)
                inner.append(STRENGTHS.index(choose_strength(task.metric, tried).strength))
            for column, strength in enumerate(STRENGTHS):
                logits = fit_raw(task.kind, vectors, targets, strength, num_labels).outputs(others)
                if number == 0:
                    found_test = score_all(task.kind, task.labels, answers, logits[num_dev:], ())[draw.metric]
                    scores[row, column] = 100 * found_test * len(known) / len(task.test)  # unseen labels are wrong
                else:
                    left_out[row, column, folds == number - 1] = logits
    losses = [[_loss_of(logits, task.train.targets) for logits in row] for row in left_out]
    return {"test": scores.round(3).tolist(), "left_out_loss": losses, "cross_validated": inner}


def _loss_of(logits: np.ndarray, targets: np.ndarray) -> float:
    """The mean loss of rows left out, at the best of a few temperatures."""
    from inlay.data import negative_log_likelihood

    return round(min(negative_log_likelihood(logits, targets, heat) for heat in HEATS), 5)


def _probe(line: Line) -> Choice:
    return 0, line["cross_validated"][0]


def _share(share: float, most: float = math.inf) -> Rule:
    """A share that is always kept, its strength by cross-validation, up to a limit."""
    row = SHARES.index(share)

    def choose(line: Line) -> Choice:
        allowed = [index for index, strength in enumerate(STRENGTHS) if strength <= most]
        return row, min(line["cross_validated"][row], allowed[-1])

    return choose


def _by_loss(*rules: Rule) -> Rule:
    """Of several choices the one with the least loss on rows left out."""

    def choose(line: Line) -> Choice:
        return min((rule(line) for rule in rules), key=lambda one: line["left_out_loss"][one[0]][one[1]])

    return choose


def _best_on_test(line: Line) -> Choice:
    row, column = np.unravel_index(np.argmax(line["test"]), np.shape(line["test"]))
    return int(row), int(column)


RULES: dict[str, Rule] = {
    **{f"{share:g} kept": _share(share) for share in SHARES[1:]},
    **{f"0.6 kept, strength at most {most:g}": _share(0.6, most) for most in (0.01, 0.1, 1.0)},
    **{
        f"the same, or the probe, by rows left out (at most {most:g})": _by_loss(_probe, _share(0.6, most))
        for most in (0.01, 0.1, 10.0)
    },
    "any share, by rows left out (at most 0.01)": _by_loss(_probe, *(_share(share, 0.01) for share in SHARES[1:])),
    "best on the test rows": _best_on_test,
}


def make_report(lines: Sequence[Line]) -> str:
    """A table for each size: what each rule gains over the probe in the mean over sets, and at worst."""
    said = [
        "# How much of a contrastive start to keep",
        "",
        "Written by `python bench/contrast_choice.py --report`. Test scores × 100 beside those of the linear probe; "
        "means over sets. Below: sets that lose more than half a point.",
    ]
    for size in sorted({line["size"] for line in lines}):
        own = [line for line in lines if line["size"] == size]
        commits = ", ".join(sorted({line["commit"][:7] for line in own}))
        sets = sorted({line["set"] for line in own})
        said += [
            "",
            f"## {size:,} rows: {len(sets)} sets, {len(own)} draws, commit {commits}",
            "",
            "| rule | gain | below | worst | 2nd worst |",
            "|---" * 5 + "|",
        ]
        for name, rule in RULES.items():
            gains = {one: [_gain(line, rule) for line in own if line["set"] == one] for one in sets}
            means = sorted((float(np.mean(found)), one) for one, found in gains.items())
            worst = " | ".join(f"{gain:+.1f} {one}" for gain, one in means[:2])
            below = sum(gain < -0.5 for gain, _ in means)
            said.append(f"| {name} | {np.mean([gain for gain, _ in means]):+.2f} | {below} | {worst} |")
    return "\n".join(said) + "\n"


def _gain(line: Line, rule: Rule) -> float:
    (row, column), (probe_row, probe_column) = rule(line), _probe(line)
    return line["test"][row][column] - line["test"][probe_row][probe_column]


if __name__ == "__main__":
    main()
