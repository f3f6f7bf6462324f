"""Banked layer norm in Triton against its formula, written in float64 slot by slot. Run by `make triton`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from inlay.model.batch.tiles import TILE_SIZES, Tiles, make_tiles, tile_capacity
from inlay.model.kernels.fused_norm import layer_norm, rms_norm

pytestmark = pytest.mark.triton
EPS = 1e-5


def tiles_of(lengths: list[int], tile: int = 64) -> Tiles:
    """Tiles of slots with so many tokens each, laid end to end, and two that are not used."""
    ends = np.cumsum(lengths).tolist()
    segments = [(slot, end - length, end) for slot, (length, end) in enumerate(zip(lengths, ends, strict=True))]
    return make_tiles(segments, len(lengths), tile, tile_capacity(sum(lengths), len(lengths), tile) + 2, "cpu")


def plain(x, residual, scale, shift, lengths):
    """The definition, token by token of each slot."""
    total = x if residual is None else x + residual
    pieces = []
    for slot, part in enumerate(total.split(lengths)):
        away = part - part.mean(-1, keepdim=True)
        normal = away / (away.square().mean(-1, keepdim=True) + EPS).sqrt()
        pieces.append(normal * scale[slot] + (0 if shift is None else shift[slot]))
    return torch.cat(pieces)


def leaves(lengths: list[int], width: int, seed: int = 0) -> list[Tensor]:
    """x, residual, scale and shift, and a gradient to send back."""
    noise = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), width)] * 2 + [(len(lengths), width)] * 2 + [(sum(lengths), width)]
    return [torch.randn(shape, generator=noise) + 0.5 for shape in shapes]


def both(lengths: list[int], width: int, absent: tuple[int, ...] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients by the kernel, and by the definition in float64."""
    *inputs, dy = leaves(lengths, width)
    results = []
    for dtype in (torch.float32, torch.float64):
        own = [None if i in absent else t.to(dtype, copy=True).requires_grad_() for i, t in enumerate(inputs)]
        y = layer_norm(*own, EPS, tiles_of(lengths)) if dtype is torch.float32 else plain(*own, lengths)
        y.backward(dy.to(dtype))
        results.append([y.detach(), *(t.grad for t in own if t is not None)])
    return results[0], results[1]


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [70, 3, 129], [0, 7, 0, 64, 0], [200]], ids=str)
@pytest.mark.parametrize("width", [16, 24, 33])
def test_output_and_gradients_equal_the_formula(lengths, width):
    for found, expected in zip(*both(lengths, width), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("lengths", [[5], [70, 3, 129], [0, 7, 0, 64, 0]], ids=str)
@pytest.mark.parametrize("width", [16, 33])
def test_without_a_mean_it_is_the_norm_of_t5(lengths, width):
    x, _, scale, _, dy = leaves(lengths, width)
    found, exact = ([t.to(dtype, copy=True).requires_grad_() for t in (x, scale)] for dtype in (x.dtype, torch.float64))
    y = rms_norm(*found, EPS, tiles_of(lengths))
    y.backward(dy)
    slots_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    expected = exact[0] / (exact[0].square().mean(-1, keepdim=True) + EPS).sqrt() * exact[1][slots_N]
    expected.backward(dy.double())
    for ours, theirs in zip((y, *(t.grad for t in found)), (expected, *(t.grad for t in exact)), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


def test_small_tiles_give_what_large_ones_give():
    lengths = [70, 3, 129]
    *inputs, _ = leaves(lengths, 16)
    found, expected = (layer_norm(*inputs, EPS, tiles_of(lengths, size)) for size in TILE_SIZES)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("absent", [(1,), (3,), (1, 3)], ids=["residual", "shift", "both"])
def test_residual_and_shift_may_be_absent(absent):
    for found, expected in zip(*both([9, 70], 24, absent), strict=True):
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


def test_a_slot_without_tokens_gets_exact_zeros():
    (_, _, _, dscale, dshift), _ = both([4, 0, 3], 16)
    assert not dscale[1].any()
    assert not dshift[1].any()


def test_one_tensor_may_be_both_x_and_residual():
    x, _, scale, shift, dy = leaves([6, 5], 16)
    x.requires_grad_()
    layer_norm(x, x, scale, shift, EPS, tiles_of([6, 5])).backward(dy)
    exact = x.detach().double().requires_grad_()
    plain(exact, exact, scale.double(), shift.double(), [6, 5]).backward(dy.double())
    torch.testing.assert_close(x.grad.double(), exact.grad, atol=2e-5, rtol=2e-5)


def test_nan_in_one_slot_stays_in_its_tokens_and_gradients():
    lengths = [66, 5, 3]
    *inputs, dy = leaves(lengths, 24)
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    with torch.no_grad():
        own[0][68], own[2][1, 3] = torch.nan, torch.nan
        dy[70] = torch.nan
    layer_norm(*own, EPS, tiles_of(lengths)).backward(dy)
    y = layer_norm(*own, EPS, tiles_of(lengths)).detach()
    others = torch.cat([torch.arange(66), torch.arange(71, 74)])
    assert y[others].isfinite().all()
    assert all(tensor.grad[others].isfinite().all() for tensor in own[:2])
    assert all(tensor.grad[[0, 2]].isfinite().all() for tensor in own[2:])
    assert y[68].isnan().all()


def test_bf16_tokens_are_normed_in_float32():
    lengths = [70, 6]
    *inputs, dy = (tensor.bfloat16() for tensor in leaves(lengths, 32))
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    y = layer_norm(*own, EPS, tiles_of(lengths))
    y.backward(dy)
    expected = plain(*exact, lengths)
    expected.backward(dy.double())
    pairs = [(y, expected), *((a.grad, b.grad) for a, b in zip(own, exact, strict=True))]
    for found, target in pairs:
        assert found.dtype == torch.bfloat16
        assert (found.double() - target).norm() < 1e-2 * target.norm()


def test_scale_in_float32_keeps_its_precision_under_bf16_tokens():
    x, _, scale, _, dy = leaves([8], 32)
    scale = (1 + 1e-4 * scale).requires_grad_()
    y = layer_norm(x.bfloat16(), None, scale, None, EPS, tiles_of([8]))
    y.backward(dy.bfloat16())
    assert scale.grad.dtype == torch.float32
    exact = scale.detach().double().requires_grad_()
    plain(x.bfloat16().double(), None, exact, None, [8]).backward(dy.bfloat16().double())
    torch.testing.assert_close(scale.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_nothing_is_kept_for_backward_without_gradients(monkeypatch):
    from inlay.model.kernels import fused_norm

    kept = []
    inner = fused_norm._norm
    monkeypatch.setattr(fused_norm, "_norm", lambda *given: kept.append(inner(*given)) or kept[-1])
    x, residual, scale, shift, _ = leaves([6], 16)
    layer_norm(x, residual, scale, shift, EPS, tiles_of([6]))
    layer_norm(x, residual, scale.requires_grad_(), shift, EPS, tiles_of([6]))
    assert [total.numel() for _, total, _ in kept] == [0, x.numel()]


def test_operators_hold_what_torch_compile_assumes_of_them():
    x, residual, scale, shift, _ = (tensor.requires_grad_() for tensor in leaves([5, 3], 16))
    tiles = tiles_of([5, 3])
    places = (tiles.buffer, tiles.tile)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.inlay.layer_norm, (x, residual, scale, shift, *places, EPS, True), test_utils=checks
    )
    total, moments = torch.randn(8, 16), torch.rand(8, 2)
    given = (torch.randn(8, 16), total, moments, scale.detach(), *places, True, True)
    torch.library.opcheck(torch.ops.inlay.layer_norm_backward, given, test_utils=("test_schema", "test_faketensor"))


def test_the_norm_compiles_whole():
    def loss(*tensors):
        return layer_norm(*tensors, EPS, tiles).square().sum()

    tiles = tiles_of([5, 3])
    found, expected = ([tensor.clone().requires_grad_() for tensor in leaves([5, 3], 16)[:4]] for _ in range(2))
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*found).backward()
    loss(*expected).backward()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
