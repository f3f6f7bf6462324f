"""The heads: what a task's outputs mean, as one table of entries: how many, which loss, which answer.

A head is a linear layer on the pooled vector; its kind says how logits become a loss in training and an answer in use.
Regression targets are standardised while training (their scale is the user's), and the mean and deviation travel with
the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.errors import UnknownName


@dataclass(frozen=True)
class HeadSpec:
    """A slot's head."""

    kind: str
    num_outputs: int
    pooling: str
    target_mean: float = 0.0
    target_std: float = 1.0
    hidden: str = "none"
    """the layer before it: none, tanh, or pooler (a trained copy of the backbone's)"""
    features: str = "last"
    """what it reads: the last layer, or a learned mix of all"""


@dataclass(frozen=True)
class Outcome:
    """What logits say: `label` or `labels` or `value`, and probabilities by label where there are labels."""

    label: str | None = None
    labels: tuple[str, ...] | None = None
    value: float | None = None
    probabilities: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Only the fields that this kind of task has."""
        fields = {"label": self.label, "labels": self.labels, "value": self.value, "probabilities": self.probabilities}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Head:
    """One row of the table."""

    num_outputs: Callable[[int], int]
    """of the number of labels"""
    row_losses: Callable[[Tensor, Tensor], Tensor]
    """logits [n, L] and targets -> the loss of each row [n]"""
    answer: Callable[[Tensor, HeadSpec, Sequence[str]], Outcome]


def _answer_class(logits_L: Tensor, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    probabilities = torch.softmax(logits_L.double(), -1).tolist()
    best = int(logits_L.argmax())
    return Outcome(label=labels[best], probabilities=dict(zip(labels, probabilities, strict=True)))


def _answer_labels(logits_L: Tensor, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    probabilities = torch.sigmoid(logits_L.double()).tolist()
    chosen = tuple(label for label, share in zip(labels, probabilities, strict=True) if share >= 0.5)
    return Outcome(labels=chosen, probabilities=dict(zip(labels, probabilities, strict=True)))


def _answer_number(logits_L: Tensor, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    return Outcome(value=float(logits_L[0]) * spec.target_std + spec.target_mean)


HEADS: dict[str, Head] = {
    "classify": Head(
        num_outputs=lambda num_labels: num_labels,
        row_losses=lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"),
        answer=_answer_class,
    ),
    "multilabel": Head(
        num_outputs=lambda num_labels: num_labels,
        row_losses=lambda logits, targets: F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(
            -1
        ),
        answer=_answer_labels,
    ),
    "regress": Head(
        num_outputs=lambda num_labels: 1,
        row_losses=lambda logits, targets: F.mse_loss(logits[:, 0], targets, reduction="none"),
        answer=_answer_number,
    ),
}


def find_head(kind: str) -> Head:
    """The table's entry for a kind of task."""
    if kind not in HEADS:
        raise UnknownName("kind of task", kind, HEADS)
    return HEADS[kind]
