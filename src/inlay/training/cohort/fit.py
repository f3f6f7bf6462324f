"""`fit(runs) -> results`: groups runs into cohorts that fit the memory, trains each, and reads the results back.

It can be killed and resumed at any point. A finished run is never trained again: its result is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from inlay.errors import Missing, OutOfMemory
from inlay.locks import TRAINING_LOCK, claim
from inlay.model import Backbone, first_layer
from inlay.settings import FitSettings
from inlay.threads import Threads, generator_lock, own_threads
from inlay.training.cohort.cohort import Cohort, CohortSettings, longest_first, seed_for
from inlay.training.cohort.frozen_cache import FrozenCache, Limits
from inlay.training.cohort.loop import CohortContext, Interrupted, train
from inlay.training.cohort.memory import (
    MAX_COHORT,
    TOKEN_BUDGET,
    available_bytes,
    choose_slots,
    count_slot_bytes,
    describe_bytes,
    find_budget,
    release_memory,
    retry_smaller,
)
from inlay.training.cohort.parallel import spread_over
from inlay.training.cohort.resume import (
    Stopped,
    cohort_id,
    drop_state,
    find_stopped,
    has_state,
    load_state,
    mend_state,
)
from inlay.training.events import Emit, Notice, ignore
from inlay.training.recipe.halving import Referee, refuse_several
from inlay.training.run.run import AnyRun, Result
from inlay.training.run.run_folder import is_finished, read_result, write_history, write_start
from inlay.training.step.compiled import has_programs
from inlay.training.step.losses import has_batched_loss

__all__ = ["FitSettings", "Interrupted", "fit", "has_compiled_losses", "needs_own_cohort", "structure_of"]

# Settings in which runs of one cohort may differ, besides seed, rates and task: they change values, not tensor shapes.
_FREE_IN_A_COHORT: dict[str, Any] = {"size": None, "init_std": 1.0, "activation": "auto", "scale": None, "alpha": None}


def fit(
    runs: Sequence[AnyRun],
    backbone: Backbone,
    folder: Path,
    settings: FitSettings = FitSettings(),
    emit: Emit = ignore,
    *,
    referee: Referee | None = None,
) -> list[Result]:
    """Train every run that is not finished yet; the results come in the order of `runs`.

    `folder` gets one folder per run, and `cohorts/` with the resume states. `emit` is called with every event. A run
    that diverges has a result that says so; it stops no other. Started by `torchrun`, each process does its part and
    gets all results; `folder` is theirs together. A `referee` may end runs early; their results are then no longer
    those of the settings alone, so `folder` should be one that no other `fit` reads. In other threads, cohorts on the
    same device take turns with these; answers and scores go on between two steps.
    """
    if referee is not None:
        refuse_several()
    unique = list({run.id: run for run in runs}.values())
    limits = Limits(settings.prefix_bytes, settings.prefix_file_bytes)
    # 1. Deal the runs, or the rows of every batch, among the processes.
    with spread_over(unique, backbone.device, settings.spread) as (own_runs, world):
        emit = emit if world.process.is_first else ignore
        with closing(FrozenCache(backbone, folder, emit, limits)) as cache:
            # 2. Train the runs that can share a bank, cohort by cohort.
            for group in _group(own_runs, backbone, folder):
                if _unfinished(group, folder):
                    with generator_lock(backbone.device):
                        context = CohortContext(group, folder, settings, emit, world, referee or Referee(), cache)
                        ids = [run.id for run in _unfinished(group, folder)]
                        lock = context.cohort_dir / TRAINING_LOCK
                        with claim(lock, ids) if world.process.is_first else nullcontext():
                            _fit_cohort(context, backbone)
                    continue
                while stopped := find_stopped(folder / "cohorts", group, []):  # killed just before it removed its state
                    drop_state(folder / "cohorts" / cohort_id(stopped.runs))
    # 3. Read the results back, those of other processes too.
    results = {}
    for run in unique:
        result = read_result(folder / run.id)
        if result is None:
            raise Missing(
                f"another process trained run `{run.id}`, but there is no result in `{folder / run.id}`",
                "every machine must see the same store: give a folder that all share with `--store`",
            )
        results[run.id] = result
    return [results[run.id] for run in runs]


def structure_of(run: AnyRun) -> tuple[Any, ...]:
    """Return the key of runs that can share a bank: one method structure and one dropout rate.

    Runs that train a copy of the backbone's weights share it one after another: programs compiled and captured for the
    first serve the next.
    """
    alone = run.id if run.spec.is_finetuned and run.spec.is_joint else ""
    rates = (run.config.train.dropout, run.config.train.attention_dropout)
    free = _FREE_IN_A_COHORT | ({"size": run.config.method.size} if run.spec.is_joint else {})  # heads are not padded
    return (replace(run.config.method, **free), rates, alone, len(run.parts))


def has_compiled_losses(run: AnyRun) -> bool:
    """Tell whether all heads of a run have a compiled loss. One without it would make its whole cohort eager."""
    return all(has_batched_loss(part.spec.head) and not part.config.train.contrast for part in run.parts)


def needs_own_cohort(run: AnyRun, backbone: Backbone) -> bool:
    """Tell whether a run must not join a cohort whose steps are compiled."""
    return has_programs(backbone, run.spec.method) and not has_compiled_losses(run)


def _group(runs: list[AnyRun], backbone: Backbone, folder: Path) -> list[list[AnyRun]]:
    """Group runs that can share a bank, in the order they get slots; a cohort that was stopped stays as it was."""
    groups: dict[tuple[Any, ...], list[AnyRun]] = {}
    for run in runs:
        begun_alone = run.id if run.spec.is_finetuned and _is_stopped([run], folder) else ""
        groups.setdefault((begun_alone, structure_of(run)), []).append(run)
    found = []
    for group in groups.values():
        parts = [[run for run in group if has_compiled_losses(run) == are_known] for are_known in (True, False)]
        parts = [part for part in parts if part]
        is_apart = any(needs_own_cohort(run, backbone) for run in group) or any(
            _is_stopped(part, folder) for part in parts
        )
        found += parts if is_apart and not _is_stopped(group, folder) else [group]
    return [longest_first(group) for group in found]


def _is_stopped(runs: list[AnyRun], folder: Path) -> bool:
    return find_stopped(folder / "cohorts", runs, _unfinished(runs, folder)) is not None


def _unfinished(runs: list[AnyRun], folder: Path) -> list[AnyRun]:
    return [run for run in runs if not is_finished(folder / run.id)]


def _fit_cohort(context: CohortContext, backbone: Backbone) -> None:
    """Train runs as one cohort, from its resume state if it was stopped; with fewer slots if memory runs out."""
    asked, folder = context.settings, context.runs_dir
    # 1. Find the cohort as it was stopped, or begin it.
    stopped = None if asked.restart else _find_proved(context)
    context.runs = runs = stopped.runs if stopped else _unfinished(context.runs, folder)
    # Caching frozen layers pays if there are some, and texts are read more than once.
    has_frozen = first_layer(backbone.anatomy, runs[0].spec.method) > 0
    is_read_again = sum(run.config.train.num_epochs for run in runs) > 1
    if not (asked.reuse_prefix and has_frozen and is_read_again):
        context.cache = None
    context.world.agree([context.cohort_dir.name, stopped is not None], "runs to train")  # all read before one writes
    if stopped is None:
        if context.world.process.is_first:
            drop_state(context.cohort_dir)
            for run in runs:
                write_start(folder / run.id, run)
        context.world.agree(context.cohort_dir.name, "cohort")  # no process reads the old state after this
        chosen = _choose(context, backbone)
    else:  # settings asked for now apply from here on, which changes rounding
        context.fallbacks, chosen = stopped.fallbacks, stopped.settings
        num_slots = chosen.num_slots or MAX_COHORT
        chosen = replace(
            chosen,
            token_budget=asked.token_budget or chosen.token_budget,
            num_slots=min(num_slots, asked.max_cohort or num_slots),
            checkpointing=asked.checkpointing or chosen.checkpointing,
        )
    # 2. Choose the number of threads.
    context.threads = _choose_threads(context, backbone, stopped.settings.num_threads if stopped else None)
    chosen = replace(chosen, num_threads=context.threads.number)
    # 3. Train to the end; whenever memory runs out beyond repair, with half as many runs at a time.
    is_measured = stopped is not None or asked.token_budget is not None

    def shrink(reason: str) -> None:
        nonlocal chosen, is_measured
        smaller = _with_fewer_slots(chosen, context, backbone, reason)
        chosen = replace(smaller, token_budget=asked.token_budget or TOKEN_BUDGET[backbone.device.type])
        is_measured = asked.token_budget is not None

    with own_threads(chosen.num_threads):
        retry_smaller(
            lambda: _train_cohort(context, backbone, chosen, is_measured=is_measured),
            shrink,
            (OutOfMemory, RuntimeError, MemoryError),
        )
    if context.world.process.is_first:
        drop_state(context.cohort_dir)


def _find_proved(context: CohortContext) -> Stopped | None:
    """Find the stopped cohort of these runs, with a state whose checksum holds; emit a note on one that was damaged."""
    runs, folder = context.runs, context.runs_dir / "cohorts"
    unfinished = _unfinished(runs, context.runs_dir)
    stopped, note = find_stopped(folder, runs, unfinished), ""
    if context.world.process.is_first:
        own = folder / cohort_id(stopped.runs if stopped else unfinished)
        if stopped is not None:
            note = mend_state(own, {run.id for run in stopped.runs})
        elif has_state(own):
            note = f"the files in `{own}` no longer say how its runs were trained together; they start again"
    note = context.world.collect(note)[0]  # the others read what the first process has mended
    if not note:
        return stopped
    context.emit(Notice(note))
    return find_stopped(folder, runs, unfinished)


def _choose(context: CohortContext, backbone: Backbone) -> CohortSettings:
    """Choose the settings a cohort begins with: those asked for, else as many slots as fit in every process."""
    asked, runs = context.settings, context.runs
    num_slots = 1 if runs[0].spec.is_finetuned else min(asked.max_cohort or MAX_COHORT, len(runs))
    if asked.max_cohort is None and num_slots > 1:
        fit_here = choose_slots(num_slots, count_slot_bytes(runs, backbone), available_bytes(backbone.device))
        num_slots = min(context.world.collect(fit_here))
    budget = asked.token_budget or TOKEN_BUDGET[backbone.device.type]
    return CohortSettings(budget, torch.get_num_threads(), asked.save_every, num_slots, asked.checkpointing)


def _choose_threads(context: CohortContext, backbone: Backbone, before: int | None) -> Threads:
    """Choose the threads to begin with; emit a note if they are fewer than possible, or others than `before` a stop."""
    most, asked = torch.get_num_threads(), context.settings.threads
    # Processes that share a batch must round alike: each takes what torch has.
    if asked is None and (backbone.device.type != "cpu" or context.world.process.size > 1):
        asked = most
    threads = Threads(most, asked)
    note = threads.note
    if before not in (None, threads.number):
        note = note or f"threads: {threads.number}"
        note += f"; before it was stopped there were {before}, so sums are rounded differently from here on"
    if note:
        context.emit(Notice(note))
    return threads


def _train_cohort(context: CohortContext, backbone: Backbone, chosen: CohortSettings, *, is_measured: bool) -> None:
    """Train the cohort to its end, from its resume state if it has one."""
    runs = context.runs
    # Afterwards the caller's generators are as before.
    with torch.random.fork_rng(devices=[backbone.device] if backbone.device.type == "cuda" else []):
        seed_for(runs[:1] if runs[0].spec.is_finetuned else runs)
        free_bytes = available_bytes(backbone.device)
        cohort = Cohort(runs, backbone, chosen, context.emit, world=context.world)
        if not is_measured:
            left_bytes = free_bytes if context.cache is None else context.cache.leave(free_bytes)
            cohort.use_budget(find_budget(cohort, left_bytes))
        context.write_membership(cohort.settings)
        if has_state(context.cohort_dir):
            load_state(context.cohort_dir, cohort)
            for member in cohort.members if context.world.process.is_first else []:
                write_history(context.runs_dir / member.run.id, member.progress.history)
        if context.cache is not None:
            cohort.reuse(context.cache)
        context.world.agree(cohort.num_steps, "steps behind it")
        context.world.spread(list(cohort.stored.values()))
        context.world.reseed(context.cohort_dir.name, cohort.num_steps)
        train(cohort, context)


def _with_fewer_slots(
    chosen: CohortSettings, context: CohortContext, backbone: Backbone, reason: str
) -> CohortSettings:
    """Return settings with half as many runs at a time; refuse where there is one, or other processes cannot follow."""
    num_slots = min(chosen.num_slots or len(context.runs), len(context.runs))
    remedies = [] if chosen.checkpointing else ["`--checkpointing`"]  # every command that trains has these flags
    if context.cache is not None and context.cache.uses_memory:
        remedies.append("`--reuse-memory 0`")
    if context.world.process.size > 1:
        fewer = ["a smaller `--max-cohort`"] if num_slots > 1 else []
        raise OutOfMemory(
            f"memory ran out in process {context.world.process.rank}: {reason}",
            "the others cannot go on with less: use " + _join([*remedies, *fewer, "`--spread cohorts`"]),
        )
    release_memory(backbone.device)
    if num_slots == 1:
        needed = describe_bytes(count_slot_bytes(context.runs, backbone))
        free = describe_bytes(available_bytes(backbone.device))
        raise OutOfMemory(
            f"one run with one row at a time does not fit in the memory of `{backbone.device}`: its parameters take "
            f"{needed} in training, a row's activations come on top, and {free} are free ({reason})",
            "use " + _join([*remedies, "a smaller `train.max_length` or `method.size`", "a smaller backbone"]),
        )
    smaller = replace(chosen, num_slots=num_slots // 2)
    context.fall_back(reason, f"{smaller.num_slots} runs together from here on, the others wait", smaller)
    return smaller


def _join(remedies: Sequence[str]) -> str:
    return ", or ".join(part for part in (", ".join(remedies[:-1]), remedies[-1]) if part)
