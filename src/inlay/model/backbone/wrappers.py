"""Thin wrappers set into a backbone at its sites, and the mount that says which bank and route are active in them.

A wrapper asks its `ActiveRoute` for the active bank at every forward pass; without one the backbone is exactly itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from inlay.model.backbone.families import Family, find_family
from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.batch.route import Pack
from inlay.model.kernels.attention import replace_biased, replace_bucketed
from inlay.model.kernels.frozen_layers import Dropout, find_gelu


class Joined(NamedTuple):
    """Three linear layers that read the same, side by side: on a GPU one product takes less than three."""

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None


def join(linears: Mapping[str, Any]) -> Joined | None:
    """Join layers into one; their own weights become views of it. None unless they are plain layers of one shape."""
    layers = list(linears.values())
    first = layers[0]
    if not all(type(layer) is nn.Linear and layer.weight.shape == first.weight.shape for layer in layers):
        return None
    if any((layer.bias is None) != (first.bias is None) for layer in layers):
        return None
    weight = _lay([layer.weight for layer in layers])
    return Joined(tuple(linears), weight, None if first.bias is None else _lay([layer.bias for layer in layers]))


def _lay(parameters: list[nn.Parameter]) -> Tensor:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.chunk(len(parameters)), strict=True):
        parameter.data = part
    return whole


class SlotOperations(Protocol):
    """The operations that a wrapper calls on the active bank. The route is bound; names are those within a block."""

    def at(self, layer: int, *, is_last: bool) -> SlotOperations: ...

    @property
    def pack(self) -> Pack | None: ...

    def enter(self, hidden: Tensor) -> Tensor | None: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor: ...

    def on_output(self, place: str, output: Tensor, dropout: Any = None) -> Tensor: ...

    def on_norm(self, name: str, place: str | None, inner: Any, x: Tensor) -> Tensor: ...

    def on_linear(self, sites: tuple[LinearSite, ...], inner: Any, x: Tensor, joined: Joined | None) -> Tensor: ...

    def on_activation(self, kind: str, inner: Any, x: Tensor) -> Tensor: ...


class ActiveRoute:
    """The wrappers of one backbone, or of one of its blocks, and the bank and route that are active in them.

    Blocks have mounts of their own, so that a wrapper knows its place within its block, but not which block it is in:
    code compiled for one block serves all.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self.active: SlotOperations | None = None
        self.joined: Joined | None = None
        """query, key and value of the block as one, where programs run that read them so"""
        self.blocks = [ActiveRoute() for _ in range(num_blocks)]

    @contextmanager
    def routed(self, operations: SlotOperations) -> Iterator[None]:
        """Send every forward pass inside the block through `operations`.

        Call `backward` inside the block too: activation checkpointing runs the forward
        pass again during backward and needs the route to be there.
        """
        outer = self.active, [block.active for block in self.blocks]
        last = len(self.blocks) - 1
        self._activate(operations, [operations.at(layer, is_last=layer == last) for layer in range(last + 1)])
        try:
            yield
        finally:
            self._activate(*outer)

    def _activate(self, whole: SlotOperations | None, by_block: Sequence[SlotOperations | None]) -> None:
        self.active = whole
        for block, active in zip(self.blocks, by_block, strict=True):
            block.active = active


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, mount: ActiveRoute) -> None:
        super().__init__()
        self.inner = inner
        self._mount = mount

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a block's attributes, such as ModernBERT's `attention_type`, are read from outside
            return getattr(super().__getattr__("inner"), name)


class OutputSite(_Wrapper):
    """A submodule whose output goes through the adapters of the active bank."""

    def __init__(self, inner: nn.Module, mount: ActiveRoute, place: str) -> None:
        super().__init__(inner, mount)
        self.place = place
        self._is_dropout = isinstance(inner, nn.Dropout)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        active = self._mount.active
        if active is not None and self._is_dropout and self.training:
            return active.on_output(self.place, args[0], self.inner)
        output = self.inner(*args, **kwargs)
        return output if active is None else active.on_output(self.place, output)


class NormWrapper(_Wrapper):
    """A layer norm with every slot's own scale and shift, and Pfeiffer's adapter where the norm ends a block."""

    def __init__(self, inner: nn.Module, mount: ActiveRoute, name: str, place: str | None) -> None:
        super().__init__(inner, mount)
        self.name, self.place = name, place

    def forward(self, x: Tensor) -> Tensor:
        active = self._mount.active
        return self.inner(x) if active is None else active.on_norm(self.name, self.place, self.inner, x)


class LinearWrapper(_Wrapper):
    """A linear layer with every slot's own update, bias and scale."""

    def __init__(self, inner: nn.Module, mount: ActiveRoute, sites: tuple[LinearSite, ...]) -> None:
        super().__init__(inner, mount)
        self.sites = sites

    def forward(self, x: Tensor) -> Tensor:
        active = self._mount.active
        return self.inner(x) if active is None else active.on_linear(self.sites, self.inner, x, self._mount.joined)


class ActivationWrapper(_Wrapper):
    """The GELU of a block, which trains nothing and takes as long as a product if it is computed carefully."""

    def __init__(self, inner: nn.Module, mount: ActiveRoute, kind: str) -> None:
        super().__init__(inner, mount)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        active = self._mount.active
        return self.inner(x) if active is None else active.on_activation(self.kind, self.inner, x)


class BlockWrapper(_Wrapper):
    """A block that a pass with a prefix leaves out, or begins at.

    The block's input is replaced, not the output of the block below: DeBERTa's convolution joins in between.
    """

    def __init__(self, inner: nn.Module, mount: ActiveRoute, num_outputs: int) -> None:
        super().__init__(inner, mount)
        self._num_outputs = num_outputs

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        active = self._mount.active
        read = hidden_states if active is None else active.enter(hidden_states)
        if read is not None:
            return self.inner(read, *args, **kwargs)
        others = (None,) * (self._num_outputs - 1)
        return (hidden_states, *others) if self._num_outputs else hidden_states


def mount(model: nn.Module, anatomy: Anatomy) -> ActiveRoute:
    """Set wrappers at the sites, norms, linear layers and blocks of `model`; they do nothing until a bank is routed."""
    mounted = ActiveRoute(anatomy.num_layers)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            model.set_submodule(path, Dropout(module.p).train(module.training))
    # Linear layers and activations first: they may lie inside a site, or be one (DistilBERT's attention).
    for path in dict.fromkeys(linear.path for linear in anatomy.linears):
        sites = tuple(linear for linear in anatomy.linears if linear.path == path)
        block = mounted.blocks[sites[0].layer]
        model.set_submodule(path, LinearWrapper(model.get_submodule(path), block, sites))
    family = find_family(anatomy.family)
    for path, block in zip(anatomy.blocks, mounted.blocks, strict=True):
        _mount_activation(model, path, block, family)
    at_norms = {site.path: site.place for site in anatomy.sites if site.is_norm}
    for norm in anatomy.norms:
        block = mounted if norm.is_outer else mounted.blocks[norm.layer]
        inner = model.get_submodule(norm.path)
        model.set_submodule(norm.path, NormWrapper(inner, block, norm.name, at_norms.get(norm.path)))
    for site in anatomy.sites:
        if not site.is_norm:
            block = mounted.blocks[site.layer]
            model.set_submodule(site.path, OutputSite(model.get_submodule(site.path), block, site.place))
    _mount_attention(model, anatomy, mounted)
    for path, block in zip(anatomy.blocks, mounted.blocks, strict=True):
        model.set_submodule(path, BlockWrapper(model.get_submodule(path), block, family.num_outputs))
    return mounted


def _mount_activation(model: nn.Module, path: str, block: ActiveRoute, family: Family) -> None:
    own = next(stack.activation for stack in family.stacks if path.startswith(f"{stack.blocks}."))
    if own and (kind := find_gelu(model.get_submodule(f"{path}.{own}"))) is not None:
        inner = model.get_submodule(f"{path}.{own}")
        model.set_submodule(f"{path}.{own}", ActivationWrapper(inner, block, kind))


def join_projections(model: nn.Module, anatomy: Anatomy, mounted: ActiveRoute) -> None:
    """Lay query, key and value of every block side by side, where they are three layers that read the same."""
    for layer, block in enumerate(mounted.blocks[: anatomy.num_readers]):
        own = {linear.name: linear.path for linear in anatomy.linears if linear.layer == layer}
        paths = {name: own[name] for name in ("query", "key", "value") if name in own}
        if len(set(paths.values())) == 3:
            block.joined = join({name: model.get_submodule(path).inner for name, path in paths.items()})


def _mount_attention(model: nn.Module, anatomy: Anatomy, mounted: ActiveRoute) -> None:
    family = find_family(anatomy.family)
    if family.packing == "none":
        return
    readers = anatomy.blocks[: anatomy.num_readers]
    attentions: list[Any] = [model.get_submodule(f"{block}.{family.attention}") for block in readers]
    if family.packing == "bias":
        replace_biased(model.get_submodule(family.stack.rpartition(".")[0]), attentions, mounted)
    elif family.packing == "buckets":
        replace_bucketed(attentions, family.max_length or 0)
    for attention, block in zip(attentions, mounted.blocks, strict=False):
        attention.inlay = block
