"""A fleet to be simulated: what a replica's work takes, how many there are, how rows are placed, and what goes wrong.

    random        any replica
    two-choices   the less busy of two random replicas
    rendezvous    one replica for each task, by its hash
    bounded       the same, but a busy replica's rows go to the next in the task's order, or to the less busy of any two
    replicated    the less busy of two of the task's first k replicas, k by its share of all rows
    helped        the same, but where those have far more rows than others the next in its order, as `placement.py` does
    pull          one queue for all, from which idle replicas take: what no placement can beat while nothing is loaded

`fleet_simulator.py` lets it happen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PLACEMENTS = ("random", "two-choices", "rendezvous", "bounded", "replicated", "helped", "pull")


@dataclass(frozen=True)
class ServiceTimes:
    """What a replica takes, in seconds; measured by `bench/fleet_replica.py`, or made up in tests."""

    pass_s: float
    """a batch, whatever is in it"""
    token_s: float
    row_s: float = 0.0
    task_s: float = 0.0
    """each different version in a batch"""
    load_s: float = 0.0
    """from asking for a version to having it in its slot, on a replica that does nothing else"""
    load_busy_s: float = 0.0
    """the part of it in which nothing is computed"""
    outside_s: float = 0.0
    """what a client waits besides queue and batch"""

    def batch_s(self, num_rows: int, num_tokens: float, num_tasks: int) -> float:
        """Return how long a batch takes."""
        return self.pass_s + self.token_s * num_tokens + self.row_s * num_rows + self.task_s * num_tasks

    def find_capacity(self, mean_tokens: float, target_s: float) -> tuple[float, float]:
        """Return the rows and the tokens a second of full batches, in which every row is of another task."""
        row_s = self.token_s * mean_tokens + self.row_s + self.task_s
        num_rows = max(1.0, (target_s - self.pass_s) / row_s) if row_s else 1.0
        rows_per_s = num_rows / (self.pass_s + num_rows * row_s)
        return rows_per_s, rows_per_s * mean_tokens


@dataclass(frozen=True)
class Cell:
    """One fleet and the load on it."""

    times: ServiceTimes
    rows_per_s: float
    """of the whole fleet"""
    placement: str = "two-choices"
    num_replicas: int = 1
    num_slots: int = 64
    target_batch_s: float = 0.06
    num_rows: int = 100_000
    num_tasks: int = 1000
    zipf: float = 1.0
    lengths: tuple[int, ...] = (38,)
    """tokens of a row, drawn evenly"""
    service: str = "fixed"
    """`fixed`, `exponential` (for the theory) or `spread`: times a factor of `spread`, drawn evenly"""
    spread: tuple[float, ...] = (1.0,)
    num_loaders: int = 2
    """threads that load versions, as in `version_loader.py`"""
    far_s: float = 0.0
    """what a load takes more, as the version comes from object storage"""
    publishes_per_s: float = 0.0
    removals_per_s: float = 0.0
    failures_per_hour: float = 0.0
    """of one replica"""
    detect_s: float = 1.0
    restart_s: float = 30.0
    most_rows: int = 1 << 30
    """of a batch"""
    seed: int = 0

    def find_budget(self) -> float:
        """Return the tokens that a batch may have, as the engine's `WorkRate` would have learnt."""
        mean = sum(self.lengths) / len(self.lengths)
        return self.times.find_capacity(mean, self.target_batch_s)[1] * self.target_batch_s


def find_homes(tasks: np.ndarray, num_replicas: int) -> np.ndarray:
    """Return the replica of each task: the one with the highest hash of task and replica together."""
    step = max(1, (1 << 22) // num_replicas)
    parts = [tasks[start : start + step] for start in range(0, len(tasks), step)]
    return np.concatenate([hash_pairs(part, num_replicas).argmax(axis=1) for part in parts])


def hash_pairs(tasks: np.ndarray, num_replicas: int) -> np.ndarray:
    """Return a hash of every task (row) with every replica (column)."""
    replicas = _mix(np.arange(num_replicas, dtype=np.uint32) + np.uint32(0x9E3779B9))
    return _mix(_mix(tasks.astype(np.uint32))[:, None] ^ replicas[None, :])


def _mix(values: np.ndarray) -> np.ndarray:
    """Return a hash of each 32-bit number (the finaliser of MurmurHash3)."""
    values = values ^ (values >> np.uint32(16))
    values = values * np.uint32(0x85EBCA6B)
    values = values ^ (values >> np.uint32(13))
    values = values * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))
