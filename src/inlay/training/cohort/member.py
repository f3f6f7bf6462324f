"""A member of a cohort: a run in its slot, with its encoded rows, its targets and how far it has come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from inlay.data.encode import Encoded, epoch_batches
from inlay.data.metrics import METRICS
from inlay.data.sampling import draw_by_label
from inlay.model.batch.route import CacheDepth, CachedStates, Row
from inlay.model.heads.head_losses import text_losses
from inlay.model.heads.heads import find_head
from inlay.training.evaluate import DevScores, Targets
from inlay.training.recipe.contrast import lose_contrast
from inlay.training.run.run import Run, count_steps

if TYPE_CHECKING:
    from inlay.model.bank.bank import Bank
    from inlay.training.cohort.frozen_cache import FrozenCache, Kept


_MOST_CONTRASTED = 4096  # tokens of a step of a contrastive start, with padding
PROBE, CONTRAST = "probe", "contrast"
"""Stages before the first step of training: a head to be fitted, and steps that pull rows of a label together."""


@dataclass
class Progress:
    """What of a run changes while it trains, apart from its weights: exactly what the resume state keeps of it."""

    epoch: int = 0
    cursor: int = 0
    """batches of this epoch already taken"""
    stage: str = ""
    """what comes before training, while it is not done: `PROBE`, then perhaps `CONTRAST`"""
    probe_score: float = 0.0
    """of the linear model last fitted, on rows left out"""
    is_fitted: bool = False
    """whether the head of this stage is fitted, and only its score is missing"""
    suspects: dict[str, Any] = field(default_factory=dict)
    """training rows that may be labelled wrongly, as the linear model says that the head began as"""
    step: int = 0
    loss_sum: float = 0.0
    """over this epoch's steps"""
    first_loss: float | None = None
    best_epoch: int = 0
    best_metric: float | None = None
    best_loss: float = 0.0
    top_metric: float | None = None
    """the best score so far, where a later epoch within chance of it is kept instead"""
    last_gain: int = 0
    """the last epoch with a better score than any before, which patience counts from; a tie is no gain"""
    status: str = ""
    message: str = ""
    began: float = 0.0
    """seconds its cohort had trained when it entered"""
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class MemberRows:
    """What a run reads, and what it is to write where its answers are written."""

    train: Encoded
    dev: Encoded
    written: Encoded | None = None
    num_unwritable: int = 0
    """answers with something that the backbone has no token for"""


class Member:
    """A run in its slot: encoded rows (windows, where a row is several), targets and progress."""

    def __init__(self, run: Run, slot: int, rows: MemberRows) -> None:
        self.run, self.slot, self.train, self.dev = run, slot, rows.train, rows.dev
        self.progress = Progress(stage=PROBE if run.config.train.head_start == "probe" else "")
        self.best_tensors: dict[str, Tensor] = {}
        self._batches: tuple[int, list[np.ndarray]] = (-1, [])
        self._written, self.num_unwritable = rows.written, rows.num_unwritable
        self._row_losses = find_head(run.task.kind).row_losses
        if rows.written is not None:
            self._row_losses = partial(text_losses, smoothing=run.config.train.label_smoothing or 0.0)
        answers = None if rows.written is None else rows.written.ids
        self._targets = Targets(run.task.train, rows.train, run.spec.head, answers)
        self._numbers = self._targets.numbers
        self._row_weights = _class_weights(run) * self._targets.weights.numpy()
        self._kept: dict[str, Kept] = {}

    @property
    def parts(self) -> list[Member]:
        """Its tasks, each in its slot: this one alone."""
        return [self]

    @property
    def weight(self) -> float:
        """What the loss of this task counts in its run."""
        return self.run.config.joint.weight_of(self.run.name)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.run.config.train.batch_size)

    @property
    def num_steps(self) -> int:
        return count_steps(len(self.train), self.run.config.train)

    @property
    def num_stages(self) -> int:
        """Epochs and what is counted as one: the contrastive start."""
        train = self.run.config.train
        return train.num_epochs + bool(train.contrast)

    @property
    def steps_left(self) -> int:
        """That it will take at most, those before training included."""
        contrast, stage = self.run.config.train.contrast or 0, self.progress.stage
        before = contrast if stage == PROBE else contrast - self.progress.cursor if stage == CONTRAST else 0
        return before + self.num_steps - self.progress.step

    @property
    def steps_taken(self) -> int:
        """So far, those before training included."""
        contrast, stage = self.run.config.train.contrast or 0, self.progress.stage
        before = 0 if stage == PROBE else self.progress.cursor if stage == CONTRAST else contrast
        return before + self.progress.step

    @property
    def steps_of_epoch(self) -> int:
        """Of the epoch it is in: the last one may end before all rows were seen."""
        if self.progress.stage:
            return self.run.config.train.contrast or 0 if self.progress.stage == CONTRAST else 0
        before = self.progress.step - self.progress.cursor
        return min(self.steps_per_epoch, self.num_steps - before)

    @property
    def is_whole(self) -> bool:
        """Whether its rows must be in one forward pass: batch norm and the contrast between rows see a batch whole."""
        return self.run.config.method.inner_norm == "batch" or self.progress.stage == CONTRAST

    @property
    def fewest_tokens(self) -> int:
        """Of a forward pass that its rows fit in: the longest row, or a batch where it must be whole."""
        if self.progress.stage == CONTRAST:
            return self.longest * self._contrast_rows
        return self.longest * (self.run.config.train.batch_size if self.is_whole else 1)

    @property
    def most_tokens(self) -> int:
        """Of one step, with padding."""
        return self.run.config.train.batch_size * self.longest

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return int(self.lengths.max())

    @property
    def num_cut_answers(self) -> int:
        """Answers to training rows that are longer than what it may write."""
        return 0 if self._written is None else self._written.num_truncated

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, those of the answer included where it is written."""
        return self.train.lengths + (0 if self._written is None else self._written.lengths)

    @property
    def is_active(self) -> bool:
        return not self.progress.status

    @property
    def leeway(self) -> float:
        """How far below the best dev score a later epoch may be and still be kept: what is chance on so few rows."""
        is_late = self.run.config.train.keep == "late" and METRICS[self.run.metric].higher_is_better
        return 0.5 / math.sqrt(len(self.run.task.dev)) if is_late else 0.0

    def next_batch(self) -> np.ndarray:
        """Row numbers of the step to come. The order is a function of seed and epoch, so a cursor is all its state."""
        train, progress = self.run.config.train, self.progress
        if progress.stage == CONTRAST:
            return self._contrast_batch(progress.cursor)
        if self._batches[0] != progress.epoch:
            batches = epoch_batches(
                self.train.lengths, train.batch_size, train.seed, progress.epoch, bucket=train.bucket or 1
            )
            self._batches = (progress.epoch, batches)
        return self._batches[1][progress.cursor]

    def next_batches(self, ahead: int = 0) -> dict[int, np.ndarray]:
        """The same by slot; or of a step so many later, which must be of the same epoch."""
        if self.progress.stage == CONTRAST:
            return {self.slot: self._contrast_batch(self.progress.cursor + ahead)}
        self.next_batch()
        return {self.slot: self._batches[1][self.progress.cursor + ahead]}

    def _contrast_batch(self, step: int) -> np.ndarray:
        train, targets = self.run.config.train, self.run.task.train.targets
        assert targets is not None
        return draw_by_label(targets, self._contrast_rows, train.seed, step)

    @property
    def _contrast_rows(self) -> int:
        """Rows of a step that are held against each other, in one forward pass: of long ones fewer."""
        return max(4, min(self.run.config.train.batch_size, _MOST_CONTRASTED // self.longest))

    def read(self, bank: Bank) -> dict[str, Tensor]:
        """All that it has trained."""
        return bank.read(self.slot)

    def judge(self, verdicts: Sequence[DevScores]) -> DevScores:
        """What the dev rows of its tasks say about it."""
        return verdicts[0]

    def targets_of(self, batch: np.ndarray) -> np.ndarray:
        """The targets of whole rows as numbers: classes, numbers on the head's scale, or which labels apply."""
        assert self._numbers is not None, "a head that reads tokens has targets of tokens"
        return self._numbers[batch]

    def answers_of(self, batch: np.ndarray) -> list[np.ndarray]:
        """The tokens of the answers to a batch's rows, where they are written."""
        assert self._written is not None
        return [np.asarray(self._written.ids[index]) for index in batch.tolist()]

    def marks_of(self, batch: np.ndarray) -> np.ndarray:
        """The targets of a batch's tokens, end to end [N, 1], or [N, 2] where they are starts and ends."""
        return self._targets.lay(batch)

    def weights_of(self, batch: np.ndarray) -> np.ndarray:
        """How much each row of a batch counts in its mean loss; nothing where no row has a labelled token."""
        return self._row_weights[batch] / self._total_weight(batch)

    def reuse(self, cache: FrozenCache, reach: CacheDepth) -> None:
        """Compute all up to `reach` once and keep it, unless the head reads those layers too, or texts apart."""
        head = self.run.spec.head
        if reach.layer > 0 and head.features == "last" and not head.has_towers:
            self._kept = {"train": cache.keep(reach, self.train), "dev": cache.keep(reach, self.dev)}

    @property
    def is_reusing(self) -> bool:
        return bool(self._kept)

    def prefixes(self, windows: Iterable[int]) -> list[CachedStates]:
        """What is known of the lower layers of the rows of a step; nothing, if they are not reused."""
        return self._kept["train"].take(list(map(int, windows))) if self._kept else []

    def rows(self, windows: Sequence[int] | np.ndarray) -> list[Row]:
        """The rows of a step, with their prefixes where these are reused."""
        prefixes: Sequence[CachedStates | None] = self.prefixes(windows) or [None] * len(windows)
        answers = None if self._written is None else self._written.ids
        rows = []
        for window, prefix in zip(map(int, windows), prefixes, strict=True):
            ids, segments, other = self.train.window(window)
            written = None if answers is None else answers[window]
            rows.append(Row(ids, self.slot, segments, prefix, written, other))
        return rows

    def dev_rows(self) -> list[Row]:
        """All dev rows, with the prefixes that are kept."""
        kept = self._kept.get("dev")
        return [
            Row(ids, self.slot, segments, None if kept is None else kept.find(window), other=other)
            for window, (ids, segments, other) in enumerate(self.dev)
        ]

    def lesson(self, windows: Sequence[int], batch: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """The targets of some rows of `batch`, those of tokens padded to `width`, and what each row counts of its mean.

        Where no row has a labelled token there is nothing to learn: all count 0.
        """
        if self.progress.stage == CONTRAST:
            return self.targets_of(np.asarray(windows)), np.full(len(windows), 1 / len(batch), dtype=np.float32)
        counts = self._row_weights[list(windows)] / self._total_weight(batch)
        return self._targets.take(windows, width).numpy(), counts

    def _total_weight(self, batch: np.ndarray) -> float:
        """Of a batch's rows; 1 where none has any, so that they can be divided by it."""
        return float(self._row_weights[batch].sum()) or 1.0

    def row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of each row, from its logits; while rows are contrasted, from the vectors that the head reads."""
        return lose_contrast(logits, targets) if self.progress.stage == CONTRAST else self._row_losses(logits, targets)


def _class_weights(run: Run) -> np.ndarray:
    """How much each row counts for its class; 1 where classes count alike."""
    if run.config.train.class_weights != "balanced":
        return np.ones((), dtype=np.float32)
    labels = run.task.train.targets
    assert labels is not None
    counts = np.bincount(labels, minlength=len(run.task.labels))
    return (len(labels) / (len(counts) * np.maximum(counts, 1)))[labels].astype(np.float32)
