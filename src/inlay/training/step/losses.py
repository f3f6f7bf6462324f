"""The losses of a compiled step: of every row by its slot's kind of head, whatever the mix, of tensors alone.

`heads.py` has the losses kind by kind, which are the definition; tests hold these equal to them. All kinds that occur
are computed for all rows and each row takes its own: shapes are those of a rung, and no row that is padding, or of
another kind, may bring a number that is none into the gradient of one that is not.

Shape letters: B rows, N packed tokens, L labels; R rows, T tokens of their answers, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.data.windows import IGNORED
from inlay.model.heads.heads import HEADS, HeadSpec
from inlay.model.kernels.select import pick_numbered

OF_ROWS = tuple(kind for kind, head in HEADS.items() if head.reads == "pooled")
"""kinds of heads that read one vector of a row"""
OF_TOKENS = tuple(kind for kind, head in HEADS.items() if head.reads == "tokens")
"""kinds that read every token"""
KINDS = (*OF_ROWS, *OF_TOKENS)
POOLINGS = ("cls", "mean", "pooler")
NO_TARGET = float(IGNORED)
"""the mark of a token that says nothing"""

_NEVER = -1e9  # a score that no softmax sees; finite, so that its gradient is


def has_batched_loss(head: HeadSpec) -> bool:
    """Whether the losses of this head are computed here: it reads the last layer's states, of one text for a row."""
    return not head.is_written and head.kind in KINDS and head.features == "last" and not head.has_towers


@dataclass(frozen=True)
class Mix:
    """The kinds of heads that a program knows, the ways of pooling, and which have a layer before their last."""

    kinds: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ()
    rows_have_hidden: bool = False
    tokens_have_hidden: bool = False
    """whether any head of rows, of tokens, has a layer before its last"""

    def with_heads(self, heads: Sequence[HeadSpec]) -> Mix:
        """With these too; a mix only ever grows, so that runs that come and go share programs."""
        kinds = {*self.kinds, *(head.kind for head in heads)}
        poolings = {*self.poolings, *(head.pooling for head in heads if head.reads_rows)}
        deeper = [head.reads_rows for head in heads if head.hidden != "none"]
        return Mix(
            tuple(k for k in KINDS if k in kinds),
            tuple(p for p in POOLINGS if p in poolings),
            self.rows_have_hidden or True in deeper,
            self.tokens_have_hidden or False in deeper,
        )

    @property
    def of_rows(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.kinds if kind in OF_ROWS)

    @property
    def of_tokens(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.kinds if kind in OF_TOKENS)


def batched_row_losses(
    logits_BL: Tensor, targets_B: Tensor, labels_BL: Tensor, num_outputs_B: Tensor, choose: Choice
) -> Tensor:
    """The loss of each row from its logits; those beyond its slot's own count nothing.

    `targets_B` are classes or numbers, `labels_BL` which labels apply.
    """
    num_labels = logits_BL.shape[1]
    own_BL = torch.arange(num_labels, device=logits_BL.device) < num_outputs_B.unsqueeze(1)

    def classify() -> Tensor:
        classes_B = targets_B.long().clamp(0, num_labels - 1)  # other kinds' numbers are no classes
        return F.cross_entropy(logits_BL.masked_fill(~own_BL, -math.inf), classes_B, reduction="none")

    def multilabel() -> Tensor:
        losses_BL = F.binary_cross_entropy_with_logits(logits_BL, labels_BL, reduction="none")
        return torch.where(own_BL, losses_BL, 0.0).sum(1) / own_BL.sum(1)

    def regress() -> Tensor:
        return (logits_BL[:, 0] - targets_B).square()

    return choose.among({"classify": classify, "multilabel": multilabel, "regress": regress})


def batched_token_losses(
    logits_NL: Tensor, marks_N2: Tensor, rows_N: Tensor, num_outputs_B: Tensor, choose: Choice
) -> Tensor:
    """The loss of each row from the logits of its tokens.

    `marks_N2` has a token's class first, for tags; for passages whether it is the start and the end, 0 or 1. A mark of
    `NO_TARGET` says nothing.
    """
    num_rows, num_labels = len(num_outputs_B), logits_NL.shape[1]

    def add_up(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(num_rows, *values_N.shape[1:]).index_add(0, rows_N, values_N)

    def tag() -> Tensor:
        own_NL = torch.arange(num_labels, device=logits_NL.device) < num_outputs_B[rows_N].unsqueeze(1)
        marks_N = marks_N2[:, 0]
        classes_N = marks_N.long().clamp(0, num_labels - 1)
        losses_N = F.cross_entropy(logits_NL.masked_fill(~own_NL, _NEVER), classes_N, reduction="none")
        is_said_N = marks_N != NO_TARGET
        return add_up(torch.where(is_said_N, losses_N, 0.0)) / add_up(is_said_N.float()).clamp(min=1)

    def span() -> Tensor:
        scores_N2 = logits_NL[:, :2].masked_fill(marks_N2 == NO_TARGET, _NEVER)
        rows_N2 = rows_N.long().unsqueeze(1).expand(-1, 2)
        largest_B2 = scores_N2.new_full((num_rows, 2), _NEVER)
        largest_B2.scatter_reduce_(0, rows_N2, scores_N2.detach(), "amax")
        away_N2 = scores_N2 - largest_B2.index_select(0, rows_N)
        # A row without tokens, which nobody reads, has no sum to take a logarithm of.
        logs_B2 = add_up(away_N2.exp()).clamp(min=1e-30).log()
        shares_N2 = away_N2 - logs_B2.index_select(0, rows_N)
        return -add_up(torch.where(marks_N2 == 1, shares_N2, 0.0)).mean(-1)

    return choose.among({"tag": tag, "span": span})


def lose_answers(logits_RTV: Tensor, written_RT: Tensor, smoothing_R: Tensor) -> Tensor:
    """The loss of each row from the logits of its answer's tokens, as `heads.text_losses` has it; 0 of an empty one.

    `smoothing_R` of every target is spread over the vocabulary.
    """
    is_said_RT = written_RT != IGNORED
    losses_RT: Tensor = _Smoothed.apply(logits_RTV, written_RT.clamp(min=0).long(), smoothing_R.unsqueeze(1))
    return torch.where(is_said_RT, losses_RT, 0.0).sum(-1) / is_said_RT.sum(-1).clamp(min=1)


class _Smoothed(torch.autograd.Function):
    """The smoothed cross-entropy of tokens; nothing but its gradient is as large as the logits."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        logits_RTV, targets_RT, smoothing_R1 = inputs
        sums_RT = logits_RTV.logsumexp(-1)
        own_RT = logits_RTV.gather(-1, targets_RT.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits_RTV, sums_RT, targets_RT, smoothing_R1)
        return sums_RT - (1 - smoothing_R1) * own_RT - smoothing_R1 * logits_RTV.mean(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_RTV, sums_RT, targets_RT, smoothing_R1 = ctx.saved_tensors
        by_logit_RTV = (logits_RTV - sums_RT.unsqueeze(-1)).exp_()
        by_logit_RTV -= (smoothing_R1 / logits_RTV.shape[-1]).unsqueeze(-1)
        by_logit_RTV.scatter_add_(-1, targets_RT.unsqueeze(-1), (smoothing_R1 - 1).expand_as(targets_RT).unsqueeze(-1))
        by_loss_RT1 = grads[0].unsqueeze(-1)
        # Not times nothing: what counts nothing may be no number.
        return by_logit_RTV.mul_(by_loss_RT1).masked_fill_(by_loss_RT1 == 0, 0.0), None, None


@dataclass(frozen=True)
class Choice:
    """Which of several things each row takes, by its slot: `codes_B` are places in `names`."""

    names: tuple[str, ...]
    codes_B: Tensor
    known: tuple[str, ...]
    """those that occur"""

    def among(self, made: Mapping[str, Callable[[], Tensor]]) -> Tensor:
        """What each row takes of what `made` makes; none is made that does not occur."""
        numbered = {self.names.index(name): made[name] for name in self.known if name in made}
        return pick_numbered(numbered, self.codes_B, lambda make: make())
