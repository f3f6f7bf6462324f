"""LoRA (Hu et al. 2022): a low-rank update of linear layers, `y + scale·x·down·up`.

Shape letters: S slots, D input width, R rank, E output width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.bank.resolved_method import ResolvedMethod
from inlay.model.kernels import reference as kernels
from inlay.model.kernels.bottleneck_weights import Bottleneck, BottleneckShape
from inlay.model.parts.bottleneck import gathered_update
from inlay.model.parts.part import (
    Occupants,
    Part,
    Placed,
    SiteShapes,
    SlotOperation,
    Stacks,
    TensorSpec,
    adapted_linears,
)

if TYPE_CHECKING:
    from inlay.model.bank.pass_hooks import PassHooks


class LoraPart(Part):
    """Low-rank updates of linear layers."""

    prefix = "lora."
    form = "lora"
    is_compact = True

    def name(self, key: str, item: str) -> str:
        """The name of `down` or `up` of a linear layer's update."""
        return f"{self.prefix}{key}.{item}"

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        assert method.size is not None
        for linear in adapted_linears(anatomy, method):
            down, up = (linear.in_width, method.size), (method.size, linear.out_width)
            yield TensorSpec(self.name(linear.key, "down"), down, "uniform", ranks=(1,))
            yield TensorSpec(self.name(linear.key, "up"), up, "zeros", ranks=(0,))

    def shapes(self, anatomy: Anatomy, method: ResolvedMethod) -> SiteShapes:
        assert method.size is not None
        shape = BottleneckShape(method.size, scale=1.0 if method.scale is None else method.scale)
        return {(self.form, linear.key): shape for linear in adapted_linears(anatomy, method)}

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        for linear in anatomy.linears:
            shapes = slots.shapes.get((self.form, linear.key))
            if shapes is not None:
                down_SDR, up_SRE = (stacks[self.name(linear.key, item)] for item in ("down", "up"))
                yield Placed("linear", linear.key, LowRankUpdate(Bottleneck(down_SDR, up_SRE, shapes)))


LORA = LoraPart()


@dataclass(frozen=True, eq=False)
class LowRankUpdate(SlotOperation):
    """A low-rank update of a linear layer's output."""

    weights: Bottleneck
    form = "lora"

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        if at.gather is not None:
            return y + gathered_update(x, self.weights, at.gather)
        return y + at.unlay(kernels.bottleneck(at.lay(x), self.weights, at.route))

    def with_weights(self, change: Callable[[Bottleneck], Bottleneck]) -> LowRankUpdate:
        return replace(self, weights=change(self.weights))
