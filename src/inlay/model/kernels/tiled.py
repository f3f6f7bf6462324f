"""The banked operations on the tiles of a pack, each a launch or a few for all slots together, whatever the mix.

`reference.py` has the definitions; tests hold these equal to them. A plain bottleneck goes through one fused program;
other forms are composed of grouped products. Where slots differ in kind (activation, depth, a norm inside), every kind
that occurs is computed and each token keeps its own. Nothing here depends on a route's values: a compiled or captured
pass is right for every mix.

Shape letters: S slots, N packed tokens, D width, E output width, R bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inlay.model.batch.route import Tiling
from inlay.model.kernels import fused_attention, fused_norm, grouped
from inlay.model.kernels import fused_bottleneck as fused
from inlay.model.kernels.select import pick


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kind of each slot, of several that occur."""

    names: tuple[Any, ...]
    """the kinds that occur"""
    numbers_S: Tensor
    """the place of each slot's kind among them"""

    def pick(self, compute: Callable[[Any], Tensor], tiling: Tiling) -> Tensor:
        """Select each token's result of `compute` by its slot's kind."""
        if len(self.names) == 1:
            return compute(self.names[0])
        return pick(self.names, self.numbers_S[tiling.slots_N], compute)


def make_kinds(kinds: Sequence[Any], default: Any, device: torch.device) -> Kinds:
    """The kinds of slots; a slot of the kind None takes any, `default` if no other has one."""
    names = tuple(dict.fromkeys(kind for kind in kinds if kind is not None)) or (default,)
    numbers = [0 if kind is None else names.index(kind) for kind in kinds]
    return Kinds(names, torch.tensor(numbers, dtype=torch.int32, device=device))


@dataclass(frozen=True, eq=False)
class TiledBottleneck:
    """The stacked bottlenecks of one site, with the differences between slots as tensors."""

    stacks: fused.Stacks
    activations: Kinds
    sizes_S: Tensor
    depths: Kinds
    inner_norms: Kinds
    multiplies: Kinds
    hidden: tuple[tuple[Tensor, Tensor], ...] = ()
    norm: tuple[Tensor, Tensor] | None = None
    running: tuple[Tensor, Tensor] | None = None
    is_plain: bool = field(default=True)
    """one fused program does it: no norm inside, no further layers, one activation, at most `fused.MAX_SIZE` wide"""
    out_norm: tuple[Tensor, Tensor] | None = None
    is_scaled: bool = True
    """whether updates are multiplied by a factor; False if every slot's is 1"""

    @property
    def all_kinds(self) -> tuple[Kinds, Kinds, Kinds, Kinds]:
        return self.activations, self.depths, self.inner_norms, self.multiplies


@dataclass(frozen=True, eq=False)
class Drop:
    """The dropout that stands before an adapter."""

    rate: float
    seed: Tensor
    """[1], on the device: another one at every step and in every block"""
    salt: int
    """tells the places of a block apart"""


def adapt(h_ND: Tensor, weights: TiledBottleneck, tiling: Tiling, drop: Drop | None = None) -> Tensor:
    """Add to h, after dropout, the update of each token's own bottleneck. Only plain bottlenecks drop by themselves."""
    if not weights.is_plain:
        assert drop is None
        return h_ND + update(h_ND, weights, tiling)
    more: dict[str, Any] = {} if drop is None else {"dropout": drop.rate, "seed": drop.seed, "salt": drop.salt}
    return fused.bottleneck(h_ND, weights.stacks, tiling.tiles, weights.activations.names[0], **more)


def update(h_ND: Tensor, weights: TiledBottleneck, tiling: Tiling) -> Tensor:
    """scale·up(act(down(h))) by each token's own slot; zero where a slot has no bottleneck here."""
    if weights.is_plain:
        return fused.bottleneck(h_ND, weights.stacks, tiling.tiles, weights.activations.names[0], residual=False)
    stacks, tiles = weights.stacks, tiling.tiles
    z_NR = grouped.segment_linear(h_ND, stacks.down_SDR, stacks.down_bias_SR, tiles)
    z_NR = weights.inner_norms.pick(lambda kind: _INNER_NORMS[kind](z_NR, weights, tiling), tiling)
    z_NR = _activate(z_NR, weights, tiling)
    for index, (w_SRR, b_SR) in enumerate(weights.hidden, start=1):
        before_NR = z_NR
        after_NR = _activate(grouped.segment_linear(z_NR, w_SRR, b_SR, tiles), weights, tiling)
        z_NR = weights.depths.pick(
            lambda depth, i=index, a=after_NR, b=before_NR: a if depth > i else b,  # type: ignore[misc]
            tiling,
        )
    update_NE = grouped.segment_linear(z_NR, stacks.up_SRE, stacks.up_bias_SE, tiles)
    update_NE = weights.inner_norms.pick(
        lambda kind: _out_norm(kind, h_ND if kind == "alone" else update_NE, weights, tiling), tiling
    )
    if weights.is_scaled:
        update_NE = (update_NE * stacks.scale_S[tiling.slots_N].unsqueeze(1)).to(h_ND.dtype)
    return weights.multiplies.pick(lambda multiplies: h_ND * update_NE if multiplies else update_NE, tiling)


def _activate(z_NR: Tensor, weights: TiledBottleneck, tiling: Tiling) -> Tensor:
    from inlay.model.kernels.reference import ACTIVATIONS

    return weights.activations.pick(lambda name: z_NR if name == "none" else ACTIVATIONS[name](z_NR), tiling)


def _norm_by_token(z_NR: Tensor, weights: TiledBottleneck, tiling: Tiling) -> Tensor:
    """Layer norm over a slot's own columns; scale and shift are zero in the padding, so it stays zero."""
    wide = z_NR.float()
    size_N1 = weights.sizes_S[tiling.slots_N].unsqueeze(1)
    is_own_NR = torch.arange(wide.shape[-1], device=wide.device) < size_N1
    # Padding is zero, but must get no gradient either: it would be trained.
    mean = (wide * is_own_NR).sum(-1, keepdim=True) / size_N1
    var = ((wide - mean) * is_own_NR).square().sum(-1, keepdim=True) / size_N1
    return _scaled(wide, mean, var, weights, tiling).to(z_NR.dtype)


def _norm_by_column(z_NR: Tensor, weights: TiledBottleneck, tiling: Tiling) -> Tensor:
    """Batch norm outside of training, by its running statistics."""
    assert weights.running is not None
    mean, var = (stack_SR[tiling.slots_N] for stack_SR in weights.running)
    return _scaled(z_NR.float(), mean, var, weights, tiling).to(z_NR.dtype)


def _scaled(wide: Tensor, mean: Tensor, var: Tensor, weights: TiledBottleneck, tiling: Tiling) -> Tensor:
    from inlay.model.kernels.reference import NORM_EPS

    assert weights.norm is not None
    scale_NR, shift_NR = (grouped.slot_vectors(stack_SR, tiling.tiles, wide.shape[0]) for stack_SR in weights.norm)
    return (wide - mean) * torch.rsqrt(var + NORM_EPS) * scale_NR + shift_NR


def _out_norm(kind: str, update_NE: Tensor, weights: TiledBottleneck, tiling: Tiling) -> Tensor:
    """Layer norm of a bottleneck's output, where it has one there."""
    from inlay.model.kernels.reference import NORM_EPS

    if kind not in ("output", "alone"):
        return update_NE
    assert weights.out_norm is not None
    return layer_norm(update_NE, *weights.out_norm, NORM_EPS, tiling)


_INNER_NORMS: dict[str, Callable[[Tensor, TiledBottleneck, Tiling], Tensor]] = {
    "none": lambda z_NR, weights, tiling: z_NR,
    "layer": _norm_by_token,
    "batch": _norm_by_column,
    "output": lambda z_NR, weights, tiling: z_NR,
    "alone": lambda z_NR, weights, tiling: z_NR,
}


def layer_norm(x_ND: Tensor, scale_SD: Tensor, shift_SD: Tensor | None, eps: float, tiling: Tiling) -> Tensor:
    """Layer norm with each token's own scale and shift, in float32 inside."""
    return fused_norm.layer_norm(x_ND, None, scale_SD, shift_SD, eps, tiling.tiles)


def rms_norm(x_ND: Tensor, scale_SD: Tensor, eps: float, tiling: Tiling) -> Tensor:
    """T5's layer norm with each token's own scale, in float32 inside."""
    return fused_norm.rms_norm(x_ND, scale_SD, eps, tiling.tiles)


def linear(h_ND: Tensor, w_SDE: Tensor, tiling: Tiling) -> Tensor:
    """h w by each token's own slot."""
    return grouped.segment_linear(h_ND.contiguous(), w_SDE, None, tiling.tiles)


def heads(pooled_BD: Tensor, weight_SLD: Tensor, bias_SL: Tensor, tiling: Tiling) -> Tensor:
    """The outputs of each vector's own head [B, L], as wide as the widest."""
    return grouped.segment_linear(pooled_BD, weight_SLD.transpose(1, 2), bias_SL, tiling.tiles)


def per_token(stacked_SD: Tensor, num_tokens: int, tiling: Tiling) -> Tensor:
    """Each token's own vector [N, D]."""
    return grouped.slot_vectors(stacked_SD, tiling.tiles, num_tokens)


def attend(
    q_NHC: Tensor, k_NHC: Tensor, v_NHC: Tensor, tiling: Tiling, *, scaling: float, dropout: float = 0.0,
    bias_HW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each row's attention to itself [N, H, C]; the bias gets no gradient."""
    seed = torch.randint(2**62, (1,), device=q_NHC.device) if dropout else None
    return fused_attention.segment_attention(
        *(q_NHC, k_NHC, v_NHC, tiling.starts_B, tiling.stops_B, bias_HW, scaling, tiling.max_length, dropout, seed),
        is_long=tiling.is_long,
    )


def attend_joined(
    qkv_N3HC: Tensor, tiling: Tiling, *, scaling: float, dropout: float = 0.0, bias_HW: Tensor | None = None
) -> Tensor:
    """`attend` for queries, keys and values side by side."""
    seed = torch.randint(2**62, (1,), device=qkv_N3HC.device) if dropout else None
    return fused_attention.joined_attention(
        *(qkv_N3HC, tiling.starts_B, tiling.stops_B, bias_HW, scaling, tiling.max_length, dropout, seed),
        is_long=tiling.is_long,
    )
