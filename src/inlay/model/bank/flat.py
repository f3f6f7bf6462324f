"""A training bank laid out flat: all parameters of a slot in one row, so that an optimizer takes few operations.

Shape letters: S rows (slots, or runs where their slots share parameters), P parameters of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatBank:
    """Parameters of a bank side by side: a row per slot, or per run where its slots share them.

    The bank's stacks are views into `values_SP`.
    """

    values_SP: Tensor
    decays_P: Tensor
    """which parameters weight decay applies to"""
    stacks: tuple[Tensor, ...]
    """in the order they lie in"""

    def take_grads(self) -> Tensor:
        """The gradients of all parameters [S, P], taken away from the stacks."""
        # Gradients that are views of one tensor would save this copy, but autograd wants them dense like the stacks.
        grads = [torch.zeros_like(stack) if stack.grad is None else stack.grad for stack in self.stacks]
        self.drop_grads()
        return torch.cat([grad.flatten(1) for grad in grads], 1) if grads else torch.zeros_like(self.values_SP)

    def drop_grads(self) -> None:
        """Forget the gradients."""
        for stack in self.stacks:
            stack.grad = None


def lay_flat(stacks: Sequence[Tensor], decays: Sequence[bool], num_rows: int, device: torch.device) -> FlatBank:
    """Copies of stacks side by side, with gradients; `decays` says which of them weight decay applies to."""
    none = torch.zeros(num_rows, 0, device=device)  # there may be no stack at all
    values_SP = torch.cat([none, *(stack.detach().flatten(1) for stack in stacks)], 1)
    decays_P = [torch.full(stack[0].shape, each).flatten() for stack, each in zip(stacks, decays, strict=True)]
    views, start = [], 0
    for stack in stacks:
        stop = start + stack[0].numel()
        views.append(values_SP[:, start:stop].view(stack.shape).requires_grad_())
        start = stop
    return FlatBank(values_SP, torch.cat([torch.zeros(0, dtype=torch.bool), *decays_P]).to(device), tuple(views))
