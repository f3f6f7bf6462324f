"""Estimates of time and memory before anything is trained, from the plans' rows and a few measured steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
_NO_COST = StepCost(0.0, 0.0, 0)
_Kind = tuple[str, bool, bool]


@dataclass(frozen=True)
class Estimate:
    """The time and memory of a unit, from a measured step of one of its kind."""

    seconds: float
    memory_bytes: int
    """memory of the slots in training, with their optimizer state, and of the measured step"""
    num_slots: int
    num_samples: int
    """training rows, counted as often as they are read"""


def estimate_units(units: Sequence[Unit], plans: Sequence[StudyPlan], *, measured: bool = True) -> list[Estimate]:
    """Estimate each unit: measure a step of the cheapest run of its kind, and scale it by the length of the texts.

    There are few kinds: adapters or a copy of the backbone, of one task or of several, on each backbone. A sequence of
    tasks takes as long as a run of each task. A baseline trains nothing and takes no time. Unless `measured`, nothing
    is computed and the time is 0.
    """
    by_study = {plan.study.name: plan for plan in plans}
    paces: dict[_Kind, StepCost] = {}
    estimates = []
    for unit in units:
        # 1. memory: as many slots as fit
        backbone = by_study[unit.items[0].study].backbone
        trained = [run for item in unit.items if (run := _find_run(item, by_study[item.study])) is not None]
        slot_bytes = count_slot_bytes(trained, backbone) if trained else 0
        most = 1 if unit.is_finetuned or unit.kind == "sequence" else min(MAX_COHORT, unit.num_runs)
        num_slots = choose_slots(most, slot_bytes, available_bytes(backbone.device)) if trained else 0
        # 2. time: the texts at the measured pace, divided by the gain of training together
        pace = _NO_COST
        if measured and unit.cost:
            kind = _kind_of(unit.items[0], by_study)
            if kind not in paces:
                paces[kind] = _measure_cheapest(kind, units, by_study)
            pace = paces[kind]
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


def _kind_of(item: PlannedRun, plans: Mapping[str, StudyPlan]) -> _Kind:
    return (plans[item.study].backbone.fingerprint, isinstance(item.run, JointRun), item.is_finetuned)


def _measure_cheapest(kind: _Kind, units: Sequence[Unit], plans: Mapping[str, StudyPlan]) -> StepCost:
    """Measure a step of the cheapest run of a kind."""
    items = [item for unit in units for item in unit.items if item.run is not None or item.sequence]
    alike = [item for item in items if _kind_of(item, plans) == kind]
    if not alike:
        return _NO_COST
    cheapest = min(alike, key=lambda item: item.cost)
    plan = plans[cheapest.study]
    run = _find_run(cheapest, plan)
    assert run is not None
    return measure_step_cost(run, plan.backbone, checkpointing=plan.study.fit.get("checkpointing", False))
