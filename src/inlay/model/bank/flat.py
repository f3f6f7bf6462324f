"""A training bank laid out flat: one tensor for all stacks, so that an optimizer takes few operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.model.parts.part import TensorSpec


@dataclass(frozen=True)
class FlatBank:
    """The parameters of a training bank as one tensor; the bank's stacks are views into it."""

    values_SP: Tensor
    """a row of parameters per slot, or per run where its slots share them"""
    decays_P: Tensor
    """which parameters weight decay applies to"""
    stacks: tuple[Tensor, ...]
    """in the order they lie in"""

    def take_grads(self) -> Tensor:
        """Return the gradients of all parameters [S, P], taken away from the stacks."""
        # Gradients that are views of one tensor would save this copy, but autograd wants them dense like the stacks.
        grads = [torch.zeros_like(stack) if stack.grad is None else stack.grad for stack in self.stacks]
        self.drop_grads()
        return torch.cat([grad.flatten(1) for grad in grads], 1) if grads else torch.zeros_like(self.values_SP)

    def drop_grads(self) -> None:
        """Forget the gradients."""
        for stack in self.stacks:
            stack.grad = None


def lay_flat(
    stacks: Mapping[str, Tensor], items: Mapping[str, TensorSpec], num_rows: int, device: torch.device
) -> tuple[FlatBank, dict[str, Tensor]]:
    """Copy stacks of `num_rows` rows into one tensor; the stacks by name are views into it then."""
    none = torch.zeros(num_rows, 0, device=device)  # there may be no stack at all
    values_SP = torch.cat([none, *(stack.detach().flatten(1) for stack in stacks.values())], 1)
    views: dict[str, Tensor] = {}
    decays, start = [torch.zeros(0, dtype=torch.bool)], 0
    for name, stack in stacks.items():
        stop = start + math.prod(stack.shape[1:])
        decays.append(torch.full((stop - start,), items[name].decays))
        views[name] = values_SP[:, start:stop].view(stack.shape).requires_grad_()
        start = stop
    return FlatBank(values_SP, torch.cat(decays).to(device), tuple(views.values())), views
