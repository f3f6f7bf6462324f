"""`fit(runs) -> results`: groups runs into cohorts that fit the memory, trains each, reads the results back.

It can be killed and resumed at any point. A finished run is never trained again: its result is read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inlay.errors import Missing, OutOfMemory
from inlay.model.backbone.backbone import Backbone
from inlay.model.bank.methods import first_layer
from inlay.model.kernels.cuda_graphs import is_out_of_memory
from inlay.settings.fit_settings import FitSettings
from inlay.threads import Threads, own_threads
from inlay.training.cohort.cohort import Cohort, CohortSettings, Watcher, seed_for
from inlay.training.cohort.frozen_cache import FrozenCache, Limits
from inlay.training.cohort.loop import CohortFiles, Interrupted, train
from inlay.training.cohort.memory import (
    MAX_COHORT,
    TOKEN_BUDGET,
    available_bytes,
    choose_slots,
    count_slot_bytes,
    describe_bytes,
    find_budget,
    first_line,
    release_memory,
)
from inlay.training.cohort.parallel import World, spread_over
from inlay.training.cohort.queue import longest_first
from inlay.training.cohort.resume import cohort_id, drop_state, find_stopped, has_state, load_state
from inlay.training.recipe.halving import Referee, refuse_several
from inlay.training.run.joint import AnyRun
from inlay.training.run.run import Result, is_finished, read_result
from inlay.training.step.compiled import has_programs
from inlay.training.step.losses import has_batched_loss

MAX_DRAWN = 8
"""curves of a cohort that are drawn, unless asked otherwise"""

__all__ = ["FitSettings", "Interrupted", "fit", "has_known_heads", "structure_of", "trains_apart"]

# What runs of one cohort may differ in, besides seed, rates and task: it changes values, not which tensors there are.
_FREE_IN_A_COHORT: dict[str, Any] = {"size": None, "init_std": 1.0, "activation": "auto", "scale": None, "alpha": None}


@dataclass(frozen=True)
class _FitContext:
    """How this process trains its cohorts: as asked, heard by whom, together with whom."""

    settings: FitSettings
    watch: Watcher
    world: World
    prefixes: FrozenCache
    referee: Referee

    def find_prefixes(self, runs: Sequence[AnyRun], backbone: Backbone) -> FrozenCache | None:
        """Where the frozen layers of these runs' texts are kept: if there are such layers, and texts are read again."""
        has_frozen = first_layer(backbone.anatomy, runs[0].spec.method) > 0
        is_read_again = sum(run.config.train.num_epochs for run in runs) > 1
        return self.prefixes if self.settings.reuse_prefix and has_frozen and is_read_again else None


def fit(
    runs: Sequence[AnyRun],
    backbone: Backbone,
    folder: Path,
    settings: FitSettings = FitSettings(),
    watch: Watcher | None = None,
    *,
    referee: Referee | None = None,
) -> list[Result]:
    """Train every run that is not finished yet; the results come in the order of `runs`.

    `folder` gets one folder per run, and `cohorts/` with the resume states. A run that diverges has a result that
    says so; it stops no other. Started by `torchrun`, each process does its part and gets all results; `folder` is
    theirs together. A `referee` may end runs early; their results are then no longer those of the settings alone, so
    `folder` should be one that no other `fit` reads.
    """
    if referee is not None:
        refuse_several()
    unique = list({run.id: run for run in runs}.values())
    limits = Limits(settings.prefix_bytes, settings.prefix_file_bytes)
    with spread_over(unique, backbone.device, settings.spread) as part:
        heard = (watch if part.world.is_first else None) or Watcher()
        with closing(FrozenCache(backbone, folder, heard, limits)) as prefixes:
            ways = _FitContext(settings, heard, part.world, prefixes, referee or Referee())
            for group in _group(part.runs, backbone, folder):
                if not _unfinished(group, folder):
                    while stopped := find_stopped(folder / "cohorts", group, []):  # killed just before the clean-up
                        drop_state(folder / "cohorts" / cohort_id(stopped.runs))
                else:
                    _fit_cohort(group, backbone, folder, ways)
    results = {run.id: _read_back(folder / run.id) for run in unique}
    return [results[run.id] for run in runs]


def _read_back(folder: Path) -> Result:
    result = read_result(folder)
    if result is None:
        raise Missing(
            f"another process trained run `{folder.name}`, but there is no result in `{folder}`",
            "every machine must see the same store: give a folder that all share with `--store`",
        )
    return result


def structure_of(run: AnyRun) -> tuple[Any, ...]:
    """What runs that share a bank have in common: one method structure and one dropout rate.

    Runs that train a copy of the backbone's weights share it one after another: what was compiled and captured for the
    first serves the next.
    """
    alone = run.id if run.spec.is_finetuned and run.spec.is_joint else ""
    rates = (run.config.train.dropout, run.config.train.attention_dropout)
    free = _FREE_IN_A_COHORT | ({"size": run.config.method.size} if run.spec.is_joint else {})  # heads are not padded
    return (replace(run.config.method, **free), rates, alone, len(run.parts))


def has_known_heads(run: AnyRun) -> bool:
    """Whether its steps are compiled where any are; if not, it would hold up those beside it."""
    return all(has_batched_loss(part.spec.head) and not part.config.train.contrast for part in run.parts)


def trains_apart(run: AnyRun, backbone: Backbone) -> bool:
    """Whether it joins no cohort of runs whose heads programs know."""
    return has_programs(backbone, run.spec.method) and not has_known_heads(run)


def _group(runs: list[AnyRun], backbone: Backbone, folder: Path) -> list[list[AnyRun]]:
    """Runs that can share a bank, in the order they get slots; those of a cohort that was stopped as they were."""
    groups: dict[tuple[Any, ...], list[AnyRun]] = {}
    for run in runs:
        begun_alone = run.id if run.spec.is_finetuned and _is_stopped([run], folder) else ""
        groups.setdefault((begun_alone, structure_of(run)), []).append(run)
    found = []
    for group in groups.values():
        parts = [[run for run in group if has_known_heads(run) == are_known] for are_known in (True, False)]
        parts = [part for part in parts if part]
        is_apart = any(trains_apart(run, backbone) for run in group) or any(_is_stopped(part, folder) for part in parts)
        found += parts if is_apart and not _is_stopped(group, folder) else [group]
    return [longest_first(group) for group in found]


def _is_stopped(runs: list[AnyRun], folder: Path) -> bool:
    return find_stopped(folder / "cohorts", runs, _unfinished(runs, folder)) is not None


def _unfinished(runs: list[AnyRun], folder: Path) -> list[AnyRun]:
    return [run for run in runs if not is_finished(folder / run.id)]


def _fit_cohort(runs: list[AnyRun], backbone: Backbone, folder: Path, ways: _FitContext) -> None:
    settings, world = ways.settings, ways.world
    stopped = None if settings.restart else find_stopped(folder / "cohorts", runs, _unfinished(runs, folder))
    runs = stopped.runs if stopped else _unfinished(runs, folder)
    desk = CohortFiles(
        folder / "cohorts" / cohort_id(runs), folder, runs, ways.watch, world, ways.find_prefixes(runs, backbone)
    )
    desk.referee = ways.referee
    desk.save_seconds, desk.keeps_last = settings.save_seconds, settings.keep_last
    desk.draws_curves = len(runs) <= MAX_DRAWN if settings.draw_curves is None else settings.draw_curves
    world.agree([desk.place.name, stopped is not None], "runs to train")  # read by all before the first one writes
    if stopped is None:
        desk.begin()
        chosen = _choose(runs, backbone, ways)
    else:
        desk.fallbacks = stopped.fallbacks
        chosen = _as_asked_now(stopped.settings, settings)
    desk.threads = _find_threads(backbone, ways)
    if note := _describe_threads(desk.threads, stopped.settings.num_threads if stopped else None):
        ways.watch.on_notice(note)
    chosen = replace(chosen, num_threads=desk.threads.number)
    is_measured = stopped is not None or settings.token_budget is not None
    with own_threads(chosen.num_threads):
        while reason := _attempt(desk, backbone, chosen, is_measured=is_measured):
            release_memory(backbone.device)
            chosen = _with_fewer_slots(chosen, desk, backbone, reason)
            is_measured = settings.token_budget is not None
            budget = settings.token_budget or TOKEN_BUDGET[backbone.device.type]
            chosen = replace(chosen, token_budget=budget)
    desk.end()


def _choose(runs: list[AnyRun], backbone: Backbone, ways: _FitContext) -> CohortSettings:
    """What a cohort begins with: what was asked for, and otherwise as many slots as fit in every process."""
    settings = ways.settings
    num_slots = 1 if runs[0].spec.is_finetuned else min(settings.max_cohort or MAX_COHORT, len(runs))
    if settings.max_cohort is None and num_slots > 1:
        fit_here = choose_slots(num_slots, count_slot_bytes(runs, backbone), available_bytes(backbone.device))
        num_slots = ways.world.least(fit_here)
    budget = settings.token_budget or TOKEN_BUDGET[backbone.device.type]
    return CohortSettings(budget, torch.get_num_threads(), settings.save_every, num_slots, settings.checkpointing)


def _find_threads(backbone: Backbone, ways: _FitContext) -> Threads:
    """How many threads to begin with. Processes that share a batch must round alike: each takes what torch has."""
    most, asked = torch.get_num_threads(), ways.settings.threads
    if asked is None and (backbone.device.type != "cpu" or ways.world.place.size > 1):
        asked = most
    return Threads(most, asked)


def _describe_threads(threads: Threads, before: int | None) -> str:
    """Why there are fewer than could be, and that a stopped cohort had another number, in words."""
    if before in (None, threads.number):
        return threads.note
    said = threads.note or f"threads: {threads.number}"
    return f"{said}; before it was stopped there were {before}, so sums are rounded otherwise from here on"


def _as_asked_now(stopped: CohortSettings, settings: FitSettings) -> CohortSettings:
    """The settings of a stopped cohort, with those asked for now, perhaps because memory ran out.

    They hold from here on; sums are then rounded otherwise.
    """
    return replace(
        stopped,
        token_budget=settings.token_budget or stopped.token_budget,
        num_slots=min(stopped.num_slots or MAX_COHORT, settings.max_cohort or stopped.num_slots or MAX_COHORT),
        checkpointing=settings.checkpointing or stopped.checkpointing,
    )


def _attempt(desk: CohortFiles, backbone: Backbone, chosen: CohortSettings, *, is_measured: bool) -> str:
    """Train the cohort from its state, if it has one, to its end; what ran out of memory on the way, or nothing."""
    try:
        with _own_randomness(backbone, desk.runs):
            free_bytes = available_bytes(backbone.device)
            cohort = Cohort(desk.runs, backbone, chosen, desk.watch, world=desk.world)
            if not is_measured:
                left_bytes = free_bytes if desk.prefixes is None else desk.prefixes.leave(free_bytes)
                cohort.use_budget(find_budget(cohort, left_bytes))
            desk.write_membership(cohort.settings)
            if has_state(desk.place):
                load_state(desk.place, cohort)
                for member in cohort.members:
                    desk.write_history(member)
            if desk.prefixes is not None:
                cohort.reuse(desk.prefixes)
            desk.world.start_alike(desk.place.name, cohort.num_steps, list(cohort.stored.values()))
            train(cohort, desk)
    except (OutOfMemory, RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if desk.world.place.size > 1:
            fewer = ["a smaller `--max-cohort`"] if _count_slots(chosen, desk) > 1 else []
            raise OutOfMemory(
                f"memory ran out in process {desk.world.place.rank}: {first_line(error)}",
                "the others cannot go on with less: use "
                + _join([*_remedies(desk, chosen), *fewer, "`--spread cohorts`"]),
            ) from None
        return first_line(error)
    return ""


def _with_fewer_slots(chosen: CohortSettings, desk: CohortFiles, backbone: Backbone, reason: str) -> CohortSettings:
    num_slots = _count_slots(chosen, desk)
    if num_slots == 1:
        needed = describe_bytes(count_slot_bytes(desk.runs, backbone))
        free = describe_bytes(available_bytes(backbone.device))
        raise OutOfMemory(
            f"one run with one row at a time does not fit in the memory of `{backbone.device}`: its parameters take "
            f"{needed} in training, a row's activations come on top, and {free} are free ({reason})",
            "use "
            + _join([*_remedies(desk, chosen), "a smaller `train.max_length` or `method.size`", "a smaller backbone"]),
        )
    smaller = replace(chosen, num_slots=num_slots // 2)
    message = f"memory ran out ({reason}): {smaller.num_slots} runs together from here on, the others wait"
    desk.fall_back(message, smaller)
    return smaller


def _count_slots(chosen: CohortSettings, desk: CohortFiles) -> int:
    """How many runs train at a time: copies of the backbone one, whatever was asked for."""
    return min(chosen.num_slots or len(desk.runs), len(desk.runs))


def _remedies(desk: CohortFiles, chosen: CohortSettings) -> list[str]:
    """What takes less memory and was not asked for yet: flags of every command that trains. The settings of a run go by
    their keys, since not all of those have a flag for each."""
    again = [] if chosen.checkpointing else ["`--checkpointing`"]
    keeps = desk.prefixes is not None and desk.prefixes.uses_memory
    return again + (["`--reuse-memory 0`"] if keeps else [])


def _join(remedies: Sequence[str]) -> str:
    return ", or ".join(part for part in (", ".join(remedies[:-1]), remedies[-1]) if part)


@contextmanager
def _own_randomness(backbone: Backbone, runs: list[AnyRun]) -> Iterator[None]:
    """The seeding of a cohort; the caller's generators are as before after it."""
    devices = [backbone.device] if backbone.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        seed_for(runs[:1] if runs[0].spec.is_finetuned else runs)
        yield
