"""The runs of a cohort that wait for a slot.

The longest wait least: the steps a run will take are known, and a long one begun last would leave the other slots idle.
A run that lost its slot when the cohort was made smaller waits with all it had, before any that has not begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from inlay.training.cohort.member import Progress
from inlay.training.run.joint import AnyRun


def longest_first(runs: Iterable[AnyRun]) -> list[AnyRun]:
    """Runs in the order they get slots; of equally long ones the order given."""
    return sorted(runs, key=lambda run: -run.num_steps)


@dataclass(frozen=True)
class Parked:
    """A run that has begun, taken out of its slot: what a resume state has of it."""

    run: AnyRun
    progress: Progress
    num_steps: list[int]
    """that its optimizer counts, for every slot and for what they share"""
    rows: dict[str, Tensor]
    """its row of the bank's values and of both moments, by name"""
    best_tensors: dict[str, Tensor] = field(default_factory=dict)


class Queue:
    """Who enters next. `num_begun` of the runs have had a slot; those of them that lost it are parked."""

    def __init__(self, runs: Sequence[AnyRun]) -> None:
        self.runs = list(runs)
        self.num_begun = 0
        self.parked: list[Parked] = []
        self.passed: set[str] = set()
        """ids of runs that were trained elsewhere: if they have not begun here, they do not"""

    @property
    def waiting(self) -> list[AnyRun]:
        """The runs without a slot that have not ended, in the order they will get one."""
        fresh = [run for run in self.runs[self.num_begun :] if run.id not in self.passed]
        return [parked.run for parked in self.parked] + fresh

    def take(self) -> AnyRun | Parked | None:
        """The next to enter a slot, or None."""
        if self.parked:
            return self.parked.pop(0)
        while self.num_begun < len(self.runs):
            self.num_begun += 1
            if self.runs[self.num_begun - 1].id not in self.passed:
                return self.runs[self.num_begun - 1]
        return None
