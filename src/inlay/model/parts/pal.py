"""Projected attention layers (Stickland and Murray 2019): a small attention layer beside every block.

One way down and up for all blocks, attention of its own for each: `decode·attention(encode·x)`, added to what the
block's feed-forward sublayer gives.

Shape letters: S slots, D width, P width of the small attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from inlay.model.backbone.sites import Anatomy
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
    from inlay.model.bank.pass_hooks import PassHooks

_ITEMS = ("query", "key", "value")
_SHARE, _STD = 0.266, 0.02


class PalPart(Part):
    """Projected attention beside every block."""

    prefix = "pal."
    graph_obstacle = (
        "has attention of its own beside every block",
        "no graph holds it: leave it out, or train it with an adapter method",
    )

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        # The multiple of the head count nearest to 0.266 of the backbone's width.
        width, num_heads = anatomy.hidden_size, anatomy.num_heads
        size = max(1, round(_SHARE * width / num_heads)) * num_heads
        yield TensorSpec("pal.encode", (width, size), "normal", _STD)
        yield TensorSpec("pal.decode", (size, width), "normal", _STD)
        for layer in adapted_layers(anatomy, method):
            for item in _ITEMS:
                yield TensorSpec(f"pal.{layer}.{item}", (size, size), "normal", _STD)

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        for layer in range(anatomy.num_layers):
            if f"pal.{layer}.query" in stacks:
                query, key, value = (stacks[f"pal.{layer}.{item}"] for item in _ITEMS)
                encode, decode = stacks["pal.encode"], stacks["pal.decode"]
                weights = kernels.Projected(encode, decode, query, key, value, anatomy.num_heads)
                yield "output", f"{layer}.feedforward", ProjectedAttention(weights)


PALS = PalPart()


@dataclass(frozen=True, eq=False)
class ProjectedAttention(Operation):
    """Projected attention of a block's input, added to the output of its feed-forward sublayer."""

    weights: kernels.Projected
    reads_block = True

    def on_output(self, place: str, y: Tensor, at: PassHooks) -> Tensor:
        if at.entered is None:
            return y
        whole = at.whole  # attention reads all tokens, also where the block computes a few
        return y + at.take(whole.unlay(kernels.projected_attention(whole.lay(at.entered), self.weights, whole.route)))
