"""The banked operations: each row through the parameters of its own slot.

The loops over segments are the definition, in plain PyTorch, and the path used on CPU: a slot's NaN stays in its rows,
a slot uses exactly its own columns, and a slot without rows costs nothing. On a GPU, where launches cost more than
work, segments of equal length (a cohort's usual step) go through one batched product instead; padded columns are zero
and stay so. Tests hold the two equal; nothing outside this file knows which ran.

Shape letters: S slots, B rows, T tokens of a row (any shape between rows and width), D width, R bottleneck, L labels;
G segments of M tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.route import Route

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu-exact": F.gelu,
    "relu": F.relu,
    "tanh": torch.tanh,
    "swish": F.silu,
}


BATCHED_ON = {"cuda"}
"""Device types on which even segments go through one batched product."""


@dataclass(frozen=True)
class Bottleneck:
    """The stacked adapters of one site. A slot of size 0 has none here; columns beyond a slot's size are padding."""

    down_SDR: Tensor
    down_bias_SR: Tensor
    up_SRD: Tensor
    up_bias_SD: Tensor
    sizes: Sequence[int]
    activations: Sequence[str]


def bottleneck_update(h_BTD: Tensor, weights: Bottleneck, route: Route) -> Tensor:
    """up(act(down(h))), the rows of each segment through its slot; zero where a slot has no adapter."""
    if _is_batched(h_BTD, route) and _is_uniform(weights, route):
        return _batched_bottleneck(h_BTD, weights, route)
    down, down_bias = _by_slot(weights.down_SDR), _by_slot(weights.down_bias_SR)
    up, up_bias = _by_slot(weights.up_SRD), _by_slot(weights.up_bias_SD)
    pieces = []
    for slot, start, stop in route.segments:
        h, size = h_BTD[start:stop], weights.sizes[slot]
        if size == 0:
            pieces.append(torch.zeros_like(h))
            continue
        w, b = _columns(down[slot], 1, size).to(h.dtype), _columns(down_bias[slot], 0, size).to(h.dtype)
        z = F.linear(h, w.t(), b)
        z = ACTIVATIONS[weights.activations[slot]](z)
        w, b = _columns(up[slot], 0, size).to(h.dtype), up_bias[slot].to(h.dtype)
        pieces.append(F.linear(z, w.t(), b))
    return _join(pieces)


def layer_norm(x_BTD: Tensor, scale_SD: Tensor, shift_SD: Tensor | None, eps: float, route: Route) -> Tensor:
    """Layer norm with each slot's own scale and shift, in float32 at least: bf16 would round away what they learn."""
    dtype = torch.promote_types(x_BTD.dtype, scale_SD.dtype)
    if _is_batched(x_BTD, route):
        normal_GMD = F.layer_norm(_grouped(x_BTD, route).to(dtype), x_BTD.shape[-1:], eps=eps)
        y = normal_GMD * _chosen(scale_SD, route).unsqueeze(1)
        y = y if shift_SD is None else y + _chosen(shift_SD, route).unsqueeze(1)
        return y.to(x_BTD.dtype).view_as(x_BTD)
    scales, shifts = _by_slot(scale_SD), None if shift_SD is None else _by_slot(shift_SD)
    pieces = []
    for slot, start, stop in route.segments:
        x = x_BTD[start:stop]
        shift = None if shifts is None else shifts[slot]
        pieces.append(F.layer_norm(x.to(dtype), x.shape[-1:], scales[slot], shift, eps).to(x.dtype))
    return _join(pieces)


def linear_heads(
    pooled_BD: Tensor, weight_SLD: Tensor, bias_SL: Tensor, num_outputs: Sequence[int], route: Route
) -> list[Tensor]:
    """The logits of each segment, float32, as wide as its slot's head."""
    weights, biases = _by_slot(weight_SLD), _by_slot(bias_SL)
    return [
        F.linear(pooled_BD[start:stop].float(), weights[slot][: num_outputs[slot]], biases[slot][: num_outputs[slot]])
        for slot, start, stop in route.segments
    ]


def _batched_bottleneck(h_BTD: Tensor, weights: Bottleneck, route: Route) -> Tensor:
    h_GMD = _grouped(h_BTD, route)
    down, down_bias, up, up_bias = (
        _chosen(tensor, route).to(h_BTD.dtype)
        for tensor in (weights.down_SDR, weights.down_bias_SR, weights.up_SRD, weights.up_bias_SD)
    )
    z_GMR = torch.baddbmm(down_bias.unsqueeze(1), h_GMD, down)
    z_GMR = ACTIVATIONS[weights.activations[route.segments[0].slot]](z_GMR)
    return torch.baddbmm(up_bias.unsqueeze(1), z_GMR, up).view_as(h_BTD)


def _is_batched(h_BTD: Tensor, route: Route) -> bool:
    return len(route.segments) > 1 and h_BTD.device.type in BATCHED_ON and route.is_even


def _is_uniform(weights: Bottleneck, route: Route) -> bool:
    """Every segment has an adapter, and all have the same activation."""
    slots = [segment.slot for segment in route.segments]
    return all(weights.sizes[slot] for slot in slots) and len({weights.activations[slot] for slot in slots}) == 1


def _grouped(h_BTD: Tensor, route: Route) -> Tensor:
    """G even segments of M tokens each."""
    return h_BTD.reshape(len(route.segments), -1, h_BTD.shape[-1])


def _chosen(stacked: Tensor, route: Route) -> Tensor:
    """The route's slots of a stacked tensor, in order; the whole stack where that is the same."""
    slots = [segment.slot for segment in route.segments]
    return stacked if slots == list(range(len(stacked))) else stacked[torch.tensor(slots, device=stacked.device)]


def _by_slot(stacked: Tensor) -> Tensor | tuple[Tensor, ...]:
    # Indexing a stacked tensor slot by slot makes backward add S tensors of the whole stack's size; `unbind` adds one,
    # and a view of the only slot none.
    if not stacked.requires_grad:
        return stacked
    return (stacked.view(stacked.shape[1:]),) if len(stacked) == 1 else stacked.unbind(0)


def _columns(tensor: Tensor, dim: int, size: int) -> Tensor:
    # A slice that takes everything still costs a copy in backward.
    return tensor if tensor.shape[dim] == size else tensor.narrow(dim, 0, size)


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
