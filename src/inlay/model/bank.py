"""The bank: the parameters of S slots, stacked in one tensor per name.

A slot holds one task's parameters at its own size, padded to the bank's; a slot without a tensor at some site is that
site's identity (no adapter, the backbone's own norm). `Bank.routed` binds a route to the backbone's wrappers for the
forward passes inside the block. Training banks have gradients; serving banks grow as versions come in.

What always holds: reading a slot gives back exactly what was put in it, and no operation on one slot touches another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inlay.config import MethodConfig
from inlay.errors import StoreDamaged, Unsupported
from inlay.model import kernels
from inlay.model.backbone import Backbone
from inlay.model.heads import HeadSpec, find_head
from inlay.model.methods import TensorSpec, layout, resolve_method
from inlay.model.route import Batch, Route, Segment
from inlay.model.sites import Anatomy

_ALIGN = 8  # grouped products want the bottleneck to be a multiple of this


@dataclass(frozen=True)
class SlotSpec:
    """What a slot holds: a method with all its settings, and a head."""

    method: MethodConfig
    head: HeadSpec

    def layout(self, anatomy: Anatomy) -> list[TensorSpec]:
        """The slot's tensors, in a fixed order."""
        return layout(anatomy, self.method, self.head)

    @classmethod
    def from_stored(cls, method: Mapping[str, Any], head: Mapping[str, Any]) -> SlotSpec:
        """The spec a version's manifest describes."""
        try:
            return cls(MethodConfig(**method), HeadSpec(**head))
        except TypeError as error:
            raise Unsupported(
                f"the version has a setting this Inlay does not know: {error}", "it was made by a newer Inlay: upgrade"
            ) from None


@dataclass(frozen=True)
class FlatBank:
    """All parameters of a bank side by side, a row per slot. The bank's stacks are views into `values_SP`."""

    values_SP: Tensor
    decays_P: Tensor
    """which parameters weight decay applies to"""
    stacks: tuple[Tensor, ...]
    """in the order they lie in"""

    def take_grads(self) -> Tensor:
        """The gradients of all parameters [S, P], taken away from the stacks."""
        # Gradients that are views of one tensor would save this copy, but autograd wants them dense like the stacks.
        grads = [torch.zeros_like(stack) if stack.grad is None else stack.grad for stack in self.stacks]
        self.drop_grads()
        return torch.cat([grad.flatten(1) for grad in grads], 1)

    def drop_grads(self) -> None:
        """Forget the gradients."""
        for stack in self.stacks:
            stack.grad = None


class Bank:
    """Stacked parameters of the slots of one backbone. `stacks[name]` is [S, …]; `specs[s]` is None for a free slot."""

    def __init__(self, backbone: Backbone, num_slots: int, *, trainable: bool = False) -> None:
        self.backbone = backbone
        self.anatomy = backbone.anatomy
        self.is_trainable = trainable
        self.specs: list[SlotSpec | None] = [None] * num_slots
        self.stacks: dict[str, Tensor] = {}
        self._layouts: list[dict[str, TensorSpec]] = [{} for _ in range(num_slots)]
        self._bottlenecks: dict[str, kernels.Bottleneck] = {}
        self._backbone_norms = backbone.norm_tensors()

    @property
    def num_slots(self) -> int:
        return len(self.specs)

    def put(self, slot: int, spec: SlotSpec, tensors: Mapping[str, Tensor]) -> None:
        """Set a slot to `tensors`, growing the bank where they do not fit. Refuses missing, extra or misshapen ones."""
        expected = {item.name: item for item in spec.layout(self.anatomy)}
        _check_tensors(expected, tensors)
        self.free(slot)
        self.specs[slot], self._layouts[slot] = spec, expected
        with torch.no_grad():
            for name, item in expected.items():
                stack = self._stack_for(name, item.shape)
                stack[slot][_corner(item.shape)] = tensors[name].to(stack)
        self._refresh()

    def initialise(self, slot: int, spec: SlotSpec, seed: int) -> None:
        """Set a slot to fresh values, which depend on the seed, the site and the slot's own size only."""
        tensors = {item.name: self._initial(item, seed) for item in spec.layout(self.anatomy)}
        self.put(slot, spec, tensors)

    def free(self, slot: int) -> None:
        """Empty a slot: whatever was in it becomes the identity again."""
        with torch.no_grad():
            for name in self._layouts[slot]:
                self.stacks[name][slot] = self._neutral(name)
        self.specs[slot], self._layouts[slot] = None, {}
        self._refresh()

    def read(self, slot: int) -> dict[str, Tensor]:
        """The slot's tensors at their own size, as float32 copies on the CPU."""
        return {
            name: self.stacks[name][slot][_corner(item.shape)].detach().to("cpu", torch.float32, copy=True).contiguous()
            for name, item in self._layouts[slot].items()
        }

    def flatten(self) -> FlatBank:
        """Lay the stacks out for training. The bank must not grow after it: its slots are set."""
        names, stacks = list(self.stacks), list(self.stacks.values())
        values = torch.cat([stack.detach().flatten(1) for stack in stacks], 1)
        decays = [torch.full(stack[0].shape, stack.dim() > 2).flatten() for stack in stacks]
        start = 0
        for name, stack in zip(names, stacks, strict=True):
            stop = start + stack[0].numel()
            self.stacks[name] = values[:, start:stop].view(stack.shape).requires_grad_()
            start = stop
        self._refresh()
        return FlatBank(values, torch.cat(decays).to(values.device), tuple(self.stacks.values()))

    @contextmanager
    def routed(self, route: Route) -> Iterator[None]:
        """Send every forward pass of the backbone inside the block through the slots of `route`."""
        with self.backbone.mount.routed(_Routed(self, route)):
            yield

    def logits(self, batch: Batch, *, dropout: Mapping[int, float] | None = None) -> list[Tensor]:
        """The logits of each segment of the batch, through backbone, slots and heads.

        They are [n, L], or [n, T, L] with padding where a slot's head reads tokens. `dropout` is each slot's rate on
        what its head reads. Call it, and `backward`, inside `routed(batch.route)`.
        """
        hidden_BTD = self.backbone.hidden(batch)
        read: list[Tensor] = []
        segments: list[Segment] = []
        for slot, start, stop in batch.route.segments:
            spec = self.specs[slot]
            assert spec is not None, f"slot {slot} is free"
            states = hidden_BTD[start:stop]
            if find_head(spec.head.kind).reads == "pooled":
                states = self.backbone.pool(states, batch.mask_BT[start:stop], spec.head.pooling)
            read.append(F.dropout(states, dropout[slot]) if dropout else states)
            before = segments[-1].stop if segments else 0
            segments.append(Segment(slot, before, before + states[..., 0].numel()))
        num_outputs = [0 if spec is None else spec.head.num_outputs for spec in self.specs]
        vectors = torch.cat([states.flatten(0, -2) for states in read])
        logits = kernels.linear_heads(
            vectors, self.stacks["head.weight"], self.stacks["head.bias"], num_outputs, Route(tuple(segments))
        )
        return [part.view(*states.shape[:-1], -1) for part, states in zip(logits, read, strict=True)]

    def _initial(self, item: TensorSpec, seed: int) -> Tensor:
        if item.start == "backbone":
            return self._backbone_norms[item.name]
        tensor = torch.zeros(item.shape)
        if item.start == "normal":
            words = f"{seed}/{item.name}/{'x'.join(map(str, item.shape))}"
            generator = torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big")
            )
            nn.init.trunc_normal_(tensor, std=item.std, a=-2 * item.std, b=2 * item.std, generator=generator)
        return tensor

    def _neutral(self, name: str) -> Tensor | float:
        return self._backbone_norms[name].to(self.stacks[name]) if name.startswith("norm.") else 0.0

    def _stack_for(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The stack of `name`, made or enlarged so that `shape` fits."""
        shape = _aligned(name, shape)
        old = self.stacks.get(name)
        if old is not None and all(have >= want for have, want in zip(old.shape[1:], shape, strict=True)):
            return old
        if old is not None:
            shape = tuple(max(have, want) for have, want in zip(old.shape[1:], shape, strict=True))
        new = torch.zeros(self.num_slots, *shape, device=self.backbone.device)
        if old is not None:
            new[_corner(tuple(old.shape))] = old.detach()
        self.stacks[name] = new
        if old is None and name.startswith("norm."):
            new[:] = self._neutral(name)
        return new.requires_grad_(self.is_trainable)

    def _refresh(self) -> None:
        """Rebuild the views the forward pass reads; stacks may have been replaced."""
        self._bottlenecks = {}
        for name in self.stacks:
            if not name.endswith(".down"):
                continue
            key = name.removeprefix("adapter.").removesuffix(".down")
            at = [items.get(name) for items in self._layouts]
            self._bottlenecks[key] = kernels.Bottleneck(
                self.stacks[f"adapter.{key}.down"],
                self.stacks[f"adapter.{key}.down_bias"],
                self.stacks[f"adapter.{key}.up"],
                self.stacks[f"adapter.{key}.up_bias"],
                sizes=[0 if item is None else item.shape[1] for item in at],
                activations=["" if spec is None else resolve_method(spec.method).activation for spec in self.specs],
            )


class _Routed:
    """A bank with a route bound: what the wrappers in the backbone call."""

    def __init__(self, bank: Bank, route: Route) -> None:
        self._bank, self._route = bank, route

    def rewrite(self, key: str, output: Tensor) -> Tensor:
        weights = self._bank._bottlenecks.get(key)
        if weights is None:
            return output
        return output + kernels.bottleneck_update(output, weights, self._route)

    def normalize(self, norm_key: str, site_key: str | None, inner: Any, x: Tensor) -> Tensor:
        weights = None if site_key is None else self._bank._bottlenecks.get(site_key)
        if weights is not None:
            x = x + kernels.bottleneck_update(self._norm(norm_key, inner, x), weights, self._route)
        return self._norm(norm_key, inner, x)

    def _norm(self, key: str, inner: Any, x: Tensor) -> Tensor:
        scale = self._bank.stacks.get(f"norm.{key}.scale")
        if scale is None:
            return inner(x)
        return kernels.layer_norm(x, scale, self._bank.stacks.get(f"norm.{key}.shift"), inner.eps, self._route)


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _aligned(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    axis = {"down": 1, "down_bias": 0, "up": 0}.get(name.rsplit(".", 1)[-1])
    if axis is None or not name.startswith("adapter."):
        return shape
    return tuple(-(-size // _ALIGN) * _ALIGN if i == axis else size for i, size in enumerate(shape))


def _check_tensors(expected: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        what = f"lacks `{missing[0]}`" if missing else f"has `{extra[0]}`, which its method does not train"
        raise StoreDamaged(f"a version's set of tensors {what}", "run `inlay verify`, or publish the task again")
    for name, item in expected.items():
        if tuple(tensors[name].shape) != item.shape:
            raise StoreDamaged(
                f"tensor `{name}` has the shape {tuple(tensors[name].shape)}, not {item.shape}",
                "run `inlay verify`, or publish the task again",
            )
