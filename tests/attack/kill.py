"""Kills every command that writes, at random moments, and sees that nothing is lost: `make kill`, or

    python tests/attack/kill.py [--kills N] [--seed S] [--actions a,b]

A moment is a step of training, an operation on files, or, one time in four, any time at all. After each kill every
version that was there is whole. Begun again, a command ends with the versions, to the last bit, that it would have
ended with. Prints `ACTION: N kills, M failed`, and for each failure the seed that repeats it.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ["INLAY_CACHE_BYTES"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import torch
from kill_and_resume import Fate, plant

import inlay.explore  # the rooms that commands need: a child finds them imported
import inlay.serving
import inlay.stream
import inlay.training  # noqa: F401
from inlay.cli import main as inlay_main
from inlay.store import Store
from tiny_backbones import make_folder
from toys import make_toy_task

SMALL = "--size 4 --epochs 3 --max-length 16 --batch-size 8 --dev-share 0.25".split()
ON_FILES = ("unlink", "rename", "link", "mkdir")


@dataclass(frozen=True)
class Action:
    """A command, and the store it begins with."""

    words: str
    before: Sequence[str] = ()
    """commands that prepare the store"""


TRAIN = "train a.csv --task a --lr 1e-2"
ACTIONS = {
    "train": Action(TRAIN),
    "publish": Action(f"{TRAIN} --name b", (TRAIN,)),
    "stream": Action("stream in --once --settle 0s --lr 1e-2"),
    "sweep": Action("sweep a.csv --task swept --lr 1e-2,3e-3"),
    "multitask": Action("multitask a=a.csv b=b.csv --lr 1e-2"),
    "gc": Action("gc", (TRAIN, f"{TRAIN} --name c", f"{TRAIN} --set train.seed=2", "remove a@2")),
    "remove": Action("remove a", (TRAIN, f"{TRAIN} --set train.seed=2", f"{TRAIN} --set train.seed=3")),
}


def run_command(words: str, root: Path, backbone: Path, fate: Fate, report: Path | None = None) -> None:
    """Run a command over the store in `root`, in this process, which is a child."""
    os.chdir(root)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(os.open(root / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    plant(fate)
    for name in ON_FILES:
        setattr(os, name, _watched(getattr(os, name), fate))
    first = words.split()[0]
    more = ["--backbone", str(backbone)] if first not in ("gc", "remove") else []
    more += SMALL if first in ("train", "sweep", "multitask") else []
    more += [f"--set={key}" for key in ("data.dev_share=0.25", "train.max_length=16")] if first == "stream" else []
    more += ["--size", "4", "--epochs", "3"] if first == "stream" else []
    status = 0
    try:
        inlay_main([*words.split(), *more, "--store", str(root / "store")])
    except SystemExit as stop:
        status = int(stop.code or 0)
    if report is not None:
        report.write_text(str(fate.count))
    os._exit(status)


def _watched(original: Callable[..., object], fate: Fate) -> Callable[..., object]:
    def call(*arguments: object, **options: object) -> object:
        fate.event()
        return original(*arguments, **options)

    return call


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """Run `work` in a fork; return its exit status, negative for a signal."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            work()
        os._exit(99)
    timer = threading.Timer(kill_after or 0.0, os.kill, (child, signal.SIGKILL))
    if kill_after is not None:
        timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    return os.waitstatus_to_exitcode(status)


def versions_of(store: Store) -> dict[str, str]:
    return {info.version.reference: info.version.digest for task in store.ledger() for info in task.versions}


class Trial:
    """An action, run undisturbed once, and then killed and begun again."""

    def __init__(self, name: str, folder: Path, backbone: Path) -> None:
        self.action, self.folder, self.backbone = ACTIONS[name], folder / name, backbone
        base = self.folder / "base"
        (base / "in").mkdir(parents=True)
        for seed, place in enumerate(("a.csv", "b.csv", "in/x.csv", "in/y.csv")):
            split = make_toy_task(seed=seed, num_rows=40).train
            rows = [f'"{text}",label-{target}' for text, target in zip(split.texts, split.targets, strict=True)]
            (base / place).write_text("\n".join(["text,label", *rows]) + "\n")
        for words in ("train b.csv --task keeper --lr 1e-2", *self.action.before):
            self._run(base, words)
        self.before = versions_of(Store(base / "store"))
        calm, report = self._copy("calm"), self.folder / "events"
        began = time.monotonic()
        self._run(calm, self.action.words, report)
        self.seconds, self.num_events = time.monotonic() - began, int(report.read_text())
        self.expected = versions_of(Store(calm / "store"))

    def _copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.folder / "base", self.folder / name, dirs_exist_ok=True))

    def _run(self, root: Path, words: str, report: Path | None = None) -> None:
        status = in_child(lambda: run_command(words, root, self.backbone, Fate(None, False), report))
        if status:
            raise AssertionError(f"`inlay {words}` ended with {status}: {(root / 'stderr').read_text()[-2000:]}")

    def kill(self, seed: str) -> tuple[int, str]:
        """Kill the action up to three times and let it end; the number of kills, and what is wrong."""
        chance, root, num_kills = random.Random(seed), self._copy("killed"), 0
        try:
            for _ in range(chance.choice((1, 1, 2, 3))):
                fate, delay = Fate(chance.randrange(1, self.num_events + 1), chance.random() < 0.5), None
                if chance.random() < 0.25:
                    fate, delay = Fate(None, False), chance.uniform(0, self.seconds)
                status = in_child(partial(run_command, self.action.words, root, self.backbone, fate), delay)
                num_kills += status == -signal.SIGKILL
                if problem := self._check(Store(root / "store")):
                    return num_kills, problem
            return num_kills, self._end(root)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _check(self, store: Store) -> str:
        """What was there is whole; only what is being removed may be gone."""
        found = versions_of(store)
        lost = {name for name, digest in self.before.items() if found.get(name) != digest}
        if lost - (self.before.keys() - self.expected.keys()):
            return f"lost: {sorted(lost)}"
        for task in store.ledger():
            for info in task.versions:
                store.check(info.version)
                store.load(info.version)
        return ""

    def _end(self, root: Path) -> str:
        """Begun again and left alone, it ends with what it would have ended with."""
        if self.action.words != "remove a" or versions_of(Store(root / "store")) != self.expected:
            self._run(root, self.action.words)
        store = Store(root / "store")
        found = versions_of(store)
        if found != self.expected:
            return f"ended with {found}, not {self.expected}"
        problem = self._check(store)
        store.gc()
        stray = [path.name for path in store.root.rglob(".draft-*") if "runs" not in path.parts]
        return problem or (f"left behind after gc: {stray}" if stray else self._check(store))


def kill_all(folder: Path, names: Sequence[str], seed: str, num_kills: int) -> Iterator[tuple[str, int, list[str]]]:
    """Kill each action so many times; its name, kills and failures."""
    backbone = make_folder("bert", folder / "backbone")
    gc.freeze()  # no child looks through, and so copies, what all of them share
    for name in names:
        trial, kills, failures, number = Trial(name, folder, backbone), 0, [], 0
        while kills < num_kills:
            more, problem = 0, ""
            try:
                more, problem = trial.kill(f"{name}:{seed}:{number}")
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            failures += [f"--seed {seed} ({name}:{seed}:{number})  {problem}"] if problem else []
            kills, number = kills + max(more, bool(problem)), number + 1
        yield name, kills, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=150, help="kills of each action at least")
    parser.add_argument("--seed", default="0", help="another seed kills at other moments")
    parser.add_argument("--actions", default=",".join(ACTIONS), help="a,b of: " + ", ".join(ACTIONS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder, total, failed = Path(tempfile.mkdtemp(prefix="kill-")), 0, 0
    try:
        for name, kills, failures in kill_all(folder, given.actions.split(","), given.seed, given.kills):
            print(*(f"  {failure}" for failure in failures), f"{name}: {kills} kills, {len(failures)} failed", sep="\n")
            sys.stdout.flush()
            total, failed = total + kills, failed + len(failures)
        print(f"all: {total:,} kills, {failed:,} failed")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
