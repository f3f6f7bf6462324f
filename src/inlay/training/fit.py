"""`fit(runs) -> results`: groups runs into cohorts, trains each in one loop, writes each run's folder.

It can be killed and resumed at any point. A finished run is never trained again: its result is read back.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inlay.config import digest
from inlay.model.backbone import Backbone
from inlay.training.cohort import Cohort, CohortSettings, Watcher, peak_memory_bytes
from inlay.training.curve import draw_curve
from inlay.training.member import Member
from inlay.training.prefix import Limits, PrefixCache
from inlay.training.resume import (
    cohort_id,
    drop_state,
    find_stopped,
    load_state,
    save_state,
    write_membership,
)
from inlay.training.run import (
    Result,
    Run,
    is_finished,
    read_result,
    write_history,
    write_result,
    write_start,
    write_tensors,
)

TOKEN_BUDGET = {"cpu": 16384, "cuda": 131072}
# What runs of one cohort may differ in, besides seed, rates and task: it changes values, not which tensors there are.
_FREE_IN_A_COHORT: dict[str, Any] = {"size": None, "init_std": 1.0, "activation": "auto", "scale": None, "alpha": None}


@dataclass(frozen=True)
class FitSettings:
    """How `fit` goes about it. None of this is part of a run: without dropout a run's result does not depend on it
    beyond rounding, with dropout its distribution does not."""

    max_cohort: int = 32
    """runs trained together at most"""
    token_budget: int | None = None
    """tokens of one forward pass at most; smaller needs less memory and accumulates gradients"""
    save_every: int = 100
    """steps between resume states"""
    restart: bool = False
    """begin anew where an unfinished state is found"""
    reuse_prefix: bool = True
    """compute the layers below the lowest trained one once per text"""
    prefix_bytes: int | None = None
    """memory for what is reused; default: a quarter of what is free"""
    prefix_file_bytes: int | None = None
    """disk for what exceeds it; default: half of what is free"""


@dataclass(frozen=True)
class _Ways:
    """How cohorts are trained: as asked, heard by whom, with what is kept for all of them."""

    settings: FitSettings
    watch: Watcher
    prefixes: PrefixCache


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training: the resume state is on disk."""


def fit(
    runs: Sequence[Run],
    backbone: Backbone,
    folder: Path,
    settings: FitSettings = FitSettings(),
    watch: Watcher | None = None,
) -> list[Result]:
    """Train every run that is not finished yet; the results come in the order of `runs`.

    `folder` gets one folder per run, and `cohorts/` with the resume states. A run that diverges has a result that
    says so; it stops no other.
    """
    unique = list({run.id: run for run in runs}.values())
    watch = watch or Watcher()
    limits = Limits(settings.prefix_bytes, settings.prefix_file_bytes)
    with closing(PrefixCache(backbone, folder, watch, limits)) as prefixes:
        ways = _Ways(settings, watch, prefixes)
        for members in _group(unique, settings.max_cohort):
            if not _unfinished(members, folder):
                while stopped := find_stopped(folder / "cohorts", members, []):  # killed just before the clean-up
                    drop_state(folder / "cohorts" / cohort_id(stopped.runs))
            else:
                _fit_cohort(members, backbone, folder, ways)
    results = {run.id: read_result(folder / run.id) for run in unique}
    return [result for run in runs if (result := results[run.id]) is not None]


def _group(runs: list[Run], max_cohort: int) -> Iterator[list[Run]]:
    """Runs that can share a bank: one method structure and one dropout rate, in the order given."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        alone = run.id if run.spec.is_solo else ""  # it trains a copy of the backbone's weights
        structure = replace(run.config.method, **_FREE_IN_A_COHORT)
        rates = (run.config.train.dropout, run.config.train.attention_dropout)
        groups.setdefault((structure, rates, alone), []).append(run)
    for group in groups.values():
        for start in range(0, len(group), max_cohort):
            yield group[start : start + max_cohort]


def _fit_cohort(runs: list[Run], backbone: Backbone, folder: Path, ways: _Ways) -> None:
    settings, watch = ways.settings, ways.watch
    stopped = None if settings.restart else find_stopped(folder / "cohorts", runs, _unfinished(runs, folder))
    runs = stopped.runs if stopped else _unfinished(runs, folder)
    place = folder / "cohorts" / cohort_id(runs)
    if stopped is None:
        budget = settings.token_budget or TOKEN_BUDGET[backbone.device.type]
        chosen = CohortSettings(budget, torch.get_num_threads(), settings.save_every)
        drop_state(place)
        write_membership(place, runs, chosen)
        for run in runs:
            write_start(folder / run.id, run)
    else:
        # A budget asked for now, perhaps because memory ran out, holds from here on; sums are then rounded otherwise.
        chosen = replace(stopped.settings, token_budget=settings.token_budget or stopped.settings.token_budget)
        write_membership(place, runs, chosen)
    with _own_randomness(backbone, runs), _own_threads(chosen.num_threads):
        cohort = Cohort(runs, backbone, chosen, watch)
        if stopped is not None:
            load_state(place, cohort)
            for member in cohort.members:
                write_history(folder / member.run.id, member.progress.history)
        if settings.reuse_prefix and sum(run.config.train.epochs for run in runs) > 1:  # texts are read again
            cohort.reuse(ways.prefixes)
        _train(cohort, place, folder, watch)
    drop_state(place)


def _unfinished(runs: list[Run], folder: Path) -> list[Run]:
    return [run for run in runs if not is_finished(folder / run.id)]


def _train(cohort: Cohort, place: Path, folder: Path, watch: Watcher) -> None:
    watch.on_start(cohort)
    for member in cohort.members:  # ended before the kill, but perhaps not yet written
        if not member.is_active:
            _write_end(member, cohort, folder)
    with _interruptible() as interrupted, cohort.training():
        while cohort.active:
            before, began = cohort.active, time.perf_counter()
            num_rows = cohort.step()
            records = _score(cohort)
            cohort.seconds += time.perf_counter() - began
            watch.on_step(cohort, num_rows)
            for member, record in records:
                write_history(folder / member.run.id, member.progress.history)
                watch.on_epoch(member, record)
            ended = [member for member in before if not member.is_active]
            # Before any result is written: resumed, the runs still training must find their cohort as it was.
            if records or ended or interrupted.is_set() or cohort.num_steps % cohort.settings.save_every == 0:
                save_state(place, cohort)
            for member in ended:
                _write_end(member, cohort, folder)
                watch.on_end(member)
            if interrupted.is_set():
                raise Interrupted


def _score(cohort: Cohort) -> list[tuple[Member, dict[str, Any]]]:
    cohort.backbone.model.eval()
    try:
        return cohort.finish_epochs()
    finally:
        cohort.backbone.model.train()


def _write_end(member: Member, cohort: Cohort, folder: Path) -> None:
    """Everything of an ended run, the result last. Written again after a kill, with the same content."""
    place, progress = folder / member.run.id, member.progress
    if is_finished(place):
        return
    write_history(place, progress.history)
    if member.best_tensors:
        write_tensors(place / "best.safetensors", member.best_tensors)
    write_tensors(place / "last.safetensors", cohort.bank.read(member.slot))
    draw_curve(place / "curve.png", member.run, progress)
    result = Result(
        run_id=member.run.id,
        status=progress.status,
        best_epoch=progress.best_epoch,
        dev_metric=progress.best_metric,
        history=progress.history,
        seconds=cohort.seconds,
        peak_memory_bytes=peak_memory_bytes(cohort.backbone.device),
        message=progress.message,
    )
    write_result(place, result)


@contextmanager
def _own_randomness(backbone: Backbone, runs: list[Run]) -> Iterator[None]:
    """The single seeding of a cohort; the caller's generators are as before after it."""
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(digest([run.id for run in runs])[:12], 16))
        yield


@contextmanager
def _own_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the step in hand is finished and saved; a second Ctrl-C stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
