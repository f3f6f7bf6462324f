"""The losses of a compiled step: of every row by its slot's kind of head, whatever the mix, of tensors alone.

`heads.py` has the losses kind by kind, which are the definition; tests hold these equal to them. All kinds that occur
are computed for all rows and each row takes its own: shapes are those of a rung, and no row that is padding, or of
another kind, may bring a number that is none into the gradient of one that is not.

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
"""kinds of heads that read one vector of a row"""
OF_TOKENS = tuple(kind for kind, head in HEADS.items() if head.reads == "tokens" and head.batched_losses)
"""kinds that read every token"""
KINDS = (*OF_ROWS, *OF_TOKENS)
POOLINGS = ("cls", "mean", "pooler")
NO_TARGET = float(IGNORED)
"""the mark of a token that says nothing"""


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
    """Return the loss of each row from its logits; those beyond its slot's own count nothing.

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
