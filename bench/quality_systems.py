"""The systems that `bench/quality.py` compares: which commands each runs on a draw, and how their answers are scored.

Every command is a process of its own with one thread, so that its CPU seconds and its memory are its own: imports,
loading, training and answering the test rows are all in them. Caches of Inlay are empty at its start.
"""

from __future__ import annotations

import csv
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from quality_draws import Draw
from report import ROOT, find_versions

from inlay.data.metrics import score_all

PEERS = ROOT / "bench" / "peers"
ENVIRONMENT = Path("~/.cache/inlay-bench/setfit").expanduser()
PINNED = ("torch==2.13.0", "setfit==1.2.0", "sentence-transformers==6.2.0", "transformers==5.23.0")
RATES, EPOCHS = ("5e-4", "1e-3", "2e-3", "4e-3"), ("10", "30")
"""the grid of `best`"""
WALL_FACTOR = 20
"""seconds on the clock that a second of the limit may take: a process that waits for ever is ended too"""


@dataclass(frozen=True)
class Measured:
    """What a process came to."""

    status: str
    """ok, timeout (its CPU seconds were used up), stalled (it took too long beside others) or error"""
    cpu_s: float
    wall_s: float
    peak_mb: float
    output: str
    message: str = ""


@dataclass(frozen=True)
class Found:
    """What a system came to on a draw."""

    status: str
    score: float | None
    cpu_s: float
    wall_s: float
    peak_mb: float
    message: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where systems run: their Pythons, the backbone's folder, a folder to write in, and the limit of CPU seconds."""

    setfit_python: Path
    backbone: Path
    folder: Path
    limit_s: int
    bytecode: Path
    """for compiled modules, which all commands share"""
    threads: int = 1
    gpu: bool = False


@dataclass(frozen=True)
class System:
    """An entry of the table."""

    run: Callable[[Draw, Place], dict[str, Found]]
    """the systems whose records a draw's commands give -> what they came to"""
    passes: Callable[[int], float]
    """passes over the training rows, roughly: only the order of the work depends on it"""
    kinds: tuple[str, ...] = ("classify", "regress")
    is_ours: bool = False


_running: set[int] = set()


def end_all() -> None:
    """End the commands that run in other threads."""
    for group in list(_running):
        os.killpg(group, signal.SIGKILL)


def measure(command: Sequence[str | Path], place: Place) -> Measured:
    """Run a command to its end or its limit; CPU seconds and memory are those of all its processes."""
    place.folder.mkdir(parents=True, exist_ok=True)
    out, err = place.folder / "stdout", place.folder / "stderr"
    began, limits = time.monotonic(), (place.limit_s, place.limit_s + 5)  # first asked to end, then ended
    with out.open("wb") as output, err.open("wb") as errors:
        # A group of its own, to be ended as a whole; not a session, which would change how the kernel shares the cores.
        process = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=errors, env=_environment(place), cwd=place.folder,
            process_group=0, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limits),
        )  # fmt: skip
        watch = threading.Timer(WALL_FACTOR * place.limit_s, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        _running.add(process.pid)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            _running.discard(process.pid)
            watch.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    ends = {0: "ok", -signal.SIGXCPU: "timeout", -signal.SIGKILL: "stalled"}
    lines = err.read_text(encoding="utf8", errors="replace").strip().splitlines()
    return Measured(
        status=ends.get(process.returncode, "error"),
        cpu_s=round(cpu_s, 2),
        wall_s=round(time.monotonic() - began, 2),
        peak_mb=round(usage.ru_maxrss / 1024, 1),
        output=out.read_text(encoding="utf8"),
        message="" if process.returncode == 0 else " | ".join(lines[-2:])[-300:],
    )


def _environment(place: Place) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(place.threads))
    paths = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(place.folder / "cache"), "HF_HUB_OFFLINE": "1"}
    # Modules are compiled once: a library that is compiled in every run would pay for it in its CPU seconds.
    own["PYTHONPYCACHEPREFIX"] = str(place.bytecode)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | threads | own | {"TOKENIZERS_PARALLELISM": "false"}


def make_environment(folder: Path = ENVIRONMENT) -> Path:
    """SetFit's own environment, made if it is not there; its Python."""
    python, done = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(PINNED)
    if not done.is_file() or done.read_text(encoding="utf8") != wanted:
        if not python.exists():
            venv.create(folder, with_pip=True, symlinks=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", *PINNED], check=True)
        done.write_text(wanted, encoding="utf8")
    return python


def _inlay(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "inlay", *words]


def _run_train(draw: Draw, place: Place) -> dict[str, Found]:
    """`inlay train` with no option but where the test rows and the store are."""
    command = _inlay("train", draw.train, "--test", draw.test, "--store", place.folder / "store", "--json")
    done = measure(command, place)
    return {"inlay": _read_train(done, draw)}


def _read_train(done: Measured, draw: Draw) -> Found:
    if done.status != "ok":
        return _failed(done)
    said = json.loads(done.output)
    _check_kind(said["kind"], draw)
    value = 100 * said["metrics"]["test"][draw.metric]
    settings = {"best_epoch": said["best_epoch"], "num_parameters": said["num_parameters"]}
    return _ok(done, value, settings, find_versions())


def _run_baseline(draw: Draw, place: Place) -> dict[str, Found]:
    """`inlay baseline`, which fits both cheap models: each has the CPU seconds of the whole process."""
    done = measure(_inlay("baseline", draw.train, "--test", draw.test, "--json"), place)
    if done.status != "ok":
        return dict.fromkeys(("probe", "tfidf"), _failed(done))
    said = json.loads(done.output)
    _check_kind(said["kind"], draw)
    parts = {"probe": said["probe"], "tfidf": said}
    return {
        name: _ok(
            done,
            100 * part["metrics"]["test"][draw.metric],
            {key: part[key] for key in ("strength", "seconds", "reading") if key in part},
            find_versions(),
        )
        for name, part in parts.items()
    }


def _run_best(draw: Draw, place: Place) -> dict[str, Found]:
    """The grid as one sweep, then the test score of each of its runs: `inlay train` finds them finished."""
    store = ("--test", draw.test, "--store", place.folder / "store")
    grid = ("--lr", ",".join(RATES), "--epochs", ",".join(EPOCHS), "--no-publish")
    steps = [measure(_inlay("sweep", draw.train, *store, *grid, "--json"), place)]
    scores = {}
    for rate in RATES:
        for epochs in EPOCHS:
            if steps[-1].status != "ok":
                break
            options = ("--lr", rate, "--epochs", epochs, "--no-publish", "--json")
            steps.append(measure(_inlay("train", draw.train, *store, *options), place))
            if "diverged" in steps[-1].message:  # a setting that fails is not the best one
                steps[-1] = Measured("ok", *_costs(steps[-1]), output="")
            elif steps[-1].status == "ok":
                scores[f"lr {rate}, {epochs} epochs"] = (
                    100 * json.loads(steps[-1].output)["metrics"]["test"][draw.metric]
                )
    whole = Measured(
        steps[-1].status,
        cpu_s=round(sum(step.cpu_s for step in steps), 2),
        wall_s=round(sum(step.wall_s for step in steps), 2),
        peak_mb=max(step.peak_mb for step in steps),
        output="",
        message=steps[-1].message,
    )
    if whole.status != "ok" or not scores:
        return {"best": _failed(whole)}
    best = max(scores, key=lambda key: scores[key])
    tried = {key: round(value, 2) for key, value in scores.items()}
    return {"best": _ok(whole, scores[best], {"best": best, "tried": tried}, find_versions())}


def _run_setfit(draw: Draw, place: Place) -> dict[str, Found]:
    return {"setfit": _run_peer([place.setfit_python, PEERS / "setfit_run.py"], draw, place)}


def _run_full(draw: Draw, place: Place) -> dict[str, Found]:
    return {"full": _run_peer(_finetune(draw, place), draw, place)}


def _run_full_faster(draw: Draw, place: Place) -> dict[str, Found]:
    return {"full-5e-5": _run_peer([*_finetune(draw, place), "--lr", "5e-5"], draw, place)}


def _finetune(draw: Draw, place: Place) -> list[str | Path]:
    options = [*(["--regress"] if draw.kind == "regress" else []), *(["--gpu"] if place.gpu else [])]
    return [sys.executable, PEERS / "finetune_run.py", *options]


def _run_peer(command: Sequence[str | Path], draw: Draw, place: Place) -> Found:
    """A script of peers/: it writes its answers to the test rows, which are scored here."""
    answers = place.folder / "answers.json"
    files = ("--train", draw.train, "--test", draw.test, "--backbone", place.backbone, "--out", answers)
    done = measure([*command, *files], place)
    if done.status != "ok":
        return _failed(done)
    said = json.loads(answers.read_text(encoding="utf8"))
    return _ok(done, score_answers(draw, said["predictions"]), said["settings"], said["versions"])


def score_answers(draw: Draw, predictions: Sequence[Any]) -> float:
    """The metric of a draw's test rows for predicted labels or numbers, × 100, by the functions that Inlay uses."""
    with draw.test.open(encoding="utf8", newline="") as file:
        wanted = [row["label"] for row in csv.DictReader(file)]
    if len(predictions) != len(wanted):
        raise ValueError(f"{len(predictions)} answers to {len(wanted)} test rows of {draw.test}")
    if draw.kind == "regress":
        outputs, targets = np.array(predictions, dtype=float)[:, None], np.array(wanted, dtype=float)
    else:
        outputs = np.eye(len(draw.labels))[[draw.labels.index(label) for label in predictions]]
        targets = np.array([(*draw.labels, *draw.unseen).index(label) for label in wanted])
    return 100 * score_all(draw.kind, draw.labels, targets, outputs, draw.unseen)[draw.metric]


def _check_kind(kind: str, draw: Draw) -> None:
    if kind != draw.kind:
        raise ValueError(f"`inlay` takes {draw.train} for a `{kind}` task, not `{draw.kind}`")


def _ok(done: Measured, value: float, settings: dict[str, Any], versions: dict[str, str]) -> Found:
    return Found("ok", round(value, 3), *_costs(done), settings=settings, versions=versions)


def _failed(done: Measured) -> Found:
    return Found(done.status, None, *_costs(done), message=done.message)


def _costs(done: Measured) -> tuple[float, float, float]:
    return done.cpu_s, done.wall_s, done.peak_mb


def _setfit_passes(num_rows: int) -> float:
    return 3 * min(num_rows, 100)


SYSTEMS = {
    "inlay": System(_run_train, lambda num_rows: 60, is_ours=True),
    "probe": System(_run_baseline, lambda num_rows: 2, is_ours=True),
    "tfidf": System(_run_baseline, lambda num_rows: 2, is_ours=True),
    "setfit": System(_run_setfit, _setfit_passes, kinds=("classify",)),
    "full": System(_run_full, lambda num_rows: 9),
    "full-5e-5": System(_run_full_faster, lambda num_rows: 9),
    "best": System(_run_best, lambda num_rows: 480, is_ours=True),
}
USUAL = ("inlay", "probe", "tfidf", "setfit", "full", "best")
