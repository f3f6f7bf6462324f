"""Bottleneck adapters: down, an activation, up, with a residual connection, at the sites of blocks.

`x + scale·up(act(down(x)))` behind a sublayer (sequential) or beside it (parallel), with more layers, a norm inside or
after it where the method says so. Adapters of several sites may be one (`sharing`).

Shape letters: S slots, D width, R bottleneck.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.errors import BadConfig
from inlay.model.backbone.sites import Anatomy
from inlay.model.kernels import reference as kernels
from inlay.model.kernels.bottleneck_weights import ACTIVATIONS, NORM_EPS, Bottleneck, BottleneckShape
from inlay.model.kernels.reference import Moments
from inlay.model.kernels.select import Gather
from inlay.model.kernels.tiled import Drop
from inlay.model.parts.part import (
    Occupants,
    Part,
    Placed,
    ResolvedMethod,
    SiteShapes,
    SlotOperation,
    Stacks,
    TensorSpec,
    adapted_layers,
)

if TYPE_CHECKING:
    from inlay.model.bank.pass_hooks import PassHooks

BLOCK = ("down", "down_bias", "up", "up_bias")
"""the tensors of every bottleneck"""
OUT_NORM = ("out_scale", "out_shift")
"""the norm after it"""
_MOMENTUM = 0.1  # rate of running statistics, as in torch's batch norm; their variance is biased, as in training
_SALTS = {"attention": 0, "feedforward": 1, "output": 2}  # tell the dropout of a block's places apart


@dataclass(frozen=True)
class BottleneckPart(Part):
    """Bottleneck adapters at sites."""

    starts_at_zero: bool = False
    """the way up is zero at first, as LoRA's"""

    prefix = "adapter."
    is_compact = True

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        width, size, norm = anatomy.hidden_size, method.size, method.inner_norm
        assert size is not None
        down, up = ("uniform", "zeros") if self.starts_at_zero else ("normal", "normal")
        for group in dict.fromkeys(adapter_groups(anatomy, method).values()):
            name = self.name(group)
            if norm in ("output", "alone"):
                yield from self.norm_behind(anatomy, group)
            if norm == "alone":
                continue
            yield TensorSpec(f"{name}.down", (width, size), down, method.init_std, ranks=(1,))
            if norm != "batch":  # which takes the mean away: a bias before it would only drift
                yield TensorSpec(f"{name}.down_bias", (size,), "zeros", ranks=(0,))
            for index in range(1, method.depth):
                yield TensorSpec(f"{name}.hidden{index}", (size, size), "uniform", ranks=(0, 1))
                yield TensorSpec(f"{name}.hidden{index}_bias", (size,), "zeros", ranks=(0,))
            if norm in ("layer", "batch"):
                yield TensorSpec(f"{name}.norm_scale", (size,), "ones", ranks=(0,))
                yield TensorSpec(f"{name}.norm_shift", (size,), "zeros", ranks=(0,))
            if norm == "batch":
                yield TensorSpec(f"{name}.running_mean", (size,), "zeros", ranks=(0,), is_trained=False)
                yield TensorSpec(f"{name}.running_var", (size,), "ones", ranks=(0,), is_trained=False)
            yield TensorSpec(f"{name}.up", (size, width), up, method.init_std, ranks=(0,))
            yield TensorSpec(f"{name}.up_bias", (width,), "zeros")

    def norm_behind(self, anatomy: Anatomy, key: str) -> Iterator[TensorSpec]:
        """Yield the norm after the adapter at a site.

        Its scale begins at one, as published, on T5, whose states are far larger than what the norm adds. An encoder's
        states are of size one and would drown in it, so there the scale begins small.
        """
        start, std = ("ones", 0.0) if anatomy.has_decoder else ("normal", 0.08)
        yield TensorSpec(self.name(key, "out_scale"), (anatomy.hidden_size,), start, std)
        yield TensorSpec(self.name(key, "out_shift"), (anatomy.hidden_size,), "zeros")

    def places(self, anatomy: Anatomy, method: ResolvedMethod, name: str) -> list[str]:
        if method.sharing == "none":
            return [name]
        group, _, item = name.removeprefix(self.prefix).rpartition(".")
        return [self.name(site, item) for site, owner in adapter_groups(anatomy, method).items() if owner == group]

    def leader(self, name: str) -> str:
        return f"{name.rpartition('.')[0]}.down"

    def shapes(self, anatomy: Anatomy, method: ResolvedMethod) -> SiteShapes:
        assert method.size is not None
        assert method.scale is not None
        multiplies = method.combine == "multiply"
        shape = BottleneckShape(
            method.size, method.activation, method.scale, method.depth, method.inner_norm, multiplies
        )
        return {(method.form, key): shape for key in adapter_groups(anatomy, method)}

    def bind(self, anatomy: Anatomy, stacks: Stacks, slots: Occupants) -> Iterator[Placed]:
        owners: dict[str, str] = {}
        if not slots.are_expanded:
            groups = [adapter_groups(anatomy, method) for method in slots.methods if method.form != "auto"]
            assert all(group == groups[0] for group in groups), "slots trained together must share alike"
            owners = groups[0] if groups else {}
        for site in anatomy.sites:
            for form, kind in (("sequential", SequentialAdapter), ("parallel", ParallelAdapter)):
                shapes = slots.shapes.get((form, site.key))
                if shapes is not None:
                    weights = _stacked(self.name(owners.get(site.key, site.key)), stacks, shapes)
                    yield "output", site.key, kind(weights)


BOTTLENECK = BottleneckPart()


def adapter_groups(anatomy: Anatomy, method: ResolvedMethod) -> dict[str, str]:
    """Map each site's key to that of the adapter it reads: its own, or one that several sites share."""
    layers = adapted_layers(anatomy, method)
    step, groups = sharing_step(method.sharing, anatomy.num_layers), {}
    for site in anatomy.sites:
        if site.layer not in layers or site.place not in method.places:
            continue
        if not step:
            groups[site.key] = site.key
            continue
        first = site.layer // step * step
        last = min(first + step, anatomy.num_layers) - 1
        groups[site.key] = str(first) if first == last else f"{first}-{last}"
    return groups


def sharing_step(sharing: str, num_layers: int) -> int:
    """Return the number of layers that share one adapter; 0: none do."""
    match = re.fullmatch(r"every-([1-9][0-9]{0,5})", sharing)
    if match:
        return int(match[1])
    known = {"none": 0, "within-layer": 1, "all": num_layers}
    if sharing not in known:
        raise BadConfig(f"`method.sharing` is `{sharing:.80}`", "it must be none, within-layer, every-K or all")
    return known[sharing]


def _stacked(name: str, stacks: Stacks, shapes: list[BottleneckShape | None]) -> Bottleneck:
    """Return the bank's stacks of one adapter."""
    depth = max(shape.depth for shape in shapes if shape)

    def pair(first: str, second: str) -> tuple[Tensor, Tensor] | None:
        return (stacks[f"{name}.{first}"], stacks[f"{name}.{second}"]) if f"{name}.{first}" in stacks else None

    out_norm = pair(*OUT_NORM)
    down, up = stacks.get(f"{name}.down"), stacks.get(f"{name}.up")
    if down is None or up is None:  # slots have the norm only: the bottleneck before it is not read
        assert out_norm is not None
        num_slots, width = out_norm[0].shape
        down, up = (out_norm[0].new_zeros(num_slots, *shape) for shape in ((width, 8), (8, width)))
    return Bottleneck(
        down,
        up,
        shapes,
        stacks.get(f"{name}.down_bias"),
        stacks.get(f"{name}.up_bias"),
        tuple((stacks[f"{name}.hidden{i}"], stacks[f"{name}.hidden{i}_bias"]) for i in range(1, depth)),
        norm=pair("norm_scale", "norm_shift"),
        out_norm=out_norm,
        running=pair("running_mean", "running_var"),
    )


class SequentialAdapter(SlotOperation):
    """Adapters after a sublayer: they read its output. At a block's norm they read the norm's output."""

    form = "sequential"

    def on_output(self, place: str, y: Tensor, at: PassHooks) -> Tensor:
        if at.gather is not None:
            return y + gathered_update(y, self.weights, at.gather)
        return at.unlay(kernels.bottleneck(at.lay(y), self.weights, at.route, at.moments_of(self), is_added=True))

    def update(self, h: Tensor, at: PassHooks) -> Tensor:
        """Return the update of h by each row's own adapter."""
        if at.gather is not None:
            return gathered_update(h, self.weights, at.gather)
        return at.unlay(kernels.bottleneck(at.lay(h), self.weights, at.route, at.moments_of(self)))

    def drop_and_add(self, place: str, rate: float, y: Tensor, at: PassHooks) -> Tensor | None:
        if at.seed is None or not kernels.drops(self.weights, at.route):
            return None
        drop = Drop(rate, at.seed, _SALTS[place])
        return at.unlay(kernels.bottleneck(at.lay(y), self.weights, at.route, is_added=True, drop=drop))

    @torch.no_grad()
    def settle(self, seen: Sequence[Moments]) -> None:
        """Move the running statistics by what batch norm saw."""
        assert self.weights.running is not None
        # Once for each slot: checkpointed, a block runs again in the backward pass and sees the same.
        for slot, *found in {moments.slot: moments for moments in seen}.values():
            for running, value in zip(self.weights.running, found, strict=True):
                running[slot, : len(value)].lerp_(value.to(running), _MOMENTUM)


class ParallelAdapter(SequentialAdapter):
    """Adapters beside a sublayer: they read the sublayer's input."""

    reads_input = True
    form = "parallel"

    def on_output(self, place: str, y: Tensor, at: PassHooks) -> Tensor:
        return y + self.update(at.inputs.pop(place), at)

    def drop_and_add(self, place: str, rate: float, y: Tensor, at: PassHooks) -> None:
        return None


def gathered_update(h: Tensor, weights: Bottleneck, gather: Gather) -> Tensor:
    """Compute scale·up(act(down(h))) of rows that gather their slots' weights; zero where a slot has no bottleneck."""
    shapes = weights.shapes
    z = gather.plus(h @ gather.own(weights.down_SDR), weights.down_bias_SR)
    norms = [None if shape is None else shape.inner_norm for shape in shapes]
    z = gather.pick(norms, lambda norm: _norm_inside(norm, z, weights, gather))
    z = _activate(z, shapes, gather)
    for index, (hidden_SRR, bias_SR) in enumerate(weights.hidden, start=1):
        deeper = _activate(gather.plus(z @ gather.own(hidden_SRR), bias_SR), shapes, gather)
        is_deep = [None if shape is None else shape.depth > index for shape in shapes]
        z = gather.pick(is_deep, lambda deep, deeper=deeper, z=z: deeper if deep else z)  # type: ignore[misc]
    update = gather.plus(z @ gather.own(weights.up_SRE), weights.up_bias_SE)
    behind = {"output": update, "alone": h}  # kind of the norm after it -> its input
    update = gather.pick(norms, lambda norm: _norm_behind(behind[norm], weights, gather) if norm in behind else update)
    scales = [0.0 if shape is None else shape.scale for shape in shapes]
    update = update if set(scales) == {1.0} else update * gather.value(scales, update)
    multiplies = [None if shape is None else shape.multiplies for shape in shapes]
    return gather.pick(multiplies, lambda does: h * update if does else update)


def _activate(z: Tensor, shapes: Sequence[BottleneckShape | None], gather: Gather) -> Tensor:
    if not any(shape.activation for shape in shapes if shape is not None):
        return z  # LoRA
    names = [None if shape is None else shape.activation for shape in shapes]
    return gather.pick(names, lambda name: ACTIVATIONS[name](z))


def _norm_inside(kind: str, z: Tensor, weights: Bottleneck, gather: Gather) -> Tensor:
    """Return the norm before the activation, of this kind."""
    if kind not in ("layer", "batch"):
        return z
    assert weights.norm is not None
    if kind == "batch":  # by the statistics stored with the slot
        assert weights.running is not None
        (scale, shift), (mean, variance) = weights.norm, weights.running
        factor_SR = scale * torch.rsqrt(variance + NORM_EPS)
        return z * gather.per_row(factor_SR, z) + gather.per_row(shift - mean * factor_SR, z)
    # Over a slot's own columns; those beyond its size are zero and stay so.
    size = gather.value([1 if shape is None else shape.size for shape in weights.shapes], z)
    is_own = torch.arange(z.shape[-1], device=z.device) < size
    centred = torch.where(is_own, z - z.sum(-1, keepdim=True) / size, 0.0)
    variance = centred.square().sum(-1, keepdim=True) / size
    scale, shift = (gather.per_row(tensor, z) for tensor in weights.norm)
    return centred * torch.rsqrt(variance + NORM_EPS) * scale + shift


def _norm_behind(update: Tensor, weights: Bottleneck, gather: Gather) -> Tensor:
    assert weights.out_norm is not None
    scale_SD, shift_SD = weights.out_norm
    normal = F.layer_norm(update, update.shape[-1:], eps=NORM_EPS) * gather.per_row(scale_SD, update)
    return gather.plus(normal, shift_SD)
