"""Kills training at random moments and resumes it; run by test_resume.py as a program of its own.

    python kill_and_resume.py BACKBONE FOLDER one|several|queued|upper NUM_KILLS SEED

`queued` runs are those of `several` and two more in two slots: they enter as others end. `upper` runs
have adapters above layers that are computed once, kept partly in the file.

It forks after the imports, so that forty trainings need one import of torch. An event is a step begun, an optimizer
step done, or a file operation of a write (before the data is safe, before and after the rename). A process kills
itself with SIGKILL at the n-th event; half of the kills at a write leave half a draft behind.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from inlay.model import Backbone, load_backbone
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import write_atomically
from inlay.training import FitSettings, Run, fit, make_run
from inlay.training.cohort import loop
from inlay.training.cohort.cohort import Cohort
from inlay.training.step.optimizer import SlotOptimizer
from toys import make_toy_task


class Fate:
    """Counts events and ends the process at one of them."""

    def __init__(self, kill_at: int | None, halve: bool) -> None:
        self.kill_at, self.halve, self.count = kill_at, halve, 0

    def event(self, descriptor: int | None = None) -> None:
        self.count += 1
        if self.count == self.kill_at:
            if descriptor is not None and self.halve and stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def plant(fate: Fate) -> None:
    """Report events from the training loop and from every write."""

    def around(owner: object, name: str, *, descriptor: bool = False, after: bool = False) -> None:
        original = getattr(owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            fate.event(args[0] if descriptor else None)  # type: ignore[arg-type]
            result = original(*args, **kwargs)
            if after:
                fate.event()
            return result

        setattr(owner, name, watched)

    around(os, "fsync", descriptor=True)
    around(os, "replace", after=True)
    around(Cohort, "step")
    around(SlotOptimizer, "step", after=True)
    # A picture is written as every other file, and takes longer to draw than a run.
    loop.draw_curve = lambda path, run, progress: write_atomically(path, b"\x89PNG")


def make_runs(backbone: Backbone, kind: str) -> list[Run]:
    usual = {"batch_size": 8, "max_length": 32, "epochs": 3, "lr": 5e-3}
    settings, layers = [usual], "1:" if kind == "upper" else "all"
    if kind in ("several", "queued"):  # one ends early by its epochs, one by its patience, one by diverging
        early = [{**usual, "epochs": 1}, {**usual, "patience": 1, "lr": 1e-8}]
        lost = {**usual, "lr": 9.9, "warmup": 0.0, "clip_norm": 0.0, "epochs": 60}  # diverges within an epoch
        settings = [usual, *early, {**usual, "batch_size": 11}, lost]
    if kind == "queued":
        settings += [{**usual, "epochs": 2}, {**usual, "epochs": 1, "batch_size": 5}]
    return [
        make_run(
            make_toy_task(f"toy-{seed}", num_labels=2 + seed % 2, num_rows=30 + seed, seed=seed),
            RunConfig(method=MethodConfig(size=4 + 4 * seed, layers=layers), train=TrainConfig(**more, seed=seed)),
            backbone,
        )
        for seed, more in enumerate(settings)
    ]


NUM_SLOTS = {"queued": 2}


def train(runs: list[Run], backbone: Backbone, folder: Path, fate: Fate) -> None:
    plant(fate)
    kind, limit = sys.argv[3], 20_000  # bytes: the rest is in the file
    slots = NUM_SLOTS.get(kind)
    fit(runs, backbone, folder, FitSettings(save_every=2, max_cohort=slots, prefix_bytes=limit, draw_curves=True))


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork; returns the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"child failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a training process failed")
    return os.WTERMSIG(status)


def outcome(folder: Path, runs: list[Run]) -> dict[str, object]:
    """All that a run leaves behind, without times."""
    found: dict[str, object] = {}
    for run in runs:
        place = folder / run.id
        for name in ("best.safetensors", "last.safetensors", "config.toml"):
            found[f"{run.id}/{name}"] = (place / name).read_bytes() if (place / name).exists() else None
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((place / "result.json").read_text())
        found[run.id] = [
            [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
            [result[key] for key in ("status", "best_epoch", "dev_metric")],
        ]
    return found


def main() -> None:
    backbone_path, root, kind, num_kills, seed = sys.argv[1:]
    torch.set_num_threads(1)
    backbone, base = load_backbone(backbone_path, device="cpu"), Path(root)
    runs, chance = make_runs(backbone, kind), random.Random(int(seed))
    counter = base / "events"
    gc.freeze()  # no child looks through, and so copies, what all of them share

    def undisturbed() -> None:
        fate = Fate(None, False)
        train(runs, backbone, base / "undisturbed", fate)
        counter.write_text(str(fate.count))

    assert in_child(undisturbed) == 0
    expected, num_events = outcome(base / "undisturbed", runs), int(counter.read_text())
    statuses = {expected[run.id][1][0] for run in runs}  # type: ignore[index]
    assert kind in ("one", "upper") or statuses == {"finished", "stopped-early", "diverged"}, statuses
    for trial in range(int(num_kills)):
        folder, moments = base / f"trial-{trial}", [chance.randrange(1, num_events)]
        if trial % 4 == 0:  # and killed again while resuming
            moments.append(chance.randrange(1, num_events // 3))
        for moment in moments:
            fate = Fate(moment, chance.random() < 0.5)
            in_child(lambda folder=folder, fate=fate: train(runs, backbone, folder, fate))  # type: ignore[misc]
        assert in_child(lambda folder=folder: train(runs, backbone, folder, Fate(None, False))) == 0  # type: ignore[misc]
        found = outcome(folder, runs)
        different = [name for name in expected if expected[name] != found[name]]
        assert not different, f"killed at events {moments} of {num_events}: {different}"
        leftover = list((folder / "cohorts").rglob("state.safetensors"))
        assert not leftover, leftover
    print(json.dumps({"kills": int(num_kills), "events": num_events}))


if __name__ == "__main__":
    main()
