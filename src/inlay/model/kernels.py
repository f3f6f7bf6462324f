"""The banked operations: each row through the parameters of its own slot.

The functions here are the definition, in plain PyTorch, and the path used on CPU. They loop over segments: a slot's
NaN stays in its rows, a slot uses exactly its own columns, and a slot without rows costs nothing. Faster ones must
equal them; nothing outside this file knows which ran.

Shape letters: S slots, B rows, T tokens of a row (any shape between rows and width), D width, R bottleneck, L labels.
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
    down, down_bias = _by_slot(weights.down_SDR), _by_slot(weights.down_bias_SR)
    up, up_bias = _by_slot(weights.up_SRD), _by_slot(weights.up_bias_SD)
    pieces = []
    for slot, start, stop in route.segments:
        h, size = h_BTD[start:stop], weights.sizes[slot]
        if size == 0:
            pieces.append(torch.zeros_like(h))
            continue
        z = F.linear(h, down[slot][:, :size].t().to(h.dtype), down_bias[slot][:size].to(h.dtype))
        z = ACTIVATIONS[weights.activations[slot]](z)
        pieces.append(F.linear(z, up[slot][:size].t().to(h.dtype), up_bias[slot].to(h.dtype)))
    return _join(pieces)


def layer_norm(x_BTD: Tensor, scale_SD: Tensor, shift_SD: Tensor | None, eps: float, route: Route) -> Tensor:
    """Layer norm with each slot's own scale and shift."""
    scales, shifts = _by_slot(scale_SD), None if shift_SD is None else _by_slot(shift_SD)
    pieces = []
    for slot, start, stop in route.segments:
        x = x_BTD[start:stop]
        shift = None if shifts is None else shifts[slot].to(x.dtype)
        pieces.append(F.layer_norm(x, x.shape[-1:], scales[slot].to(x.dtype), shift, eps))
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


def _by_slot(stacked: Tensor) -> Tensor | tuple[Tensor, ...]:
    # Indexing a stacked tensor slot by slot makes backward add S tensors of the whole stack's size; `unbind` adds one.
    return stacked.unbind(0) if stacked.requires_grad else stacked


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
