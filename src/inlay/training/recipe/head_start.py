"""The head's first weights: the linear model fitted to what a slot gives of the training rows (probe, then tune).

So training begins where logistic regression ends, and adapters learn under a head that already means something (Kumar
et al. 2022). With few rows a linear model has every training row right, and surely so: nothing would be left to learn
from. So its outputs are divided by the temperature that makes it honest about rows it was not fitted to, which changes
no answer.

The same is done after a contrastive start. Few rows are soon learnt by heart, so of what it changed a part is kept, and
the head fitted to what that gives: weights between the start and the end generalise better than either (Wortsman et al.
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

from inlay.data import KINDS, Task, as_probabilities, find_label_errors, is_better, likeliest_temperature
from inlay.model import Bank, find_head, infer_vectors
from inlay.model import head as head_part
from inlay.training.recipe.linear import Linear, Validated, choose_strength, cross_validate, decision_targets, fit_raw

if TYPE_CHECKING:
    from inlay.training.cohort.member import Member

_MOST_NUMBERS = 40_000_000  # that a head is fitted to: of more rows some, drawn by chance
_CHUNK = 4_096
_TEMPERATURES = (1.0, 10.0)  # a linear model of few rows is too sure, never too unsure
_MOST_VALIDATED = 5_000  # rows that tell the strength of a linear model
_SURE = 0.5  # margin of a row that is worth a word though nobody asked
_MOST_NAMED = 3


@dataclass(frozen=True)
class FittedHead:
    """A head that was fitted to training rows."""

    tensors: dict[str, Tensor]
    score: float
    """score of such a model on rows left out"""
    suspects: dict[str, Any]
    """training rows that may be labelled wrongly: how many, and the lines of the first few; nothing if none are"""


def fit_head(bank: Bank, member: Member, token_budget: int) -> FittedHead:
    """Fit a head for the slot of `member`, fitted to what the slot gives now of its training rows."""
    run = member.run
    width = bank.backbone.hidden_size * (4 if run.spec.head.has_towers else 1)
    rows = draw_rows(len(member.train), _MOST_NUMBERS // width)
    chunks = np.array_split(rows, -(-len(rows) // _CHUNK))  # rows may bring what is kept of their lower layers
    parts = [infer_vectors(bank, member.rows(chunk), token_budget=token_budget) for chunk in chunks]
    vectors = np.concatenate(parts)
    if not np.isfinite(vectors).all():
        return FittedHead({}, math.nan, {})
    head = run.spec.head
    task = dataclasses.replace(run.task, train=run.task.train.take(rows))
    honest = fit_honest(task, vectors, has_towers=head.has_towers)
    weights, bias = honest.model.weights, honest.model.bias
    if find_head(head.kind).is_scaled:  # heads give numbers on the scale of their targets
        weights, bias = weights / head.target_std, (bias - head.target_mean) / head.target_std
    width = bank.backbone.hidden_size
    found = {head_part.WEIGHT: weights[:, :width], head_part.BIAS: bias}
    if head.has_towers:
        found[head_part.PAIR_WEIGHT] = weights[:, width:]
    tensors = {name: torch.from_numpy(np.ascontiguousarray(own, dtype=np.float32)) for name, own in found.items()}
    return FittedHead(tensors, honest.left_out.score, _find_suspects(task, honest))


def _find_suspects(task: Task, honest: Honest) -> dict[str, Any]:
    """Find training rows that may be labelled wrongly, by the folds that chose the strength of the linear model."""
    if not KINDS[task.kind].finds_label_errors:
        return {}
    rows = task.train.take(honest.rows)
    assert rows.targets is not None
    found = find_label_errors(rows, task.labels, as_probabilities(honest.left_out.outputs, rows.targets))
    sure = [error.line for error in found.errors if error.margin >= _SURE]
    return {"num_rows": len(sure), "lines": sure[:_MOST_NAMED]} if sure else {}


def _find_temperature(outputs: np.ndarray, targets: np.ndarray) -> float:
    """Return the temperature that makes a model honest about rows it left out, within limits.

    Rows that are all right, or classes that a fold never saw, would take it to any length.
    """
    return float(np.clip(likeliest_temperature(outputs, targets), *_TEMPERATURES))


def draw_rows(num_rows: int, most: int) -> np.ndarray:
    """Draw all rows, or as many of them by chance, in their order; the same whenever it is asked."""
    if num_rows <= most:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(0).permutation(num_rows)[:most])


def keep_part(start: Mapping[str, Tensor], end: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return the tensors of a slot between its start and its end, by the share of the change that is kept."""
    return {name: torch.lerp(start[name], tensor, share) for name, tensor in end.items()}


@dataclass(frozen=True)
class Honest:
    """A linear model of training rows, and what models of its strength gave for rows that they left out."""

    model: Linear
    left_out: Validated
    rows: np.ndarray
    """positions of the rows that were left out: all, or some of very many"""


def fit_honest(task: Task, vectors: np.ndarray, *, has_towers: bool = False) -> Honest:
    """Fit the linear model of a task's training rows, no surer than it is right about rows it was not fitted to."""
    targets = task.train.targets
    assert targets is not None
    most = _MOST_VALIDATED
    if KINDS[task.kind].linear == "labels":  # a model for each label
        most = max(500, 20 * _MOST_VALIDATED // len(task.labels))
    some = draw_rows(len(vectors), min(most, _MOST_VALIDATED))
    with threadpool_limits(torch.get_num_threads()):
        best = choose_strength(
            task.metric, cross_validate(task.kind, task.metric, vectors[some], targets[some], len(task.labels))
        )
        # Strength weighs the sum of the rows' losses: of more rows than it was chosen by it must count less.
        strength = best.strength * len(some) / len(vectors)
        model = fit_raw(task.kind, vectors, targets, strength, len(task.labels))
    if KINDS[task.kind].is_number:
        return Honest(_or_cosine(task, vectors, best, model) if has_towers else model, best, some)
    decided = decision_targets(task.kind, targets[some], len(task.labels))
    temperature = _find_temperature(best.outputs, decided)
    cooler = Linear(model.weights / temperature, model.bias / temperature, model.has_converged)
    return Honest(cooler, best, some)


def _or_cosine(task: Task, vectors: np.ndarray, best: Validated, model: Linear) -> Linear:
    """Return the model, or one of the cosine of both texts alone where that is better on rows left out.

    A backbone that was tuned for similar texts knows more by it than few rows can teach.
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


def contrast_losses(vectors_nD: Tensor, labels_n: Tensor) -> Tensor:
    """Return for each row how far its cosines with the other rows are from 1 (same label) and 0 (others), squared.

    Pairs of one label count as much together as all others, of whichever there are more. The mean over rows is the mean
    of both.
    """
    unit_nD = F.normalize(vectors_nD.float(), dim=-1)
    is_same_nn = labels_n.unsqueeze(0) == labels_n.unsqueeze(1)
    is_self_nn = torch.eye(len(labels_n), dtype=torch.bool, device=labels_n.device)
    squares_nn = (unit_nD @ unit_nD.T - is_same_nn.float()).square()
    sides = [side.float() / side.sum().clamp(min=1) for side in (is_same_nn & ~is_self_nn, ~is_same_nn)]
    return len(labels_n) * (squares_nn * (sides[0] + sides[1]) / 2).sum(1)
