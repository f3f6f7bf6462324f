"""Bottlenecks and attention on the tiles of a pack, each a launch or a few for all slots together, whatever the mix.

`reference.py` has the definitions; tests hold these equal to them. A plain bottleneck goes through one fused program;
other forms are composed of grouped products. Where slots differ in kind (activation, depth, a norm inside), every kind
that occurs is computed and each token keeps its own. Nothing here depends on a route's values: a compiled or captured
pass is right for every mix.

Shape letters: S slots, N packed tokens, D width, E output width, R bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inlay.model.batch.route import Tiling
from inlay.model.kernels import fused_bottleneck as fused
from inlay.model.kernels import fused_norm, grouped
from inlay.model.kernels.bottleneck_weights import ACTIVATIONS, NORM_EPS, Bottleneck
from inlay.model.kernels.fused_attention import segment_attention


@dataclass(frozen=True, eq=False)
class Drop:
    """The dropout that stands before an adapter."""

    rate: float
    seed: Tensor
    """[1], on the device: another one at every step and in every block"""
    salt: int
    """tells the places of a block apart"""


def bottleneck(
    h_ND: Tensor, weights: Bottleneck, tiling: Tiling, *, is_added: bool, drop: Drop | None = None
) -> Tensor:
    """Compute scale·up(act(down(h))) by each token's own slot, zero where a slot has no bottleneck here.

    With `is_added` h is added to it. Only fused bottlenecks read dropout(h) in h's stead.
    """
    forms, tiles = weights.forms, tiling.tiles
    assert forms is not None, "views for routes with tilings have them"
    activations, depths, inner_norms, multiplies = forms.kinds
    if forms.is_plain:
        ends, biases = (weights.down_SDR, weights.up_SRE), (weights.down_bias_SR, weights.up_bias_SE)
        stacks = fused.Stacks(*ends, forms.scale_S, *biases, weights.copies)
        more: dict[str, Any] = {} if drop is None else {"dropout": drop.rate, "seed": drop.seed, "salt": drop.salt}
        return fused.bottleneck(h_ND, stacks, tiles, activations.names[0], residual=is_added, **more)
    assert drop is None

    def activate(z_NR: Tensor) -> Tensor:
        return activations.pick(lambda name: z_NR if name == "none" else ACTIVATIONS[name](z_NR), tiling)

    z_NR = grouped.segment_linear(h_ND, weights.down_SDR, weights.down_bias_SR, tiles)
    z_NR = inner_norms.pick(lambda kind: _norm_inside(kind, z_NR, weights, tiling), tiling)
    z_NR = activate(z_NR)
    for index, (w_SRR, b_SR) in enumerate(weights.hidden, start=1):
        before_NR = z_NR
        after_NR = activate(grouped.segment_linear(z_NR, w_SRR, b_SR, tiles))
        z_NR = depths.pick(
            lambda depth, i=index, a=after_NR, b=before_NR: a if depth > i else b,  # type: ignore[misc]
            tiling,
        )
    update_NE = grouped.segment_linear(z_NR, weights.up_SRE, weights.up_bias_SE, tiles)

    def norm_after(kind: str) -> Tensor:
        if kind not in ("output", "alone"):
            return update_NE
        assert weights.out_norm is not None
        return fused_norm.layer_norm(h_ND if kind == "alone" else update_NE, None, *weights.out_norm, NORM_EPS, tiles)

    normed_NE = inner_norms.pick(norm_after, tiling)
    if forms.is_scaled:
        normed_NE = (normed_NE * forms.scale_S[tiling.slots_N].unsqueeze(1)).to(h_ND.dtype)
    found_NE = multiplies.pick(lambda multiplies: h_ND * normed_NE if multiplies else normed_NE, tiling)
    return h_ND + found_NE if is_added else found_NE


def _norm_inside(kind: str, z_NR: Tensor, weights: Bottleneck, tiling: Tiling) -> Tensor:
    """Apply layer norm over a slot's own columns, or batch norm outside of training, by its running statistics."""
    if kind not in ("layer", "batch"):
        return z_NR
    assert weights.norm is not None
    wide = z_NR.float()
    if kind == "batch":
        assert weights.running is not None
        mean, var = (stack_SR[tiling.slots_N] for stack_SR in weights.running)
    else:
        assert weights.forms is not None
        size_N1 = weights.forms.sizes_S[tiling.slots_N].unsqueeze(1)
        is_own_NR = torch.arange(wide.shape[-1], device=wide.device) < size_N1
        # Padding is zero, but must get no gradient either: it would be trained.
        mean = (wide * is_own_NR).sum(-1, keepdim=True) / size_N1
        var = ((wide - mean) * is_own_NR).square().sum(-1, keepdim=True) / size_N1
    # Scale and shift are zero in the padding, so it stays zero.
    scale_NR, shift_NR = (grouped.slot_vectors(stack_SR, tiling.tiles, wide.shape[0]) for stack_SR in weights.norm)
    return ((wide - mean) * torch.rsqrt(var + NORM_EPS) * scale_NR + shift_NR).to(z_NR.dtype)


def attend(
    q_NHC: Tensor, k_NHC: Tensor | None, v_NHC: Tensor | None, tiling: Tiling, *, scaling: float,
    dropout: float = 0.0, bias_HW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute each row's attention to itself [N, H, C]; q may be all three [N, 3, H, C]; the bias gets no gradient."""
    seed = torch.randint(2**62, (1,), device=q_NHC.device) if dropout else None
    return segment_attention(
        *(q_NHC, k_NHC, v_NHC, tiling.starts_B, tiling.stops_B, bias_HW, scaling, tiling.max_length, dropout, seed),
        is_long=tiling.is_long,
    )
