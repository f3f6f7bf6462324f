"""The settings of `fit`: how many runs at a time, in how much memory, what is kept, what processes share.

None of them is part of a run. No torch: a wrong value is refused before anything is loaded.
"""

from __future__ import annotations

import numbers
import operator
from dataclasses import dataclass
from typing import NamedTuple

from inlay.errors import BadConfig, UnknownName
from inlay.processes import SPREADS


class _Number(NamedTuple):
    least: int
    hint: str
    kind: type = numbers.Integral


# Field -> the numbers it may be. A field that may be left open says so in its hint and is None by default.
_NUMBERS = {
    "max_cohort": _Number(1, "give a whole number from 1 on, or None for as many runs as fit, 32 at most"),
    "token_budget": _Number(1, "give a whole number from 1 on, or None for what fits in memory"),
    "threads": _Number(1, "give a whole number from 1 on, or None for as many as other processes leave cores"),
    "save_every": _Number(1, "give a whole number of steps from 1 on"),
    "save_seconds": _Number(0, "give a number of seconds from 0 on", numbers.Real),
    "prefix_bytes": _Number(0, "give a whole number of bytes from 0 on, or None for a quarter of what is free"),
    "prefix_file_bytes": _Number(0, "give a whole number of bytes from 0 on, or None for half of what is free"),
}
_SWITCHES = ("checkpointing", "draw_curves", "keep_last", "restart", "reuse_prefix")


@dataclass(frozen=True)
class FitSettings:
    """The settings of `fit`. None of them is part of a run.

    Without dropout they change a run's result by rounding only; with dropout its distribution stays the same. A wrong
    value is a `BadConfig`.

    >>> inlay.FitSettings(max_cohort=4).max_cohort
    4
    """

    max_cohort: int | None = None
    """runs trained together at most; default: as many as fit in half the memory, 32 at most"""
    token_budget: int | None = None
    """tokens of one forward pass at most; fewer need less memory, and gradients are accumulated; default: what fits"""
    checkpointing: bool = False
    """compute blocks again in the backward pass: far less memory, but slower, also because steps are not compiled"""
    threads: int | None = None
    """threads that compute on a CPU; default: what `OMP_NUM_THREADS` says, or as many as other processes leave cores
    free, which is looked at again while training"""
    save_every: int = 100
    """steps between resume states"""
    save_seconds: float = 0.0
    """least time between resume states, except when training is asked to stop; with several processes it is ignored. A
    state that takes seconds to write is written no more often than every twenty times as long."""
    draw_curves: bool | None = None
    """draw each run's curve into its folder, half a second each; default: only for eight runs or fewer"""
    keep_last: bool = True
    """keep the last epoch's weights too, beside the best one's"""
    restart: bool = False
    """start again from the beginning where an unfinished run is found"""
    spread: str = "auto"
    """what the processes of `torchrun` share: `cohorts`, `rows` of every batch, or `auto`: rows if runs are too few"""
    reuse_prefix: bool = True
    """compute the layers below the lowest trained one once per text, and cache the result"""
    prefix_bytes: int | None = None
    """memory of that cache; default: a quarter of what is free"""
    prefix_file_bytes: int | None = None
    """disk for what exceeds it; default: half of what is free"""

    def __post_init__(self) -> None:
        for name, allowed in _NUMBERS.items():
            value = getattr(self, name)
            if _is_left_open(self, name):
                continue
            is_number = isinstance(value, allowed.kind) and not isinstance(value, bool)
            if not is_number or not value >= allowed.least:  # NaN is not
                raise BadConfig(f"`{name}` is `{value}`", allowed.hint)
            # As Python's own number: numpy's cannot be written as JSON.
            plain = operator.index(value) if isinstance(value, numbers.Integral) else float(value)
            object.__setattr__(self, name, plain)
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not _is_left_open(self, name):
                raise BadConfig(f"`{name}` is `{value}`", "give True or False")
        if self.spread not in SPREADS:
            raise UnknownName("way to spread training", str(self.spread), SPREADS)


def _is_left_open(settings: FitSettings, name: str) -> bool:
    """Tell whether a setting that may be None is None."""
    return getattr(settings, name) is None and getattr(FitSettings, name) is None
