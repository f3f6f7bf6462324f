"""The banked operations: each row through the parameters of its own slot.

The loops over segments are the definition, in plain PyTorch, and the path used on CPU: a slot's NaN stays in its rows,
a slot uses exactly its own columns, and a slot without rows costs nothing. On a GPU, where launches cost more than
work, segments of equal length (a cohort's usual step) go through one batched product instead; padded columns are zero
and stay so. Tests hold the two equal; nothing outside this file knows which ran.

Shape letters: S slots, B rows, T tokens of a row (any shape between rows and width), D width, E output width, R
bottleneck, L labels; G segments of M tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
NORM_EPS = 1e-5  # of norms inside a bottleneck, as torch's own


@dataclass(frozen=True)
class Shape:
    """What one slot's bottleneck is, besides its weights."""

    size: int
    activation: str | None = None
    """None: none, as in LoRA"""
    scale: float = 1.0
    depth: int = 1
    inner_norm: str = "none"
    multiplies: bool = False
    """the update is h·f(h), so that h + update = h·(1 + f(h))"""


@dataclass(frozen=True)
class Bottleneck:
    """The stacked bottlenecks of one site. A slot of shape None has none here; columns beyond its size are padding."""

    down_SDR: Tensor
    up_SRE: Tensor
    shapes: Sequence[Shape | None]
    down_bias_SR: Tensor | None = None
    up_bias_SE: Tensor | None = None
    hidden: tuple[tuple[Tensor, Tensor], ...] = ()
    """[S, R, R] and [S, R] of each further layer"""
    norm: tuple[Tensor, Tensor] | None = None
    """scale and shift [S, R] of the norm inside"""
    running: tuple[Tensor, Tensor] | None = None
    """mean and variance [S, R] that batch norm uses outside of training"""


class Moments(NamedTuple):
    """What batch norm saw of one slot's tokens in a training step."""

    slot: int
    mean_R: Tensor
    var_R: Tensor


def bottleneck_update(h_BTD: Tensor, weights: Bottleneck, route: Route, moments: list[Moments] | None = None) -> Tensor:
    """scale·up(act(down(h))), the rows of each segment through its slot; zero where a slot has no bottleneck here.

    With `moments`, batch norm is training: it uses the tokens at hand and notes what it saw of them.
    """
    if _is_batched(h_BTD, route) and _is_uniform(weights, route):
        return _batched_bottleneck(h_BTD, weights, route, moments)
    pieces = []
    by_slot = _BySlot(weights)
    for slot, start, stop in route.segments:
        h, shape = h_BTD[start:stop], weights.shapes[slot]
        if shape is None:
            pieces.append(h.new_zeros(*h.shape[:-1], weights.up_SRE.shape[-1]))
            continue
        real = None if route.mask_BT is None else route.mask_BT[start:stop].bool()
        update = by_slot.update(h, slot, shape, real, moments)
        pieces.append(h * update if shape.multiplies else update)
    return _join(pieces)


class _BySlot:
    """The weights of each slot, taken from the stacks once."""

    def __init__(self, weights: Bottleneck) -> None:
        self._weights = weights
        self._down, self._up = _by_slot(weights.down_SDR), _by_slot(weights.up_SRE)
        self._down_bias, self._up_bias = _by_slot_or_none(weights.down_bias_SR), _by_slot_or_none(weights.up_bias_SE)
        self._hidden = [(_by_slot(w), _by_slot(b)) for w, b in weights.hidden]
        self._norm = None if weights.norm is None else tuple(_by_slot(tensor) for tensor in weights.norm)

    def update(self, h: Tensor, slot: int, shape: Shape, real: Tensor | None, moments: list[Moments] | None) -> Tensor:
        size, activate = shape.size, ACTIVATIONS.get(shape.activation or "")
        bias = None if self._down_bias is None else _columns(self._down_bias[slot], 0, size)
        z = _linear(h, _columns(self._down[slot], 1, size), bias)
        z = z if shape.inner_norm == "none" else self._inner_norm(z, slot, shape, real, moments)
        z = z if activate is None else activate(z)
        for w, b in self._hidden[: shape.depth - 1]:
            z = _linear(z, _columns(_columns(w[slot], 0, size), 1, size), _columns(b[slot], 0, size))
            z = z if activate is None else activate(z)
        update = _linear(z, _columns(self._up[slot], 0, size), None if self._up_bias is None else self._up_bias[slot])
        return update if shape.scale == 1.0 else update * shape.scale

    def _inner_norm(
        self, z: Tensor, slot: int, shape: Shape, real: Tensor | None, moments: list[Moments] | None
    ) -> Tensor:
        """A norm over a slot's own columns, in float32 at least."""
        assert self._norm is not None
        scale, shift = (_columns(tensor[slot], 0, shape.size) for tensor in self._norm)
        wide = z.to(torch.promote_types(z.dtype, scale.dtype))
        if shape.inner_norm == "layer":
            return F.layer_norm(wide, wide.shape[-1:], scale, shift, NORM_EPS).to(z.dtype)
        if moments is None:
            assert self._weights.running is not None
            mean, var = (_columns(tensor[slot], 0, shape.size) for tensor in self._weights.running)
        else:
            tokens = wide.flatten(0, -2) if real is None else wide[real]
            mean, var = tokens.mean(0), tokens.var(0, correction=0)
            moments.append(Moments(slot, mean.detach(), var.detach()))
        return ((wide - mean) * torch.rsqrt(var + NORM_EPS) * scale + shift).to(z.dtype)


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


def per_row(stacked_SD: Tensor, x_BTD: Tensor, route: Route) -> Tensor:
    """Each row's own vector [B, 1, …, D], to be added to or multiplied with the rows of x. A gather: NaN stays put."""
    if len(route.segments) == 1:
        return _by_slot(stacked_SD)[route.segments[0].slot]
    return stacked_SD[route.slots_B.to(stacked_SD.device)].view(len(x_BTD), *[1] * (x_BTD.dim() - 2), -1)


def linear_heads(
    pooled_BD: Tensor, weight_SLD: Tensor, bias_SL: Tensor, num_outputs: Sequence[int], route: Route
) -> list[Tensor]:
    """The logits of each segment, float32, as wide as its slot's head."""
    weights, biases = _by_slot(weight_SLD), _by_slot(bias_SL)
    return [
        F.linear(pooled_BD[start:stop].float(), weights[slot][: num_outputs[slot]], biases[slot][: num_outputs[slot]])
        for slot, start, stop in route.segments
    ]


def _batched_bottleneck(h_BTD: Tensor, weights: Bottleneck, route: Route, moments: list[Moments] | None) -> Tensor:
    h_GMD = _grouped(h_BTD, route)
    shape = weights.shapes[route.segments[0].slot]
    assert shape is not None
    activate = ACTIVATIONS.get(shape.activation or "", lambda z: z)
    z_GMR = _batched_linear(h_GMD, weights.down_SDR, weights.down_bias_SR, route)
    z_GMR = z_GMR if shape.inner_norm == "none" else _batched_norm(z_GMR, weights, route, moments)
    z_GMR = activate(z_GMR)
    for w_SRR, b_SR in weights.hidden[: shape.depth - 1]:
        z_GMR = activate(_batched_linear(z_GMR, w_SRR, b_SR, route))
    update_GME = _batched_linear(z_GMR, weights.up_SRE, weights.up_bias_SE, route)
    update_GME = update_GME if shape.scale == 1.0 else update_GME * shape.scale
    update_GME = h_GMD * update_GME if shape.multiplies else update_GME
    return update_GME.view(*h_BTD.shape[:-1], -1)


def _batched_norm(z_GMR: Tensor, weights: Bottleneck, route: Route, moments: list[Moments] | None) -> Tensor:
    """The norm inside even segments. Scale and shift are zero in the padding, so it stays zero."""
    assert weights.norm is not None
    shapes = [weights.shapes[segment.slot] for segment in route.segments]
    sizes = [shape.size for shape in shapes if shape is not None]
    scale_G1R, shift_G1R = (_chosen(tensor, route).unsqueeze(1) for tensor in weights.norm)
    wide = z_GMR.to(torch.promote_types(z_GMR.dtype, scale_G1R.dtype))
    if shapes[0] is not None and shapes[0].inner_norm == "layer":
        size_G11 = torch.tensor(sizes, device=wide.device).view(-1, 1, 1)
        own_G1R = torch.arange(wide.shape[-1], device=wide.device) < size_G11
        mean = wide.sum(-1, keepdim=True) / size_G11  # the padding is zero
        var = ((wide - mean) * own_G1R).square().sum(-1, keepdim=True) / size_G11
    elif moments is None:
        assert weights.running is not None
        mean, var = (_chosen(tensor, route).unsqueeze(1) for tensor in weights.running)
    else:
        real_GM1 = (
            torch.ones_like(wide[..., :1]) if route.mask_BT is None else _grouped(route.mask_BT[..., None], route)
        )
        count_G11 = real_GM1.sum(1, keepdim=True)
        mean = (wide * real_GM1).sum(1, keepdim=True) / count_G11
        var = ((wide - mean).square() * real_GM1).sum(1, keepdim=True) / count_G11
        for group, (segment, size) in enumerate(zip(route.segments, sizes, strict=True)):
            moments.append(Moments(segment.slot, mean[group, 0, :size].detach(), var[group, 0, :size].detach()))
    return ((wide - mean) * torch.rsqrt(var + NORM_EPS) * scale_G1R + shift_G1R).to(z_GMR.dtype)


def _batched_linear(x_GMD: Tensor, stacked: Tensor, bias: Tensor | None, route: Route) -> Tensor:
    w = _chosen(stacked, route).to(x_GMD.dtype)
    if bias is None:
        return torch.bmm(x_GMD, w)
    return torch.baddbmm(_chosen(bias, route).to(x_GMD.dtype).unsqueeze(1), x_GMD, w)


def _is_batched(h_BTD: Tensor, route: Route) -> bool:
    return len(route.segments) > 1 and h_BTD.device.type in BATCHED_ON and route.is_even


def _is_uniform(weights: Bottleneck, route: Route) -> bool:
    """Every segment has a bottleneck, and all are alike but for their size."""
    shapes = [weights.shapes[segment.slot] for segment in route.segments]
    return None not in shapes and len({shape and replace(shape, size=0) for shape in shapes}) == 1


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


def _by_slot_or_none(stacked: Tensor | None) -> Tensor | tuple[Tensor, ...] | None:
    return None if stacked is None else _by_slot(stacked)


def _linear(x: Tensor, w_DE: Tensor, bias_E: Tensor | None) -> Tensor:
    return F.linear(x, w_DE.to(x.dtype).t(), None if bias_E is None else bias_E.to(x.dtype))


def _columns(tensor: Tensor, dim: int, size: int) -> Tensor:
    # A slice that takes everything still costs a copy in backward.
    return tensor if tensor.shape[dim] == size else tensor.narrow(dim, 0, size)


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
