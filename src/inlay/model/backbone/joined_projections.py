"""Query, key and value of a block as one matrix: on a GPU one product takes less than three, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Joined(NamedTuple):
    """Three linear layers that read the same, side by side."""

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None


def join(linears: Mapping[str, Any]) -> Joined | None:
    """The layers as one; from then on their own weights are views of it. None if they are no plain layers alike."""
    layers = list(linears.values())
    first = layers[0]
    if not all(type(layer) is nn.Linear and layer.weight.shape == first.weight.shape for layer in layers):
        return None
    if any((layer.bias is None) != (first.bias is None) for layer in layers):
        return None
    weight = _lay([layer.weight for layer in layers])
    return Joined(tuple(linears), weight, None if first.bias is None else _lay([layer.bias for layer in layers]))


def _lay(parameters: list[nn.Parameter]) -> Tensor:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.chunk(len(parameters)), strict=True):
        parameter.data = part
    return whole
