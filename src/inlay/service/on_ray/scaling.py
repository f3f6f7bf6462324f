"""How many engines and trainers there should be: engines by queueing time, trainers by the work in the queue.

Only the arithmetic is here; `fleet_keeper.py` starts and ends them. The number grows within seconds but shrinks slowly,
since a new engine or trainer has to load a backbone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONG_QUEUE_S, SHORT_QUEUE_S = 0.5, 0.05
"""mean queueing times above which there are too few engines, and below which there may be too many"""
_GROW_AFTER_S, _SHRINK_AFTER_S = 3.0, 60.0
_GROWTH = 1.5
TRAINER_WORK_S = 600.0
"""queued work for each trainer"""


@dataclass
class Scaler:
    """The number of members of one role."""

    number: int
    _high_since: float | None = None
    _low_since: float | None = None

    def bound(self, least: int, most: int) -> int:
        """Keep the number within limits, and return it."""
        self.number = min(most, max(least, self.number))
        return self.number

    def follow_queue(self, queue_s: float, now: float) -> None:
        """Update the number by the mean queueing time of the engines: half as many more if it stays long."""
        is_long, is_short = queue_s > LONG_QUEUE_S, queue_s < SHORT_QUEUE_S
        if not is_long:
            self._high_since = None
        elif self._high_since is None:
            self._high_since = now
        if not is_short:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        if self._high_since is not None and now - self._high_since >= _GROW_AFTER_S:
            self.number = math.ceil(self.number * _GROWTH)
            self._high_since = None
        elif self._low_since is not None and now - self._low_since >= _SHRINK_AFTER_S:
            self.number -= 1
            self._low_since = now

    def follow_work(self, queued_s: float, now: float) -> None:
        """Update the number by the time that one trainer would need for all queued jobs."""
        wanted = math.ceil(queued_s / TRAINER_WORK_S)
        if wanted > self.number:
            self.number, self._low_since = wanted, None
        elif wanted == self.number:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= _SHRINK_AFTER_S:
            self.number, self._low_since = max(wanted, self.number - 1), now
