"""DoRA (Liu et al. 2024): LoRA's update of a linear layer, with the length of every output's weights trained apart.

`y = m·(W + s·B·A)x / ‖W + s·B·A‖ + b`, where A and B are the way down and up, the norm is that of each output's
weights and gets no gradient (as in the paper, 4.3), and the magnitude m begins as ‖W‖. With f = m / ‖…‖ this is
`y + (f − 1)·(y − b) + f·s·B·A·x` of the frozen layer's y: of the weights nothing but their norms is needed, which
follow from products as wide as the rank. Where a slot has none, f is one and the row is as it was to the last bit.

Shape letters: S slots, A slots of a pass, D input width, R rank, E output width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.bank.resolved_method import ResolvedMethod
from inlay.model.kernels.bottleneck_weights import Bottleneck, BottleneckShape
from inlay.model.parts.lora import LoraPart, LowRankUpdate
from inlay.model.parts.part import Occupants, Placed, SlotOperation, Stacks, TensorSpec

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone
    from inlay.model.bank.pass_hooks import PassHooks

_SMALLEST = 1e-20  # least squared norm, for updates that cancel the weights


class DoraPart(LoraPart):
    """Low-rank updates of linear layers, and the magnitudes of their weights."""

    prefix = "dora."
    form = "dora"

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        widths = {linear.key: linear.out_width for linear in anatomy.linears}
        for item in super().tensors(anatomy, method):
            yield item
            key, _, which = item.name.removeprefix(self.prefix).rpartition(".")
            if which == "up":
                yield TensorSpec(self.name(key, "magnitude"), (widths[key],), "backbone")

    def neutral(self, name: str, backbone: Backbone) -> Tensor | float:
        return backbone.own_tensor(name) if name.endswith(".magnitude") else 0.0

    def own(self, name: str, backbone: Backbone) -> Tensor:
        key = name.removeprefix(self.prefix).rpartition(".")[0]
        linear = next(linear for linear in backbone.anatomy.linears if linear.key == key)
        module: Any = backbone.model.get_submodule(linear.path)
        return _squares(_weight(module.inner, linear)).sqrt()

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        for placed in super().bind(anatomy, stacks, slots):
            update = placed.operation
            assert isinstance(update, LowRankUpdate)
            magnitude_SE = stacks[self.name(placed.key, "magnitude")]
            # An inference pass may be the first to bind; slots are set, and gradients taken, outside of such passes.
            with torch.inference_mode(False):
                scale_S = torch.zeros(len(magnitude_SE), device=magnitude_SE.device)
                is_own_S = torch.zeros_like(scale_S, dtype=torch.bool)
                operation = Redirected(update.weights, update, magnitude_SE, scale_S, is_own_S)
                for slot, shape in enumerate(update.weights.shapes):
                    operation.set_slot(slot, shape)
            yield replace(placed, operation=operation)


DORA = DoraPart()


def _weight(inner: Any, site: LinearSite) -> Tensor:
    """The frozen weights of a linear layer's site [E, D], in float32."""
    weight = inner.dequantized() if inner.weight is None else inner.weight.detach()
    return weight[site.start : site.stop].float()


def _squares(weight_ED: Tensor) -> Tensor:
    return weight_ED.square().sum(1)


@dataclass(frozen=True, eq=False)
class Redirected(SlotOperation):
    """A linear layer whose weights' directions are updated, and their lengths learnt."""

    weights: Bottleneck
    update: LowRankUpdate
    magnitude_SE: Tensor
    scale_S: Tensor
    is_own_S: Tensor
    """the slots that have one here"""
    form = "dora"

    @torch.no_grad()
    def set_slot(self, slot: int, shape: BottleneckShape | None) -> None:
        super().set_slot(slot, shape)
        self.scale_S[slot] = 0.0 if shape is None else shape.scale
        self.is_own_S[slot] = shape is not None

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        used = {segment.slot for segment in at.route.segments}  # none where any mix may come
        if used and all(self.weights.shapes[slot] is None for slot in used):
            return y
        factor = at.per_row(self._factors(_weight(inner, site), at), y)
        plain = y if inner.bias is None else y - inner.bias[site.start : site.stop]
        update = self.update.on_linear(site, x, torch.zeros_like(y), inner, at)
        return (y + (factor - 1) * plain + factor * update).to(y.dtype)

    def with_weights(self, change: Callable[[Bottleneck], Bottleneck]) -> Redirected:
        update = self.update.with_weights(change)
        return replace(self, weights=update.weights, update=update)

    def _factors(self, weight_ED: Tensor, at: PassHooks) -> Tensor:
        """m / ‖W + s·B·A‖ [S, E]: computed for the slots of the pass, one elsewhere."""
        used = sorted({segment.slot for segment in at.route.segments})  # none where any mix may come
        if not used or len(used) == len(self.is_own_S):
            factor_SE = self.magnitude_SE / self._norms(weight_ED, slice(None))
            return torch.where(self.is_own_S.unsqueeze(1), factor_SE, 1.0)
        slots_A = torch.tensor(used, device=self.magnitude_SE.device)
        factor_AE = self.magnitude_SE[slots_A] / self._norms(weight_ED, slots_A)
        factor_AE = torch.where(self.is_own_S[slots_A].unsqueeze(1), factor_AE, 1.0)
        return torch.ones_like(self.magnitude_SE).index_copy(0, slots_A, factor_AE)

    @torch.no_grad()
    def _norms(self, weight_ED: Tensor, slots: Any) -> Tensor:
        """‖W + s·B·A‖ of every output, as ‖W‖² + 2s·W·BA + s²·‖BA‖²: nothing is as large as the weights."""
        down_ADR, up_ARE = self.weights.down_SDR[slots].float(), self.weights.up_SRE[slots].float()
        scale_A1 = self.scale_S[slots].unsqueeze(1)
        up_AER = up_ARE.transpose(1, 2)
        across_AE = ((weight_ED @ down_ADR) * up_AER).sum(-1)
        within_AE = (up_AER @ (down_ADR.transpose(1, 2) @ down_ADR) * up_AER).sum(-1)
        squares_AE = _squares(weight_ED) + 2 * scale_A1 * across_AE + scale_A1.square() * within_AE
        return squares_AE.clamp(min=_SMALLEST).sqrt()
