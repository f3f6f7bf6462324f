"""The inputs of a batch's heads, read from the states of a pass: one vector for each row, or every token.

Heads that pool alike do it at once, whatever their number: on a GPU each operation is a launch. The two texts of a pair
that is read apart are pooled each by itself, to u and v; the head reads them and features of both.

Shape letters: B rows, D hidden, T tokens of a row, L outputs, F features of a pair beside u (3 D + 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.batch.route import Batch, Segment
from inlay.model.batch.tiles import Tiles
from inlay.model.heads.heads import HeadSpec
from inlay.model.kernels import grouped
from inlay.model.parts import head as head_part

if TYPE_CHECKING:
    from inlay.model.bank.bank import Bank


_SMALLEST = 1e-12  # least product of two lengths that a cosine is divided by


@dataclass(frozen=True)
class HeadInput:
    """The input of a segment's head, float32."""

    states: Tensor
    """one vector for each row [n, D], or one for each token; u for pairs that are read apart"""
    pairs_BF: Tensor | None = None
    """for such pairs v, |u − v|, u · v (element by element) and the cosine of u and v, side by side"""

    @property
    def vectors(self) -> Tensor:
        """The whole input of each row, side by side."""
        return self.states if self.pairs_BF is None else torch.cat([self.states, self.pairs_BF], -1)


def read(
    bank: Bank, batch: Batch, layers: Sequence[Tensor], rates: Sequence[float], weights: Mapping[str, Tensor] | None
) -> list[HeadInput]:
    """Read the input of each segment's head, after dropout at the segment's rate.

    `layers` are the last states, or those of all layers; tokens are padded or packed as they lie.
    """
    slots = [segment.slot for segment in batch.route.segments]
    heads = [bank.head_of(slot) for slot in slots]
    kinds = {(h.pooling, h.reads_rows, h.features, h.hidden, rate) for h, rate in zip(heads, rates, strict=True)}
    if kinds == {(heads[0].pooling, True, "last", "none", rates[0])}:
        states = layers[-1] if batch.pack is None else layers[-1][0]
        pooled_BD = _pool(bank, batch, Segment(slots[0], 0, batch.num_texts), states, weights)
        if batch.split is None:
            return [HeadInput(own) for own in _dropped(pooled_BD, rates[0]).float().split(sizes_of(batch.rows))]
        parts = zip(heads, pooled_BD.split(sizes_of(batch.texts)), strict=True)
        return [
            _pair_up(own, rates[0]) if head.has_towers else HeadInput(_dropped(own, rates[0]).float())
            for head, own in parts
        ]
    # Slices would each fill all states with zeros in the backward pass.
    split = [(layer if batch.pack is None else layer[0]).split(sizes_of(batch.route.segments)) for layer in layers]
    found = []
    for head, rate, texts, own in zip(heads, rates, batch.texts, zip(*split, strict=True), strict=True):
        states = _mix(bank, texts.slot, own)
        states = _pool(bank, batch, texts, states, weights) if head.reads_rows else states
        if head.has_towers:
            found.append(_pair_up(states, rate))
            continue
        # BERT's dropout follows its pooler, it does not precede it.
        states = _dropped(states, 0.0 if head.hidden == "pooler" else rate)
        found.append(HeadInput(_before_head(bank, texts.slot, states, head, rate)))
    return found


def _pair_up(vectors: Tensor, rate: float) -> HeadInput:
    """Make a head's input of pairs whose texts lie side by side; dropout acts on each feature by itself."""
    u_BD, v_BD = vectors.float().unflatten(0, (-1, 2)).unbind(1)
    # Features first, then dropout: otherwise |u − v| would mostly measure which elements were dropped.
    return HeadInput(_dropped(u_BD, rate), _dropped(pair_features(u_BD, v_BD), rate))


def pair_features(u_BD: Tensor, v_BD: Tensor) -> Tensor:
    """Return v, |u − v|, u · v (element by element) and the cosine of u and v, side by side [B, 3 D + 1]."""
    lengths_B = u_BD.norm(dim=-1) * v_BD.norm(dim=-1)
    cosine_B = (u_BD * v_BD).sum(-1) / lengths_B.clamp(min=_SMALLEST)
    return torch.cat([v_BD, (u_BD - v_BD).abs(), u_BD * v_BD, cosine_B.unsqueeze(-1)], -1)


def as_rows(logits: Tensor, states: Tensor, batch: Batch, texts: Segment) -> Tensor:
    """Return the logits of tokens as padded rows [n, T, L]."""
    if batch.pack is None:
        return logits.view(*states.shape[:-1], -1)
    return batch.pack.take(texts.start, texts.stop).unpack(logits)


def sizes_of(segments: Sequence[Segment]) -> list[int]:
    """Return the number of items of each segment."""
    return [segment.stop - segment.start for segment in segments]


def _pool(bank: Bank, batch: Batch, texts: Segment, states: Tensor, weights: Mapping[str, Tensor] | None) -> Tensor:
    """Return a vector for each of some neighbouring texts, of their states."""
    pooling = bank.head_of(texts.slot).pooling
    if batch.pack is not None:
        return bank.backbone.pool_packed(states, batch.pack.take(texts.start, texts.stop), pooling, weights)
    assert batch.mask_BT is not None
    return bank.backbone.pool(states, batch.mask_BT[texts.start : texts.stop], pooling, weights)


def _mix(bank: Bank, slot: int, layers: Sequence[Tensor]) -> Tensor:
    """Return the last layer, or ELMo's mix of all: a factor times their mean weighted by a softmax."""
    if bank.head_of(slot).features == "last":
        return layers[-1]
    weights = torch.softmax(bank.stacks[head_part.MIX][slot], -1) * bank.stacks[head_part.MIX_SCALE][slot]
    # In float32: bf16 would round away what the weights learn.
    mixed = sum(weight * layer.float() for weight, layer in zip(weights, layers, strict=True))
    return mixed.to(layers[-1].dtype)


def _before_head(bank: Bank, slot: int, vector_BD: Tensor, head: HeadSpec, rate: float) -> Tensor:
    """Return the vector the head reads: as it is, or through a tanh layer."""
    if head.hidden == "none":
        return vector_BD.float()
    weight, bias = bank.stacks[head_part.HIDDEN_WEIGHT][slot], bank.stacks[head_part.HIDDEN_BIAS][slot]
    return _dropped(torch.tanh(F.linear(vector_BD.float(), weight, bias)), rate)


def apply_heads(
    vectors_VD: Tensor,
    stacks: Mapping[str, Tensor],
    tiles: Tiles,
    has_hidden_V: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] = lambda above: above,
) -> Tensor:
    """Apply each vector's own slot's head [V, L], with tensors alone: for passes of any mix of slots.

    `has_hidden_V` says which have a hidden layer, if any may; `drop` is the dropout after that layer.
    """
    if has_hidden_V is not None:  # slots without one have zeros there
        weight_SDD = stacks[head_part.HIDDEN_WEIGHT].transpose(1, 2)
        above_VD = torch.tanh(grouped.segment_linear(vectors_VD, weight_SDD, stacks[head_part.HIDDEN_BIAS], tiles))
        vectors_VD = torch.where(has_hidden_V.unsqueeze(1) > 0, drop(above_VD), vectors_VD)
    weight_SDL = stacks[head_part.WEIGHT].transpose(1, 2)
    return grouped.segment_linear(vectors_VD, weight_SDL, stacks[head_part.BIAS], tiles)


def _dropped(vector: Tensor, rate: float) -> Tensor:
    return F.dropout(vector, rate) if rate else vector
