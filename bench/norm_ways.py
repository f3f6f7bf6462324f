"""The ways to do what is done to each token by itself: norms of both kinds, the exact GELU, a slot's vector for each.

With one slot torch has the very operation. With many, torch's norm goes without weights, and each token's scale and
shift come by a gather in float32 (`gathered`), by one gather of both in the tokens' type (`addcmul`), by a product with
the slots of the tokens as ones and zeros (`one-hot`: a gather's gradient takes ten times as long) or by our own
`slot vectors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kernel_ways import Call, Way
from torch import Tensor

from inlay.model.batch.buckets import Capacity, round_up_tokens
from inlay.model.batch.tiles import Tiles, make_tiles, tile_capacity
from inlay.model.kernels import fused_norm, grouped
from inlay.model.kernels.frozen_layers import quick_gelu
from inlay.model.kernels.fused_norm import layer_norm, rms_norm
from inlay.model.kernels.grouped import slot_vectors

EPS = 1e-12
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Makers = dict[str, Callable[[], Way]]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a step."""

    slots: int
    tokens: int
    """of each slot"""
    width: int

    @property
    def num_tokens(self) -> int:
        return self.slots * self.tokens

    def make_tiles(self) -> Tiles:
        """As a step of so many tokens, in rows of 38, is cut."""
        tile = Capacity(round_up_tokens(self.num_tokens), max(1, self.num_tokens // 38), self.slots, 128).tile
        segments = [(slot, slot * self.tokens, (slot + 1) * self.tokens) for slot in range(self.slots)]
        return make_tiles(segments, self.slots, tile, tile_capacity(self.num_tokens, self.slots, tile), DEVICE)


class Work:
    """The tensors of a case."""

    def __init__(self, case: Tokens, dtype: torch.dtype) -> None:
        self.case, self.dtype, self.tiles = case, dtype, case.make_tiles()
        self.x, self.residual, self.dy = (self._draw(case.num_tokens, dtype) for _ in range(3))
        self.scale, self.shift = (self._draw(case.slots, torch.float32) for _ in range(2))
        slots_S = torch.arange(case.slots, device=DEVICE)
        self.slot_N = slots_S.repeat_interleave(case.tokens)
        self.slots_NS = (self.slot_N[:, None] == slots_S).to(dtype)  # as ones and zeros

    def _draw(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(num_rows, self.case.width, device=DEVICE, dtype=dtype, requires_grad=True)

    def by_product(self, stack_SD: Tensor) -> Tensor:
        return self.slots_NS @ stack_SD.to(self.dtype)

    def by_vectors(self, stack_SD: Tensor) -> Tensor:
        return slot_vectors(stack_SD, self.tiles, self.case.num_tokens, self.dtype)


def norm_ways(case: Tokens, dtype: torch.dtype) -> Makers:
    """Layer norm of a sum with each token's own scale and shift."""
    work = Work(case, dtype)
    x, residual, scale, shift, width = work.x, work.residual, work.scale, work.shift, (case.width,)

    def of_one_slot() -> Tensor:
        return F.layer_norm(x + residual, width, scale[0].to(dtype), shift[0].to(dtype), EPS)

    def gathered() -> Tensor:
        normal = F.layer_norm((x + residual).float(), width, eps=EPS)
        return (normal * scale[work.slot_N] + shift[work.slot_N]).to(dtype)

    def addcmul() -> Tensor:
        both_N2D = torch.stack((scale, shift), 1).to(dtype).index_select(0, work.slot_N)
        return torch.addcmul(both_N2D[:, 1], F.layer_norm(x + residual, width, eps=EPS), both_N2D[:, 0])

    def one_hot() -> Tensor:
        normal = F.layer_norm(x + residual, width, eps=EPS)
        return torch.addcmul(work.by_product(shift), normal, work.by_product(scale))

    def vectors() -> Tensor:
        normal = F.layer_norm(x + residual, width, eps=EPS)
        return torch.addcmul(work.by_vectors(shift), normal, work.by_vectors(scale))

    ways = {"ours": lambda: layer_norm(x, residual, scale, shift, EPS, work.tiles)}
    plain = {"of one slot": of_one_slot} if case.slots == 1 else {"one-hot": one_hot, "slot vectors": vectors}
    return _makers(ways | plain | {"addcmul": addcmul, "gathered": gathered}, (x, residual, scale, shift), work.dy)


def rms_ways(case: Tokens, dtype: torch.dtype) -> Makers:
    """T5's layer norm with each token's own scale."""
    work = Work(case, dtype)
    x, scale, width = work.x, work.scale, (case.width,)

    def of_one_slot() -> Tensor:
        return F.rms_norm(x, width, scale[0].to(dtype), EPS)

    def gathered() -> Tensor:
        return (F.rms_norm(x.float(), width, eps=EPS) * scale[work.slot_N]).to(dtype)

    def one_hot() -> Tensor:
        return F.rms_norm(x, width, eps=EPS) * work.by_product(scale)

    def vectors() -> Tensor:
        return F.rms_norm(x, width, eps=EPS) * work.by_vectors(scale)

    ways = {"ours": lambda: rms_norm(x, scale, EPS, work.tiles)}
    plain = {"of one slot": of_one_slot} if case.slots == 1 else {"one-hot": one_hot, "slot vectors": vectors}
    return _makers(ways | plain | {"gathered": gathered}, (x, scale), work.dy)


def gelu_ways(case: Tokens, dtype: torch.dtype) -> Makers:
    """The exact GELU of frozen blocks, as wide as they are inside."""
    work = Work(case, dtype)
    x = work.x
    return _makers({"ours": lambda: quick_gelu(x), "F.gelu": lambda: F.gelu(x)}, (x,), work.dy)


def vector_ways(case: Tokens, dtype: torch.dtype) -> Makers:
    """Each token's slot's vector."""
    work = Work(case, dtype)
    scale = work.scale
    ways = {
        "ours": lambda: work.by_vectors(scale),
        "one-hot": lambda: work.by_product(scale),
        "index_select": lambda: scale.to(dtype).index_select(0, work.slot_N),
    }
    return _makers(ways, (scale,), work.dy)


def _makers(ways: dict[str, Callable[[], Tensor]], leaves: tuple[Tensor, ...], dy: Tensor) -> Makers:
    """What makes each way, and each but ours compiled."""
    gradient = dy.detach()

    def make(run: Callable[[], Tensor], is_compiled: bool) -> Way:
        return Way(torch.compile(run, fullgraph=True) if is_compiled else run, leaves, gradient)

    plain = {name: lambda run=run: make(run, False) for name, run in ways.items()}
    return plain | {
        f"{name}, compiled": lambda run=run: make(run, True) for name, run in ways.items() if name != "ours"
    }


def norm_programs(case: Tokens, dtype: torch.dtype) -> dict[str, Call]:
    """Forward and backward of a case, each by itself, by the name of the table they are cut by."""
    work = Work(case, dtype)
    x, dy, scale, shift = (tensor.detach() for tensor in (work.x, work.dy, work.scale, work.shift))
    places = (work.tiles.buffer, work.tiles.tile)
    moments = fused_norm._norm(x, None, scale, shift, *places, EPS, True)[2]
    return {
        "FORWARD": lambda: fused_norm._norm(x, None, scale, shift, *places, EPS, True),
        "BACKWARD": lambda: fused_norm._norm_backward(dy, x, moments, scale, *places, True, True),
    }


def vector_programs(case: Tokens, dtype: torch.dtype) -> dict[str, Call]:
    """The sums over slots' tokens, which a gradient is: the program that has cuts to choose from."""
    work = Work(case, dtype)
    dy = work.dy.detach()
    return {"sums": lambda: grouped._slot_sums(dy, work.tiles.buffer, work.tiles.num_slots)}
