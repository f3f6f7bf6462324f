"""Which of several processes this one is, as `torchrun` tells it through the environment. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from inlay.errors import BadConfig

JOBS = "INLAY_JOBS"
"""set by `inlay study --jobs` for the processes it starts: how many there are"""


@dataclass(frozen=True)
class Place:
    """A process among those started together: its number, how many there are, and its number on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    num_local: int = 1
    """how many are on this machine"""

    @property
    def is_first(self) -> bool:
        """Whether it is the one that speaks, writes and publishes."""
        return self.rank == 0


def find_place() -> Place:
    """This process's place; the only one, where nobody started several."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return Place()
    rank, size = _read("RANK"), _read("WORLD_SIZE")
    if not 0 <= rank < max(size, 1):
        raise BadConfig(f"`RANK` is `{rank}` of `WORLD_SIZE` `{size}`", "start it with `torchrun`, which sets both")
    return Place(rank, size, _read("LOCAL_RANK", rank), _read("LOCAL_WORLD_SIZE", 1)) if size > 1 else Place()


def count_sharers() -> int:
    """The processes that share this machine's memory: those of `torchrun`, or of `inlay study --jobs`."""
    return max(1, _read(JOBS, 1)) * find_place().num_local


def _read(name: str, usual: int = 0) -> int:
    value = os.environ.get(name, str(usual))
    if not value.isdigit():
        raise BadConfig(f"`{name}` is `{value}`", "start it with `torchrun`, which sets it to a number, or unset it")
    return int(value)
