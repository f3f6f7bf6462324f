"""The head's first weights: a linear model fitted to a slot's vectors of the training rows (first probe, then tune).

Training then begins where logistic regression ends, and adapters learn under a head that already means something (Kumar
et al. 2022). With few rows a linear model gets every training row right, with a probability near 1: no loss would be
left to learn from. So its outputs are divided by the temperature that calibrates it on rows it was not fitted to, which
changes no answer.

The same is done after a contrastive start. Few rows are soon memorised, so only a part of its change is kept, and the
head is fitted to what that gives: weights between the start and the end generalise better than either (Wortsman et al.
2022), and where labels are noise little is lost. The contrastive start is SetFit's (Tunstall et al. 2022): rows of one
label are pulled together, others pushed apart. There a whole copy of the backbone is trained for each task, on pairs
drawn one by one; here it is a slot on a frozen backbone, and a batch of n rows gives all n·(n−1)/2 of its pairs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from inlay.data import (
    KINDS,
    Task,
    as_probabilities,
    find_label_errors,
    is_better,
    likeliest_temperature,
    negative_log_likelihood,
)
from inlay.model import Bank, find_head, infer_vectors
from inlay.model import head as head_part
from inlay.training.recipe.linear import Linear, Validated, choose_strength, cross_validate, decision_targets, fit_raw

if TYPE_CHECKING:
    from inlay.training.cohort.member import Member

_MOST_NUMBERS = 40_000_000  # rows that a head is fitted to; of more rows, a random sample
_CHUNK = 4_096
_TEMPERATURES = (1.0, 10.0)  # a linear model of few rows is overconfident, never underconfident
_MOST_VALIDATED = 5_000  # rows used to choose the strength of a linear model
_SURE = 0.5  # margin from which a suspicious row is reported unasked
_MOST_NAMED = 3


@dataclass(frozen=True)
class FittedHead:
    """A head that was fitted to training rows."""

    tensors: dict[str, Tensor]
    score: float
    """score of such a model on held-out rows"""
    suspects: dict[str, Any]
    """training rows that may be labelled wrongly: their number and the lines of the first few; empty if none are"""
    left_out_loss: float = 0.0
    """summed loss of all rows, each by a model of the folds without it; 0 without folds"""


def fit_head(
    bank: Bank, member: Member, token_budget: int, *, num_folds: int = 0, most_strength: float = math.inf
) -> FittedHead:
    """Fit a head for the slot of `member` to the slot's current outputs for the training rows.

    Where the slot was trained on these rows, cross-validation finds too strong a model: `most_strength` is a limit.
    """
    run = member.run
    width = bank.backbone.hidden_size * (4 if run.spec.head.has_towers else 1)
    rows = draw_rows(len(member.train), _MOST_NUMBERS // width)
    vectors = read_vectors(bank, member, rows, token_budget)
    if not np.isfinite(vectors).all():
        return FittedHead({}, math.nan, {}, math.inf)
    head = run.spec.head
    task = dataclasses.replace(run.task, train=run.task.train.take(rows))
    calibrated = fit_calibrated(task, vectors, has_towers=head.has_towers, most_strength=most_strength)
    weights, bias = calibrated.model.weights, calibrated.model.bias
    if find_head(head.kind).is_scaled:  # heads give numbers on the scale of their targets
        weights, bias = weights / head.target_std, (bias - head.target_mean) / head.target_std
    width = bank.backbone.hidden_size
    found = {head_part.WEIGHT: weights[:, :width], head_part.BIAS: bias}
    if head.has_towers:
        found[head_part.PAIR_WEIGHT] = weights[:, width:]
    tensors = {name: torch.from_numpy(np.ascontiguousarray(own, dtype=np.float32)) for name, own in found.items()}
    folds = (split_fold(len(rows), num_folds, fold) for fold in range(num_folds))
    loss = sum(left_out_loss(task, vectors, *fold) for fold in folds) * len(member.train) / len(rows)
    return FittedHead(tensors, calibrated.left_out.score, _find_suspects(task, calibrated), loss)


def read_vectors(bank: Bank, member: Member, rows: np.ndarray, token_budget: int) -> np.ndarray:
    """Return what the head of `member` reads of some of its training rows."""
    chunks = np.array_split(rows, -(-len(rows) // _CHUNK))  # rows may come with cached states of their lower layers
    return np.concatenate([infer_vectors(bank, member.rows(chunk), token_budget=token_budget) for chunk in chunks])


def _find_suspects(task: Task, calibrated: CalibratedLinear) -> dict[str, Any]:
    """Find training rows that may be labelled wrongly, by the folds that chose the strength of the linear model."""
    if not KINDS[task.kind].finds_label_errors:
        return {}
    rows = task.train.take(calibrated.rows)
    assert rows.targets is not None
    found = find_label_errors(rows, task.labels, as_probabilities(calibrated.left_out.outputs, rows.targets))
    sure = [error.line for error in found.errors if error.margin >= _SURE]
    return {"num_rows": len(sure), "lines": sure[:_MOST_NAMED]} if sure else {}


def _find_temperature(outputs: np.ndarray, targets: np.ndarray) -> float:
    """Return the temperature that calibrates a model on held-out rows, within limits.

    Without limits, rows that are all right or classes that a fold never saw would give extreme values.
    """
    return float(np.clip(likeliest_temperature(outputs, targets), *_TEMPERATURES))


def draw_rows(num_rows: int, most: int) -> np.ndarray:
    """Return all rows, or a random sample of `most` in their order; always the same one."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(0).permutation(num_rows)[:most])


@dataclass(frozen=True)
class CalibratedLinear:
    """A linear model of training rows, with the outputs of models of its strength for held-out rows."""

    model: Linear
    left_out: Validated
    rows: np.ndarray
    """positions of the held-out rows: all, or some of very many"""


def fit_calibrated(
    task: Task, vectors: np.ndarray, *, has_towers: bool = False, most_strength: float = math.inf
) -> CalibratedLinear:
    """Fit a linear model to a task's training rows, with outputs calibrated on held-out rows."""
    targets = task.train.targets
    assert targets is not None
    most = _MOST_VALIDATED
    if KINDS[task.kind].linear == "labels":  # one model per label
        most = max(500, 20 * _MOST_VALIDATED // len(task.labels))
    some = draw_rows(len(vectors), min(most, _MOST_VALIDATED))
    with threadpool_limits(torch.get_num_threads()):
        tried = cross_validate(task.kind, task.metric, vectors[some], targets[some], len(task.labels))
        best = choose_strength(task.metric, _up_to(most_strength, tried))
        # Strength multiplies the sum of row losses: chosen on fewer rows, it must be scaled down.
        strength = best.strength * len(some) / len(vectors)
        model = fit_raw(task.kind, vectors, targets, strength, len(task.labels))
    if KINDS[task.kind].is_number:
        return CalibratedLinear(_choose_cosine(task, vectors, best, model) if has_towers else model, best, some)
    decided = decision_targets(task.kind, targets[some], len(task.labels))
    temperature = _find_temperature(best.outputs, decided)
    cooler = Linear(model.weights / temperature, model.bias / temperature, model.has_converged)
    return CalibratedLinear(cooler, best, some)


def _choose_cosine(task: Task, vectors: np.ndarray, best: Validated, model: Linear) -> Linear:
    """Return the model, or one of the cosine of both texts alone if that is better on held-out rows.

    For a backbone that was trained on similar texts, the cosine says more than few rows can teach.
    """
    targets, cosine = task.train.targets, vectors[:, -1:]
    assert targets is not None
    some = draw_rows(len(vectors), _MOST_VALIDATED)
    alone = choose_strength(task.metric, cross_validate(task.kind, task.metric, cosine[some], targets[some], 0))
    if not is_better(task.metric, alone.score, best.score):
        return model
    found = fit_raw(task.kind, cosine, targets, alone.strength, 0)
    weights = np.zeros_like(model.weights)
    weights[:, -1:] = found.weights
    return Linear(weights, found.bias)


def split_fold(num_rows: int, num_folds: int, fold: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of all rows but a fold's, and those of the fold; always the same ones."""
    of_fold = np.random.default_rng(1).permutation(num_rows) % num_folds == fold
    return np.flatnonzero(~of_fold), np.flatnonzero(of_fold)


def left_out_loss(
    task: Task, vectors: np.ndarray, inside: np.ndarray, outside: np.ndarray, *, most_strength: float = math.inf
) -> float:
    """Return the summed loss of the training rows `outside`, by a linear model of the rows `inside`.

    It is the loss at the likeliest temperature, so that only what is known counts, and not how sure the answers are.
    Rows of a class that no row inside has are left out: nothing could know it.
    """
    targets, num_labels = task.train.targets, len(task.labels)
    assert targets is not None
    outside = outside[np.isin(targets[outside], targets[inside])]
    if not len(outside) or not np.isfinite(vectors).all():
        return math.inf if len(outside) else 0.0
    with threadpool_limits(torch.get_num_threads()):
        tried = cross_validate(task.kind, task.metric, vectors[inside], targets[inside], num_labels)
        strength = choose_strength(task.metric, _up_to(most_strength, tried)).strength
        logits = fit_raw(task.kind, vectors[inside], targets[inside], strength, num_labels).outputs(vectors[outside])
    temperature = likeliest_temperature(logits, targets[outside])
    return len(outside) * negative_log_likelihood(logits, targets[outside], temperature)


def _up_to(most: float, tried: Mapping[float, Validated]) -> dict[float, Validated]:
    return {strength: found for strength, found in tried.items() if strength <= most}


def contrast_losses(vectors_nD: Tensor, labels_n: Tensor) -> Tensor:
    """Return each row's squared errors of its cosines with the others: target 1 for the same label, 0 otherwise.

    Pairs of one label count as much together as all others, of whichever there are more. The mean over rows is the mean
    of both.
    """
    unit_nD = F.normalize(vectors_nD.float(), dim=-1)
    is_same_nn = labels_n.unsqueeze(0) == labels_n.unsqueeze(1)
    is_self_nn = torch.eye(len(labels_n), dtype=torch.bool, device=labels_n.device)
    squares_nn = (unit_nD @ unit_nD.T - is_same_nn.float()).square()
    sides = [side.float() / side.sum().clamp(min=1) for side in (is_same_nn & ~is_self_nn, ~is_same_nn)]
    return len(labels_n) * (squares_nn * (sides[0] + sides[1]) / 2).sum(1)
