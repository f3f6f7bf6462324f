"""Attention over packed rows: every row attends to itself, and nothing is computed for padding.

Families that take transformers' attention interface get `IMPLEMENTATION` for it; mpnet and T5's encoder, which add a
position bias of their own to the scores, get their self-attention and bias replaced, the bias as a table by distance,
never as a matrix for the whole pack. While no packed batch is routed, both are exactly what transformers does.

On a CPU neighbouring rows of one length go through one product as they lie, which is faster there than a call for each
row, blocks of rows or padding (bench/cpu_attention.py). Training keeps the weights of rows that are not long, and
computes with plain products: torch's fused attention is made for long rows. Where attention has dropout, rows are
padded for this product alone.

Shape letters: N packed tokens, B rows, T tokens of a padded row, M = B·T, H heads, C channels of a head, W distances,
L tokens of the encoder's text.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.batch.route import Pack, Tiling
from inlay.model.kernels.fused_attention import cross_attention, flashes

IMPLEMENTATION = "inlay"
"""The name under which transformers finds packed attention."""
MOST_KEPT = 128
"""Tokens of a row at most whose attention weights are kept for the backward pass: they take memory by the square."""


def attend(
    q_NHC: Tensor, k_NHC: Tensor, v_NHC: Tensor, pack: Pack, *, scaling: float, dropout: float = 0.0,
    bias_HW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute each row's attention to itself [N, H, C]; `bias_HW` is added to the scores by distance, key - query."""
    if dropout or q_NHC.device.type != "cpu":
        q_BTHC, k_BTHC, v_BTHC = (pack.unpack(x) for x in (q_NHC, k_NHC, v_NHC))
        return attend_rows(q_BTHC, k_BTHC, v_BTHC, pack.is_real_BT, scaling, dropout, bias_HW)[pack.is_real_BT]
    has_grad = q_NHC.requires_grad and torch.is_grad_enabled() and not (bias_HW is not None and bias_HW.requires_grad)
    if has_grad and max(pack.lengths) <= MOST_KEPT:
        attended: Tensor = _Products.apply(q_NHC, k_NHC, v_NHC, pack.lengths, pack.lengths, scaling, bias_HW)
        return attended
    sizes = [count * length for count, length in pack.runs_of_equal_length]
    pieces = []
    parts = zip(q_NHC.split(sizes), k_NHC.split(sizes), v_NHC.split(sizes), pack.runs_of_equal_length, strict=True)
    for q, k, v, (count, length) in parts:
        # [n, H, T, C] without a copy: rows of one length lie as a batch would.
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        bias = None if bias_HW is None else spread_bias(bias_HW, length)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
        pieces.append(out.transpose(1, 2).flatten(0, 1))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def attend_first(
    q_BHC: Tensor, k_NHC: Tensor, v_NHC: Tensor, pack: Pack, *, scaling: float, bias_HW: Tensor | None = None
) -> Tensor:
    """Return the attention of each row's first token [B, H, C] to the row; the bias gets no gradient."""
    attended: Tensor = _Products.apply(q_BHC, k_NHC, v_NHC, (1,) * len(q_BHC), pack.lengths, scaling, bias_HW)
    return attended


class _Products(torch.autograd.Function):
    """softmax(scaling·q·kᵀ + bias)·v of each row, and its gradients, as products over heads; the bias gets none.

    A row may have fewer queries than keys: those of its first tokens.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q_NHC, k_NHC, v_NHC, num_queries, lengths, scaling, bias_HW = inputs
        qkv_HNC = [x.transpose(0, 1).contiguous() for x in (q_NHC * scaling, k_NHC, v_NHC)]
        sizes = (num_queries, lengths, lengths)
        weights, pieces = [], []
        for q, k, v in zip(*(x.split(size, 1) for x, size in zip(qkv_HNC, sizes, strict=True)), strict=True):
            scores = torch.bmm(q, k.transpose(1, 2))
            if bias_HW is not None:
                scores += spread_bias(bias_HW, k.shape[1])[:, : q.shape[1]]
            weights.append(torch.softmax(scores, -1))
            pieces.append(torch.bmm(weights[-1], v).transpose(0, 1))
        ctx.sizes, ctx.scaling = (*sizes, num_queries), scaling
        ctx.save_for_backward(*qkv_HNC, *weights)
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_HNC, k_HNC, v_HNC, *weights_of = ctx.saved_tensors
        all_HNC = (q_HNC, k_HNC, v_HNC, grads[0].transpose(0, 1).contiguous())
        parts = (x.split(size, 1) for x, size in zip(all_HNC, ctx.sizes, strict=True))
        pieces = []
        for q, k, v, grad, weights in zip(*parts, weights_of, strict=True):
            by_weights = torch.bmm(grad, v.transpose(1, 2))
            by_scores = torch._softmax_backward_data(by_weights, weights, -1, weights.dtype)
            row = (
                torch.bmm(by_scores, k),
                torch.bmm(by_scores.transpose(1, 2), q),
                torch.bmm(weights.transpose(1, 2), grad),
            )
            pieces.append([x.transpose(0, 1) for x in row])
        by_q, by_k, by_v = (torch.cat(column) for column in zip(*pieces, strict=True))
        return by_q.mul_(ctx.scaling), by_k, by_v, None, None, None, None


def attend_rows(
    q_BTHC: Tensor, k_BLHC: Tensor, v_BLHC: Tensor, is_key_BL: Tensor, scaling: float, dropout: float = 0.0,
    bias_HW: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of padded rows [B, T, H, C] to their real keys."""
    mask = is_key_BL[:, None, None, :]
    if bias_HW is not None:
        mask = torch.where(mask, spread_bias(bias_HW, mask.shape[-1]), -torch.inf).to(q_BTHC.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHC, k_BLHC, v_BLHC))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling).transpose(1, 2)


def attend_any_mix(
    q_NHC: Tensor, k_NHC: Tensor, v_NHC: Tensor, tiling: Tiling, *, scaling: float, bias_HW: Tensor,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """Do what `attend` does by tensors alone: rows are padded to the longest that may come."""
    assert tiling.rows_N is not None
    places_T = torch.arange(tiling.max_length, device=q_NHC.device)
    tokens_BT = tiling.starts_B.unsqueeze(1) + places_T
    # A row without tokens is never read, but its result must be a finite number.
    is_key_BT = (tokens_BT < tiling.stops_B.unsqueeze(1)) | (places_T == 0)
    tokens_BT = tokens_BT.clamp(max=q_NHC.shape[0] - 1)
    tokens_M = tokens_BT.flatten()
    q, k, v = (x.index_select(0, tokens_M).unflatten(0, tokens_BT.shape) for x in (q_NHC, k_NHC, v_NHC))
    starts_N = tiling.starts_B.index_select(0, tiling.rows_N)
    homes_N = tiling.rows_N * tiling.max_length + torch.arange(q_NHC.shape[0], device=q_NHC.device) - starts_N
    return attend_rows(q, k, v, is_key_BT, scaling, dropout, bias_HW).flatten(0, 1).index_select(0, homes_N)


def attend_across(
    q_BTHC: Tensor, k_NHC: Tensor, v_NHC: Tensor, tiling: Tiling, *, scaling: float, dropout: float = 0.0
) -> Tensor:
    """Compute cross-attention of each row's answer [B, T, H, C] to the row's text, which lies in a pack.

    The pack's rows after the first B are not read. A row without tokens gives some finite number.
    """
    num_rows = len(q_BTHC)
    if not dropout and flashes(q_BTHC.flatten(0, 1)):
        stops_B = tiling.stops_B[:num_rows]
        out_MHC = cross_attention(q_BTHC.flatten(0, 1), k_NHC, v_NHC, stops_B, tiling.max_length, scaling)
        return out_MHC.unflatten(0, q_BTHC.shape[:2])
    (k_BLHC, is_real_BL), (v_BLHC, _) = (tiling.unpack(x, num_rows) for x in (k_NHC, v_NHC))
    is_real_BL = is_real_BL | (torch.arange(is_real_BL.shape[1], device=is_real_BL.device) == 0)
    return attend_rows(q_BTHC, k_BLHC, v_BLHC, is_real_BL, scaling, dropout)


def spread_bias(bias_HW: Tensor, length: int) -> Tensor:
    """Return the bias of every pair of tokens of a row [H, T, T], from the bias of every distance."""
    places_T = torch.arange(length, device=bias_HW.device)
    return bias_HW[:, bias_HW.shape[1] // 2 + places_T.unsqueeze(0) - places_T.unsqueeze(1)]


def register() -> None:
    """Make packed attention known to transformers under its name; safe to call again."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, _take_interface)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def _take_interface(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    active = module.inlay.active if hasattr(module, "inlay") else None  # none on a model that was never mounted
    if active is None or active.pack is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return active.attend(q, k, v, scaling=options["scaling"], dropout=options.get("dropout", 0.0)).unsqueeze(0), None


def replace_biased(encoder: Any, attentions: list[Any], mount: Any) -> None:
    """Make mpnet's encoder and self-attention modules take packed batches; other batches go the usual way."""
    padded = encoder.compute_position_bias.__func__

    def compute_position_bias(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.inlay.active is None or self.inlay.active.pack is None:
            return padded(self, x, *args, **kwargs)
        longest = int(self.config.max_position_embeddings)
        distances_W = torch.arange(-longest, longest + 1, device=x.device)
        return self.relative_attention_bias(self.relative_position_bucket(distances_W)).t()

    encoder.compute_position_bias = types.MethodType(compute_position_bias, encoder)
    encoder.inlay = mount
    for attention in attentions:
        attention.forward = types.MethodType(_attention_with_table(type(attention).forward), attention)


def replace_bucketed(attentions: list[Any], longest: int) -> None:
    """Make T5's self-attention modules take packed batches of rows of `longest` tokens at most."""
    for attention in attentions:
        attention.forward = types.MethodType(_attention_with_buckets(type(attention).forward, longest), attention)


@contextmanager
def placed(model: Any, places_T: Tensor) -> Iterator[None]:
    """Set the distances between tokens of T5's decoder to those of `places_T` inside the block."""
    attention = model.decoder.block[0].layer[0].SelfAttention  # the biases of all blocks
    buckets_TT = _find_buckets(attention, places_T[None, :] - places_T[:, None], both_ways=False)
    handle = attention.relative_attention_bias.register_forward_pre_hook(lambda module, args: (buckets_TT,))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def crossing(attentions: Sequence[Any], tiling: Tiling) -> Iterator[None]:
    """Make these cross-attentions of T5's decoder read packed rows inside the block, not padded ones."""

    def forward(self: Any, hidden_states: Tensor, *, key_value_states: Tensor, **kwargs: Any) -> Any:
        shape = (-1, self.n_heads, self.key_value_proj_dim)
        q_BTHC = self.q(hidden_states).unflatten(-1, shape[1:])
        k_NHC, v_NHC = (linear(key_value_states).view(shape) for linear in (self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        out_BTHC = attend_across(q_BTHC, k_NHC, v_NHC, tiling, scaling=1.0, dropout=dropout)
        return self.o(out_BTHC.flatten(2)), None, None

    try:
        for attention in attentions:
            attention.forward = types.MethodType(forward, attention)
        yield
    finally:
        for attention in attentions:
            attention.__dict__.pop("forward", None)


def _find_buckets(attention: Any, distances: Tensor, *, both_ways: bool) -> Tensor:
    """Return the rows of T5's table of biases for distances; a decoder's look back alone."""
    return attention._relative_position_bucket(
        distances,
        bidirectional=both_ways,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )


def _attention_with_buckets(padded: Callable[..., Any], longest: int) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: Tensor, mask: Any = None, **kwargs: Any) -> Any:
        active = self.inlay.active
        if active is None or active.pack is None:
            return padded(self, hidden_states, mask, **kwargs)
        bias_HW = kwargs.get("position_bias")  # from the first block, which computes it for all
        if bias_HW is None:
            distances_W = torch.arange(-longest, longest + 1, device=hidden_states.device)
            buckets_W = _find_buckets(self, distances_W, both_ways=True)
            # Not as an embedding: torch sorts the gradients of so many, which cannot be captured.
            bias_HW = self.relative_attention_bias.weight.index_select(0, buckets_W).t()
        shape = (-1, self.n_heads, self.key_value_proj_dim)
        q, k, v = (linear(hidden_states).view(shape) for linear in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        out = active.attend(q, k, v, scaling=1.0, dropout=dropout, bias_HW=bias_HW)
        return self.o(out.reshape(*hidden_states.shape[:-1], -1)), bias_HW, None

    return forward


def _attention_with_table(padded: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, position_bias: Any = None, **kwargs: Any
    ) -> Any:
        active = self.inlay.active
        if active is None or active.pack is None:
            return padded(self, hidden_states, attention_mask, position_bias, **kwargs)
        shape = (-1, self.num_attention_heads, self.attention_head_size)
        q, k, v = (linear(hidden_states).view(shape) for linear in (self.q, self.k, self.v))
        dropout = self.dropout.p if self.training else 0.0
        scaling = 1 / math.sqrt(self.attention_head_size)
        out = active.attend(q, k, v, scaling=scaling, dropout=dropout, bias_HW=position_bias)
        return (self.o(out.reshape(hidden_states.shape)),)

    return forward
