"""The norm and attention of packed tokens on a GPU, at real sizes, against float64.

Deselected by `make test`; run with `pytest -m gpu tests/test_gpu_norm_attention.py`. With INLAY_KERNEL_LOG=PATH every
case's errors are written there, a line of JSON for each. Compiling takes most of the time: each shape is there for what
no other has, and bf16, which steps are in, comes before float32, which the interpreter tests at large.
"""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.batch.buckets import BucketBuffers, Capacity, PackedRows, round_up_tokens
from inlay.model.batch.tiles import Tiles, make_tiles, tile_capacity
from inlay.model.kernels import fused_attention
from inlay.model.kernels.attention import attend_across
from inlay.model.kernels.frozen_layers import quick_gelu
from inlay.model.kernels.fused_attention import segment_attention
from inlay.model.kernels.fused_norm import layer_norm, rms_norm
from inlay.model.kernels.tiled import attend
from kernel_log import note

pytestmark = pytest.mark.gpu
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
EPS = 1e-12


def tiles_of(lengths: list[int], capacity: int | None = None, tile: int = 64) -> Tiles:
    """Tiles of slots with so many tokens each, laid end to end."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    segments = [(slot, end - length, end) for slot, (length, end) in enumerate(zip(lengths, ends, strict=True))]
    capacity = capacity or tile_capacity(sum(lengths), len(lengths), tile)
    return make_tiles(segments, len(lengths), tile, capacity, "cuda")


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected.double()).norm() / expected.double().norm()).detach())


def judge(what: str, shape: str, dtype: torch.dtype, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Hold the errors of whole tensors under the limit of their precision, and note them."""
    errors = {name: relative_error(found, expected) for name, (found, expected) in pairs.items()}
    note(kernel=what, case=shape, dtype=str(dtype), tolerance=LIMITS[dtype], errors=errors)
    assert max(errors.values()) < LIMITS[dtype], f"{what} {shape}: {errors}"


def plain_norm(x, residual, scale, shift, slot_N, *, is_centered=True):
    total = x if residual is None else x + residual
    away = total - total.mean(-1, keepdim=True) if is_centered else total
    normal = away / (away.square().mean(-1, keepdim=True) + EPS).sqrt()
    return normal * scale[slot_N] + (0 if shift is None else shift[slot_N])


def kernel_norm(x, residual, scale, shift, tiles, *, is_centered=True):
    return layer_norm(x, residual, scale, shift, EPS, tiles) if is_centered else rms_norm(x, scale, EPS, tiles)


ABSENT = {"norm": (), "norm without residual": (1,), "rms_norm": (1, 3)}
"""which of x, residual, scale and shift there are not"""
NORMS = {  # slots, tokens, width, tile
    "one slot": (1, 1216, 768, 16),
    "cohort": (32, 1216, 768, 64),
    "large": (16, 1216, 1024, 64),
    "many slots": (256, 38, 384, 64),
    "odd": (3, 1, 33, 16),
}
IN_BF16 = [(torch.bfloat16, kind, norm) for kind in ABSENT for norm in NORMS]
IN_FLOAT32 = [(torch.float32, kind, norm) for kind in ("norm", "rms_norm") for norm in ("one slot", "odd")]


@pytest.mark.parametrize(("dtype", "kind", "norm"), [*IN_BF16, *IN_FLOAT32], ids=str)
def test_norm_equals_float64(dtype, kind, norm):
    torch.manual_seed(0)
    slots, tokens, width, tile = NORMS[norm]
    lengths = torch.randint(0, 2 * tokens + 1, (slots,)).tolist()
    lengths[0] = tokens
    num_tokens, is_centered = sum(lengths), kind != "rms_norm"
    x, residual, dy = (torch.randn(num_tokens, width, device="cuda").to(dtype) for _ in range(3))
    scale, shift = (torch.randn(slots, width, device="cuda") for _ in range(2))
    inputs = [None if i in ABSENT[kind] else tensor for i, tensor in enumerate((x, residual, scale, shift))]
    own = [None if tensor is None else tensor.clone().requires_grad_() for tensor in inputs]
    exact = [None if tensor is None else tensor.double().requires_grad_() for tensor in inputs]
    y = kernel_norm(*own, tiles_of(lengths, tile=tile), is_centered=is_centered)
    y.backward(dy)
    slot_N = torch.arange(slots, device="cuda").repeat_interleave(torch.tensor(lengths, device="cuda"))
    expected = plain_norm(*exact, slot_N, is_centered=is_centered)
    expected.backward(dy.double())
    by_name = zip(("x", "residual", "scale", "shift"), own, exact, strict=True)
    gradients = {f"d_{name}": (a.grad, b.grad) for name, a, b in by_name if a is not None}
    judge(kind, f"S{slots} N{num_tokens} D{width} tile {tile}", dtype, {"out": (y, expected), **gradients})


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


PACKS = {  # rows, shortest, longest, max_length, heads, width
    "cohort": (1024, 2, 74, 128, 12, 64),
    "one run": (32, 2, 74, 128, 12, 64),
    "long": (64, 384, 384, 512, 12, 64),
    "mixed to 512": (16, 1, 512, 512, 16, 64),
    "short": (200, 1, 30, 32, 4, 32),
    "narrow heads": (64, 1, 64, 64, 12, 32),
    "odd heads": (8, 1, 200, 256, 3, 24),
}
ATTENTIONS = [
    *((torch.bfloat16, name, has_bias) for name in ("cohort", "one run", "long") for has_bias in (False, True)),
    *((torch.bfloat16, name, False) for name in ("mixed to 512", "short", "narrow heads")),
    *((torch.bfloat16, "odd heads", True), (torch.float32, "one run", False), (torch.float32, "odd heads", True)),
]
"""a precision, a pack and whether scores have a bias"""


@pytest.mark.parametrize(("dtype", "pack", "has_bias"), ATTENTIONS, ids=str)
def test_attention_equals_float64(dtype, pack, has_bias):
    torch.manual_seed(0)
    rows, shortest, longest, max_length, heads, width = PACKS[pack]
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
    by_name = zip("qkv", own.grad.chunk(3, 1), exact.grad.chunk(3, 1), strict=True)
    judge("attention", shape, dtype, {"out": (o, expected), **{f"d_{name}": (a, b) for name, a, b in by_name}})


def test_long_rows_go_through_flash_attention_side_by_side_and_recorded(monkeypatch):
    """As a rung lays them: rows of padding behind, and empty ones."""
    torch.manual_seed(0)
    lengths, heads, width = [512, 300, 411], 12, 64
    rung = BucketBuffers(Capacity(round_up_tokens(sum(lengths)), 4, 1, 512), 0, 0, torch.device("cuda"))
    rung.fill(rung.lay(PackedRows(np.zeros(sum(lengths), np.int64), None, np.array(lengths), np.zeros(3, np.int64))))
    tiling, num_real = rung.route.tiling, sum(lengths)
    qkv = torch.randn(rung.capacity.num_tokens, 3, heads, width, device="cuda").bfloat16()
    do = torch.randn(len(qkv), heads, width, device="cuda").bfloat16()
    flash, flash_backward = Mock(wraps=fused_attention._flash), Mock(wraps=fused_attention._flash_backward)
    monkeypatch.setattr(fused_attention, "_flash", flash)
    monkeypatch.setattr(fused_attention, "_flash_backward", flash_backward)

    def both() -> tuple[Tensor, Tensor]:
        own = qkv.clone().requires_grad_()
        o = attend(own, None, None, tiling, scaling=width**-0.5)
        return o.detach(), torch.autograd.grad(o, own, do)[0]

    both()
    assert (flash.call_count, flash_backward.call_count) == (1, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, grad = both()
    graph.replay()
    exact = qkv[:num_real].double().requires_grad_()
    expected = plain_attention(*exact.unbind(1), lengths, None)
    by_qkv = torch.autograd.grad(expected, exact, do[:num_real].double())[0]
    pairs = {"out": (o[:num_real], expected), "d_qkv": (grad[:num_real], by_qkv)}
    judge("attention", "long, joined, recorded", torch.bfloat16, pairs)


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(63, 6), (80, 2), (80, 6)])
def test_attention_to_what_was_read_equals_float64_recorded_too(monkeypatch, num_rows, num_tokens):
    """As T5's decoder asks: few tokens of each row; of the rows of padding some are asked about, and empty ones."""
    torch.manual_seed(0)
    lengths, heads, width = [*torch.randint(1, 128, (61,)).tolist(), 1, 128], 6, 64
    rung = BucketBuffers(Capacity(round_up_tokens(sum(lengths)), 80, 1, 128), 0, 0, torch.device("cuda"))
    rung.fill(rung.lay(PackedRows(np.zeros(sum(lengths), np.int64), None, np.array(lengths), np.zeros(63, np.int64))))
    tiling = rung.route.tiling
    q = torch.randn(num_rows, num_tokens, heads, width, device="cuda").div(4).bfloat16()
    k, v = (torch.randn(rung.capacity.num_tokens, heads, width, device="cuda").bfloat16() for _ in range(2))
    do = torch.randn_like(q)
    do[63:] = 0  # nobody reads what is behind
    flash = Mock(wraps=fused_attention._flash)
    monkeypatch.setattr(fused_attention, "_flash", flash)

    def both() -> tuple[Tensor, ...]:
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.full_like(k, torch.nan)  # its memory is taken next: what is not written there is seen
        o = attend_across(*own, tiling, scaling=1.0)
        return o.detach(), *torch.autograd.grad(o, own, do)

    both()
    assert flash.call_count == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, *grads = both()
    graph.replay()
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    rows = zip(exact[0][:63], *(x[: sum(lengths)].split(lengths) for x in exact[1:]), strict=True)
    scores = ((torch.einsum("thc,nhc->htn", a, b).softmax(-1), c) for a, b, c in rows)
    expected = torch.stack([torch.einsum("htn,nhc->thc", weights, values) for weights, values in scores])
    pairs = {"out": (o[:63], expected)}
    by_name = zip("qkv", grads, torch.autograd.grad(expected, exact, do[:63].double()), strict=True)
    pairs |= {f"d_{name}": (found, wanted) for name, found, wanted in by_name}
    judge("attention across", f"B{num_rows} T{num_tokens} H6 d64", torch.bfloat16, pairs)
    assert not any(grad[sum(lengths) :].any() for grad in grads[1:])


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
        tiles.buffer.copy_(tiles_of(lengths, 8).buffer)
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
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=2**-7)
    assert (found == expected.bfloat16()).float().mean() > 0.995
    found.sum().backward()
    expected.sum().backward()
    judge("quick_gelu", "N40001", x.dtype, {"out": (found, expected), "d_x": (x.grad, wide.grad)})
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=1e-6, rtol=2**-7)
