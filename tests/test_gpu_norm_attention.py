"""The norm and attention of packed tokens on a GPU, at real sizes, against float64.

Deselected by `make test`; run with `pytest -m gpu tests/test_gpu_norm_attention.py`. With INLAY_KERNEL_LOG set to a
path, every error measured is appended there.
"""

from __future__ import annotations

import os
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model import fused_attention
from inlay.model.fused_attention import segment_attention
from inlay.model.fused_norm import layer_norm
from inlay.model.gelu import quick_gelu
from inlay.model.rung import Capacity, Laid, Rung, climb
from inlay.model.tiled import attend_joined
from inlay.model.tiles import Tiles, make_tiles, tile_capacity

pytestmark = pytest.mark.gpu
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
EPS = 1e-12


def tiles_of(lengths: list[int], capacity: int | None = None) -> Tiles:
    """Tiles of slots with so many tokens each, laid end to end."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    segments = [(slot, end - length, end) for slot, (length, end) in enumerate(zip(lengths, ends, strict=True))]
    capacity = capacity or tile_capacity(sum(lengths), len(lengths), 64)
    return make_tiles(segments, len(lengths), 64, capacity, "cuda")


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected.double()).norm() / expected.double().norm()).detach())


def judge(what: str, shape: str, dtype: torch.dtype, found: Tensor, expected: Tensor) -> None:
    """Hold the error of the whole tensor under the limit of its precision, and note it."""
    error = relative_error(found, expected)
    if path := os.environ.get("INLAY_KERNEL_LOG"):
        with open(path, "a", encoding="utf8") as log:
            log.write(f"{what}\t{shape}\t{str(dtype).removeprefix('torch.')}\t{error:.2e}\n")
    assert error < LIMITS[dtype], f"{what} {shape}: {error}"


def plain_norm(x, residual, scale, shift, slot_N):
    total = x if residual is None else x + residual
    away = total - total.mean(-1, keepdim=True)
    normal = away / (away.square().mean(-1, keepdim=True) + EPS).sqrt()
    return normal * scale[slot_N] + (0 if shift is None else shift[slot_N])


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    ("slots", "tokens", "width"), [(1, 1216, 768), (32, 1216, 768), (16, 1216, 1024), (256, 38, 384), (3, 1, 33)]
)
@pytest.mark.parametrize("has_residual", [True, False])
def test_norm_equals_float64(dtype, slots, tokens, width, has_residual):
    torch.manual_seed(0)
    lengths = torch.randint(0, 2 * tokens + 1, (slots,)).tolist()
    lengths[0] = tokens
    num_tokens = sum(lengths)
    x, residual, dy = (torch.randn(num_tokens, width, device="cuda").to(dtype) for _ in range(3))
    scale, shift = (torch.randn(slots, width, device="cuda") for _ in range(2))
    inputs = [x, residual if has_residual else None, scale, shift]
    own = [None if tensor is None else tensor.clone().requires_grad_() for tensor in inputs]
    exact = [None if tensor is None else tensor.double().requires_grad_() for tensor in inputs]
    y = layer_norm(*own, EPS, tiles_of(lengths))
    y.backward(dy)
    slot_N = torch.arange(slots, device="cuda").repeat_interleave(torch.tensor(lengths, device="cuda"))
    expected = plain_norm(*exact, slot_N)
    expected.backward(dy.double())
    shape = f"S{slots} N{num_tokens} D{width} residual={has_residual}"
    judge("norm", shape, dtype, y, expected)
    for name, a, b in zip(("x", "residual", "scale", "shift"), own, exact, strict=True):
        if a is not None:
            judge(f"norm d{name}", shape, dtype, a.grad, b.grad)


def places(lengths: list[int]) -> tuple[Tensor, Tensor]:
    stops = torch.tensor(lengths).cumsum(0)
    return (stops - torch.tensor(lengths)).int().cuda(), stops.int().cuda()


def plain_attention(q, k, v, lengths, bias):
    pieces = []
    for parts in zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True):
        q_H, k_H, v_H = (part.transpose(0, 1) for part in parts)
        s = q_H @ k_H.transpose(1, 2) * q.shape[-1] ** -0.5
        if bias is not None:
            at = torch.arange(s.shape[-1], device=s.device)
            s = s + bias[:, bias.shape[1] // 2 + at[None, :] - at[:, None]]
        pieces.append((s.softmax(-1) @ v_H).transpose(0, 1))
    return torch.cat(pieces)


PACKS = [  # rows, shortest, longest, max_length, heads, width
    *[(1024, 2, 74, 128, 12, 64), (32, 2, 74, 128, 12, 64), (64, 1, 64, 64, 12, 32), (64, 384, 384, 512, 12, 64)],
    *[(16, 1, 512, 512, 16, 64), (200, 1, 30, 32, 4, 32), (8, 1, 200, 256, 3, 24)],
]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("rows", "shortest", "longest", "max_length", "heads", "width"), PACKS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_equals_float64(dtype, rows, shortest, longest, max_length, heads, width, has_bias):
    torch.manual_seed(0)
    lengths = [*torch.randint(shortest, longest + 1, (rows,)).tolist(), 0, 0]
    qkv = torch.randn(sum(lengths), 3 * heads * width, device="cuda").to(dtype)
    do = torch.randn(sum(lengths), heads, width, device="cuda").to(dtype)
    bias = torch.randn(heads, 2 * max_length, device="cuda") if has_bias else None
    own, exact = qkv.clone().requires_grad_(), qkv.double().requires_grad_()
    views = (part.unflatten(1, (heads, width)) for part in own.chunk(3, 1))
    o = segment_attention(*views, *places(lengths), bias, width**-0.5, max_length)
    o.backward(do)
    views = (part.unflatten(1, (heads, width)) for part in exact.chunk(3, 1))
    expected = plain_attention(*views, lengths, None if bias is None else bias.double())
    expected.backward(do.double())
    shape = f"B{rows} N{sum(lengths)} L{max_length} H{heads} d{width} bias={has_bias}"
    judge("attention", shape, dtype, o, expected)
    for name, a, b in zip("qkv", own.grad.chunk(3, 1), exact.grad.chunk(3, 1), strict=True):
        judge(f"attention d{name}", shape, dtype, a, b)


def test_long_rows_go_through_flash_attention_side_by_side_and_recorded(monkeypatch):
    """As a rung lays them: rows of padding behind, and empty ones."""
    torch.manual_seed(0)
    lengths, heads, width = [512, 300, 411], 12, 64
    rung = Rung(Capacity(climb(sum(lengths)), 4, 1, 512), 0, 0, torch.device("cuda"))
    rung.fill(rung.lay(Laid(np.zeros(sum(lengths), np.int64), None, np.array(lengths), np.zeros(3, np.int64))))
    tiling, num_real = rung.route.tiling, sum(lengths)
    qkv = torch.randn(rung.capacity.num_tokens, 3, heads, width, device="cuda").bfloat16()
    do = torch.randn(len(qkv), heads, width, device="cuda").bfloat16()
    flash, flash_backward = Mock(wraps=fused_attention._flash), Mock(wraps=fused_attention._flash_backward)
    monkeypatch.setattr(fused_attention, "_flash", flash)
    monkeypatch.setattr(fused_attention, "_flash_backward", flash_backward)

    def both() -> tuple[Tensor, Tensor]:
        own = qkv.clone().requires_grad_()
        o = attend_joined(own, tiling, scaling=width**-0.5)
        return o.detach(), torch.autograd.grad(o, own, do)[0]

    both()
    assert (flash.call_count, flash_backward.call_count) == (1, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, grad = both()
    graph.replay()
    exact = qkv[:num_real].double().requires_grad_()
    expected = plain_attention(*exact.unbind(1), lengths, None)
    judge("attention", "long, joined, recorded", torch.bfloat16, o[:num_real], expected)
    by_qkv = torch.autograd.grad(expected, exact, do[:num_real].double())[0]
    judge("attention dqkv", "long, joined, recorded", torch.bfloat16, grad[:num_real], by_qkv)


def test_dropout_is_unbiased_and_the_same_in_backward():
    torch.manual_seed(0)
    length, heads, dropout, seed = 128, 12, 0.1, torch.tensor([7], device="cuda")
    q, k = (torch.randn(2 * length, heads, length, device="cuda") for _ in range(2))
    eye = torch.eye(length, device="cuda").repeat(2, 1)[:, None].repeat(1, heads, 1)
    rows = places([length, length])
    given = (None, length**-0.5, length)
    weights, whole = (segment_attention(q, k, eye, *rows, *given, share, seed) for share in (dropout, 0.0))
    kept = weights / whole
    dropped = (kept < 0.5).double().mean()
    assert abs(dropped - dropout) < 4 * (dropout * (1 - dropout) / kept.numel()) ** 0.5
    torch.testing.assert_close(kept[kept > 0.5], torch.full_like(kept[kept > 0.5], 1 / (1 - dropout)))
    # The output is linear in v with the dropped weights W, so that dv must be Wᵀdo with the very same ones.
    v, do = (torch.randn(2 * length, heads, length, device="cuda") for _ in range(2))
    v.requires_grad_()
    segment_attention(q, k, v, *rows, *given, dropout, seed).backward(do)
    expected = torch.einsum("bihj,bihd->bjhd", weights.unflatten(0, (2, -1)), do.unflatten(0, (2, -1))).flatten(0, 1)
    torch.testing.assert_close(v.grad, expected, atol=1e-4, rtol=1e-4)


def test_one_captured_graph_serves_other_routes_and_rows():
    torch.manual_seed(0)
    width, heads = 768, 12
    x, dy = (torch.randn(128, width, device="cuda") for _ in range(2))
    scales, shifts = (torch.randn(4, width, device="cuda") for _ in range(2))
    mixes = [[64, 3, 0, 61], [1, 0, 127, 0], [20, 40, 40, 28]]
    tiles, rows = tiles_of([128, 0, 0, 0], 8), places([128, 0, 0, 0])

    def step() -> tuple[Tensor, Tensor, Tensor]:
        scale, shift = (tensor.detach().requires_grad_() for tensor in (scales, shifts))  # no leaf of another stream
        y = layer_norm(x, x, scale, shift, EPS, tiles)
        heads_NHd = y.unflatten(1, (heads, -1))
        o = segment_attention(heads_NHd, heads_NHd, heads_NHd, *rows, None, 0.125, 128).flatten(1)
        return o.detach(), *torch.autograd.grad(o, (scale, shift), dy)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    for lengths in mixes:
        tiles.copy_(tiles_of(lengths, 8))
        for mine, theirs in zip(rows, places(lengths), strict=True):
            mine.copy_(theirs)
        graph.replay()
        found = [tensor.clone() for tensor in captured]
        for a, b in zip(found, step(), strict=True):
            assert torch.equal(a, b)


def test_both_compile_whole_and_equal_eager():
    torch.manual_seed(0)
    lengths, slots = [30, 2, 64, 32], [32, 96]
    tiles, rows = tiles_of(slots), places(lengths)
    x, residual = (torch.randn(128, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    scale, shift = (torch.randn(2, 768, device="cuda", requires_grad=True) for _ in range(2))
    leaves = (x, residual, scale, shift)

    def loss() -> Tensor:
        y = layer_norm(x, residual, scale, shift, EPS, tiles).unflatten(1, (12, 64))
        return segment_attention(y, y, y, *rows, None, 0.125, 64).float().square().mean()

    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(), leaves)
    for a, b in zip(found, torch.autograd.grad(loss(), leaves), strict=True):
        assert relative_error(a, b) < LIMITS[torch.bfloat16]


def test_the_quick_gelu_rounds_to_bf16_as_the_exact_one_nearly_everywhere():
    x = torch.linspace(-3, 6, 40001, device="cuda").bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    found, expected = quick_gelu(x), F.gelu(wide)
    assert (found == expected.bfloat16()).float().mean() > 0.995
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=1e-6, rtol=2**-7)
