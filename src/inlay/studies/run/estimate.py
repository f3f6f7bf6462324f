"""Estimates of time and memory before anything is trained: rows from the plans, time from a step or two, measured."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from inlay.studies.run.units import Unit
from inlay.studies.spec.planning import PlannedRun, StudyPlan
from inlay.training import (
    MAX_COHORT,
    AnyRun,
    JointRun,
    StepCost,
    available_bytes,
    choose_slots,
    count_slot_bytes,
    make_run,
    measure_step_cost,
)

# Runs together -> times the rows per second of one run alone, as measured on an H200; a CPU gains nothing.
_GAIN = {"cuda": {1: 1.0, 8: 2.6, 32: 3.1}, "cpu": {1: 1.0}}
_CHARACTERS = 4  # characters of a token, as in `PlannedRun.cost`
_STILL = StepCost(0.0, 0.0, 0)


@dataclass(frozen=True)
class Estimate:
    """The time and memory of a unit, from a measured step of one of its kind."""

    seconds: float
    memory_bytes: int
    """memory of the slots in training, with their optimizer, and of the measured step's pass"""
    num_slots: int
    num_samples: int
    """rows trained on, counted as often as they are read"""


def estimate_units(units: Sequence[Unit], plans: Sequence[StudyPlan], *, measured: bool = True) -> list[Estimate]:
    """Estimate each unit: measure a step of the cheapest run of its kind, and scale it by the texts.

    The kinds are few: adapters or a copy of the backbone, of one task or of several, on each backbone. A sequence of
    tasks takes what their runs would. Time that no training takes (a baseline) is not counted. Unless `measured`,
    nothing is computed and no time is known.
    """
    by_study = {plan.study.name: plan for plan in plans}
    find_pace = _measure_lazily([item for unit in units for item in unit.items], by_study)
    estimates = []
    for unit in units:
        # 1. memory: as many slots as fit
        backbone = by_study[unit.items[0].study].backbone
        trained = [run for item in unit.items if (run := _find_run(item, by_study[item.study])) is not None]
        slot_bytes = count_slot_bytes(trained, backbone) if trained else 0
        most = 1 if unit.is_finetuned or unit.kind == "sequence" else min(MAX_COHORT, unit.num_runs)
        num_slots = choose_slots(most, slot_bytes, available_bytes(backbone.device)) if trained else 0
        # 2. time: the texts at the measured pace, less the gain of training together
        pace = find_pace(unit.items[0]) if measured and unit.cost else _STILL
        num_steps = sum(item.num_samples / item.config.train.batch_size for item in unit.items)
        seconds = unit.cost * _CHARACTERS * pace.seconds_a_character + num_steps * pace.seconds_a_step
        known = _GAIN[backbone.device.type]
        gain = float(np.interp(math.log(max(1, num_slots)), [math.log(size) for size in known], list(known.values())))
        memory_bytes = num_slots * slot_bytes + pace.peak_memory_bytes
        num_samples = sum(item.num_samples for item in unit.items)
        estimates.append(Estimate(seconds / gain, memory_bytes, num_slots, num_samples))
    return estimates


def _find_run(item: PlannedRun, plan: StudyPlan) -> AnyRun | None:
    """Return the run that an item trains; for a sequence, of its first task. None if nothing is trained."""
    if item.run is not None or not item.sequence:
        return item.run
    return make_run(item.sequence[0], item.config, plan.backbone)


def _measure_lazily(items: Sequence[PlannedRun], plans: dict[str, StudyPlan]) -> Callable[[PlannedRun], StepCost]:
    """Return a function that gives an item's pace: that of the cheapest run of its kind, measured once."""

    def kind_of(item: PlannedRun) -> tuple[str, bool, bool]:
        return (plans[item.study].backbone.fingerprint, isinstance(item.run, JointRun), item.is_finetuned)

    cheapest: dict[tuple[str, bool, bool], PlannedRun] = {}
    for item in items:
        if item.run is not None or item.sequence:
            other = cheapest.setdefault(kind_of(item), item)
            if item.cost < other.cost:
                cheapest[kind_of(item)] = item

    @functools.cache
    def measure(kind: tuple[str, bool, bool]) -> StepCost:
        if kind not in cheapest:
            return _STILL
        plan = plans[cheapest[kind].study]
        run = _find_run(cheapest[kind], plan)
        assert run is not None
        return measure_step_cost(run, plan.backbone, checkpointing=plan.study.fit.get("checkpointing", False))

    return lambda item: measure(kind_of(item))
