"""By what rule an epoch should be kept: runs whose every epoch is scored on dev rows and on test rows.

    python bench/epoch_choice.py --data-root DIR [--sizes 200,1000] [--sets glue/cola,…] [--jobs N]
    python bench/epoch_choice.py --report

A line of results/defaults/by-epoch/runs.jsonl is one run: for each of its epochs, and the stages before them, the score
on dev rows, the loss on dev rows (after the likeliest temperature, so that only what the model knows counts) and the
score on test rows. `--report` says what each rule for choosing an epoch would have come to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
from defaults import RESULTS as DEFAULTS
from defaults import _begin, _has_pairs
from quality import FOLDER, _numbers, _words, find_source
from quality_draws import SETS, Draw, list_draws
from report import describe_hardware, find_commit, say

RESULTS = DEFAULTS / "by-epoch"
FILE = "runs.jsonl"
RATES = (5e-4, 1e-3)
EPOCHS = 10
Epoch = Mapping[str, Any]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of the GLUE and extra sets")
    parser.add_argument("--sets", type=_words, default=SETS)
    parser.add_argument("--sizes", type=_numbers, default=(200, 1000))
    parser.add_argument("--draws", type=_numbers, default=(0, 1))
    parser.add_argument("--backbone", default="minilm", help="name or folder")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--most-words", type=float, default=100)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="0: the stages before training alone")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long")
    parser.add_argument("--report", action="store_true", help="measure nothing, write what the rules come to")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for draws")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="what is measured, where the checkout has no .git")
    options = parser.parse_args(words)
    if not options.report:
        measure_all(options)
    lines = (options.results / FILE).read_text(encoding="utf8").splitlines()
    text = make_report([json.loads(line) for line in lines])
    (options.results / "report.md").write_text(text, encoding="utf8")
    print(text)


def measure_all(options: argparse.Namespace) -> None:
    """Train the runs of every draw, and append a line for each."""
    head = {"commit": options.commit or find_commit(), "source": find_source(), "hardware": describe_hardware()}
    path = options.results / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf8").splitlines() if path.is_file() else []
    known = {(said["set"], said["size"], said["draw"]) for said in map(json.loads, lines)}
    draws = [draw for name in options.sets for draw in list_draws(name, options.data_root, options.folder / "draws")]
    work = [
        draw
        for draw in sorted(draws, key=lambda draw: (draw.draw, draw.num_train * draw.num_words))
        if draw.size in options.sizes and draw.draw in options.draws and draw.cell not in known
        if draw.num_words <= options.most_words and not draw.unseen
    ]
    late = None if options.minutes is None else time.time() + 60 * options.minutes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        options.jobs, mp_context=spawn, initializer=_begin, initargs=(options.backbone, late)
    ) as pool:
        waiting = {pool.submit(measure_draw, draw, options.epochs, late): draw for draw in work}
        for number, done in enumerate(as_completed(waiting), start=1):
            draw = waiting[done]
            if done.exception() is not None:
                say(f"{draw.set} {draw.size}-{draw.draw}: {type(done.exception()).__name__}: {done.exception()}")
                continue
            with path.open("a", encoding="utf8") as file:
                for found in done.result():
                    place = {"set": draw.set, "size": draw.size, "draw": draw.draw, "metric": draw.metric}
                    file.write(json.dumps(place | found | head) + "\n")
            say(f"{number}/{len(work)} {draw.set} {draw.size}-{draw.draw}")


def measure_draw(draw: Draw, num_epochs: int, late: float | None) -> list[dict[str, Any]]:
    """Train the runs of a draw as one cohort, its test rows scored beside its dev rows after every epoch."""
    import defaults

    import inlay
    from inlay.training import FitSettings
    from inlay.training.cohort import cohort as room
    from inlay.training.recipe.recipe import CONTRAST_STEPS

    if late is not None and time.time() > late:
        return []
    backbone = defaults._backbone
    task = inlay.load_task(draw.train, name="draw", test=str(draw.test))
    assert task.test is not None
    num_dev = len(task.dev)
    both = dataclasses.replace(task, dev=task.dev.join(task.test))
    runs: dict[str, Any] = {}
    steps = next((steps for most, steps in CONTRAST_STEPS if len(task.train) <= most), CONTRAST_STEPS[-1][1])
    for lr in RATES if num_epochs else RATES[1:]:
        common = {"lr": lr, "epochs": num_epochs, "head_start": "probe", "keep": "best"}
        runs[f"probe-{lr:g}"] = inlay.make_run(both, backbone, **common)
        if draw.kind == "classify" and not _has_pairs(draw):
            runs[f"contrast-{lr:g}"] = inlay.make_run(both, backbone, **common, contrast=steps)
    epochs: dict[str, list[Epoch]] = {run.id: [] for run in runs.values()}
    score_dev, first = room.score_dev, dict[str, np.ndarray]()

    def score_both(run: Any, encoded: Any, logits: Sequence[Any]) -> Any:
        outputs = np.stack([row.double().cpu().numpy() for row in logits])
        scored, losses = _score(draw, run.task, outputs, num_dev)
        gap = losses - first.setdefault(run.id, losses)
        epochs[run.id].append({**scored, "gap": float(gap.mean()), "gap_error": float(gap.std() / np.sqrt(num_dev))})
        return score_dev(run, encoded, logits)

    room.score_dev = score_both
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = FitSettings(draw_curves=False, keep_last=False, threads=1)
            inlay.fit(list(runs.values()), backbone, inlay.Store(folder), settings)
    finally:
        room.score_dev = score_dev
    return [{"run": name, "num_dev": num_dev, "epochs": epochs[run.id]} for name, run in runs.items()]


def _score(draw: Draw, task: Any, outputs: np.ndarray, num_dev: int) -> tuple[Epoch, np.ndarray]:
    """An epoch's scores and its losses on dev rows: of classes also at the likeliest temperature; of each row alone."""
    from inlay.data.calibration import likeliest_temperature, negative_log_likelihood
    from inlay.data.metrics import score_all

    targets = task.dev.targets
    dev, test = (
        score_all(task.kind, task.labels, targets[part], outputs[part], ())
        for part in (slice(num_dev), slice(num_dev, None))
    )
    logits, known = outputs[:num_dev], targets[:num_dev]
    if draw.kind == "classify":
        loss = negative_log_likelihood(logits, known, likeliest_temperature(logits, known))
        losses = np.array([negative_log_likelihood(logits[[row]], known[[row]]) for row in range(num_dev)])
    else:
        losses = (logits[:, 0] - (known - known.mean()) / known.std()) ** 2
        loss = float(losses.mean())
    plain = float(losses.mean())
    return {"dev": dev[task.metric], "dev_loss": loss, "plain_loss": plain, "test": 100 * test[draw.metric]}, losses


def _best_score(epochs: Sequence[Epoch], num_dev: int) -> int:
    return max(range(len(epochs)), key=lambda index: (epochs[index]["dev"], -epochs[index]["plain_loss"]))


def _least_loss(epochs: Sequence[Epoch], num_dev: int) -> int:
    return min(range(len(epochs)), key=lambda index: epochs[index]["dev_loss"])


def _least_plain_loss(epochs: Sequence[Epoch], num_dev: int) -> int:
    return min(range(len(epochs)), key=lambda index: epochs[index]["plain_loss"])


def _late(epochs: Sequence[Epoch], num_dev: int) -> int:
    top = max(epoch["dev"] for epoch in epochs)
    return max(index for index, epoch in enumerate(epochs) if epoch["dev"] >= top - 0.5 / np.sqrt(num_dev))


def _last_unless_worse(errors: float) -> Callable[[Sequence[Epoch], int], int]:
    """The last epoch, unless its dev loss is above epoch 0's by more than so many standard errors."""
    return lambda epochs, num_dev: (
        0 if epochs[-1].get("gap", 0.0) > errors * epochs[-1].get("gap_error", 0.0) else len(epochs) - 1
    )


def _late_by_loss(epochs: Sequence[Epoch], num_dev: int) -> int:
    """The last epoch whose loss is within 1% of the least."""
    least = min(epoch["dev_loss"] for epoch in epochs)
    return max(index for index, epoch in enumerate(epochs) if epoch["dev_loss"] <= 1.01 * least)


def _least_before_stop(patience: int) -> Callable[[Sequence[Epoch], int], int]:
    """The rule of a run that ends where so many epochs have brought no smaller loss."""
    return lambda epochs, num_dev: _least_plain_loss(epochs[: count_until_stop(epochs, patience)], num_dev)


def count_until_stop(epochs: Sequence[Epoch], patience: int) -> int:
    """How many epochs such a run has, epoch 0 among them."""
    best = 0
    for index, epoch in enumerate(epochs):
        if epoch["plain_loss"] < epochs[best]["plain_loss"]:
            best = index
        if index - best >= patience:
            return index + 1
    return len(epochs)


_PATIENCE_TOLD = (
    "With a patience a run ends where so many epochs have brought no smaller dev loss; its epochs are those it then "
    "takes, of all."
)
PATIENCES = {f"least loss, not calibrated, patience {number}": number for number in (1, 2, 3, 4)}
FIXED = {f"epoch {number}": number for number in (0, 1, 3, 6)}
RULES: dict[str, Callable[[Sequence[Epoch], int], int]] = {
    **{name: lambda epochs, num_dev, number=number: number for name, number in FIXED.items()},
    "last": lambda epochs, num_dev: len(epochs) - 1,
    "best score": _best_score,
    "last within chance": _late,
    "least loss": _least_loss,
    "least loss, not calibrated": _least_plain_loss,
    **{name: _least_before_stop(number) for name, number in PATIENCES.items()},
    "last within 1% of the least loss": _late_by_loss,
    **{f"last, unless its loss is above by {number} errors": _last_unless_worse(number) for number in (0, 1, 2)},
    "best on test rows": lambda epochs, num_dev: int(np.argmax([epoch["test"] for epoch in epochs])),
}


def make_report(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table for each size and run: what each rule gains over epoch 0 in the mean over sets, and at worst."""
    said = [
        "# Which epoch to keep",
        "",
        f"Test scores × 100 beside those of epoch 0, the linear probe; means over sets. {_PATIENCE_TOLD}",
    ]
    for size in sorted({line["size"] for line in lines}):
        for run in sorted({line["run"] for line in lines if line["size"] == size}):
            own = [line for line in lines if (line["size"], line["run"]) == (size, run)]
            sets = sorted({line["set"] for line in own})
            said += [
                "",
                f"## {size:,} rows, {run}: {len(sets)} sets",
                "",
                "| rule | gain | worst | 2nd worst | epochs |",
                "|---" * 5 + "|",
            ]
            for name, rule in RULES.items():
                if name in FIXED and any(len(line["epochs"]) <= FIXED[name] for line in own):
                    continue
                gains = {}
                for one in sets:
                    found = [line for line in own if line["set"] == one]
                    gains[one] = np.mean(
                        [
                            line["epochs"][rule(line["epochs"], line["num_dev"])]["test"] - line["epochs"][0]["test"]
                            for line in found
                        ]
                    )
                worst = sorted((gain, one) for one, gain in gains.items())[:2]
                shown = " | ".join(f"{gain:+.1f} {one}" for gain, one in worst)
                taken = f"{_share_until_stop(own, PATIENCES[name]):.0%}" if name in PATIENCES else ""
                said.append(f"| {name} | {np.mean(list(gains.values())):+.2f} | {shown} | {taken} |")
    return "\n".join(said) + "\n"


def _share_until_stop(lines: Sequence[Mapping[str, Any]], patience: int) -> float:
    """The share of the epochs after epoch 0 that runs take, in the mean."""
    return float(
        np.mean([(count_until_stop(line["epochs"], patience) - 1) / max(len(line["epochs"]) - 1, 1) for line in lines])
    )


if __name__ == "__main__":
    main()
