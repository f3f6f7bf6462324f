"""How many engines and trainers there should be: engines by queueing time, trainers by the work that is queued.

Plain arithmetic over what was measured; `fleet_keeper.py` does what it says. More is decided within seconds, less only
after a while, since an engine or trainer that comes has a backbone to load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONG_QUEUE_S, SHORT_QUEUE_S = 0.5, 0.05
"""mean queueing time above which there are too few engines, and below which there may be too many"""
_GROW_AFTER_S, _SHRINK_AFTER_S = 3.0, 60.0
_GROWTH = 1.5
TRAINER_WORK_S = 600.0
"""queued work that one trainer is for"""


@dataclass
class Scaler:
    """The number of members of one role, between the fewest and the most."""

    number: int
    _high_since: float | None = None
    _low_since: float | None = None

    def bound(self, least: int, most: int) -> int:
        """Keep the number within its limits, and return it."""
        self.number = min(most, max(least, self.number))
        return self.number

    def follow_queue(self, queue_s: float, now: float) -> None:
        """Take the mean queueing time of the engines: half as many more after a long one."""
        if self._lasted(queue_s > LONG_QUEUE_S, queue_s < SHORT_QUEUE_S, now) > 0:
            self.number = math.ceil(self.number * _GROWTH)
            self._high_since = None
        elif self._low_since is not None and now - self._low_since >= _SHRINK_AFTER_S:
            self.number -= 1
            self._low_since = now

    def follow_work(self, queued_s: float, now: float) -> None:
        """Take the time that one trainer would need for all that is queued."""
        wanted = math.ceil(queued_s / TRAINER_WORK_S)
        if wanted > self.number:
            self.number, self._low_since = wanted, None
        elif wanted == self.number:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= _SHRINK_AFTER_S:
            self.number, self._low_since = max(wanted, self.number - 1), now

    def _lasted(self, is_high: bool, is_low: bool, now: float) -> int:
        """Note since when it is high or low; 1 if it has been high for long enough."""
        self._high_since = (self._high_since if self._high_since is not None else now) if is_high else None
        self._low_since = (self._low_since if self._low_since is not None else now) if is_low else None
        return int(self._high_since is not None and now - self._high_since >= _GROW_AFTER_S)
