"""The losses of the heads: of each row, and of rows of any mix of heads in a compiled step.

The losses of padded tokens are the definition; tests hold those of packed tokens equal to them. Targets of tokens
that say nothing are `IGNORED`.

Shape letters: n rows of one head, B rows of any mix of heads, N packed tokens, T tokens of a row, L outputs,
V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.batch.route import IGNORED


@dataclass(frozen=True)
class RowBatch:
    """Logits and targets of rows of any mix of heads, for a compiled step."""

    logits_BL: Tensor
    targets_B: Tensor
    """classes or numbers, as a head has them; other heads' are any number"""
    labels_BL: Tensor
    """which labels apply"""
    own_BL: Tensor
    """which logits are the row's own; the others count nothing"""


@dataclass(frozen=True)
class TokenBatch:
    """Logits and targets of the tokens of rows of any mix of heads, for a compiled step."""

    logits_NL: Tensor
    marks_N2: Tensor
    """a token's class first; for passages whether it is the start and the end, 0 or 1; `IGNORED`: it says nothing"""
    rows_N: Tensor
    num_outputs_B: Tensor

    def add_up(self, values_N: Tensor) -> Tensor:
        """Sum values of tokens by row [B]."""
        num_rows = len(self.num_outputs_B)
        return values_N.new_zeros(num_rows, *values_N.shape[1:]).index_add(0, self.rows_N, values_N)


def text_losses(logits_nTV: Tensor, targets_nT: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross-entropy of each answer's tokens, `smoothing` of every target spread over the vocabulary."""
    # Not as [n, V, T]: torch sums over a vocabulary that is not last several times slower, and less exactly.
    losses = F.cross_entropy(
        logits_nTV.float().flatten(0, 1),
        targets_nT.flatten(),
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )
    losses_nT = losses.view_as(targets_nT)
    return losses_nT.sum(-1) / (targets_nT != IGNORED).sum(-1).clamp(min=1)


# Of rows of any mix of heads, in a compiled step, `own_nL` says which logits are a row's own; the others count nothing,
# and neither they nor the targets of other heads may bring NaN or infinity into a gradient.


def class_losses(logits_nL: Tensor, classes_n: Tensor, own_nL: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of each row's class."""
    if own_nL is not None:
        logits_nL = logits_nL.masked_fill(~own_nL, -math.inf)
        classes_n = classes_n.long().clamp(0, logits_nL.shape[1] - 1)  # targets of other kinds may be out of range
    return F.cross_entropy(logits_nL, classes_n, reduction="none")


def number_losses(logits_n1: Tensor, targets_n: Tensor) -> Tensor:
    """Return the squared error of each row's number."""
    return F.mse_loss(logits_n1[:, 0], targets_n, reduction="none")


def set_losses(logits_nL: Tensor, targets_nL: Tensor, own_nL: Tensor | None = None) -> Tensor:
    losses_nL = F.binary_cross_entropy_with_logits(logits_nL, targets_nL, reduction="none")
    if own_nL is None:
        return losses_nL.mean(-1)
    return torch.where(own_nL, losses_nL, 0.0).sum(1) / own_nL.sum(1)


def level_losses(logits_nL: Tensor, levels_n: Tensor, own_nL: Tensor | None = None) -> Tensor:
    """Return the sum over k of the binary cross-entropy of whether the level exceeds k."""
    levels_L = torch.arange(logits_nL.shape[1], device=logits_nL.device)
    exceeds_nL = (levels_n.unsqueeze(1) > levels_L).to(logits_nL.dtype)
    losses_nL = F.binary_cross_entropy_with_logits(logits_nL, exceeds_nL, reduction="none")
    return (losses_nL if own_nL is None else torch.where(own_nL, losses_nL, 0.0)).sum(-1)


def tag_losses(logits_nTL: Tensor, targets_nT: Tensor) -> Tensor:
    losses_nT = F.cross_entropy(logits_nTL.transpose(1, 2), targets_nT, reduction="none", ignore_index=IGNORED)
    return losses_nT.sum(-1) / (targets_nT != IGNORED).sum(-1).clamp(min=1)


def passage_losses(logits_nT2: Tensor, targets_nT2: Tensor) -> Tensor:
    """Return the mean of the start's and the end's cross-entropy over the tokens that can be one."""
    shares_nT2 = logits_nT2.masked_fill(targets_nT2 == IGNORED, -torch.inf).log_softmax(1)
    return -shares_nT2.masked_fill(targets_nT2 != 1, 0.0).sum(1).mean(-1)


# The same for packed tokens in a compiled step.

_NEVER = -1e9  # a score that no softmax sees; finite, so that its gradient is


def batched_tag_losses(batch: TokenBatch) -> Tensor:
    logits_NL, num_labels = batch.logits_NL, batch.logits_NL.shape[1]
    own_N = batch.num_outputs_B[batch.rows_N]
    own_NL = torch.arange(num_labels, device=logits_NL.device) < own_N.unsqueeze(1)
    marks_N = batch.marks_N2[:, 0]
    classes_N = marks_N.long().clamp(0, num_labels - 1)
    losses_N = F.cross_entropy(logits_NL.masked_fill(~own_NL, _NEVER), classes_N, reduction="none")
    is_said_N = marks_N != IGNORED
    return batch.add_up(torch.where(is_said_N, losses_N, 0.0)) / batch.add_up(is_said_N.float()).clamp(min=1)


def batched_passage_losses(batch: TokenBatch) -> Tensor:
    scores_N2 = batch.logits_NL[:, :2].masked_fill(batch.marks_N2 == IGNORED, _NEVER)
    rows_N2 = batch.rows_N.long().unsqueeze(1).expand(-1, 2)
    largest_B2 = scores_N2.new_full((len(batch.num_outputs_B), 2), _NEVER)
    largest_B2.scatter_reduce_(0, rows_N2, scores_N2.detach(), "amax")
    away_N2 = scores_N2 - largest_B2.index_select(0, batch.rows_N)
    # A row without tokens, which is never read, has no sum to take a logarithm of.
    logs_B2 = batch.add_up(away_N2.exp()).clamp(min=1e-30).log()
    shares_N2 = away_N2 - logs_B2.index_select(0, batch.rows_N)
    return -batch.add_up(torch.where(batch.marks_N2 == 1, shares_N2, 0.0)).mean(-1)
