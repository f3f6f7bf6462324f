"""Whether a run was still getting better when it ended, so that more epochs would pay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inlay.data.metrics import METRICS

_TWICE = 2
_LAST = 3  # epochs at the end that are held against as many before them
_LEAST = 0.005  # a gain that is worth the time


@dataclass(frozen=True)
class Rising:
    """What it would take to go on."""

    epochs: int
    """to ask for: twice as many"""
    seconds: float
    """that a run of so many would take"""


def find_rising(history: Sequence[Mapping[str, Any]], metric: str, num_dev: int) -> Rising | None:
    """Whether the dev score of the last epochs is above that of those before by more than chance on so many rows."""
    trained = [line for line in history if not line.get("stage")]
    scores = [line["dev"][metric] for line in trained]
    if len(scores) < _TWICE * _LAST or not all(map(math.isfinite, scores)):
        return None
    sign = 1 if METRICS[metric].higher_is_better else -1
    late, early = (sum(part) / _LAST for part in (scores[-_LAST:], scores[-_TWICE * _LAST : -_LAST]))
    is_number = not 0 <= max(scores, key=abs) <= 1  # an error on the targets' own scale
    least = _LEAST * abs(early) if is_number else max(_LEAST, 0.5 / math.sqrt(num_dev) / math.sqrt(_LAST))
    # The rate falls to nothing at the end: who still gains there has more to gain.
    if sign * (late - early) <= least:
        return None
    began = history[0]["seconds"] if history[0].get("stage") else 0.0
    return Rising(_TWICE * len(trained), began + _TWICE * (trained[-1]["seconds"] - began))
