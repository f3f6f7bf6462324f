"""Dropout of a backbone that trains on a CPU."""

from __future__ import annotations

import math

import pytest
import torch

from inlay.model.kernels.frozen_layers import Dropout

RATE = 0.1
NUM = 2**20
THRESHOLD = round(RATE * 65536)


def drop_ones(rate=RATE, shape=(NUM,), dtype=torch.float32):
    torch.manual_seed(7)
    return Dropout(rate).train()(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate):
    share = (drop_ones(rate) == 0).double().mean()
    assert abs(share - rate) < 5 * math.sqrt(rate * (1 - rate) / NUM) + 1 / 65536


def test_every_sixteen_bits_of_a_word_drop_alike_and_apart_from_each_other():
    dropped_N4 = (drop_ones() == 0).double().view(-1, 4)
    spread = 5 * math.sqrt(RATE * (1 - RATE) / len(dropped_N4))
    torch.testing.assert_close(dropped_N4.mean(0), torch.full((4,), RATE).double(), atol=spread, rtol=0)
    together_44 = dropped_N4.T.cov()
    torch.testing.assert_close(together_44, torch.eye(4).double() * RATE * (1 - RATE), atol=spread, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept_is_scaled_by_exactly_the_inverse_of_its_share(dtype):
    values = drop_ones(dtype=dtype).unique()
    expected = torch.tensor([0.0, 65536 / (65536 - THRESHOLD)], dtype=dtype)
    assert torch.equal(values, expected)
    assert abs(THRESHOLD / 65536 - RATE) <= 1 / 65536


def test_gradients_go_through_what_was_kept():
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    out = Dropout(0.5).train()(x)
    weights = torch.randn(5, 7, dtype=torch.float64)
    (out * weights).sum().backward()
    torch.testing.assert_close(x.grad, weights * (out != 0) * 2)


def test_the_generator_of_torch_decides():
    first, again = drop_ones(shape=(13, 3)), drop_ones(shape=(13, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, Dropout(RATE).train()(torch.ones(13, 3)))


def test_outside_of_training_and_at_the_ends_of_the_scale_it_is_torch_s():
    x = torch.randn(4, 5)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)
    assert torch.equal(Dropout(1.0).train()(x), torch.zeros(4, 5))


def test_a_mounted_backbone_drops_nothing_until_it_trains(backbone_of):
    backbone = backbone_of("bert")
    found = [module for module in backbone.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert found
    assert all(type(module) is Dropout and not module.training for module in found)
