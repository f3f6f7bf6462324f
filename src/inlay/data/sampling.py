"""The rows that each training step sees, for runs of several tasks and for batches that contrast labels.

They depend on seed and step only, so a resumed run needs no other state. Tasks are drawn by their shares; the rows of
each task come from one pass over all its rows after the other, each in a new order, whatever batches they fall into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from inlay.settings import JointConfig

_ROWS_OF_A_LABEL = 4  # least rows of each label in a batch that contrasts labels
_ANNEALED = 0.8  # how far PALs' exponent falls from 1 over the epochs


def task_shares(sizes: Sequence[int], config: JointConfig, epoch: int = 0, num_epochs: int = 1) -> np.ndarray:
    """Return the probability that each task is drawn, by its number of rows. Epochs count from 0."""
    exponent = _EXPONENTS[config.sampling](config, epoch / max(1, num_epochs - 1))
    # In logarithms, less the largest: with a temperature near zero the powers would overflow.
    logs = exponent * np.log(np.asarray(sizes, dtype=float))
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()


def draw_by_label(targets: np.ndarray, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Draw the rows of a step with several of each label: random labels, the same number of rows of each, none twice.

    A label with a single row is left out if others have more.
    """
    random = np.random.default_rng([seed, step])
    labels, counts = np.unique(targets, return_counts=True)
    several = labels[counts > 1] if (counts > 1).sum() > 1 else labels
    most = max(2, batch_size // _ROWS_OF_A_LABEL)
    drawn = random.choice(several, min(len(several), most), replace=False)
    per_label = max(2, batch_size // len(drawn))
    rows = [random.permutation(np.flatnonzero(targets == label))[:per_label] for label in drawn]
    return np.concatenate(rows)


_EXPONENTS: dict[str, Callable[[JointConfig, float], float]] = {
    "temperature": lambda config, progress: 1 / config.temperature,
    "uniform": lambda config, progress: 0.0,
    "annealed": lambda config, progress: 1 - _ANNEALED * progress,
}


@dataclass
class TaskSampler:
    """The rows of every step; they depend on the seed and the step only."""

    sizes: tuple[int, ...]  # rows of each task
    config: JointConfig
    batch_size: int
    steps_per_epoch: int
    num_epochs: int
    seed: int
    _known_ends: list[np.ndarray] = field(default_factory=list, repr=False)
    _orders: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)

    def rows(self, epoch: int, cursor: int) -> dict[int, np.ndarray]:
        """Return task -> its rows in step `cursor` of an epoch; a task without rows there is left out."""
        starts, stops = self._ends(epoch)[cursor : cursor + 2]
        return {
            task: self._take(task, int(start), int(stop - start))
            for task, (start, stop) in enumerate(zip(starts, stops, strict=True))
            if stop > start
        }

    def counts(self, epoch: int) -> np.ndarray:
        """Return how many rows of each task every step of an epoch has: [steps, tasks]."""
        shares = task_shares(self.sizes, self.config, epoch, self.num_epochs)
        generator = np.random.default_rng([self.seed % 2**63, epoch, 0])
        if self.config.batches == "mixed":
            return generator.multinomial(self.batch_size, shares, size=self.steps_per_epoch)
        drawn = generator.choice(len(shares), size=self.steps_per_epoch, p=shares)
        return self.batch_size * np.eye(len(shares), dtype=int)[drawn]

    def _ends(self, epoch: int) -> np.ndarray:
        """Return how many rows of each task were taken before every step of an epoch, and after the last."""
        for each in range(len(self._known_ends), epoch + 1):
            before = self._known_ends[each - 1][-1:] if each else np.zeros((1, len(self.sizes)), dtype=int)
            self._known_ends.append(np.concatenate([before, self.counts(each)]).cumsum(0))
        return self._known_ends[epoch]

    def _take(self, task: int, start: int, count: int) -> np.ndarray:
        """Return the next `count` rows of a task, after the first `start` rows that its passes gave."""
        size, pieces = self.sizes[task], []
        while count:
            turn, first = divmod(start, size)
            piece = self._order(task, turn)[first : first + count]
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return np.concatenate(pieces)

    def _order(self, task: int, turn: int) -> np.ndarray:
        """Return the rows of a task in the order of its pass `turn`."""
        if (task, turn) not in self._orders:
            self._orders = {key: order for key, order in self._orders.items() if key[0] != task or key[1] == turn - 1}
            generator = np.random.default_rng([self.seed % 2**63, turn, task + 1])
            self._orders[task, turn] = generator.permutation(self.sizes[task])
        return self._orders[task, turn]
