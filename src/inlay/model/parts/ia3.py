"""(IA)³ (Liu et al. 2022): factors on what linear layers give (keys, values), or read (the wide activations)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.bank.resolved_method import ResolvedMethod
from inlay.model.parts.part import Occupants, Operation, Part, Placed, Stacks, TensorSpec, adapted_linears

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone
    from inlay.model.bank.pass_hooks import PassHooks


class FactorPart(Part):
    """Factors on linear layers."""

    prefix = "ia3."

    def name(self, key: str) -> str:
        """The name of a linear layer's factors."""
        return f"ia3.{key}"

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        for linear in adapted_linears(anatomy, method):
            width = linear.in_width if scales_input(linear) else linear.out_width
            yield TensorSpec(self.name(linear.key), (width,), "ones")

    def neutral(self, name: str, backbone: Backbone) -> float:
        return 1.0

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        for linear in anatomy.linears:
            if self.name(linear.key) in stacks:
                yield Placed("linear", linear.key, Factors(stacks[self.name(linear.key)]))


FACTORS = FactorPart()


def scales_input(linear: LinearSite) -> bool:
    """Whether (IA)³ scales this layer's input (the wide activations) rather than its output (keys, values)."""
    return linear.name in ("project", "contract")


@dataclass(frozen=True, eq=False)
class Factors(Operation):
    """A linear layer's factors [S, D]."""

    factor_SD: Tensor

    def on_input(self, site: LinearSite, x: Tensor, at: PassHooks) -> Tensor:
        return (x * at.per_row(self.factor_SD, x)).to(x.dtype) if scales_input(site) else x

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        return y if scales_input(site) else (y * at.per_row(self.factor_SD, y)).to(y.dtype)
