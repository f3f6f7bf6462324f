"""Members of a cohort: runs in their slots, with their encoded rows, their targets and their progress.

A `Member` is a run of one task, a `JointMember` one of several. `Encoder` tokenises what several members read once. The
functions at the end are called after a step or an epoch: they record the history, choose which weights are kept, and
detect early stop and divergence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
    is_better,
)
from inlay.locks import lock_of
from inlay.model import Backbone, CacheDepth, CachedStates, Row, find_head, text_losses
from inlay.settings import TrainConfig
from inlay.training.evaluate import DevScores, Targets, find_texts
from inlay.training.events import Emit, RowsEncoded
from inlay.training.recipe.head_start import contrast_losses, split_fold
from inlay.training.run.joint import JointRun, count_joint_steps
from inlay.training.run.run import (
    DIVERGED,
    FINISHED,
    STOPPED_EARLY,
    Run,
    count_fold_steps,
    count_start_steps,
    count_steps,
)
from inlay.training.step.optimizer import StepStats, learning_rate

if TYPE_CHECKING:
    from inlay.model import Bank
    from inlay.training.cohort.frozen_cache import CachedTexts, FrozenCache


_EXPLODED = 50.0  # a run whose loss is this many times the first one (or 1, if that was less) counts as diverged
_MOST_CONTRASTED = 4096  # padded tokens of a step of a contrastive start
PROBE, FOLD, CONTRAST = "probe", "fold", "contrast"
"""Stages before the first step of training: a head to be fitted; steps that pull rows of a label together, without each
fold of rows that judges them; and the same steps on all rows."""


@dataclass
class Progress:
    """Progress of a run: everything but weights that changes in training, as the resume state keeps it."""

    epoch: int = 0
    cursor: int = 0
    """batches of this epoch already taken"""
    stage: str = ""
    """the stage before training, while it is not done: `PROBE`, then perhaps `FOLD` and `CONTRAST`"""
    fold: int = 0
    """the fold that the contrastive start leaves out now"""
    fold_losses: dict[str, float] = field(default_factory=dict)
    """summed losses of rows left out: of all by the linear probe, of the folds so far after the contrastive start"""
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
    """the last epoch with a better score than any before; a tie is no gain. Patience counts from it, unless the loss
    decides"""
    status: str = ""
    message: str = ""
    began: float = 0.0
    """seconds its cohort had trained when the run entered"""
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)


class _StepCounts:
    """The counts of a member: the steps, epochs and stages of its run, done and to be done."""

    leeway = 0.0
    """distance below the best dev score within which a later epoch is kept"""

    def __init__(self, train: TrainConfig, num_steps: int, steps_per_epoch: int) -> None:
        self.progress = Progress(stage=PROBE if train.head_start == "probe" else "")
        self.best_tensors: dict[str, Tensor] = {}
        self.num_steps, self.steps_per_epoch = num_steps, steps_per_epoch
        self._contrast = train.contrast or 0
        """steps before training, in the stage `CONTRAST`"""
        self.num_folds, self._fold_steps = train.contrast_folds or 0, count_fold_steps(train)
        """folds that judge them, and steps in the stage `FOLD` without one of them"""
        self._start_steps = count_start_steps(train)
        self.num_stages = train.num_epochs + bool(train.contrast)
        """scored stages: the epochs, plus the contrastive start"""

    @property
    def is_active(self) -> bool:
        return not self.progress.status

    @property
    def is_contrasting(self) -> bool:
        """Whether its steps compare the rows of a whole batch with each other."""
        return self.progress.stage in (FOLD, CONTRAST)

    @property
    def steps_left(self) -> int:
        """Upper limit of the steps left, including those before training."""
        return self._start_steps + self.num_steps - self.steps_taken

    @property
    def steps_taken(self) -> int:
        """Steps taken, including those before training."""
        progress = self.progress
        if progress.stage == PROBE:
            return progress.step
        if progress.stage == FOLD:
            return progress.fold * self._fold_steps + progress.cursor
        if progress.stage == CONTRAST:
            return self._start_steps - self._contrast + progress.cursor
        return self._start_steps + progress.step

    @property
    def steps_of_epoch(self) -> int:
        """Steps of the current epoch; the last epoch may end before all rows were seen."""
        if self.progress.stage:
            return {PROBE: 0, FOLD: self._fold_steps, CONTRAST: self._contrast}[self.progress.stage]
        before = self.progress.step - self.progress.cursor
        return min(self.steps_per_epoch, self.num_steps - before)


class Member(_StepCounts):
    """A run in its slot: encoded rows (windows, if a row is several), targets and progress."""

    def __init__(self, run: Run, slot: int, encoder: Encoder) -> None:
        self.run, self.slot = run, slot
        self.train, self.dev = encoder.encode(run, "train"), encoder.encode(run, "dev")
        self._written, self.num_unwritable = encoder.write(run)
        train, num_windows = run.config.train, len(self.train)
        super().__init__(train, count_steps(num_windows, train), -(-num_windows // train.batch_size))
        if train.keep == "late" and METRICS[run.metric].higher_is_better:
            self.leeway = 0.5 / math.sqrt(len(run.task.dev))  # the error of a score on few rows
        self.lengths = self.train.lengths
        """tokens of every row, including the answer on a seq2seq backbone"""
        answers = None
        self.num_cut_answers = 0
        """number of training answers longer than the longest answer allowed"""
        self._row_losses = find_head(run.task.kind).row_losses
        if self._written is not None:
            self.lengths, answers = self.lengths + self._written.lengths, self._written.ids
            self.num_cut_answers = self._written.num_truncated
            self._row_losses = partial(text_losses, smoothing=run.config.train.label_smoothing or 0.0)
        self.longest = int(self.lengths.max())
        """tokens of its longest row"""
        self.most_tokens = train.batch_size * self.longest
        """most tokens of one step, with padding"""
        self.targets = Targets(run.task.train, self.train, run.spec.head, answers)
        self._row_weights = _class_weights(run) * self.targets.weights.numpy()
        self._batches: tuple[int, list[np.ndarray]] = (-1, [])
        self._cached: dict[str, CachedTexts] = {}

    @property
    def parts(self) -> list[Member]:
        """The members of a run's tasks; a run of one task has itself."""
        return [self]  # not kept: it would refer to itself, and the states cached for it would stay with it

    @property
    def is_whole(self) -> bool:
        """Whether a batch must be one forward pass: batch norm and the contrastive loss need all its rows."""
        return self.run.config.method.inner_norm == "batch" or self.is_contrasting

    @property
    def fewest_tokens(self) -> int:
        """Smallest token budget it can train with: its longest row, or one whole batch if that cannot be split."""
        if self.is_contrasting:
            return self.longest * self._contrast_rows
        return self.longest * (self.run.config.train.batch_size if self.is_whole else 1)

    @property
    def _contrast_rows(self) -> int:
        """Number of rows in one contrastive step, which is one forward pass: fewer if they are long."""
        return max(4, min(self.run.config.train.batch_size, _MOST_CONTRASTED // self.longest))

    def next_batch(self, ahead: int = 0) -> np.ndarray:
        """Return the row numbers of the next step, or of a step `ahead` steps later in the same epoch.

        The order follows from seed and epoch, so the cursor is the only state.
        """
        train, progress, targets = self.run.config.train, self.progress, self.run.task.train.targets
        if self.is_contrasting:
            assert targets is not None
            rows, _ = self.split_fold()
            return rows[draw_by_label(targets[rows], self._contrast_rows, train.seed, progress.cursor + ahead)]
        if self._batches[0] != progress.epoch:
            batches = epoch_batches(
                self.train.lengths, train.batch_size, train.seed, progress.epoch, bucket=train.bucket or 1
            )
            self._batches = (progress.epoch, batches)
        return self._batches[1][progress.cursor + ahead]

    def split_fold(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the training rows that the contrastive steps see now, and those of the fold that they leave out."""
        if self.progress.stage != FOLD:
            return np.arange(len(self.train)), np.arange(0)
        return split_fold(len(self.train), self.num_folds, self.progress.fold)

    def next_batches(self, ahead: int = 0) -> dict[int, np.ndarray]:
        """Return what `next_batch` does, by slot."""
        return {self.slot: self.next_batch(ahead)}

    def read(self, bank: Bank) -> dict[str, Tensor]:
        """Return all tensors that it has trained."""
        return bank.read(self.slot)

    def targets_of(self, batch: np.ndarray) -> np.ndarray:
        """Return the targets of whole rows as numbers: classes, numbers on the head's scale, or which labels apply."""
        assert self.targets.numbers is not None, "a head that reads tokens has targets of tokens"
        return self.targets.numbers[batch]

    def answers_of(self, batch: np.ndarray) -> list[np.ndarray]:
        """Return the tokens of the answers to a batch's rows, on a seq2seq backbone."""
        assert self._written is not None
        return [np.asarray(self._written.ids[index]) for index in batch.tolist()]

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
        if self.is_contrasting:
            return self.targets_of(np.asarray(windows)), np.full(len(windows), 1 / len(batch), dtype=np.float32)
        counts = self._row_weights[list(windows)] / self._total_weight(batch)
        return self.targets.take(windows, width).numpy(), counts

    def _total_weight(self, batch: np.ndarray) -> float:
        """Return the sum of a batch's row weights, or 1 where all are 0."""
        return float(self._row_weights[batch].sum()) or 1.0

    def row_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each row from its logits; in a contrastive start, from the vectors that the head reads."""
        if self.is_contrasting:
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


class JointMember(_StepCounts):
    """A run of several tasks in its slots: a member for each task, which share their progress."""

    def __init__(self, run: JointRun, parts: list[Member]) -> None:
        self.run, self.parts, train = run, parts, run.config.train
        self.slot = parts[0].slot
        sizes = tuple(len(part.train) for part in parts)
        num_steps = count_joint_steps(sum(sizes), run.config)
        super().__init__(train, num_steps, -(-num_steps // train.num_epochs))
        for part in parts:
            part.progress = self.progress
        self._sampler = TaskSampler(
            sizes, run.config.joint, train.batch_size, self.steps_per_epoch, train.num_epochs, train.seed
        )

    def next_batches(self, ahead: int = 0) -> dict[int, np.ndarray]:
        """Return the row numbers of the next step, or of one `ahead` steps later, by slot, for the tasks with rows."""
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
        metrics = [part.run.metric for part in self.parts]
        mean = float(np.mean([verdict.scores[metric] for verdict, metric in zip(verdicts, metrics, strict=True)]))
        scores = {MEAN: mean}
        untuned: dict[str, float] = {}
        named = {part.run.name: verdict for part, verdict in zip(self.parts, verdicts, strict=True)}
        for name, verdict in named.items():
            scores |= {f"{name}/{metric}": value for metric, value in verdict.scores.items()}
            untuned |= {f"{name}/{metric}": value for metric, value in verdict.untuned.items()}
        loss = float(np.mean([verdict.loss for verdict in verdicts]))
        fitted = {name: verdict.fitted for name, verdict in named.items()}
        num_lost = sum(verdict.num_lost for verdict in verdicts)
        return DevScores(scores, loss, fitted, num_lost=num_lost, untuned=untuned)


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

    def write(self, run: Run) -> tuple[Encoded | None, int]:
        """Return the tokens of the answers to a run's training rows, and how many the backbone cannot write.

        Such answers contain something that it has no token for. None and 0 unless the backbone is seq2seq.
        """
        head, targets, tokenizer = run.spec.head, run.task.train.targets, self._backbone.tokenizer
        if not head.is_written:
            return None, 0
        assert targets is not None
        chosen = [head.texts[index] for index in find_texts(targets, head)] if head.texts else list(targets)
        with lock_of(tokenizer):
            lengths = [len(tokenizer(text)["input_ids"]) for text in head.texts]
        max_length = max(head.max_answer, *lengths, 1)
        written = encode_cached(tokenizer, Split(chosen, None, None, []), Reading(WRITTEN_TEXT, max_length))
        if tokenizer.unk_token_id is None:
            return written, 0
        places = np.flatnonzero(written.flat_ids == tokenizer.unk_token_id)
        return written, len(np.unique(np.searchsorted(written.offsets, places, "right")))

    def keep(self, runs: Sequence[Run]) -> None:
        """Drop the rows that none of these runs reads."""
        read = {(run.task.digest, run.reading) for run in runs}
        self._known = {key: rows for key, rows in self._known.items() if (key[0], key[2]) in read}


def close_epoch(member: AnyMember, verdict: DevScores, seconds: float, bank: Bank) -> dict[str, Any]:
    """Record an epoch or stage that was just scored, `seconds` after its cohort began; keep its weights if best."""
    progress, metric, train = member.progress, member.run.metric, member.run.config.train
    stage, num_steps = progress.stage, progress.cursor  # fewer than a whole epoch's if time was up
    record = {
        "epoch": progress.epoch + (stage != PROBE),
        "step": progress.step,
        "train_loss": progress.loss_sum / num_steps if num_steps else None,
        "lr": rate_of(member, ahead=-1) if num_steps else 0.0,
        "dev": verdict.scores,
        "dev_loss": verdict.loss,
        "head": verdict.fitted,
        "seconds": round(seconds - progress.began, 3),
        **({"unpredicted": list(verdict.unpredicted)} if verdict.unpredicted else {}),
        **({"dev_untuned": verdict.untuned} if verdict.untuned else {}),
        **({"stage": stage} if stage else {}),
        **({"suspects": progress.suspects} if stage == PROBE and progress.suspects else {}),
    }
    progress.history.append(record)
    # 1. Begin the next epoch or stage.
    if stage != PROBE:
        progress.epoch += 1
    progress.cursor = 0
    progress.loss_sum = 0.0
    progress.stage = (FOLD if train.contrast_folds else CONTRAST) if stage == PROBE and train.contrast else ""
    progress.is_fitted = False
    # 2. Keep the weights if this epoch is the best.
    value, dev_loss = verdict.scores[metric], verdict.loss
    if train.keep == "loss" and verdict.calibrated_loss is not None:
        dev_loss = verdict.calibrated_loss
    if is_better(metric, value, progress.top_metric):
        progress.last_gain = progress.epoch
        progress.top_metric = value
    # A contrastive start that did worse on rows left out was never trained on all rows.
    is_chosen = stage == CONTRAST and bool(progress.fold_losses) and math.isfinite(dev_loss)
    if is_chosen or _is_kept(member, value, dev_loss):
        member.best_tensors = member.read(bank)
        progress.best_epoch = progress.epoch
        progress.best_metric = value
        progress.best_loss = dev_loss
    # 3. End the run if it diverged, finished or stopped gaining.
    gained = progress.best_epoch if train.keep == "loss" else progress.last_gain
    if verdict.num_lost:
        reason = f"the outputs of {verdict.num_lost:,} dev rows are not finite"
        _end_diverged(member, f"diverged in epoch {progress.epoch}: {reason}")
    elif progress.step == member.num_steps and not progress.stage:
        progress.status = FINISHED
    elif not stage and train.patience and progress.epoch - gained >= train.patience:
        progress.status = STOPPED_EARLY
        what = "smaller dev loss" if train.keep == "loss" else f"better dev {metric}"
        progress.message = f"no {what} for {train.patience} epochs"
    return record


def close_fold(member: Member, loss: float) -> None:
    """Record the summed loss of a fold's rows after the contrastive start without them; begin what is next.

    After the last fold that is the contrastive start on all rows. If the probe did better it is not taken: training
    begins at the probe, and where there is none to be done the run ends.
    """
    progress = member.progress
    progress.fold_losses[CONTRAST] = progress.fold_losses.get(CONTRAST, 0.0) + loss
    progress.fold += 1
    progress.cursor = 0
    progress.loss_sum = 0.0
    if progress.fold < member.num_folds:
        return
    progress.stage = CONTRAST
    means = {name: total / len(member.train) for name, total in progress.fold_losses.items()}
    progress.history[0]["left_out_loss"] = {  # JSON has no infinity
        name: round(mean, 5) if math.isfinite(mean) else None for name, mean in means.items()
    }
    if means[CONTRAST] > means[PROBE]:
        progress.stage = ""  # training, if there is any, begins at the probe
        if not member.num_steps:
            progress.status = FINISHED
            progress.message = (
                f"the linear probe is kept: on rows left out its loss is {means[PROBE]:.3f}, "
                f"after a contrastive start {means[CONTRAST]:.3f}"
            )


def _is_kept(member: AnyMember, value: float, dev_loss: float) -> bool:
    """Tell whether the epoch that was just scored is kept instead of the one that is."""
    progress = member.progress
    if member.run.config.train.keep == "loss":
        return math.isfinite(dev_loss) and (progress.best_metric is None or dev_loss < progress.best_loss)
    if progress.last_gain == progress.epoch:
        return True
    if member.leeway and progress.top_metric is not None:  # on few rows the score is chance: later is better
        return value >= progress.top_metric - member.leeway
    # On a small dev set epochs tie; the loss still tells a sure answer from a lucky one.
    return value == progress.best_metric and dev_loss < progress.best_loss


def rate_of(member: AnyMember, ahead: int = 0) -> float:
    """Return the learning rate of the next step, or of one `ahead` steps later.

    The steps before training have a schedule of their own.
    """
    train, progress = member.run.config.train, member.progress
    if member.is_contrasting:
        return learning_rate(train, progress.cursor + ahead, member.steps_of_epoch)
    return learning_rate(train, progress.step + ahead, member.num_steps)


def loss_limit(member: AnyMember) -> float:
    """Return the loss above which a run counts as diverged."""
    first = member.progress.first_loss
    return math.inf if first is None else _EXPLODED * max(1.0, first)


def has_diverged(member: AnyMember, seen: StepStats, limit: float) -> bool:
    """Tell whether a step ended its run: its loss or gradient is not finite, or its loss is above the limit."""
    progress = member.progress
    if progress.first_loss is None and math.isfinite(seen.loss):
        progress.first_loss = seen.loss
    if seen.is_finite(limit):
        return False
    reason = f"loss {seen.loss:g}, gradient norm {seen.norm:g}"
    if math.isfinite(seen.loss) and math.isfinite(seen.norm):
        reason = f"loss {seen.loss:g} after a first loss of {progress.first_loss:g}"
    _end_diverged(member, f"diverged at step {progress.step + 1}: {reason}")
    return True


def _end_diverged(member: AnyMember, reason: str) -> None:
    """End a diverged run; its best epoch's weights are kept."""
    member.progress.status = DIVERGED
    member.progress.message = f"{reason}; try a smaller learning rate than {member.run.config.train.lr:g}"
