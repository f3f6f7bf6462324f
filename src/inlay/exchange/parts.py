"""Joins the tensors that a folder has at each place to the tensors of one slot.

Other libraries let every layer have its own size, and any set of layers; a slot has one size and a rectangle of layers
and places. Both come together exactly: zero columns change no answer, nor does an adapter that adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model import BOTTLENECK, LORA, Backbone, LoraPart, ResolvedMethod, layout


@dataclass(frozen=True)
class ForeignAdapter:
    """An adapter at one site."""

    down_DR: Tensor
    down_bias_R: Tensor
    up_RD: Tensor
    up_bias_D: Tensor


@dataclass(frozen=True)
class LowRank:
    """LoRA's update of one linear layer: `scale · x·down·up`."""

    down_DR: Tensor
    up_RE: Tensor
    scale: float


def join_bottlenecks(parts: Mapping[str, ForeignAdapter]) -> tuple[int, dict[str, Tensor]]:
    """The common size, and the tensors of a slot, by the sites' keys."""
    size = max(part.down_bias_R.numel() for part in parts.values())
    tensors = {}
    for key, part in parts.items():
        missing = size - part.down_bias_R.numel()
        tensors[BOTTLENECK.name(key, "down")] = F.pad(part.down_DR, (0, missing))
        tensors[BOTTLENECK.name(key, "down_bias")] = F.pad(part.down_bias_R, (0, missing))
        tensors[BOTTLENECK.name(key, "up")] = F.pad(part.up_RD, (0, 0, 0, missing))
        tensors[BOTTLENECK.name(key, "up_bias")] = part.up_bias_D
    return size, tensors


def join_low_ranks(parts: Mapping[str, LowRank], ours: LoraPart = LORA) -> tuple[int, float, dict[str, Tensor]]:
    """The common rank and scale, and the tensors of a slot, by the linear layers' keys.

    Where scales differ, the first that is not 0 stands for all and the ratio goes into the other layers' `up`.
    """
    size = max(part.down_DR.shape[1] for part in parts.values())
    scale = next((part.scale for part in parts.values() if part.scale), 1.0)
    tensors = {}
    for key, part in parts.items():
        missing = size - part.down_DR.shape[1]
        up = part.up_RE if part.scale == scale else part.up_RE * (part.scale / scale)
        tensors[ours.name(key, "down")] = F.pad(part.down_DR, (0, missing))
        tensors[ours.name(key, "up")] = F.pad(up, (0, 0, 0, missing))
    return size, scale, tensors


def complete(
    backbone: Backbone, method: ResolvedMethod, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """Fill the method's places that the folder lacks with neutral tensors; return all tensors and how many are new."""
    whole = dict(tensors)
    for spec in layout(backbone.anatomy, method):
        if spec.name not in whole and spec.start == "backbone":
            whole[spec.name] = backbone.own_tensor(spec.name)
        elif spec.name not in whole:
            whole[spec.name] = torch.full(spec.shape, float(spec.start == "ones"))
    return {name: tensor.contiguous() for name, tensor in whole.items()}, len(whole) - len(tensors)


def name_layers(layers: Iterable[int], num_layers: int) -> str:
    """Layers as `method.layers` has them."""
    found = sorted(set(layers))
    return "all" if found == list(range(num_layers)) else ",".join(map(str, found))
