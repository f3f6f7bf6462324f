"""How much of a contrastive start to keep, and how strong its head: every choice scored, with folds and without.

    python bench/contrast_choice.py --data-root DIR [--sizes 50,200] [--draws 0,1,2] [--jobs N] [--folds 3]
    python bench/contrast_choice.py --report

For each draw of a set of single texts the slot is trained as `inlay train` does, on all training rows and once without
each fold of them. Then, for each share of its change and each strength of the linear model, a file
FOLDER/SET-SIZE-DRAW.npz keeps the logits of the held-out rows and of the dev rows, and the labels that the test rows
get. `--report` says what each rule that could choose among them would have come to. No texts are kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from defaults import _begin, _has_pairs
from quality import FOLDER, _numbers, _words
from quality_draws import SETS, Draw, list_draws
from report import say

SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8, 1.0)
"""of the contrastive start's change; 0 is the linear probe"""
STRENGTHS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
KEPT = FOLDER / "contrast-choice"


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
    parser.add_argument("--kept", type=Path, default=KEPT, help="for what is measured")
    options = parser.parse_args(words)
    if options.data_root is None:
        sys.exit("where are the sets? give `--data-root DIR`")
    measure_all(options)


def measure_all(options: argparse.Namespace) -> None:
    """Measure the draws that have no file yet, the cheapest first."""
    options.kept.mkdir(parents=True, exist_ok=True)
    draws = [draw for name in options.sets for draw in list_draws(name, options.data_root, options.folder / "draws")]
    work = [
        draw
        for draw in sorted(draws, key=lambda draw: (draw.draw, draw.num_train * min(draw.num_words, 100)))
        if draw.size in options.sizes and draw.draw in options.draws
        if draw.kind == "classify" and not _has_pairs(draw) and not _file_of(options.kept, draw).exists()
    ]
    late = None if options.minutes is None else time.time() + 60 * options.minutes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        options.jobs, mp_context=spawn, initializer=_begin, initargs=(options.backbone, late)
    ) as pool:
        waiting = {pool.submit(measure_draw, draw, options.folds, options.kept, late): draw for draw in work}
        for number, done in enumerate(as_completed(waiting), start=1):
            draw = waiting[done]
            problem = done.exception()
            ended = "" if problem is None else f": {type(problem).__name__}: {problem}"
            say(f"{number}/{len(work)} {draw.set} {draw.size}-{draw.draw}{ended}")


def _file_of(kept: Path, draw: Draw) -> Path:
    return kept / f"{draw.set.replace('/', '-')}-{draw.size}-{draw.draw}.npz"


def measure_draw(draw: Draw, num_folds: int, kept: Path, late: float | None) -> None:
    """Train the slot on all rows and without each fold, as one cohort; write what each head answers."""
    import defaults

    import inlay
    from inlay.model import Bank, infer_vectors
    from inlay.training import FitSettings
    from inlay.training.cohort import cohort as room
    from inlay.training.recipe.linear import choose_strength, cross_validate, fit_raw
    from inlay.training.recipe.recipe import CONTRAST_STEPS

    if late is not None and time.time() > late:
        return
    began = time.monotonic()
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
    trained_s = time.monotonic() - began
    shape = (len(SHARES), len(STRENGTHS))
    left_out = np.zeros((*shape, num_rows, num_labels), dtype=np.float32)
    dev = np.zeros((*shape, num_dev, num_labels), dtype=np.float32)
    test = np.zeros((*shape, len(known)), dtype=np.int16)
    inner = np.zeros(len(SHARES), dtype=np.int16)
    """the strength that cross-validation on a share's own vectors takes, as `inlay train` does"""
    for number, (run, one) in enumerate(zip(runs, tasks, strict=True)):
        targets = one.train.targets
        for row, share in enumerate(SHARES):
            vectors, others = found[run.id][share]
            if number == 0:
                tried = cross_validate(task.kind, task.metric, vectors, targets, num_labels)
                inner[row] = STRENGTHS.index(choose_strength(task.metric, tried).strength)
            for column, strength in enumerate(STRENGTHS):
                logits = fit_raw(task.kind, vectors, targets, strength, num_labels).outputs(others)
                if number == 0:
                    dev[row, column], test[row, column] = logits[:num_dev], logits[num_dev:].argmax(1)
                else:
                    left_out[row, column, folds == number - 1] = logits
    said = {"set": draw.set, "size": draw.size, "draw": draw.draw, "metric": draw.metric, "task_metric": task.metric,
            "num_unseen": len(task.test.targets) - len(known), "trained_s": round(trained_s, 1),
            "seconds": round(time.monotonic() - began, 1)}  # fmt: skip
    np.savez_compressed(
        _file_of(kept, draw), said=np.array(json.dumps(said)), left_out=left_out.astype(np.float16),
        dev=dev.astype(np.float16), test=test, inner=inner, train_targets=task.train.targets,
        dev_targets=task.dev.targets, test_targets=task.test.targets[known],
    )  # fmt: skip


if __name__ == "__main__":
    main()
