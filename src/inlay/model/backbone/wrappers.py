"""Thin wrappers set into a backbone at its sites, and the mount that says which bank and route are active in them.

At every forward pass a wrapper asks its `ActiveRoute` for the active pass of a bank; without one the backbone is
exactly itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from inlay.model.backbone.families import find_family
from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.kernels.attention import replace_biased, replace_bucketed
from inlay.model.kernels.frozen_layers import Dropout, find_gelu, lean_gelu

if TYPE_CHECKING:
    from inlay.model.bank.pass_hooks import PassHooks


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


class ActiveRoute:
    """The wrappers of one backbone, or of one of its blocks, and the bank's pass that is active in them.

    Blocks have mounts of their own, so that a wrapper knows its place within its block, but not which block it is in:
    code compiled for one block serves all.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self.active: PassHooks | None = None
        self.joined: Joined | None = None
        """query, key and value of the block as one, where programs run that read them so"""
        self.blocks = [ActiveRoute() for _ in range(num_blocks)]

    @contextmanager
    def routed(self, hooks: PassHooks) -> Iterator[None]:
        """Send every forward pass inside the block through `hooks`.

        Call `backward` inside the block too: activation checkpointing runs the forward
        pass again during backward and needs the route to be there.
        """
        outer = self.active, [block.active for block in self.blocks]
        last = len(self.blocks) - 1
        self._activate(hooks, [hooks.at(layer, is_last=layer == last) for layer in range(last + 1)])
        try:
            yield
        finally:
            self._activate(*outer)

    def _activate(self, whole: PassHooks | None, by_block: Sequence[PassHooks | None]) -> None:
        self.active = whole
        for block, active in zip(self.blocks, by_block, strict=True):
            block.active = active


class _Wrapper(nn.Module):
    inner: Any

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
    """A submodule whose output goes through the operations at its place."""

    def __init__(self, inner: nn.Module, mount: ActiveRoute, place: str) -> None:
        super().__init__(inner, mount)
        self.place = place
        self._is_dropout = isinstance(inner, nn.Dropout)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        active = self._mount.active
        if active is None:
            return self.inner(*args, **kwargs)
        operations = active.views.outputs.get(self.place, ())
        if len(operations) == 1 and self._is_dropout and self.training and self.inner.p:
            done = operations[0].drop_and_add(self.place, self.inner.p, args[0], active)
            if done is not None:
                return done
        output = self.inner(*args, **kwargs)
        for operation in operations:
            output = operation.on_output(self.place, output, active)
        return output


class NormWrapper(_Wrapper):
    """A layer norm with every slot's own scale and shift, and Pfeiffer's adapter where the norm ends a block."""

    def __init__(self, inner: nn.Module, mount: ActiveRoute, name: str, place: str) -> None:
        super().__init__(inner, mount)
        self.name, self.place = name, place

    def forward(self, x: Tensor) -> Tensor:
        active = self._mount.active
        if active is None:
            return self.inner(x)
        norm = active.views.norms.get(self.name, ())
        adapters: Any = active.views.outputs.get(self.place, ())
        for adapter in adapters:
            x = x + adapter.update(norm[0].on_norm(x, self.inner, active) if norm else self.inner(x), active)
        return norm[0].on_norm(x, self.inner, active) if norm else self.inner(x)


class LinearWrapper(_Wrapper):
    """A linear layer with every slot's own update, bias and scale."""

    def __init__(self, inner: nn.Module, mount: ActiveRoute, sites: tuple[LinearSite, ...]) -> None:
        super().__init__(inner, mount)
        self.sites = sites

    def forward(self, x: Tensor) -> Tensor:
        active = self._mount.active
        return self.inner(x) if active is None else active.on_linear(self.sites, self.inner, x, self._mount.joined)


class ActivationWrapper(_Wrapper):
    """The GELU of a block, which trains nothing and takes as long as a product if it is computed carefully.

    Where programs run, it is one launch.
    """

    def __init__(self, inner: nn.Module, mount: ActiveRoute, kind: str) -> None:
        super().__init__(inner, mount)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        active = self._mount.active
        found = None if active is None or active.route.tiling is None else lean_gelu(x, self.kind)
        return self.inner(x) if found is None else found


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
    family, mounted = find_family(anatomy.family), ActiveRoute(anatomy.num_layers)

    def wrap(path: str, kind: type[_Wrapper], block: ActiveRoute, *args: Any) -> None:
        model.set_submodule(path, kind(model.get_submodule(path), block, *args))

    for path, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            model.set_submodule(path, Dropout(module.p).train(module.training))
    # Linear layers and activations first: they may lie inside a site, or be one (DistilBERT's attention).
    for path in dict.fromkeys(linear.path for linear in anatomy.linears):
        sites = tuple(linear for linear in anatomy.linears if linear.path == path)
        wrap(path, LinearWrapper, mounted.blocks[sites[0].layer], sites)
    for path, block in zip(anatomy.blocks, mounted.blocks, strict=True):
        own = next(stack.activation for stack in family.stacks if path.startswith(f"{stack.stack}."))
        if own and (kind := find_gelu(model.get_submodule(f"{path}.{own}"))) is not None:
            wrap(f"{path}.{own}", ActivationWrapper, block, kind)
    # Norms and outputs of sublayers; norms outside of the blocks have a key without a layer.
    at_norms = {site.path: site.place for site in anatomy.sites if site.is_norm}
    for norm in anatomy.norms:
        block = mounted.blocks[norm.layer] if "." in norm.key else mounted
        wrap(norm.path, NormWrapper, block, norm.name, at_norms.get(norm.path, ""))
    for site in anatomy.sites:
        if not site.is_norm:
            wrap(site.path, OutputSite, mounted.blocks[site.layer], site.place)
    # Attention over packed rows.
    readers = anatomy.blocks[: anatomy.num_readers] if family.packing != "none" else ()
    attentions: list[Any] = [model.get_submodule(f"{block}.{family.attention}") for block in readers]
    if family.packing == "bias":
        replace_biased(model.get_submodule(family.stack.rpartition(".")[0]), attentions, mounted)
    elif family.packing == "buckets":
        replace_bucketed(attentions, family.max_length or 0)
    for attention, block in zip(attentions, mounted.blocks, strict=False):
        attention.inlay = block
    for path, block in zip(anatomy.blocks, mounted.blocks, strict=True):
        wrap(path, BlockWrapper, block, family.num_outputs)
    return mounted


def join_projections(model: nn.Module, anatomy: Anatomy, mounted: ActiveRoute) -> None:
    """Lay query, key and value of every block side by side, where they are three layers that read the same."""
    for layer, block in enumerate(mounted.blocks[: anatomy.num_readers]):
        own = {linear.name: linear.path for linear in anatomy.linears if linear.layer == layer}
        paths = {name: own[name] for name in ("query", "key", "value") if name in own}
        if len(set(paths.values())) == 3:
            block.joined = join({name: model.get_submodule(path).inner for name, path in paths.items()})
