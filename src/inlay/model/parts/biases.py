"""BitFit (Ben Zaken et al. 2022): the biases of linear layers are trained; they begin as the backbone's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.bank.resolved_method import ResolvedMethod
from inlay.model.parts.part import Occupants, Operation, Part, Placed, Stacks, TensorSpec, adapted_layers

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone
    from inlay.model.bank.pass_hooks import PassHooks


class BiasPart(Part):
    """The biases of linear layers."""

    prefix = "bias."

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        layers = adapted_layers(anatomy, method)
        for linear in anatomy.linears:
            if linear.layer in layers and linear.has_bias:
                yield TensorSpec(f"bias.{linear.key}", (linear.out_width,), "backbone", part="biases")

    def neutral(self, name: str, backbone: Backbone) -> Tensor:
        return backbone.own_tensor(name)

    def own(self, name: str, backbone: Backbone) -> Tensor:
        key = name.removeprefix(self.prefix)
        linear = next(linear for linear in backbone.anatomy.linears if linear.key == key)
        return backbone.model.get_parameter(f"{linear.path}.inner.bias")[linear.start : linear.stop]

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        for linear in anatomy.linears:
            if f"bias.{linear.key}" in stacks:
                yield Placed("linear", linear.key, Biases(stacks[f"bias.{linear.key}"]))


BIASES = BiasPart()


@dataclass(frozen=True, eq=False)
class Biases(Operation):
    """A linear layer's biases [S, D], in place of the backbone's."""

    bias_SD: Tensor

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        return (y + at.per_row(self.bias_SD - inner.bias[site.start : site.stop], y)).to(y.dtype)
