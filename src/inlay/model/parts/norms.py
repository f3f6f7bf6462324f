"""Layer norms: each slot's own scale and shift in place of the backbone's, which they begin as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from inlay.model.backbone.sites import Anatomy, NormSite
from inlay.model.kernels import reference as kernels
from inlay.model.parts.part import (
    Occupants,
    Operation,
    Part,
    Placed,
    ResolvedMethod,
    Stacks,
    TensorSpec,
    adapted_layers,
)

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone
    from inlay.model.bank.pass_hooks import PassHooks


@dataclass(frozen=True)
class NormPart(Part):
    """The backbone's layer norms."""

    with_scales: bool = True
    """False: their shifts alone are trained"""

    prefix = "norm."

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
            yield "norm", key, SlotNorm(*pair)


NORMS = NormPart()


def trained_norms(anatomy: Anatomy, method: ResolvedMethod) -> list[NormSite]:
    """Return the layer norms trained: by `norms` (all, encoder, none), and none below the lowest adapted layer."""
    if method.norms == "none":
        return []
    lowest = min(adapted_layers(anatomy, method))
    return [
        norm
        for norm in anatomy.norms
        if (norm.layer >= lowest or lowest == 0) and (norm.key != "embeddings" or method.norms == "all")
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
            return at.unlay(kernels.rms_norm(at.lay(x), scale_SD, inner.variance_epsilon, at.route))
        if at.gather is not None:
            normal = F.layer_norm(x, x.shape[-1:], eps=inner.eps) * at.gather.per_row(scale_SD, x)
            return at.gather.plus(normal, self.shift_SD)
        return at.unlay(kernels.layer_norm(at.lay(x), scale_SD, self.shift_SD, inner.eps, at.route))
