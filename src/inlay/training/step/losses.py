"""The losses of a compiled step: for any mix of kinds of heads, computed from tensors alone.

`head_losses.py` has the losses kind by kind, which are the definition; tests hold these equal to them. Every kind that
occurs is computed for all rows, and each row takes the loss of its own kind: so all shapes are those of the rung. NaN
in a padding row, or from another kind, must not reach the gradient of any other row.

Shape letters: B rows, N packed tokens, L labels; R rows, T tokens of their answers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inlay.data import IGNORED
from inlay.model import HEADS, HeadSpec, RowBatch, TokenBatch, pick_numbered

OF_ROWS = tuple(kind for kind, head in HEADS.items() if head.reads == "pooled" and head.batched_losses)
"""kinds of heads that read one vector per row"""
OF_TOKENS = tuple(kind for kind, head in HEADS.items() if head.reads == "tokens" and head.batched_losses)
"""kinds that read every token"""
KINDS = (*OF_ROWS, *OF_TOKENS)
POOLINGS = ("cls", "mean", "pooler")
NO_TARGET = float(IGNORED)
"""the mark of a token without a target"""


def has_batched_loss(head: HeadSpec) -> bool:
    """Tell whether this head's losses are computed here: it reads the last layer, and one text per row."""
    return not head.is_written and head.kind in KINDS and head.features == "last" and not head.has_towers


@dataclass(frozen=True)
class Mix:
    """The kinds of heads and poolings that a program supports, and which heads have a hidden layer."""

    kinds: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ()
    rows_have_hidden: bool = False
    tokens_have_hidden: bool = False
    """whether any head on rows, or on tokens, has a hidden layer"""

    def with_heads(self, heads: Sequence[HeadSpec]) -> Mix:
        """Return the mix with these heads too; a mix only grows, so that runs that come and go share programs."""
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
    """Return the loss of each row from its logits; logits beyond its slot's own do not count.

    `targets_B` are classes or numbers, `labels_BL` which labels apply.
    """
    own_BL = torch.arange(logits_BL.shape[1], device=logits_BL.device) < num_outputs_B.unsqueeze(1)
    return _choose_losses(OF_ROWS, RowBatch(logits_BL, targets_B, labels_BL, own_BL), choose)


def batched_token_losses(
    logits_NL: Tensor, marks_N2: Tensor, rows_N: Tensor, num_outputs_B: Tensor, choose: Choice
) -> Tensor:
    """Return the loss of each row from the logits of its tokens.

    `marks_N2` has a token's class first, for tags; for passages whether it is the start and the end, 0 or 1. A mark of
    `NO_TARGET` says nothing.
    """
    return _choose_losses(OF_TOKENS, TokenBatch(logits_NL, marks_N2, rows_N, num_outputs_B), choose)


def _choose_losses(kinds: Sequence[str], batch: RowBatch | TokenBatch, choose: Choice) -> Tensor:
    """Return for each row the loss of its own kind of head."""
    losses = {kind: HEADS[kind].batched_losses for kind in kinds}
    return choose.among({kind: partial(function, batch) for kind, function in losses.items() if function is not None})


def answer_losses(logits_RTV: Tensor, written_RT: Tensor, smoothing_R: Tensor) -> Tensor:
    """Return the loss of each row's answer from its tokens' logits, as `heads.text_losses` does; 0 if it is empty.

    `smoothing_R` of every target is spread over the vocabulary.
    """
    is_said_RT = written_RT != IGNORED
    losses_RT: Tensor = _Smoothed.apply(logits_RTV, written_RT.clamp(min=0).long(), smoothing_R.unsqueeze(1))
    return torch.where(is_said_RT, losses_RT, 0.0).sum(-1) / is_said_RT.sum(-1).clamp(min=1)


class _Smoothed(torch.autograd.Function):
    """Smoothed cross-entropy of tokens; only its gradient is as large as the logits."""

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
        # Not multiplied by 0: an ignored value may be NaN.
        return by_logit_RTV.mul_(by_loss_RT1).masked_fill_(by_loss_RT1 == 0, 0.0), None, None


@dataclass(frozen=True)
class Choice:
    """A choice among several kinds for each row, by its slot: `codes_B` are indices into `names`."""

    names: tuple[str, ...]
    codes_B: Tensor
    known: tuple[str, ...]
    """the names that occur"""

    def among(self, made: Mapping[str, Callable[[], Tensor]]) -> Tensor:
        """Compute the kinds that occur, and pick each row's own."""
        numbered = {self.names.index(name): made[name] for name in self.known if name in made}
        return pick_numbered(numbered, self.codes_B, lambda make: make())
