"""Adam for stacked parameters: every slot with its own learning rate, step count, clip norm and variant.

One formula serves AdamW and the original BERT's Adam: `p ← p − lr·(m̂ / (√v̂ + ε) + λ·p)`, where BERT's leaves out the
bias correction (m̂ = m, v̂ = v) and has ε = 1e-6 (SEMANTICS §1). A slot that is not named in a step does not move at all:
zero gradients would still move it by momentum and decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inlay.config import TrainConfig

_BETA1, _BETA2 = 0.9, 0.999


@dataclass(frozen=True)
class Variant:
    """What the named optimizers differ in."""

    eps: float
    corrects_bias: bool


VARIANTS = {"adamw": Variant(1e-8, True), "bert-adam": Variant(1e-6, False)}


class SlotOptimizer:
    """Moments and step counts of every slot of a bank. It owns `first` and `second` and updates the stacks in place."""

    def __init__(
        self, stacks: Mapping[str, Tensor], decays: Mapping[str, bool], settings: Sequence[TrainConfig]
    ) -> None:
        self.stacks, self._decays, self._settings = stacks, decays, settings
        self.num_steps = [0] * len(settings)
        self.first = {name: torch.zeros_like(stack) for name, stack in stacks.items()}
        self.second = {name: torch.zeros_like(stack) for name, stack in stacks.items()}

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        for stack in self.stacks.values():
            stack.grad = None

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale each slot's gradients to its own largest norm; returns the norms [S] before it."""
        grads = [stack.grad for stack in self.stacks.values() if stack.grad is not None]
        norms_S = torch.stack([grad.flatten(1).square().sum(1) for grad in grads]).sum(0).sqrt()
        limits_S = torch.tensor([run.clip_norm or torch.inf for run in self._settings]).to(norms_S)
        scales_S = torch.where(norms_S > limits_S, limits_S / norms_S, 1.0)
        for grad in grads:
            grad.mul_(_per_slot(scales_S, grad))
        return norms_S

    @torch.no_grad()
    def step(self, rates: Mapping[int, float]) -> None:
        """Update the slots named in `rates`, each at its learning rate, and no other."""
        slots = sorted(rates)
        for slot in slots:
            self.num_steps[slot] += 1
        variants = [VARIANTS[self._settings[slot].optimizer] for slot in slots]
        corrections = [
            (1 - _BETA1 ** self.num_steps[slot], 1 - _BETA2 ** self.num_steps[slot])
            if variant.corrects_bias
            else (1, 1)
            for slot, variant in zip(slots, variants, strict=True)
        ]
        columns = {
            "lr": [rates[slot] for slot in slots],
            "eps": [variant.eps for variant in variants],
            "correct1": [pair[0] for pair in corrections],
            "correct2": [pair[1] for pair in corrections],
            "decay": [self._settings[slot].weight_decay for slot in slots],
        }
        device = next(iter(self.stacks.values())).device
        numbers = {name: torch.tensor(values, device=device) for name, values in columns.items()}
        index = None if len(slots) == len(self._settings) else torch.tensor(slots, device=device)
        for name in self.stacks:
            self._update(name, index, numbers)

    def _update(self, name: str, index: Tensor | None, numbers: Mapping[str, Tensor]) -> None:
        stack, first, second = self.stacks[name], self.first[name], self.second[name]
        grad = stack.grad
        if grad is None:
            return
        if index is None:
            p, m, v, g = stack, first, second, grad
        else:  # copies of the slots that take part: the others are not even read
            p, m, v, g = stack[index], first[index], second[index], grad[index]
        lr, eps, correct1, correct2, decay = (_per_slot(numbers[key], p) for key in numbers)
        m.lerp_(g, 1 - _BETA1)
        v.mul_(_BETA2).addcmul_(g, g, value=1 - _BETA2)
        if self._decays[name]:
            p.mul_(1 - lr * decay)
        p.sub_((m / correct1) / ((v / correct2).sqrt() + eps) * lr)
        if index is not None:
            stack[index], first[index], second[index] = p, m, v


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """The rate of step `step` (from 0) of `num_steps`."""
    warmup_steps = int(train.warmup * num_steps)
    if train.schedule == "bert":
        # The original's: decay from the very start, overridden by the warm-up, so it drops to 0.9·lr at its end.
        share = step / warmup_steps if step < warmup_steps else 1 - step / num_steps
    elif step < warmup_steps:
        share = (step + 1) / warmup_steps
    elif train.schedule == "constant":
        share = 1.0
    else:
        share = (num_steps - step) / max(1, num_steps - warmup_steps)
    return train.lr * share


def _per_slot(values_S: Tensor, like: Tensor) -> Tensor:
    return values_S.view(-1, *[1] * (like.dim() - 1))
