"""Small arrays on their way to a device: many in one copy, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # bytes: programs are compiled for memory that begins at such a place


def send(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """The arrays as tensors on a device. On a CPU they may share the arrays' memory."""
    device = torch.device(device)
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
    parcel = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    packed = [
        parcel[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]
    for array, place in zip(arrays, packed, strict=True):
        place.copy_(torch.from_numpy(array))
    sent = parcel.to(device, non_blocking=True)
    return [
        sent[start : start + array.nbytes].view(place.dtype).view(array.shape)
        for array, place, start in zip(arrays, packed, starts, strict=False)
    ]
