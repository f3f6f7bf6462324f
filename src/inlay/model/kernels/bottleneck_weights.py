"""The bottlenecks of one site: stacked weights, the form of each slot's bottleneck, and these forms as tensors.

Shape letters: S slots, D width, E output width, R bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.kernels.fused_bottleneck import MAX_SIZE
from inlay.model.kernels.select import SlotKinds

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu-exact": F.gelu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "swish": F.silu,
}
NORM_EPS = 1e-5  # epsilon of the norms inside a bottleneck, torch's default


@dataclass(frozen=True)
class BottleneckShape:
    """The form of one slot's bottleneck: everything but its weights."""

    size: int
    activation: str | None = None
    """None: no activation, as in LoRA"""
    scale: float = 1.0
    depth: int = 1
    inner_norm: str = "none"
    multiplies: bool = False
    """the update is h·f(h), so that h + update = h·(1 + f(h))"""

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The settings that are not numbers, as `SlotForms.kinds` has them."""
        return self.activation or "none", self.depth, self.inner_norm, self.multiplies


_DEFAULTS = ("none", 1, "none", False)  # kinds of slots where no slot has a bottleneck


@dataclass(frozen=True, eq=False)
class SlotForms:
    """The forms of a site's slots as tensors, for routes that have a tiling."""

    kinds: tuple[SlotKinds, SlotKinds, SlotKinds, SlotKinds]
    """activations, depths, inner norms, and whether updates multiply"""
    scale_S: Tensor
    sizes_S: Tensor
    is_plain: bool
    """one fused program does it: no norm inside, no further layers, one activation, at most `MAX_SIZE` wide"""
    is_scaled: bool
    """whether updates are multiplied by a factor; False if every slot's is 1"""


@dataclass(frozen=True)
class Bottleneck:
    """The stacked bottlenecks of one site. A slot of shape None has none here; columns beyond its size are padding."""

    down_SDR: Tensor
    up_SRE: Tensor
    shapes: list[BottleneckShape | None]
    down_bias_SR: Tensor | None = None
    up_bias_SE: Tensor | None = None
    hidden: tuple[tuple[Tensor, Tensor], ...] = ()
    """[S, R, R] and [S, R] of each further layer"""
    norm: tuple[Tensor, Tensor] | None = None
    """scale and shift [S, R] of the norm inside"""
    out_norm: tuple[Tensor, Tensor] | None = None
    """scale and shift [S, E] of the norm after it"""
    running: tuple[Tensor, Tensor] | None = None
    """mean and variance [S, R] that batch norm uses outside of training"""
    copies: tuple[Tensor, Tensor] | None = None
    """down and up in the type of the tokens, where a device reads them faster so; the gradients are still theirs"""
    forms: SlotForms | None = None
    """where routes have tilings"""

    @property
    def is_fused(self) -> bool:
        """Whether one program computes them: it reads copies in the type of the tokens, and drops by itself."""
        return self.forms is not None and self.forms.is_plain

    def has_kind(self, shape: BottleneckShape) -> bool:
        """Tell whether a slot of this shape fits in place: its kinds occur, and it is no deeper than the stacks."""
        kinds = () if self.forms is None else zip(self.forms.kinds, shape.kinds, strict=True)
        return shape.depth <= len(self.hidden) + 1 and all(name in kind.names for kind, name in kinds)

    @torch.no_grad()
    def set_slot(self, slot: int, shape: BottleneckShape | None) -> None:
        """Make a slot of this shape, which must be of a kind that occurs; its weights are set by others."""
        self.shapes[slot] = shape
        if self.forms is None:
            return
        self.forms.scale_S[slot] = 0.0 if shape is None else shape.scale
        self.forms.sizes_S[slot] = 1 if shape is None else shape.size
        if shape is not None:
            for kind, name in zip(self.forms.kinds, shape.kinds, strict=True):
                kind.numbers_S[slot] = kind.names.index(name)

    def with_forms(self, known: SlotForms | None = None, *, is_fixed: bool = False) -> Bottleneck:
        """Return the same ready for routes that have a tiling; `known` are the forms of slots of the same shapes.

        With `is_fixed` no slot will change its shape later: steps that no slot needs, such as a factor, are left out.
        """
        if known is not None:
            return replace(self, forms=known)
        device, shapes = self.down_SDR.device, self.shapes
        by_slot = [None if shape is None else shape.kinds for shape in shapes]
        activations, depths, inner_norms, multiplies = (
            SlotKinds.of([None if kinds is None else kinds[which] for kinds in by_slot], default, device)
            for which, default in enumerate(_DEFAULTS)
        )
        is_plain = len(activations.names) == 1 and inner_norms.names == ("none",) and multiplies.names == (False,)
        scales = [0.0 if shape is None else shape.scale for shape in shapes]
        sizes = [1 if shape is None else shape.size for shape in shapes]
        forms = SlotForms(
            (activations, depths, inner_norms, multiplies),
            torch.tensor(scales, device=device),
            torch.tensor(sizes, dtype=torch.int32, device=device),
            is_plain=is_plain and not self.hidden and self.down_SDR.shape[-1] <= MAX_SIZE,
            is_scaled=not is_fixed or any(scale != 1.0 for scale in scales),
        )
        return replace(self, forms=forms)
