"""The banked operations written plainly in float64, slot by slot, and kernels measured against them.

Shared by the tests of the kernels in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inlay.model.batch.tiles import Tiles, make_tiles, tile_capacity
from inlay.model.kernels.bottleneck_weights import ACTIVATIONS
from inlay.model.kernels.fused_bottleneck import Stacks, bottleneck
from inlay.model.kernels.grouped import segment_linear, slot_vectors

Segments = list[tuple[int, int, int]]
Tensors = dict[str, Tensor]


def lay_out(lengths: list[int], order: list[int] | None = None) -> Segments:
    """Slots laid end to end with so many tokens each, in some order; a slot without tokens is left out."""
    segments, start = [], 0
    for slot in order or range(len(lengths)):
        if lengths[slot]:
            segments.append((slot, start, start + lengths[slot]))
            start += lengths[slot]
    return segments


def tiles_of(lengths: list[int], tile: int, device: str = "cpu", order: list[int] | None = None) -> Tiles:
    """Tiles of slots laid end to end, with two to spare."""
    capacity = tile_capacity(sum(lengths), len(lengths), tile) + 2
    return make_tiles(lay_out(lengths, order), len(lengths), tile, capacity, device)


@dataclass(frozen=True)
class Case:
    """A bank, a pack of tokens and what is done with them."""

    lengths: list[int]
    sizes: list[int]
    """each slot's own size; the stacks are padded to the widest, rounded up to a multiple of eight"""
    width: int = 40
    width_out: int | None = None
    tile: int = 16
    activation: str | None = "gelu"
    has_biases: bool = True
    residual: bool = True
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    order: list[int] | None = None
    device: str = "cpu"
    dropout: float = 0.0
    salt: int = 0
    seed: int = field(default=0, kw_only=True)

    @property
    def padded(self) -> int:
        return -(-max(self.sizes) // 8) * 8

    @property
    def segments(self) -> Segments:
        return lay_out(self.lengths, self.order)

    @property
    def drawn(self) -> Tensor:
        """The seed of dropout, as the kernels take it."""
        return torch.tensor([self.seed * 0x123456789ABCDEF + 7], device=self.device)

    @property
    def mask(self) -> Tensor:
        """What dropout multiplies h with."""
        shape = (sum(self.lengths), self.width)
        return dropout_mask(shape, self.dropout, int(self.drawn), self.salt, self.device)

    @property
    def tiles(self) -> Tiles:
        return tiles_of(self.lengths, self.tile, self.device, self.order)

    def make(self) -> Tensors:
        """Inputs by name, float64 but exactly as the kernels' types hold them."""
        generator = torch.Generator().manual_seed(self.seed)  # the same numbers on every device

        def draw(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

        num_slots, width_out = len(self.lengths), self.width_out or self.width
        own_SR = torch.arange(self.padded) < torch.tensor(self.sizes)[:, None]
        down = draw(num_slots, self.width, self.padded, dtype=torch.float64) / self.width**0.5
        up = draw(num_slots, self.padded, width_out, dtype=torch.float64) / self.padded**0.5
        # The kernels read weights in h's type; a formula that knew them better would have other zeros of relu.
        made = {
            "h": draw(sum(self.lengths), self.width, dtype=self.dtype),
            "down": (down * own_SR[:, None]).to(self.dtype).double(),
            "up": (up * own_SR[:, :, None]).to(self.dtype).double(),
        }
        if self.has_biases:
            made["down_bias"] = draw(num_slots, self.padded, dtype=self.weight_dtype) * own_SR
            made["up_bias"] = draw(num_slots, width_out, dtype=self.weight_dtype)
        made["scale"] = torch.linspace(0.5, 1.5, num_slots, dtype=torch.float64).float().double()
        made["grad"] = draw(sum(self.lengths), width_out, dtype=self.dtype)
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    def in_kernel_types(self, inputs: Tensors) -> Tensors:
        """The same inputs as the kernels take them."""
        dtypes = {"h": self.dtype, "grad": self.dtype, "scale": torch.float32}
        return {name: tensor.to(dtypes.get(name, self.weight_dtype)) for name, tensor in inputs.items()}


TRAINED = ("h", "down", "up", "down_bias", "up_bias")


def gradients(function: Callable[..., Tensor], inputs: Tensors) -> Tensors:
    """What a function of named tensors returns, and the gradient of each trained one."""
    leaves = {name: tensor.detach().clone().requires_grad_(name in TRAINED) for name, tensor in inputs.items()}
    grad = leaves.pop("grad").detach()
    out = function(**leaves)
    out.backward(grad)
    return {"out": out.detach(), **{f"d_{name}": leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}}


def dropout_mask(shape: tuple[int, int], rate: float, seed: int, salt: int, device: str = "cpu") -> Tensor:
    """What dropout multiplies with: sixteen bits of a mixed counter for each number, two numbers to a counter."""

    def mixed(x: Tensor, key: Tensor) -> Tensor:
        x = x & 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15 ^ key) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    place, low, high = (torch.tensor(number, device=device) for number in (salt, seed, seed >> 32))
    key = mixed(low, place)
    between = mixed(high & 0xFFFFFFFF ^ key, place)
    n, d = torch.arange(shape[0], device=device)[:, None], torch.arange(shape[1], device=device)
    word = mixed(n * -(-shape[1] // 2) + d // 2 + key, between)
    number = torch.where(d % 2 == 1, word >> 16, word & 0xFFFF)
    threshold = round(rate * 65536)
    return (number >= threshold).double() / (1 - threshold / 65536)


def plain_bottleneck(case: Case) -> Callable[..., Tensor]:
    """The formula of a bottleneck; a slot uses its own columns only."""
    activate = ACTIVATIONS.get(case.activation or "", lambda z: z)

    def formula(h, down, up, scale, down_bias=None, up_bias=None):
        pieces = []
        h = h * case.mask if case.dropout else h
        for slot, start, stop in case.segments:
            x, size = h[start:stop], case.sizes[slot]
            z = x @ down[slot, :, :size] + (0 if down_bias is None else down_bias[slot, :size])
            y = scale[slot] * (activate(z) @ up[slot, :size] + (0 if up_bias is None else up_bias[slot]))
            pieces.append(x + y if case.residual else y)
        return torch.cat(pieces)

    return formula


def fused_bottleneck(case: Case) -> Callable[..., Tensor]:
    """The fused kernel."""

    def kernel(h, down, up, scale, down_bias=None, up_bias=None):
        stacks = Stacks(down, up, scale, down_bias, up_bias)
        drawn = {"dropout": case.dropout, "seed": case.drawn, "salt": case.salt}
        return bottleneck(h, stacks, case.tiles, case.activation, residual=case.residual, **drawn)

    return kernel


def composed_bottleneck(case: Case) -> Callable[..., Tensor]:
    """The same of grouped products, for bottlenecks wider than the fused kernel takes."""
    activate = ACTIVATIONS.get(case.activation or "", lambda z: z)

    def kernel(h, down, up, scale, down_bias=None, up_bias=None):
        tiles = case.tiles
        z = activate(segment_linear(h, down, down_bias, tiles))
        y = segment_linear(z, up, up_bias, tiles)
        y = y * slot_vectors(scale[:, None], tiles, len(h), dtype=h.dtype)
        return h + y if case.residual else y

    return kernel


def errors(case: Case, kernel: Callable[[Case], Callable[..., Tensor]] = fused_bottleneck) -> dict[str, float]:
    """‖kernel − formula‖ / ‖formula‖ of the output and of every gradient."""
    inputs = case.make()
    expected = gradients(plain_bottleneck(case), inputs)
    got = gradients(kernel(case), case.in_kernel_types(inputs))
    return {name: distance(got[name], expected[name]) for name in expected}


def distance(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖."""
    assert got.shape == expected.shape
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))
