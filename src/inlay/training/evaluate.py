"""Scores: a run on its dev rows, trained tensors on any labelled rows, all through the one inference forward.

What is learned from dev rows besides a score goes into the head: the temperature of its probabilities, the margin above
which a question has no answer, and, if a run asks for it, the thresholds of its labels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.data import (
    IGNORED,
    KINDS,
    WHOLE_ROW,
    Encoded,
    Reading,
    Split,
    align_targets,
    calibration_error,
    decide,
    encode_cached,
    fit_temperature,
    likeliest_temperature,
    negative_log_likelihood,
    score_all,
    tune_threshold,
    tune_thresholds,
)
from inlay.errors import NotFinite
from inlay.model import (
    WRITTEN,
    Backbone,
    Bank,
    HeadSpec,
    Outcome,
    Output,
    Row,
    SlotSpec,
    collect_outputs,
    find_head,
    find_output_passages,
    infer,
    make_rows,
)
from inlay.training.run.run import Result, Run

_MANY_ROWS = 200  # dev rows from which a temperature fitted to them says more than chance


class Targets:
    """The targets of a split in the form the head's loss takes, by row or by window."""

    def __init__(
        self,
        split: Split,
        encoded: Encoded,
        head: HeadSpec,
        written: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Prepare the targets; `written` has the tokens of every answer on a seq2seq backbone."""
        assert split.targets is not None
        aligned = align_targets(head.kind, encoded, split.targets) if written is None else written
        self._whole: Tensor | None = None
        if aligned is None and head.texts:
            self._whole = torch.as_tensor(find_texts(split.targets, head))
        elif aligned is None and find_head(head.kind).is_scaled:
            scaled = (split.targets - head.target_mean) / head.target_std
            self._whole = torch.as_tensor(scaled.astype(np.float32))
        elif aligned is None:
            self._whole = torch.as_tensor(split.targets)
        self.numbers = None if self._whole is None else self._whole.numpy()
        """the targets of whole rows"""
        tokens = [] if aligned is None else [np.asarray(target, dtype=np.int64) for target in aligned]
        self._tokens = [torch.from_numpy(target) for target in tokens]
        weigh = find_head(WRITTEN if written is not None else head.kind).weight
        weights = [weigh(target) for target in self._tokens] if aligned is not None else np.ones(len(encoded))
        self.weights = torch.as_tensor(weights, dtype=torch.float32)
        """the weight of each window in a mean: its number of labelled or written tokens, else 1"""

    def take(self, windows: Sequence[int], width: int) -> Tensor:
        """Return the targets of some windows; targets of tokens are padded to `width`."""
        if self._whole is not None:
            return self._whole[torch.as_tensor(np.asarray(windows))]
        chosen = [self._tokens[window] for window in windows]
        padded = chosen[0].new_full((len(chosen), width, *chosen[0].shape[1:]), IGNORED)
        for row, target in enumerate(chosen):
            padded[row, : len(target)] = target
        return padded

    def lay(self, windows: np.ndarray) -> np.ndarray:
        """Return the targets of some windows' tokens, end to end: [N, 1] or [N, 2]."""
        laid = torch.cat([self._tokens[window] for window in windows])
        return laid.view(len(laid), -1).numpy()


def find_texts(targets: np.ndarray, head: HeadSpec) -> np.ndarray:
    """Return the index of each target's text among the texts that a head scores."""
    return KINDS[head.kind].match_answers(targets, head.texts)


@dataclass(frozen=True)
class DevScores:
    """The scores of a run on its dev rows: every metric, the mean loss, and the head settings fitted to them.

    If the outputs of some rows are not finite, scores and loss are NaN, which no epoch is chosen by, and the run has
    diverged.
    """

    scores: dict[str, float]
    loss: float
    fitted: dict[str, Any]
    calibrated_loss: float | None = None
    """the loss at the likeliest temperature, which counts only what a run knows, not how sure it says it is; None on
    few rows, where such a temperature is mostly chance"""
    num_lost: int = 0
    """rows whose outputs are not finite"""
    unpredicted: tuple[str, ...] = ()
    """labels of dev rows that were never predicted"""
    untuned: dict[str, float] = dataclasses.field(default_factory=dict)
    """the scores without tuned thresholds, if there are any; `scores` are too good on the rows that tuned them"""


def score_dev(run: Run, encoded: Encoded, logits: Sequence[Tensor]) -> DevScores:
    """Score the dev rows from the logits of their windows."""
    split, head, kind, labels = run.task.dev, run.spec.head, run.task.kind, run.task.labels
    assert split.targets is not None
    outputs = _collect(split, encoded, logits)
    num_lost = sum(not output.is_finite for output in outputs)
    if num_lost:
        return DevScores(_score(kind, labels, outputs, split, head), math.nan, {}, num_lost=num_lost)
    # 1. Fit the head's settings to these rows. Thresholds are kept if they are better on rows that did not choose them.
    decisions = _decisions(kind, outputs, split, encoded)
    num_doubtful = int(run.config.train.head_start == "probe")  # such a head may be right, but sure of nothing
    fitted = _fit_head(head, outputs, split, decisions, num_doubtful)
    calibrated = dataclasses.replace(head, **fitted)
    untuned: dict[str, float] = {}
    if run.config.train.thresholds == "dev" and decisions is not None and KINDS[kind].has_cuts(head.num_outputs):
        cuts = tune_thresholds(run.task.metric, *_take_known(head, decisions))
        if cuts is not None:
            untuned = _score(kind, labels, outputs, split, calibrated)
            fitted["thresholds"], calibrated = list(cuts), dataclasses.replace(calibrated, thresholds=cuts)
    # 2. Score by every metric, and note the labels of dev rows that were never predicted.
    predictions = read_outputs(calibrated, labels, outputs)
    scores = score_all(kind, labels, split.targets, predictions, split.unseen)
    if decisions is not None:
        scores["ece"] = calibration_error(*decisions, calibrated.temperature)
        scores["ece_uncalibrated"] = calibration_error(*decisions, head.temperature)
    form, unpredicted = KINDS[kind].targets, []
    if true := form.find_present(split.targets):
        predicted = form.find_present(decide(kind, predictions))
        unpredicted = [name for label, name in enumerate(labels) if label in true and label not in predicted]
    # 3. The loss; labels not seen in training have no output and do not count.
    if head.is_free_text:  # generated answers are right or wrong: there are no logits to calibrate
        return DevScores(scores, 1.0 - scores["exact_match"], fitted)
    known = split
    if split.unseen:
        known = dataclasses.replace(split, targets=form.ignore_unseen(split.targets, len(labels)))
    loss, calibrated_loss = _mean_loss(head, Targets(known, encoded, head), logits), None
    if decisions is not None and len(decisions[1]) >= _MANY_ROWS:
        logits_known, targets_known = _take_known(head, decisions)
        calibrated_loss = negative_log_likelihood(
            logits_known, targets_known, likeliest_temperature(logits_known, targets_known)
        )
    return DevScores(scores, loss, fitted, calibrated_loss, unpredicted=tuple(unpredicted), untuned=untuned)


def _mean_loss(head: HeadSpec, targets: Targets, logits: Sequence[Tensor]) -> float:
    row_losses = partial(F.cross_entropy, reduction="none") if head.texts else find_head(head.kind).row_losses
    if logits[0].dim() == 1:
        taken = targets.take(range(len(logits)), 0)
        lost = row_losses(torch.stack(list(logits)), taken)
        if taken.dim() == 1 and not taken.is_floating_point():  # without the rows of classes not seen in training
            lost = lost[taken != IGNORED]
        return float(lost.mean()) if len(lost) else 0.0
    losses = [row_losses(row.unsqueeze(0), targets.take([window], len(row))) for window, row in enumerate(logits)]
    return float((torch.cat(losses) * targets.weights).sum() / targets.weights.sum().clamp(min=1))


Decisions = tuple[np.ndarray, np.ndarray]


def _fit_head(
    head: HeadSpec, outputs: Sequence[Output], split: Split, decisions: Decisions | None, num_doubtful: int
) -> dict[str, Any]:
    """Fit a head's settings on dev rows: its temperature, if it has probabilities, and its no-answer margin."""
    fitted: dict[str, Any] = {}
    if decisions is not None:
        fitted["temperature"] = fit_temperature(*_take_known(head, decisions), num_doubtful=num_doubtful)
    if head.null_threshold is not None:
        assert split.targets is not None
        found = [find_output_passages(output, None) for output in outputs]
        fitted["null_threshold"] = tune_threshold(
            [f.margin for f in found], [f.passage for f in found], list(split.targets)
        )
    return fitted


def _take_known(head: HeadSpec, decisions: Decisions) -> Decisions:
    """Return the decisions whose target is a class seen in training."""
    logits, targets = decisions
    is_known = targets < head.num_outputs if targets.ndim == 1 else slice(None)
    return logits[is_known], targets[is_known]


def _decisions(kind: str, outputs: Sequence[Output], split: Split, encoded: Encoded) -> Decisions | None:
    """Return the logits and targets of every decision with a probability; None for kinds without any.

    A class or tag that training never saw is always a wrong decision; such a label of a set is no decision.
    """
    assert split.targets is not None
    if not find_head(kind).calibrates:
        return None
    aligned = align_targets(kind, encoded, split.targets)
    if aligned is None:
        logits = torch.stack([output.logits[0] for output in outputs]).double().numpy()
        return logits, split.targets if split.targets.ndim == 1 else split.targets[:, : logits.shape[1]]
    targets = np.concatenate(aligned)
    logits = np.concatenate([window.double().numpy() for output in outputs for window in output.logits])
    return logits[targets != IGNORED], targets[targets != IGNORED]


def score_split(run: Run, result: Result, backbone: Backbone, split: Split) -> dict[str, float]:
    """Score a run's best tensors on labelled rows by every metric of the task's kind."""
    judged = judge_split(result.spec(run), result.tensors, backbone, split, run.reading)
    scores = _score(run.task.kind, run.task.labels, judged.outputs, split, judged.head)
    return scores | ({} if judged.ece is None else {"ece": judged.ece})


def score_probe(run: Run, head: Mapping[str, Tensor], backbone: Backbone, split: Split) -> dict[str, float]:
    """Score the linear probe that a run began with (its head on the initial slot) on labelled rows, by every metric."""
    bank = Bank(backbone, 1)
    bank.initialise(0, run.spec, run.config.train.seed)
    tensors = {**bank.read(0), **run.start.of(run.name), **head}
    judged = judge_split(run.spec, tensors, backbone, split, run.reading)
    return _score(run.task.kind, run.task.labels, judged.outputs, split, judged.head)


@dataclass(frozen=True)
class SplitOutputs:
    """A head's outputs on labelled rows."""

    head: HeadSpec
    outputs: list[Output]
    ece: float | None
    """expected calibration error, where there are probabilities; NaN if some outputs are not finite"""
    num_lost: int
    """words beyond the last token"""
    num_tokens: int = 0

    def predictions(self, labels: Sequence[str]) -> Any:
        """Return the outputs as the metrics take them."""
        return read_outputs(self.head, labels, self.outputs)

    def take(self, rows: Sequence[int]) -> SplitOutputs:
        """Take the outputs of some rows."""
        return dataclasses.replace(self, outputs=[self.outputs[row] for row in rows])


def judge_split(
    spec: SlotSpec,
    tensors: Mapping[str, Tensor],
    backbone: Backbone,
    split: Split,
    reading: Reading,
    on_batch: Callable[[int], None] | None = None,
) -> SplitOutputs:
    """Compute the outputs for every labelled row, and the calibration of their probabilities."""
    encoded = encode_cached(backbone.tokenizer, split, reading)
    bank = Bank(backbone, 1)
    bank.put(0, spec, tensors)
    outputs = _collect(split, encoded, infer(bank, make_rows(encoded), on_batch=on_batch))
    decisions = _decisions(spec.head.kind, outputs, split, encoded)
    ece: float | None = None
    if decisions is not None:
        is_finite = all(output.is_finite for output in outputs)
        ece = calibration_error(*decisions, spec.head.temperature) if is_finite else math.nan
    return SplitOutputs(spec.head, outputs, ece, encoded.num_lost, int(encoded.lengths.sum()))


def _collect(split: Split, encoded: Encoded, logits: Sequence[Tensor]) -> list[Output]:
    return collect_outputs(encoded, logits, split.texts if split.pairs is None else split.pairs)


def answer_slot(bank: Bank, slot: int, split: Split, reading: Reading, labels: Sequence[str]) -> Any:
    """Answer the rows of a split, labelled or not, by a slot of a bank; return outputs in the form metrics take."""
    encoded = encode_cached(bank.backbone.tokenizer, split, reading)
    outputs = _collect(split, encoded, infer(bank, make_rows(encoded, slot)))
    return read_outputs(bank.head_of(slot), labels, outputs)


def encode_rows(backbone: Backbone, split: Split, max_length: int) -> list[Row]:
    """Encode a split's rows for slot 0, ready for `infer`, each text or pair whole."""
    return make_rows(encode_cached(backbone.tokenizer, split, Reading(WHOLE_ROW, max_length)))


def read_outputs(head: HeadSpec, labels: Sequence[str], outputs: Sequence[Output]) -> Any:
    """Return outputs in the form metrics take: logits [n, L], numbers [n] on the targets' scale, tags or texts.

    If some are not finite, return a list with None in their places, which the metrics score as NaN.
    """
    predict = find_head(head.kind).predict
    found = [predict(output, head, labels) for output in outputs]
    if any(prediction is None for prediction in found):
        return found
    return np.stack(found) if isinstance(found[0], np.ndarray | float) else found


def read_outcomes(found: SplitOutputs, labels: Sequence[str]) -> list[Outcome | None]:
    """Return the answer to every row; None where it would not be finite."""
    answer = find_head(found.head.kind).answer
    outcomes: list[Outcome | None] = []
    for output in found.outputs:
        try:
            outcomes.append(answer(output, found.head, labels))
        except NotFinite:
            outcomes.append(None)
    return outcomes


def _score(
    kind: str, labels: Sequence[str], outputs: Sequence[Output], split: Split, head: HeadSpec
) -> dict[str, float]:
    assert split.targets is not None
    return score_all(kind, labels, split.targets, read_outputs(head, labels, outputs), split.unseen)
