"""Changes of linear layers: low-rank updates (LoRA, DoRA), factors ((IA)³) and biases (BitFit).

LoRA (Hu et al. 2022) adds `scale·x·down·up` to a layer's output. DoRA (Liu et al. 2024) trains the length of every
output's weights apart: `y = m·(W + s·B·A)x / ‖W + s·B·A‖ + b`, where A and B are the way down and up, the norm is that
of each output's weights and gets no gradient (as in the paper, 4.3), and the magnitude m begins as ‖W‖. With
f = m / ‖…‖ this is `y + (f − 1)·(y − b) + f·s·B·A·x` of the frozen layer's y: only the norms of the weights are needed,
which follow from products as wide as the rank. Where a slot has no DoRA, f is one and the row does not change by a bit.

(IA)³ (Liu et al. 2022) multiplies what linear layers give (keys, values) or read (the wide activations). BitFit (Ben
Zaken et al. 2022) trains their biases, which begin as the backbone's.

Shape letters: S slots, A slots of a pass, D input width, R rank, E output width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.kernels import reference as kernels
from inlay.model.kernels.bottleneck_weights import Bottleneck, BottleneckShape
from inlay.model.parts.bottleneck import gathered_update
from inlay.model.parts.part import (
    Occupants,
    Operation,
    Part,
    Placed,
    ResolvedMethod,
    SiteShapes,
    SlotOperation,
    Stacks,
    TensorSpec,
    adapted_layers,
    adapted_linears,
)

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone
    from inlay.model.bank.pass_hooks import PassHooks

_SMALLEST = 1e-20  # least squared norm, for updates that cancel the weights


class LoraPart(Part):
    """Low-rank updates of linear layers."""

    prefix = "lora."
    form: ClassVar[str] = "lora"
    is_compact = True

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
                yield "linear", linear.key, LowRankUpdate(Bottleneck(down_SDR, up_SRE, shapes))


class LowRankUpdate(SlotOperation):
    """A low-rank update of a linear layer's output."""

    form = "lora"

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        if at.gather is not None:
            return y + gathered_update(x, self.weights, at.gather)
        return y + at.unlay(kernels.bottleneck(at.lay(x), self.weights, at.route))


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
        return _weight(module.inner, linear).square().sum(1).sqrt()

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        for hook, key, update in super().bind(anatomy, stacks, slots):
            assert isinstance(update, LowRankUpdate)
            magnitude_SE = stacks[self.name(key, "magnitude")]
            # An inference pass may be the first to bind; slots are set, and gradients taken, outside of such passes.
            with torch.inference_mode(False):
                scale_S = torch.zeros(len(magnitude_SE), device=magnitude_SE.device)
                is_own_S = torch.zeros_like(scale_S, dtype=torch.bool)
                operation = Redirected(update.weights, update, magnitude_SE, scale_S, is_own_S)
                for slot, shape in enumerate(update.weights.shapes):
                    operation.set_slot(slot, shape)
            yield hook, key, operation


@dataclass(frozen=True, eq=False)
class Redirected(SlotOperation):
    """A linear layer whose weights' directions are updated, and their lengths learnt."""

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

    def with_weights(self, change: Callable[[Bottleneck], Bottleneck]) -> Redirected:
        weights = change(self.weights)
        return replace(self, weights=weights, update=LowRankUpdate(weights))

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        used = sorted({segment.slot for segment in at.route.segments})  # none where any mix may come
        if used and all(self.weights.shapes[slot] is None for slot in used):
            return y
        factor = at.per_row(self._factors(_weight(inner, site), used), y)
        plain = y if inner.bias is None else y - inner.bias[site.start : site.stop]
        update = self.update.on_linear(site, x, torch.zeros_like(y), inner, at)
        return (y + (factor - 1) * plain + factor * update).to(y.dtype)

    def _factors(self, weight_ED: Tensor, used: list[int]) -> Tensor:
        """Return m / ‖W + s·B·A‖ [S, E]: computed for the slots of the pass, one elsewhere."""
        if not used or len(used) == len(self.is_own_S):
            factor_SE = self.magnitude_SE / self._norms(weight_ED, slice(None))
            return torch.where(self.is_own_S.unsqueeze(1), factor_SE, 1.0)
        slots_A = torch.tensor(used, device=self.magnitude_SE.device)
        factor_AE = self.magnitude_SE[slots_A] / self._norms(weight_ED, slots_A)
        factor_AE = torch.where(self.is_own_S[slots_A].unsqueeze(1), factor_AE, 1.0)
        return torch.ones_like(self.magnitude_SE).index_copy(0, slots_A, factor_AE)

    @torch.no_grad()
    def _norms(self, weight_ED: Tensor, slots: Any) -> Tensor:
        """Compute ‖W + s·B·A‖ of every output, by ‖W‖² + 2s·W·BA + s²·‖BA‖²: nothing is as large as the weights."""
        down_ADR, up_ARE = self.weights.down_SDR[slots].float(), self.weights.up_SRE[slots].float()
        scale_A1 = self.scale_S[slots].unsqueeze(1)
        up_AER = up_ARE.transpose(1, 2)
        across_AE = ((weight_ED @ down_ADR) * up_AER).sum(-1)
        within_AE = (up_AER @ (down_ADR.transpose(1, 2) @ down_ADR) * up_AER).sum(-1)
        squares_AE = weight_ED.square().sum(1) + 2 * scale_A1 * across_AE + scale_A1.square() * within_AE
        return squares_AE.clamp(min=_SMALLEST).sqrt()


def _weight(inner: Any, site: LinearSite) -> Tensor:
    """Return the frozen weights of a linear layer's site [E, D], in float32."""
    weight = inner.dequantized() if inner.weight is None else inner.weight.detach()
    return weight[site.start : site.stop].float()


class FactorPart(Part):
    """(IA)³'s factors on linear layers."""

    prefix = "ia3."

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        for linear in adapted_linears(anatomy, method):
            width = linear.in_width if scales_input(linear) else linear.out_width
            yield TensorSpec(self.name(linear.key), (width,), "ones")

    def neutral(self, name: str, backbone: Backbone) -> float:
        return 1.0

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        for linear in anatomy.linears:
            if self.name(linear.key) in stacks:
                yield "linear", linear.key, Factors(stacks[self.name(linear.key)])


def scales_input(linear: LinearSite) -> bool:
    """Tell whether (IA)³ scales this layer's input (the wide activations) rather than its output (keys, values)."""
    return linear.name in ("project", "contract")


@dataclass(frozen=True, eq=False)
class Factors(Operation):
    """A linear layer's factors [S, D]."""

    factor_SD: Tensor

    def on_input(self, site: LinearSite, x: Tensor, at: PassHooks) -> Tensor:
        return (x * at.per_row(self.factor_SD, x)).to(x.dtype) if scales_input(site) else x

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        return y if scales_input(site) else (y * at.per_row(self.factor_SD, y)).to(y.dtype)


class BiasPart(Part):
    """The biases of linear layers."""

    prefix = "bias."

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        layers = adapted_layers(anatomy, method)
        for linear in anatomy.linears:
            if linear.layer in layers and linear.has_bias:
                yield TensorSpec(self.name(linear.key), (linear.out_width,), "backbone", part="biases")

    def neutral(self, name: str, backbone: Backbone) -> Tensor:
        return backbone.own_tensor(name)

    def own(self, name: str, backbone: Backbone) -> Tensor:
        key = name.removeprefix(self.prefix)
        linear = next(linear for linear in backbone.anatomy.linears if linear.key == key)
        return backbone.model.get_parameter(f"{linear.path}.inner.bias")[linear.start : linear.stop]

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        for linear in anatomy.linears:
            if self.name(linear.key) in stacks:
                yield "linear", linear.key, Biases(stacks[self.name(linear.key)])


@dataclass(frozen=True, eq=False)
class Biases(Operation):
    """A linear layer's biases [S, D], in place of the backbone's."""

    bias_SD: Tensor

    def on_linear(self, site: LinearSite, x: Tensor, y: Tensor, inner: Any, at: PassHooks) -> Tensor:
        return (y + at.per_row(self.bias_SD - inner.bias[site.start : site.stop], y)).to(y.dtype)


LORA, DORA, FACTORS, BIASES = LoraPart(), DoraPart(), FactorPart(), BiasPart()
