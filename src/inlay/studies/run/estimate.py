"""What work will take, before it is done: rows from the plans, time from a step or two that are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inlay.studies.run.units import Unit
from inlay.studies.spec.planning import Item, Plan
from inlay.training import make_run
from inlay.training.cohort.memory import MAX_COHORT, available_bytes, choose_slots, count_slot_bytes
from inlay.training.run.joint import JointRun
from inlay.training.run.plan import StepCost, measure_step_cost
from inlay.training.run.run import AnyRun

# Runs together -> times the rows per second of one run alone, as measured on an H200 (DESIGN.md); a CPU gains nothing.
_GAIN = {"cuda": {1: 1.0, 8: 2.6, 32: 3.1}, "cpu": {1: 1.0}}
_CHARACTERS = 4  # of a token, as `Item.cost` has it
_STILL = StepCost(0.0, 0.0, 0)


@dataclass(frozen=True)
class Estimate:
    """What a unit will take, from a measured step of one of its kind."""

    seconds: float
    memory_bytes: int
    """of the slots in training, with their optimizer, and the pass of the measured step"""
    num_slots: int
    num_samples: int
    """rows trained on, each as often as it is read"""


def estimate_units(units: Sequence[Unit], plans: Sequence[Plan], *, measured: bool = True) -> list[Estimate]:
    """Time and memory of each unit: a step of the cheapest run of a kind is measured, the others follow by their texts.

    The kinds are few: adapters or a copy of the backbone, of one task or of several, on each backbone. A sequence of
    tasks takes what their runs would. Time that no training takes (a baseline) is not counted. Unless `measured`,
    nothing is computed and no time is known.
    """
    by_study = {plan.study.name: plan for plan in plans}
    measure = _Measure(units, by_study)
    estimates = []
    for unit in units:
        backbone = by_study[unit.items[0].study].backbone
        num_samples = sum(item.num_samples for item in unit.items)
        trained = [run for item in unit.items if (run := _find_run(item, by_study[item.study])) is not None]
        slot_bytes = count_slot_bytes(trained, backbone) if trained else 0
        most = 1 if unit.is_finetuned or unit.kind == "sequence" else min(MAX_COHORT, unit.num_runs)
        num_slots = choose_slots(most, slot_bytes, available_bytes(backbone.device)) if trained else 0
        known = _GAIN[backbone.device.type]
        gain = float(np.interp(math.log(max(1, num_slots)), [math.log(size) for size in known], list(known.values())))
        pace = measure.of(unit.items[0]) if measured and unit.cost else _STILL
        num_steps = sum(item.num_samples / item.config.train.batch_size for item in unit.items)
        seconds = unit.cost * _CHARACTERS * pace.seconds_a_character + num_steps * pace.seconds_a_step
        memory_bytes = num_slots * slot_bytes + pace.peak_memory_bytes
        estimates.append(Estimate(seconds / gain, memory_bytes, num_slots, num_samples))
    return estimates


def _find_run(item: Item, plan: Plan) -> AnyRun | None:
    """What an item trains; of a sequence, the first of its tasks. None where nothing is."""
    if item.run is not None or not item.sequence:
        return item.run
    return make_run(item.sequence[0], item.config, plan.backbone)


class _Measure:
    """The pace of the cheapest run of a kind; each kind once."""

    def __init__(self, units: Sequence[Unit], plans: Mapping[str, Plan]) -> None:
        self._plans = plans
        self._cheapest: dict[tuple[str, bool, bool], Item] = {}
        for item in (item for unit in units for item in unit.items if item.run is not None or item.sequence):
            other = self._cheapest.setdefault(self._kind(item), item)
            if item.cost < other.cost:
                self._cheapest[self._kind(item)] = item
        self._known: dict[tuple[str, bool, bool], StepCost] = {}

    def _kind(self, item: Item) -> tuple[str, bool, bool]:
        return (self._plans[item.study].backbone.fingerprint, isinstance(item.run, JointRun), item.is_finetuned)

    def of(self, item: Item) -> StepCost:
        """What an item takes; nothing where no run like it is trained."""
        kind = self._kind(item)
        if kind not in self._known and kind in self._cheapest:
            plan = self._plans[self._cheapest[kind].study]
            run = _find_run(self._cheapest[kind], plan)
            assert run is not None
            is_checkpointed = plan.study.fit.get("checkpointing", False)
            self._known[kind] = measure_step_cost(run, plan.backbone, checkpointing=is_checkpointed)
        return self._known.get(kind, _STILL)
