"""Arrays that go to a device together arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inlay.model.batch.transfer import send

ARRAYS = [
    np.arange(5),
    np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3),
    np.zeros(0, dtype=np.int32),
    np.arange(3, dtype=np.int32),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_of_any_type_and_shape_arrive(device):
    for array, tensor in zip(ARRAYS, send(ARRAYS, device), strict=True):
        assert tensor.device.type == device
        assert tensor.data_ptr() % 16 == 0 or device == "cpu"
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))
