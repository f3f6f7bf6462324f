"""The banked operations: each row through the parameters of its own slot.

The loops over segments are the definition, in plain PyTorch, and the path used on CPU: a slot's NaN stays in its rows,
a slot uses exactly its own columns, and a slot without rows costs nothing. A route that has a tiling (on a GPU, where
launches cost more than work) goes through `tiled.py` instead, one launch or a few for all slots. Tests hold the two
equal. The layers do not know which ran; a compiled program (a step's, an answer's) is made of tiles throughout, and
calls the grouped products of its heads itself.

Shape letters: S slots, B rows, T tokens of a row (any shape between rows and width), D width, E output width, R
bottleneck, L labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.batch.route import Route, Segment
from inlay.model.kernels import attention, fused_norm, grouped, tiled
from inlay.model.kernels.bottleneck_weights import ACTIVATIONS, NORM_EPS, Bottleneck, BottleneckShape


class Moments(NamedTuple):
    """Statistics of one slot's tokens that batch norm computed in a training step."""

    slot: int
    mean_R: Tensor
    var_R: Tensor


def bottleneck(
    h_BTD: Tensor, weights: Bottleneck, route: Route, moments: list[Moments] | None = None, *,
    is_added: bool = False, drop: tiled.Drop | None = None,
) -> Tensor:  # fmt: skip
    """Compute scale·up(act(down(h))), each segment through its slot; zero where a slot has no bottleneck here.

    With `is_added` h is added to it. With `moments`, batch norm is training: it uses the tokens at hand and notes what
    it saw of them. With `drop`, where `drops` says so, everything reads dropout(h) in h's stead.
    """
    if route.tiling is not None and moments is None:
        adapted = tiled.bottleneck(h_BTD.flatten(0, -2), weights, route.tiling, is_added=is_added, drop=drop)
        return _by_token(h_BTD, adapted)
    assert drop is None
    down, up = _by_slot(weights.down_SDR), _by_slot(weights.up_SRE)
    down_bias = None if weights.down_bias_SR is None else _by_slot(weights.down_bias_SR)
    up_bias = None if weights.up_bias_SE is None else _by_slot(weights.up_bias_SE)
    hidden = [(_by_slot(w_SRR), _by_slot(b_SR)) for w_SRR, b_SR in weights.hidden]
    norm = None if weights.norm is None else tuple(map(_by_slot, weights.norm))
    out_norm = None if weights.out_norm is None else tuple(map(_by_slot, weights.out_norm))
    pieces = []
    for (slot, start, stop), h in _by_segment(h_BTD, route):
        shape = weights.shapes[slot]
        if shape is None:
            pieces.append(h.new_zeros(*h.shape[:-1], weights.up_SRE.shape[-1]))
            continue
        update = h
        if shape.inner_norm != "alone":
            # Down, the norm inside, further layers, up: the slot's own columns of every tensor.
            size, activate = shape.size, ACTIVATIONS.get(shape.activation or "", lambda z: z)
            bias = None if down_bias is None else _columns(down_bias[slot], 0, size)
            z = _linear(h, _columns(down[slot], 1, size), bias)
            if shape.inner_norm in ("layer", "batch"):
                assert norm is not None
                real = None if route.mask_BT is None else route.mask_BT[start:stop].bool()
                z = _norm_inside(z, slot, shape, (norm[0][slot], norm[1][slot]), weights.running, real, moments)
            z = activate(z)
            for w, b in hidden[: shape.depth - 1]:
                z = activate(_linear(z, _columns(_columns(w[slot], 0, size), 1, size), _columns(b[slot], 0, size)))
            update = _linear(z, _columns(up[slot], 0, size), None if up_bias is None else up_bias[slot])
        # The norm after it, and its factor.
        if shape.inner_norm in ("output", "alone"):
            assert out_norm is not None
            update = _layer_norm(update, out_norm[0][slot], out_norm[1][slot], NORM_EPS)
        update = update if shape.scale == 1.0 else update * shape.scale
        pieces.append(h * update if shape.multiplies else update)
    update_BTE = _join(pieces)
    return h_BTD + update_BTE if is_added else update_BTE


def _norm_inside(
    z: Tensor,
    slot: int,
    shape: BottleneckShape,
    norm: tuple[Tensor, Tensor],
    running: tuple[Tensor, Tensor] | None,
    real: Tensor | None,
    moments: list[Moments] | None,
) -> Tensor:
    """Return a layer or batch norm over a slot's own columns, in float32 at least."""
    scale, shift = (_columns(tensor, 0, shape.size) for tensor in norm)
    if shape.inner_norm == "layer":
        return _layer_norm(z, scale, shift, NORM_EPS)
    wide = z.to(torch.promote_types(z.dtype, scale.dtype))
    if moments is None:
        assert running is not None
        mean, var = (_columns(tensor[slot], 0, shape.size) for tensor in running)
    else:
        tokens = wide.flatten(0, -2) if real is None else wide[real]
        mean, var = tokens.mean(0), tokens.var(0, correction=0)
        moments.append(Moments(slot, mean.detach(), var.detach()))
    return ((wide - mean) * torch.rsqrt(var + NORM_EPS) * scale + shift).to(z.dtype)


def drops(weights: Bottleneck, route: Route) -> bool:
    """Tell whether the dropout before these bottlenecks is computed with them."""
    return route.tiling is not None and weights.is_fused


def layer_norm(x_BTD: Tensor, scale_SD: Tensor, shift_SD: Tensor | None, eps: float, route: Route) -> Tensor:
    """Apply a layer norm with each slot's own scale and shift, in float32 at least: bf16 would round training away."""
    if route.tiling is not None:
        tiles = route.tiling.tiles
        return fused_norm.layer_norm(x_BTD.flatten(0, -2), None, scale_SD, shift_SD, eps, tiles).view_as(x_BTD)
    scales, shifts = _by_slot(scale_SD), None if shift_SD is None else _by_slot(shift_SD)
    pieces = [
        _layer_norm(x, scales[slot], None if shifts is None else shifts[slot], eps)
        for (slot, *_), x in _by_segment(x_BTD, route)
    ]
    return _join(pieces)


def rms_norm(x_BTD: Tensor, scale_SD: Tensor, eps: float, route: Route) -> Tensor:
    """Apply T5's layer norm, without mean and shift, with each slot's own scale; in float32 at least."""
    if route.tiling is not None:
        return fused_norm.rms_norm(x_BTD.flatten(0, -2), scale_SD, eps, route.tiling.tiles).view_as(x_BTD)
    wide = x_BTD.to(torch.promote_types(x_BTD.dtype, scale_SD.dtype))
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * per_row(scale_SD, x_BTD, route)).to(x_BTD.dtype)


@dataclass(frozen=True)
class Projected:
    """The stacked projected attention beside one block: down, attention without an output matrix, up."""

    encode_SDP: Tensor
    decode_SPD: Tensor
    query_SPP: Tensor
    key_SPP: Tensor
    value_SPP: Tensor
    num_heads: int


def projected_attention(h_BTD: Tensor, weights: Projected, route: Route) -> Tensor:
    """Compute V^D·attention(V^E·h), each row by its own slot; zero where a slot's matrices are."""
    z = slot_linear(h_BTD, weights.encode_SDP, route)
    stacks = (weights.query_SPP, weights.key_SPP, weights.value_SPP)
    q, k, v = (slot_linear(z, stack, route).unflatten(-1, (weights.num_heads, -1)) for stack in stacks)
    if route.pack is not None:
        mixed = attend(q, k, v, route, scaling=q.shape[-1] ** -0.5)
    else:
        mask = None if route.mask_BT is None else route.mask_BT[:, None, None, :].bool()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    return slot_linear(mixed.flatten(-2), weights.decode_SPD, route)


def slot_linear(h_BTD: Tensor, w_SDE: Tensor, route: Route) -> Tensor:
    """Compute h w, the rows of each segment through its slot."""
    if route.tiling is not None:
        h_ND = h_BTD.flatten(0, -2).contiguous()
        return _by_token(h_BTD, grouped.segment_linear(h_ND, w_SDE, None, route.tiling.tiles))
    weights = _by_slot(w_SDE)
    return _join([_linear(h, weights[slot], None) for (slot, *_), h in _by_segment(h_BTD, route)])


def per_row(stacked_SD: Tensor, x_BTD: Tensor, route: Route) -> Tensor:
    """Return each row's own vector [B, 1, …, D], to add to or multiply with the rows of x. A gather: NaN stays put."""
    if route.tiling is not None:
        return _by_token(x_BTD, grouped.slot_vectors(stacked_SD, route.tiling.tiles, x_BTD[..., 0].numel()))
    if len(route.segments) == 1:
        return _by_slot(stacked_SD)[route.segments[0].slot]
    return stacked_SD[route.slots_B.to(stacked_SD.device)].view(len(x_BTD), *[1] * (x_BTD.dim() - 2), -1)


def linear_heads(
    pooled_BD: Tensor, weight_SLD: Tensor, bias_SL: Tensor, num_outputs: Sequence[int], route: Route
) -> list[Tensor]:
    """Return the logits of each segment, float32, as wide as its slot's head."""
    if route.tiling is not None:
        weight_SDL = weight_SLD.transpose(1, 2)
        logits_BL = grouped.segment_linear(pooled_BD.float(), weight_SDL, bias_SL, route.tiling.tiles)
        parts = logits_BL.split([stop - start for _, start, stop in route.segments])
        return [_columns(part, 1, num_outputs[slot]) for part, (slot, *_) in zip(parts, route.segments, strict=True)]
    weights, biases = _by_slot(weight_SLD), _by_slot(bias_SL)
    return [
        F.linear(pooled.float(), weights[slot][: num_outputs[slot]], biases[slot][: num_outputs[slot]])
        for (slot, *_), pooled in _by_segment(pooled_BD, route)
    ]


def add_pairs(logits: Sequence[Tensor], weight_SLF: Tensor, pairs: Sequence[tuple[int, Tensor | None]]) -> list[Tensor]:
    """Add each slot's share for the features of its pairs [n, F] to its logits [n, L]; segments without pairs stay as
    they are."""
    weights = _by_slot(weight_SLF)
    return [
        own if features_BF is None else own + F.linear(features_BF, weights[slot][: own.shape[1]])
        for own, (slot, features_BF) in zip(logits, pairs, strict=True)
    ]


def attend(q_NHC: Tensor, k_NHC: Tensor, v_NHC: Tensor, route: Route, **options: Any) -> Tensor:
    """Compute each packed row's attention to itself [N, H, C]; options as `attention.attend` has them."""
    bias_HW = options.get("bias_HW")
    assert route.pack is not None
    # By fine-tuning; the fused kernel takes it as given.
    is_bias_trained = bias_HW is not None and bias_HW.requires_grad
    if route.tiling is None or (is_bias_trained and route.tiling.rows_N is None):
        return attention.attend(q_NHC, k_NHC, v_NHC, route.pack, **options)
    attend = attention.attend_any_mix if is_bias_trained else tiled.attend
    return attend(q_NHC, k_NHC, v_NHC, route.tiling, **options)


def attend_joined(qkv_N3HC: Tensor, route: Route, **options: Any) -> Tensor:
    """Do what `attend` does on a tiled route, for queries, keys and values in one tensor; the bias gets no gradient."""
    assert route.tiling is not None
    return tiled.attend(qkv_N3HC, None, None, route.tiling, **options)


def _layer_norm(x: Tensor, scale_D: Tensor, shift_D: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, scale_D.dtype))
    return F.layer_norm(wide, wide.shape[-1:], scale_D, shift_D, eps).to(x.dtype)


def _by_token(h_BTD: Tensor, values_NE: Tensor) -> Tensor:
    """Return values of tokens laid out as h is."""
    return values_NE.view(*h_BTD.shape[:-1], -1)


def _by_segment(values: Tensor, route: Route) -> Iterator[tuple[Segment, Tensor]]:
    """Yield each segment with its part of values that lie segment by segment."""
    # Not by slices: in backward each would fill a tensor of all values with zeros, quadratic in the number of slots.
    sizes = [stop - start for _, start, stop in route.segments]
    return zip(route.segments, (values,) if len(sizes) == 1 else values.split(sizes), strict=True)


def _by_slot(stacked: Tensor) -> Tensor | tuple[Tensor, ...]:
    # Indexing a stacked tensor slot by slot makes backward add S tensors of the whole stack's size; `unbind` adds one,
    # and a view of the only slot none.
    if not stacked.requires_grad:
        return stacked
    return (stacked.view(stacked.shape[1:]),) if len(stacked) == 1 else stacked.unbind(0)


def _linear(x: Tensor, w_DE: Tensor, bias_E: Tensor | None) -> Tensor:
    return F.linear(x, w_DE.to(x.dtype).t(), None if bias_E is None else bias_E.to(x.dtype))


def _columns(tensor: Tensor, dim: int, size: int) -> Tensor:
    # A slice that takes everything still costs a copy in backward.
    return tensor if tensor.shape[dim] == size else tensor.narrow(dim, 0, size)


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
