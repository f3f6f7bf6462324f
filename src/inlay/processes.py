"""The rank of this process among several, as `torchrun` tells it through the environment. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from inlay.errors import BadConfig

JOBS = "INLAY_JOBS"
"""set by `inlay study --jobs` for the processes it starts: how many there are"""
SPREADS = ("auto", "cohorts", "rows")
"""what the processes of `torchrun` may share"""
_SET_BY_TORCHRUN = {"RANK", "WORLD_SIZE"}


@dataclass(frozen=True)
class Process:
    """A process among those started together: its rank, their number, and its rank on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    num_local: int = 1
    """how many of them are on this machine"""

    @property
    def is_first(self) -> bool:
        """Return whether it is the one that prints, writes and publishes."""
        return self.rank == 0


def current_process() -> Process:
    """Return this process: the only one, unless `torchrun` started several."""
    if not is_launched():
        return Process()
    rank, size = _read("RANK"), _read("WORLD_SIZE")
    if not 0 <= rank < max(size, 1):
        raise BadConfig(f"`RANK` is `{rank}` of `WORLD_SIZE` `{size}`", "start it with `torchrun`, which sets both")
    return Process(rank, size, _read("LOCAL_RANK", rank), _read("LOCAL_WORLD_SIZE", 1)) if size > 1 else Process()


def is_launched() -> bool:
    """Return whether `torchrun` started this process, perhaps as the only one."""
    return os.environ.keys() >= _SET_BY_TORCHRUN


def check_shared(spread: str, command: str) -> None:
    """Refuse `--spread` in a process that is alone."""
    if spread != "auto" and not is_launched():
        raise BadConfig(
            f"`--spread {spread}` is for several processes, and this is the only one",
            f"start it with `torchrun --nproc-per-node 2 -m inlay {command} …`, or leave out `--spread`",
        )


def count_sharers() -> int:
    """Return how many processes share this machine's memory: those of `torchrun`, or of `inlay study --jobs`."""
    return max(1, _read(JOBS, 1)) * current_process().num_local


def _read(name: str, usual: int = 0) -> int:
    value = os.environ.get(name, str(usual))
    if not value.isdigit():
        raise BadConfig(f"`{name}` is `{value}`", "start it with `torchrun`, which sets it to a number, or unset it")
    return int(value)
