"""Sums that only a norm reads are added in the norm."""

from __future__ import annotations

import pytest
import torch

from inlay.model.batch.tiles import make_tiles, tile_capacity
from inlay.model.kernels.fold_residual import add_in_norms
from inlay.model.kernels.fused_norm import layer_norm

pytestmark = pytest.mark.triton
TILES = make_tiles([(0, 0, 5), (1, 5, 12)], 2, 16, tile_capacity(12, 2, 16), "cpu")


def norm(x, scale, shift):
    """As a wrapper in a backbone calls it, on a pack that is one row."""
    laid = x.squeeze(0)
    return layer_norm(laid.flatten(0, -2), None, scale, shift, 1e-12, TILES).view_as(laid).unsqueeze(0)


def added(x, y, scale, shift):
    return norm(x + y, scale, shift) * 2


def read_twice(x, y, scale, shift):
    total = x + y
    return total + norm(total, scale, shift)


def with_a_number(x, y, scale, shift):
    return norm(x + 1.0, scale, shift) + y


def spread(x, y, scale, shift):
    return norm(x + y[:, :1], scale, shift)


@pytest.mark.parametrize(
    ("function", "expected"),
    [(added, 1), (read_twice, 0), (with_a_number, 0), (spread, 0)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_sum_is_added_in_the_norm_where_nothing_else_reads_it(function, expected):
    noise = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 12, 8, generator=noise) for _ in range(2))
    scale, shift = (torch.randn(2, 8, generator=noise) for _ in range(2))
    counts = []

    def backend(module, inputs):
        counts.append(add_in_norms(module.graph))
        module.graph.lint()
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    results = []
    for call in (torch.compile(function, backend=backend, fullgraph=True), function):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, y, scale, shift)]
        out = call(*leaves)
        out.pow(3).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    assert counts == [expected]
    for found, plain in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)
