"""The head's tensors: a linear layer on the states of a pass; a layer before it and a mix of layers are options.

Shape letters: L outputs, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from inlay.model.backbone.families import find_family
from inlay.model.backbone.sites import Anatomy
from inlay.model.heads.heads import HeadSpec
from inlay.model.parts.part import Part, TensorSpec

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone

WEIGHT, BIAS = "head.weight", "head.bias"
"""the layer that gives the outputs"""
PAIR_WEIGHT = "head.pair_weight"
"""the weights of v, |u − v|, u · v and the cosine of a pair that is read apart; `WEIGHT` is for u"""
HIDDEN_WEIGHT, HIDDEN_BIAS = "head.hidden.weight", "head.hidden.bias"
"""the layer before it"""
MIX, MIX_SCALE = "head.mix", "head.mix_scale"
"""ELMo's mix of layers: a softmax over them, embeddings first, and a factor"""
OUTPUTS = (WEIGHT, PAIR_WEIGHT)
"""matrices with a row for each output"""


class HeadPart(Part):
    """The head of a task."""

    prefix = "head."

    def of(self, anatomy: Anatomy, head: HeadSpec) -> Iterator[TensorSpec]:
        """Yield the tensors of this head."""
        width = anatomy.hidden_size
        if head.is_written:
            return
        if head.features == "mix":
            yield TensorSpec(MIX, (anatomy.num_layers + 1,), "zeros", part="head")
            yield TensorSpec(MIX_SCALE, (1,), "ones", part="head")
        if head.hidden != "none":
            start = "backbone" if head.hidden == "pooler" else "normal"
            bias = "backbone" if head.hidden == "pooler" else "zeros"
            yield TensorSpec(HIDDEN_WEIGHT, (width, width), start, 0.02, "head")
            yield TensorSpec(HIDDEN_BIAS, (width,), bias, part="head")
        # The head starts from a truncated normal of 0.02, as BERT's own classifier.
        yield TensorSpec(WEIGHT, (head.num_outputs, width), "normal", 0.02, "head")
        if head.has_towers:
            yield TensorSpec(PAIR_WEIGHT, (head.num_outputs, 3 * width + 1), "normal", 0.02, "head")
        yield TensorSpec(BIAS, (head.num_outputs,), "zeros", part="head")

    def own(self, name: str, backbone: Backbone) -> Tensor:
        item = name.rpartition(".")[2]
        return backbone.model.get_parameter(f"{find_family(backbone.anatomy.family).pooler}.dense.{item}")


HEAD = HeadPart()


def is_of_head(name: str) -> bool:
    """Tell whether a tensor belongs to the head."""
    return HEAD.owns(name)
