"""Members of a cohort: runs in their slots, with their encoded rows, their targets and how far they have come.

A `Member` is a run of one task, a `JointMember` one of several. `Encoder` tokenises what several members read once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from inlay.data import (
    MEAN,
    METRICS,
    WRITTEN_TEXT,
    Encoded,
    Reading,
    Split,
    TaskSampler,
    draw_by_label,
    encode_cached,
    epoch_batches,
)
from inlay.model import Backbone, CacheDepth, CachedStates, Row, find_head, text_losses
from inlay.training.evaluate import DevScores, Targets, find_texts
from inlay.training.events import Emit, RowsEncoded
from inlay.training.recipe.head_start import contrast_losses
from inlay.training.run.joint import JointRun, count_joint_steps
from inlay.training.run.run import Run, count_steps

if TYPE_CHECKING:
    from inlay.model import Bank
    from inlay.training.cohort.frozen_cache import CachedTexts, FrozenCache


_MOST_CONTRASTED = 4096  # padded tokens of a step of a contrastive start
PROBE, CONTRAST = "probe", "contrast"
"""Stages before the first step of training: a head to be fitted, and steps that pull rows of a label together."""


@dataclass
class Progress:
    """Progress of a run: everything but weights that changes in training, as the resume state keeps it."""

    epoch: int = 0
    cursor: int = 0
    """batches of this epoch already taken"""
    stage: str = ""
    """the stage before training, while it is not done: `PROBE`, then perhaps `CONTRAST`"""
    probe_score: float = 0.0
    """score of the last fitted linear model on held-out rows"""
    is_fitted: bool = False
    """whether the head of this stage is fitted, and only its score is missing"""
    suspects: dict[str, Any] = field(default_factory=dict)
    """training rows that may be labelled wrongly, as judged by the linear model that the head began as"""
    step: int = 0
    loss_sum: float = 0.0
    """over this epoch's steps"""
    first_loss: float | None = None
    best_epoch: int = 0
    best_metric: float | None = None
    best_loss: float = 0.0
    top_metric: float | None = None
    """the best score so far; a later epoch within chance of it may be kept instead"""
    last_gain: int = 0
    """the last epoch with a better score than any before, which patience counts from; a tie is no gain"""
    status: str = ""
    message: str = ""
    began: float = 0.0
    """seconds its cohort had trained when the run entered"""
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class MemberRows:
    """The encoded rows of a run, and on a seq2seq backbone the target answers."""

    train: Encoded
    dev: Encoded
    written: Encoded | None = None
    num_unwritable: int = 0
    """answers that contain something the backbone has no token for"""


class Member:
    """A run in its slot: encoded rows (windows, if a row is several), targets and progress."""

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
        self._cached: dict[str, CachedTexts] = {}

    @property
    def parts(self) -> list[Member]:
        """The members of a run's tasks; a run of one task has itself."""
        return [self]

    @property
    def weight(self) -> float:
        """The weight of this task's loss in its run."""
        return self.run.config.joint.weight_of(self.run.name)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.run.config.train.batch_size)

    @property
    def num_steps(self) -> int:
        return count_steps(len(self.train), self.run.config.train)

    @property
    def num_stages(self) -> int:
        """Number of scored stages: the epochs, plus the contrastive start."""
        train = self.run.config.train
        return train.num_epochs + bool(train.contrast)

    @property
    def steps_left(self) -> int:
        """Upper limit of the steps left, including those before training."""
        contrast, stage = self.run.config.train.contrast or 0, self.progress.stage
        before = contrast if stage == PROBE else contrast - self.progress.cursor if stage == CONTRAST else 0
        return before + self.num_steps - self.progress.step

    @property
    def steps_taken(self) -> int:
        """Steps taken, including those before training."""
        contrast, stage = self.run.config.train.contrast or 0, self.progress.stage
        before = 0 if stage == PROBE else self.progress.cursor if stage == CONTRAST else contrast
        return before + self.progress.step

    @property
    def steps_of_epoch(self) -> int:
        """Steps of the current epoch; the last epoch may end before all rows were seen."""
        if self.progress.stage:
            return self.run.config.train.contrast or 0 if self.progress.stage == CONTRAST else 0
        before = self.progress.step - self.progress.cursor
        return min(self.steps_per_epoch, self.num_steps - before)

    @property
    def is_whole(self) -> bool:
        """Whether a batch must be one forward pass: batch norm and the contrastive loss need all its rows."""
        return self.run.config.method.inner_norm == "batch" or self.progress.stage == CONTRAST

    @property
    def fewest_tokens(self) -> int:
        """Smallest token budget it can train with: its longest row, or one whole batch if that cannot be split."""
        if self.progress.stage == CONTRAST:
            return self.longest * self._contrast_rows
        return self.longest * (self.run.config.train.batch_size if self.is_whole else 1)

    @property
    def most_tokens(self) -> int:
        """Most tokens of one step, with padding."""
        return self.run.config.train.batch_size * self.longest

    @property
    def longest(self) -> int:
        """Tokens of its longest row."""
        return int(self.lengths.max())

    @property
    def num_cut_answers(self) -> int:
        """Number of training answers longer than the longest answer allowed."""
        return 0 if self._written is None else self._written.num_truncated

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every row, including the answer on a seq2seq backbone."""
        return self.train.lengths + (0 if self._written is None else self._written.lengths)

    @property
    def is_active(self) -> bool:
        return not self.progress.status

    @property
    def leeway(self) -> float:
        """Distance below the best dev score within which a later epoch is kept: the error of a score on few rows."""
        is_late = self.run.config.train.keep == "late" and METRICS[self.run.metric].higher_is_better
        return 0.5 / math.sqrt(len(self.run.task.dev)) if is_late else 0.0

    def next_batch(self) -> np.ndarray:
        """Return the row numbers of the next step. Seed and epoch give the order, so a cursor is all its state."""
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
        """Return the row numbers of the step to come, by slot; or of a step `ahead` of it in the same epoch."""
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
        """Number of rows in one contrastive step, which is one forward pass: fewer if they are long."""
        return max(4, min(self.run.config.train.batch_size, _MOST_CONTRASTED // self.longest))

    def read(self, bank: Bank) -> dict[str, Tensor]:
        """Return all tensors that it has trained."""
        return bank.read(self.slot)

    def judge(self, verdicts: Sequence[DevScores]) -> DevScores:
        """Return the scores of its one task."""
        return verdicts[0]

    def targets_of(self, batch: np.ndarray) -> np.ndarray:
        """Return the targets of whole rows as numbers: classes, numbers on the head's scale, or which labels apply."""
        assert self._numbers is not None, "a head that reads tokens has targets of tokens"
        return self._numbers[batch]

    def answers_of(self, batch: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of the answers to a batch's rows, on a seq2seq backbone."""
        assert self._written is not None
        return [np.asarray(self._written.ids[index]) for index in batch.tolist()]

    def marks_of(self, batch: np.ndarray) -> np.ndarray:
        """Return the targets of a batch's tokens, end to end: [N, 1], or [N, 2] for starts and ends."""
        return self._targets.lay(batch)

    def weights_of(self, batch: np.ndarray) -> np.ndarray:
        """Return the weight of each row in the batch's mean loss; 0 where no row has a labelled token."""
        return self._row_weights[batch] / self._total_weight(batch)

    def reuse(self, cache: FrozenCache, reach: CacheDepth) -> None:
        """Cache the states up to `reach`, unless the head reads lower layers or reads texts apart."""
        head = self.run.spec.head
        if reach.layer > 0 and head.features == "last" and not head.has_towers:
            self._cached = {"train": cache.keep(reach, self.train), "dev": cache.keep(reach, self.dev)}

    @property
    def is_reusing(self) -> bool:
        return bool(self._cached)

    def prefixes(self, windows: Iterable[int]) -> list[CachedStates]:
        """Return the cached states of frozen layers for the rows of a step; empty if nothing is cached."""
        return self._cached["train"].take(list(map(int, windows))) if self._cached else []

    def rows(self, windows: Sequence[int] | np.ndarray) -> list[Row]:
        """Return the rows of a step, with the cached states of their frozen layers, if any."""
        prefixes: Sequence[CachedStates | None] = self.prefixes(windows) or [None] * len(windows)
        answers = None if self._written is None else self._written.ids
        rows = []
        for window, prefix in zip(map(int, windows), prefixes, strict=True):
            ids, segments, other = self.train.window(window)
            written = None if answers is None else answers[window]
            rows.append(Row(ids, self.slot, segments, prefix, written, other))
        return rows

    def dev_rows(self) -> list[Row]:
        """Return all dev rows, with the cached states of their frozen layers."""
        cached = self._cached.get("dev")
        return [
            Row(ids, self.slot, segments, None if cached is None else cached.find(window), other=other)
            for window, (ids, segments, other) in enumerate(self.dev)
        ]

    def targets_and_weights(
        self, windows: Sequence[int], batch: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the targets of some rows of `batch`, and the weight of each row in the batch's mean loss.

        Targets of tokens are padded to `width`. Where no row has a labelled token all weights are 0.
        """
        if self.progress.stage == CONTRAST:
            return self.targets_of(np.asarray(windows)), np.full(len(windows), 1 / len(batch), dtype=np.float32)
        counts = self._row_weights[list(windows)] / self._total_weight(batch)
        return self._targets.take(windows, width).numpy(), counts

    def _total_weight(self, batch: np.ndarray) -> float:
        """Return the sum of a batch's row weights, or 1 where all are 0."""
        return float(self._row_weights[batch].sum()) or 1.0

    def row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each row from its logits; in a contrastive start, from the vectors that the head reads."""
        if self.progress.stage == CONTRAST:
            return contrast_losses(logits, targets)
        return self._row_losses(logits, targets)


def _class_weights(run: Run) -> np.ndarray:
    """Return the weight of each row by its class; 1 where classes are not weighted."""
    if run.config.train.class_weights != "balanced":
        return np.ones((), dtype=np.float32)
    labels = run.task.train.targets
    assert labels is not None
    counts = np.bincount(labels, minlength=len(run.task.labels))
    return (len(labels) / (len(counts) * np.maximum(counts, 1)))[labels].astype(np.float32)


class JointMember:
    """A run of several tasks in its slots: a member for each task, which share their progress."""

    def __init__(self, run: JointRun, parts: list[Member]) -> None:
        self.run, self.parts = run, parts
        self.progress = Progress()
        self.best_tensors: dict[str, Tensor] = {}

    @property
    def slot(self) -> int:
        """The first of its slots."""
        return self.parts[0].slot

    @property
    def progress(self) -> Progress:
        """The progress that all its tasks share."""
        return self._progress

    @progress.setter
    def progress(self, progress: Progress) -> None:
        self._progress = progress
        for part in self.parts:
            part.progress = progress

    @property
    def is_active(self) -> bool:
        return not self.progress.status

    @property
    def num_stages(self) -> int:
        """Number of scored stages: its epochs."""
        return self.run.config.train.num_epochs

    @property
    def steps_left(self) -> int:
        """Upper limit of the steps left."""
        return self.num_steps - self.progress.step

    @property
    def steps_taken(self) -> int:
        """Steps it has taken."""
        return self.progress.step

    @property
    def leeway(self) -> float:
        """Zero: the epoch with the best mean is kept."""
        return 0.0

    @property
    def num_steps(self) -> int:
        return count_joint_steps(sum(len(part.train) for part in self.parts), self.run.config)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_steps // self.run.config.train.num_epochs)

    @property
    def steps_of_epoch(self) -> int:
        """Steps of the current epoch; the last one may be shorter."""
        before = self.progress.step - self.progress.cursor
        return min(self.steps_per_epoch, self.num_steps - before)

    @property
    def fewest_tokens(self) -> int:
        """Smallest token budget it can train with."""
        return max(part.fewest_tokens for part in self.parts)

    @property
    def most_tokens(self) -> int:
        """Most tokens of one step, with padding."""
        return max(part.most_tokens for part in self.parts)

    @cached_property
    def _sampler(self) -> TaskSampler:
        train = self.run.config.train
        sizes = tuple(len(part.train) for part in self.parts)
        return TaskSampler(
            sizes, self.run.config.joint, train.batch_size, self.steps_per_epoch, train.num_epochs, train.seed
        )

    def next_batches(self, ahead: int = 0) -> dict[int, np.ndarray]:
        """Return the row numbers of the next step, or of the step `ahead` of it, by slot of the tasks with rows."""
        found = self._sampler.rows(self.progress.epoch, self.progress.cursor + ahead)
        return {self.parts[task].slot: rows for task, rows in found.items()}

    def read(self, bank: Bank) -> dict[str, Tensor]:
        """Return all trained tensors: the shared ones, and each task's own as `task/name`."""
        found = {}
        for part in self.parts:
            shared = {item.name for item in part.run.spec.layout(bank.anatomy) if item.is_shared}
            for name, tensor in bank.read(part.slot).items():
                found[name if name in shared else f"{part.run.name}/{name}"] = tensor
        return found

    def judge(self, verdicts: Sequence[DevScores]) -> DevScores:
        """Return the mean over the tasks, each by its own metric, and every task's scores as `task/metric`."""
        names, metrics = [part.run.name for part in self.parts], [part.run.metric for part in self.parts]
        mean = float(np.mean([verdict.scores[metric] for verdict, metric in zip(verdicts, metrics, strict=True)]))
        scores = {MEAN: mean}
        for name, verdict in zip(names, verdicts, strict=True):
            scores |= {f"{name}/{metric}": value for metric, value in verdict.scores.items()}
        loss = float(np.mean([verdict.loss for verdict in verdicts]))
        fitted = {name: verdict.fitted for name, verdict in zip(names, verdicts, strict=True)}
        untuned = {
            f"{name}/{metric}": value
            for name, verdict in zip(names, verdicts, strict=True)
            for metric, value in verdict.untuned.items()
        }
        return DevScores(scores, loss, fitted, sum(verdict.num_lost for verdict in verdicts), untuned=untuned)

    def reuse(self, cache: FrozenCache, reach: CacheDepth) -> None:
        """Cache the states up to `reach` for every task."""
        for part in self.parts:
            part.reuse(cache, reach)


AnyMember = Member | JointMember


class Encoder:
    """Tokenises each (task, split, length) once, however many runs share it."""

    def __init__(self, backbone: Backbone, emit: Emit) -> None:
        self._backbone, self._emit = backbone, emit
        self._known: dict[tuple[str, str, Reading], Encoded] = {}

    def encode(self, run: Run, split: str) -> Encoded:
        """Return the rows of a split as a run reads them."""
        key = (run.task.digest, split, run.reading)
        if key not in self._known:
            rows = run.task.train if split == "train" else run.task.dev
            number = len(rows)
            self._known[key] = encode_cached(
                self._backbone.tokenizer, rows, run.reading, lambda num_done: self._emit(RowsEncoded(num_done, number))
            )
        return self._known[key]

    def rows_of(self, run: Run) -> MemberRows:
        """Return all rows that a run trains on and is scored on."""
        written = self._write(run)
        return MemberRows(self.encode(run, "train"), self.encode(run, "dev"), written, self._count_unwritable(written))

    def _write(self, run: Run) -> Encoded | None:
        """Return the tokens of the answers to a run's training rows; None unless the backbone is seq2seq."""
        head, targets = run.spec.head, run.task.train.targets
        if not head.is_written:
            return None
        assert targets is not None
        chosen = [head.texts[index] for index in find_texts(targets, head)] if head.texts else list(targets)
        max_length = max(head.max_answer, *(len(self._backbone.tokenizer(text)["input_ids"]) for text in head.texts), 1)
        return encode_cached(self._backbone.tokenizer, Split(chosen, None, None, []), Reading(WRITTEN_TEXT, max_length))

    def _count_unwritable(self, written: Encoded | None) -> int:
        """Count the answers that contain the unknown token."""
        unknown = self._backbone.tokenizer.unk_token_id
        if written is None or unknown is None:
            return 0
        return len(np.unique(np.searchsorted(written.offsets, np.flatnonzero(written.flat_ids == unknown), "right")))

    def keep(self, runs: Sequence[Run]) -> None:
        """Drop the rows that none of these runs reads."""
        read = {(run.task.digest, run.reading) for run in runs}
        self._known = {key: rows for key, rows in self._known.items() if (key[0], key[2]) in read}
