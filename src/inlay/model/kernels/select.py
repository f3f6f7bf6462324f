"""Selection of each row's own result: every kind that occurs is computed for all rows, and each row keeps its own.

For passes of any mix of slots (compiled, captured, exported), where nothing may depend on which rows are there.

Shape letters: S slots, B rows (or tokens), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.model.batch.route import Tiling


def pick(names: Sequence[Any], numbers_B: Tensor, compute: Callable[[Any], Tensor]) -> Tensor:
    """Select each row's result of `compute` by its name; `numbers_B` are indices in `names`."""
    return pick_numbered(dict(enumerate(names)), numbers_B, compute)


def pick_numbered(names: dict[int, Any], numbers_B: Tensor, compute: Callable[[Any], Tensor]) -> Tensor:
    """Select each row's result of `compute` by its number; a row whose number is not in `names` gets any of them."""
    (_, first), *others = names.items()
    result = compute(first)
    for number, name in others:
        is_own = (numbers_B == number).view(-1, *[1] * (result.dim() - 1))
        result = torch.where(is_own, compute(name), result)
    return result


@dataclass(frozen=True, eq=False)
class SlotKinds:
    """The kind of each slot, of several that occur."""

    names: tuple[Any, ...]
    """the kinds that occur"""
    numbers_S: Tensor
    """the place of each slot's kind among them"""

    def pick(self, compute: Callable[[Any], Tensor], tiling: Tiling) -> Tensor:
        """Select each token's result of `compute` by its slot's kind."""
        if len(self.names) == 1:
            return compute(self.names[0])
        return pick(self.names, self.numbers_S[tiling.slots_N], compute)

    @classmethod
    def of(cls, kinds: Sequence[Any], default: Any, device: torch.device) -> SlotKinds:
        """Return the kinds of slots; a slot of the kind None takes any, `default` if no other has one."""
        names = tuple(dict.fromkeys(kind for kind in kinds if kind is not None)) or (default,)
        numbers = [0 if kind is None else names.index(kind) for kind in kinds]
        return cls(names, torch.tensor(numbers, dtype=torch.int32, device=device))


class Gather:
    """The rows' slots, and gathers of their parameters: in an exported graph the slot is an input."""

    def __init__(self, slots_B: Tensor) -> None:
        self.slots_B = slots_B
        self._known: dict[tuple[float, ...], Tensor] = {}

    def own(self, stacked: Tensor) -> Tensor:
        """Return each row's own entry of a stack."""
        return stacked.index_select(0, self.slots_B)  # `stacked[slots_B]` is traced as a slower kind of gather

    def per_row(self, stacked_SD: Tensor, x: Tensor) -> Tensor:
        """Return each row's own vector [B, 1, …, D], to be added to or multiplied with the rows of x."""
        return self.own(stacked_SD).reshape(-1, *[1] * (x.dim() - 2), stacked_SD.shape[-1])

    def plus(self, x: Tensor, bias_SD: Tensor | None) -> Tensor:
        """Add each row's own vector, if there are any."""
        return x if bias_SD is None else x + self.per_row(bias_SD, x)

    def value(self, values: Sequence[float], x: Tensor) -> Tensor:
        """Return each row's own number [B, 1, …, 1], for the rows of x."""
        return self._numbers(values).reshape(-1, *[1] * (x.dim() - 1))

    def pick(self, kinds: Sequence[Any], compute: Callable[[Any], Tensor]) -> Tensor:
        """Select each row's result of `compute` by its slot's kind; a slot of the kind None gets any."""
        names = [*dict.fromkeys(kind for kind in kinds if kind is not None)]
        if len(names) == 1:
            return compute(names[0])
        return pick(names, self._numbers([0 if kind is None else names.index(kind) for kind in kinds]), compute)

    def _numbers(self, values: Sequence[float]) -> Tensor:
        key = tuple(map(float, values))
        if key not in self._known:
            self._known[key] = self.own(torch.tensor(key, dtype=torch.float32, device=self.slots_B.device))
        return self._known[key]
