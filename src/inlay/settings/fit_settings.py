"""How `fit` goes about training: how much together, in how much memory, what is kept, what processes share.

None of it is part of a run. No torch: a value that cannot be is refused before anything is loaded.
"""

from __future__ import annotations

import numbers
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

from inlay.errors import BadConfig, UnknownName
from inlay.processes import SPREADS


class _Number(NamedTuple):
    least: int
    hint: str
    kind: type = numbers.Integral


# Field -> what it may be. Those that may be left open say so in their hint, and are None by default.
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
    """How `fit` goes about it. None of this is part of a run: without dropout a run's result does not depend on it
    beyond rounding, with dropout its distribution does not. A value that cannot be is a `BadConfig`."""

    max_cohort: int | None = None
    """runs trained together at most; default: as many as fit in half the memory, 32 at most"""
    token_budget: int | None = None
    """tokens of one forward pass at most; smaller needs less memory and accumulates gradients; default: what fits"""
    checkpointing: bool = False
    """compute blocks again in the backward pass: far less memory, and slower, also since steps are not compiled then"""
    threads: int | None = None
    """that compute on a CPU; default: what `OMP_NUM_THREADS` says, or as many as other processes leave cores free,
    which is looked at while training too"""
    save_every: int = 100
    """steps between resume states"""
    save_seconds: float = 0.0
    """at least this long between them, except when asked to stop; of several processes none waits. Where a state takes
    seconds to write, twenty times as long lies between them anyway."""
    draw_curves: bool | None = None
    """draw each run's curve into its folder, half a second each; default: if there are no more than eight runs"""
    keep_last: bool = True
    """keep the last epoch's weights too, beside the best one's"""
    restart: bool = False
    """begin anew where an unfinished state is found"""
    spread: str = "auto"
    """what the processes of `torchrun` share: `cohorts`, `rows` of every batch, or `auto`: rows if runs are too few"""
    reuse_prefix: bool = True
    """compute the layers below the lowest trained one once per text"""
    prefix_bytes: int | None = None
    """memory for what is reused; default: a quarter of what is free"""
    prefix_file_bytes: int | None = None
    """disk for what exceeds it; default: half of what is free"""

    def __post_init__(self) -> None:
        for name, allowed in _NUMBERS.items():
            if not _is_left_open(self, name):
                number = _check_number(name, getattr(self, name), allowed)
                object.__setattr__(self, name, number)
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not _is_left_open(self, name):
                raise BadConfig(f"`{name}` is `{value}`", "give True or False")
        if self.spread not in SPREADS:
            raise UnknownName("way to spread training", str(self.spread), SPREADS)


def _is_left_open(settings: FitSettings, name: str) -> bool:
    """Whether a field that is None by default is None."""
    return getattr(settings, name) is None and getattr(FitSettings, name) is None


def _check_number(name: str, value: Any, allowed: _Number) -> int | float:
    """The value as Python's own number: those of numpy cannot be written as JSON."""
    is_number = isinstance(value, allowed.kind) and not isinstance(value, bool)
    if not is_number or not value >= allowed.least:  # NaN is not
        raise BadConfig(f"`{name}` is `{value}`", allowed.hint)
    return operator.index(value) if isinstance(value, numbers.Integral) else float(value)
