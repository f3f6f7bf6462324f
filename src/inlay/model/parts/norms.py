"""Layer norms: each slot's own scale and shift in place of the backbone's, which they begin as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from inlay.model.backbone.sites import Anatomy, NormSite
from inlay.model.bank.resolved_method import ResolvedMethod
from inlay.model.parts.part import Occupants, Operation, Part, Placed, Stacks, TensorSpec, adapted_layers

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone
    from inlay.model.bank.pass_hooks import PassHooks


@dataclass(frozen=True)
class NormPart(Part):
    """The backbone's layer norms."""

    with_scales: bool = True
    """False: their shifts alone are trained"""

    prefix = "norm."

    def name(self, key: str, item: str) -> str:
        """The name of a norm's `scale` or `shift`."""
        return f"norm.{key}.{item}"

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        for norm in trained_norms(anatomy, method):
            if self.with_scales:
                yield TensorSpec(self.name(norm.key, "scale"), (norm.width,), "backbone", part="norms")
            if norm.has_shift:
                yield TensorSpec(self.name(norm.key, "shift"), (norm.width,), "backbone", part="norms")

    def neutral(self, name: str, backbone: Backbone) -> Tensor:
        return backbone.own_tensor(name)

    def own(self, name: str, backbone: Backbone) -> Tensor:
        key, _, item = name.removeprefix(self.prefix).rpartition(".")
        path = next(norm.path for norm in backbone.anatomy.norms if norm.key == key)
        return backbone.model.get_parameter(f"{path}.inner.{'weight' if item == 'scale' else 'bias'}")

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        keys = dict.fromkeys(name.removeprefix(self.prefix).rpartition(".")[0] for name in stacks if self.owns(name))
        for key in keys:
            pair = (stacks.get(self.name(key, item)) for item in ("scale", "shift"))
            yield Placed("norm", key, SlotNorm(*pair))


NORMS = NormPart()


def trained_norms(anatomy: Anatomy, method: ResolvedMethod) -> list[NormSite]:
    """The layer norms trained: by `norms` (all, encoder, none), and none below the lowest adapted layer."""
    if method.norms == "none":
        return []
    lowest = min(adapted_layers(anatomy, method))
    return [
        norm
        for norm in anatomy.norms
        if (norm.layer >= lowest or lowest == 0) and (norm.is_encoder or method.norms == "all")
    ]


@dataclass(frozen=True, eq=False)
class SlotNorm(Operation):
    """A layer norm's scale and shift [S, D]; None: the backbone's own."""

    scale_SD: Tensor | None
    shift_SD: Tensor | None

    def on_norm(self, x: Tensor, inner: Any, at: PassHooks) -> Tensor:
        scale_SD = self.scale_SD
        if scale_SD is None:  # BitFit trains the shift alone
            assert self.shift_SD is not None
            scale_SD = inner.weight.to(self.shift_SD.dtype).expand(len(self.shift_SD), -1)
        if not isinstance(inner, nn.LayerNorm):  # T5's
            return at.rms_norm(x, scale_SD, inner.variance_epsilon)
        return at.layer_norm(x, scale_SD, self.shift_SD, inner.eps)
