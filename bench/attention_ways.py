"""The ways to let every token of a pack attend to the tokens of its own row.

"Padded" does not pay for padding and unpadding; the block mask of flex attention is made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kernel_ways import Call, Way
from torch import Tensor

from inlay.model.batch.route import LONG
from inlay.model.kernels import fused_attention
from inlay.model.kernels.fused_attention import segment_attention

WIDTH = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Makers = dict[str, Callable[[], Way]]


@dataclass(frozen=True)
class AttentionCase:
    rows: int
    heads: int
    max_length: int
    same: int | None = None
    """length of every row; None: of mean 38 between 2 and 128"""
    bias: bool = False
    dropout: float = 0.0


def names_of_attention(case: AttentionCase, dtype: torch.dtype) -> tuple[str, ...]:
    """The ways that can do the work of a case."""
    if case.dropout:
        return "ours", "padded SDPA"
    has_varlen = not case.bias and dtype is not torch.float32
    return ("ours", *(["varlen_attn"] if has_varlen else []), "padded SDPA", "flex_attention, compiled")


def kernel_of(case: AttentionCase) -> str:
    """What a case is a case of. Packs of long rows go through flash attention, if nothing is added or dropped."""
    is_long = case.same is not None and case.same >= LONG
    if case.bias or case.dropout:
        return f"attention with {'bias' if case.bias else 'dropout'}{', long rows' if is_long else ''}"
    return "attention of long rows, which steps leave to flash attention" if is_long else "attention"


def attention_ways(case: AttentionCase, dtype: torch.dtype) -> Makers:
    lengths = draw_lengths(case)
    stops = lengths.cumsum(0)
    starts = stops - lengths
    shape = (int(stops[-1]), case.heads, WIDTH)
    q, k, v = qkv = tuple(torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    do = torch.randn(shape, device=DEVICE, dtype=dtype)
    bias = torch.randn(case.heads, 2 * case.max_length, device=DEVICE) if case.bias else None
    seed = torch.tensor([1], device=DEVICE)
    rows = (starts.int(), stops.int())

    def ours() -> Tensor:
        return segment_attention(q, k, v, *rows, bias, WIDTH**-0.5, case.max_length, case.dropout, seed)

    def padded() -> Way:
        shape = (case.rows, case.heads, int(lengths.max()), WIDTH)
        inputs = tuple(torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
        return Way(padded_way(inputs, lengths, bias, case.dropout), inputs, torch.randn_like(inputs[0]))

    return {
        "ours": lambda: Way(ours, qkv, do),
        "varlen_attn": lambda: Way(varlen_way(qkv, starts, stops, case), qkv, do),
        "padded SDPA": padded,
        "flex_attention, compiled": lambda: Way(flex_way(qkv, lengths, bias), qkv, do),
    }


def draw_lengths(case: AttentionCase) -> Tensor:
    if case.same is not None:
        return torch.full((case.rows,), case.same, device=DEVICE)
    drawn = torch.exp(torch.randn(case.rows, generator=torch.Generator().manual_seed(0)) * 0.6 + 3.46)
    return drawn.round().clamp(2, 128).long().to(DEVICE)


def attention_programs(case: AttentionCase, dtype: torch.dtype) -> dict[str, Call]:
    """Forward and backward of a case, each by itself, by the name of the table they are cut by."""
    lengths = draw_lengths(case)
    stops = lengths.cumsum(0)
    places = ((stops - lengths).int(), stops.int(), None, None)
    q, k, v, do = (torch.randn(int(stops[-1]), case.heads, WIDTH, device=DEVICE, dtype=dtype) for _ in range(4))
    settings = (WIDTH**-0.5, case.max_length, 0.0, False)
    o, lse = fused_attention._attention(q, k, v, *places, *settings)
    return {
        "FORWARD": lambda: fused_attention._attention(q, k, v, *places, *settings),
        "BACKWARD": lambda: fused_attention._attention_backward(do, q, k, v, o, lse, *places, *settings),
    }


def varlen_way(qkv: tuple[Tensor, ...], starts: Tensor, stops: Tensor, case: AttentionCase) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    offsets = torch.cat([starts[:1], stops]).int()
    return lambda: varlen_attn(*qkv, offsets, offsets, case.max_length, case.max_length)


def flex_way(qkv: tuple[Tensor, ...], lengths: Tensor, bias: Tensor | None) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_tokens = len(qkv[0])
    row_N = torch.arange(len(lengths), device=DEVICE).repeat_interleave(lengths)
    mask = create_block_mask(
        lambda batch, head, i, j: row_N[i] == row_N[j], None, None, num_tokens, num_tokens, device=DEVICE, _compile=True
    )
    middle = 0 if bias is None else bias.shape[1] // 2
    score = None
    if bias is not None:

        def score(s, batch, head, i, j):
            # Pairs of other rows are masked afterwards, but the bias is read for them too.
            return s + bias[head, (middle + j - i).clamp(0, bias.shape[1] - 1)]

    compiled = torch.compile(flex_attention, fullgraph=True)

    def attend() -> Tensor:
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in qkv)
        return compiled(q, k, v, score_mod=score, block_mask=mask)[0].transpose(0, 1)

    return attend


def padded_way(qkv: tuple[Tensor, ...], lengths: Tensor, bias: Tensor | None, dropout: float) -> Callable[[], Tensor]:
    longest = qkv[0].shape[2]
    at = torch.arange(longest, device=DEVICE)
    mask = (at < lengths[:, None])[:, None, None, :]
    if bias is not None:
        by_pair = bias[:, bias.shape[1] // 2 + at[None, :] - at[:, None]]
        mask = torch.where(mask, by_pair, float("-inf")).to(qkv[0].dtype)
    elif bool((lengths == longest).all()):
        mask = None
    return lambda: F.scaled_dot_product_attention(*qkv, attn_mask=mask, dropout_p=dropout)
