"""The forward pass of a bank's slots: the operations that a backbone's wrappers call while a route is bound.

A `PassHooks` lives for one pass, and keeps state of the pass: inputs of sublayers, statistics of batch norm. It
loops over the operations that parts have bound at a hook (`linear`, `output`, `norm`); `at` returns the one of a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.backbone.sites import ATTENTION_LINEARS, LinearSite
from inlay.model.backbone.wrappers import Joined
from inlay.model.bank.views import Views
from inlay.model.batch.route import Pack, Route
from inlay.model.kernels import reference as kernels
from inlay.model.kernels.attention import attend_first
from inlay.model.kernels.frozen_layers import lean_gelu
from inlay.model.kernels.select import Gather
from inlay.model.parts.bottleneck import SequentialAdapter
from inlay.model.parts.part import SlotOperation


class PassHooks:
    """A bank's views with a route bound. `route`, `gather`, `seed`, `inputs` and `entered` are for the operations."""

    def __init__(
        self,
        views: Views,
        route: Route,
        *,
        is_training: bool = False,
        seeds: Tensor | None = None,
        num_readers: int | None = None,
        is_finetuned: bool = False,
        gather: Gather | None = None,
    ) -> None:
        """`seeds` has a random number for each block, on the device, if it trains there with fused dropout.

        Blocks beyond the first `num_readers` are a decoder's, whose tokens have a route of their own. With
        `is_finetuned` the backbone's weights are the slot's own. With `gather`, rows gather their slots' parameters and
        the route is empty.
        """
        self._views, self._is_training, self._seeds, self._is_solo = views, is_training, seeds, is_finetuned
        self.route, self._firsts = route.wide or route, None if route.wide is None else route
        self.gather = gather
        self._num_readers = num_readers
        self.seed: Tensor | None = None
        self._moments: dict[SlotOperation, list[kernels.Moments]] | None = {} if is_training else None
        self.inputs: dict[str, Tensor] = {}
        """inputs of the sublayers that have an operation beside them"""
        self.entered: Tensor | None = None
        """the input of this block, where an operation stands beside the block"""
        self._blocks: list[PassHooks] = []
        self._layer = -1
        self._attended: Tensor | None = None  # output of this block's attention, where it is cached
        self._projected: tuple[Tensor, Tensor] | None = None  # an input, and its query, key and value

    def at(self, layer: int, *, is_last: bool = False) -> PassHooks:
        """The same for the wrappers of one block."""
        views = self._views.at(layer)
        firsts = self._firsts if is_last else None
        block = self._block(views) if firsts is None else _FirstTokens(views, firsts, is_training=self._is_training)
        block.seed = None if self._seeds is None else self._seeds[layer : layer + 1]
        block._layer = layer
        if self._num_readers is not None and layer >= self._num_readers and self.route.decoder is not None:
            block.route = self.route.decoder
        if self.route.prefix is not None and self.route.prefix.reach.layer == layer:
            attended = self.route.prefix.attended
            block._attended = None if attended is None else block.take(attended)
        self._blocks.append(block)
        return block

    def _block(self, views: Views) -> PassHooks:
        return PassHooks(
            views, self.route, is_training=self._is_training, is_finetuned=self._is_solo, gather=self.gather
        )

    @property
    def whole(self) -> PassHooks:
        """The pass over all tokens, also where this block computes a few."""
        return self

    def take(self, states: Tensor) -> Tensor:
        """The part of all tokens' states that this block computes."""
        return states

    @property
    def pack(self) -> Pack | None:
        """The layout of the packed rows; None if they are padded."""
        return self.route.pack

    # Called by the wrappers.

    def enter(self, hidden: Tensor) -> Tensor | None:
        """The input of this block: `hidden`, or the cached states; None if the pass begins above."""
        prefix = self.route.prefix
        read: Tensor | None = hidden
        if prefix is not None and self._layer <= prefix.reach.layer:
            read = prefix.hidden if self._layer == prefix.reach.layer else None
        self.entered = read if self._views.has_beside_block else None
        return read

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of each packed row to itself."""
        if self._attended is not None:
            return q  # nothing reads it
        if self._projected is None:
            return kernels.attend(q, k, v, self.route, **options)
        projected, self._projected = self._projected[1], None
        return kernels.attend_joined(projected.view(-1, 3, *q.shape[1:]), self.route, **options)

    def on_output(self, place: str, output: Tensor, dropout: Any = None) -> Tensor:
        """A sublayer's output, through its `dropout` if one stands there, changed by the operations at this place."""
        operations = self._views.outputs.get(place, ())
        if dropout is not None:
            first = operations[0] if len(operations) == 1 else None
            if isinstance(first, SequentialAdapter) and dropout.p and first.drops(self):
                return first.drop_and_add(place, dropout.p, output, self)
            output = dropout(output)
        for operation in operations:
            output = operation.on_output(place, output, self)
        return output

    def on_norm(self, name: str, place: str | None, inner: Any, x: Tensor) -> Tensor:
        """A layer norm with each slot's scale and shift, around Pfeiffer's adapter where one stands there."""
        norm = self._views.norms.get(name, ())
        for adapter in () if place is None else self._views.outputs.get(place, ()):
            assert isinstance(adapter, SequentialAdapter)
            x = x + adapter.update(norm[0].on_norm(x, inner, self) if norm else inner(x), self)
        return norm[0].on_norm(x, inner, self) if norm else inner(x)

    def on_activation(self, kind: str, inner: Any, x: Tensor) -> Tensor:
        """A block's GELU, in one launch where programs run."""
        found = None if self.route.tiling is None else lean_gelu(x, kind)
        return inner(x) if found is None else found

    def on_linear(self, sites: tuple[LinearSite, ...], inner: Any, x: Tensor, joined: Joined | None = None) -> Tensor:
        """A linear layer with the slots' operations; `joined` are the layers that may be computed with it at once.

        It may be several sites side by side, each with operations of its own.
        """
        self._note(sites, x)
        if self._attended is not None and sites[0].name in ATTENTION_LINEARS:
            return self._attended if sites[0].name == "project" else x  # the other results are not read
        found = [self._views.linears.get(site.name, ()) for site in sites]
        if not any(found):
            if joined is None or not self._joins(joined, sites[0].name):
                return inner(x)
            return self._project(joined, sites[0].name, x)
        for site, operations in zip(sites, found, strict=True):
            for operation in operations:
                x = operation.on_input(site, x, self)
        y = inner(x)
        pieces = []
        for site, operations in zip(sites, found, strict=True):
            own = y if len(sites) == 1 else y[..., site.start : site.stop]
            for operation in operations:
                own = operation.on_linear(site, x, own, inner, self)
            pieces.append(own)
        return pieces[0] if len(sites) == 1 else torch.cat(pieces, -1)

    def _joins(self, joined: Joined, name: str) -> bool:
        """Whether query, key and value are the backbone's own and go through our packed attention kernels."""
        if name not in joined.names or self._is_solo:
            return False
        is_ours = self.route.tiling is not None and self.route.pack is not None
        return is_ours and not any(other in self._views.linears for other in joined.names)

    def _project(self, joined: Joined, name: str, x: Tensor) -> Tensor:
        """One of query, key and value; the first that is asked for computes all three."""
        if self._projected is None or self._projected[0] is not x:
            self._projected = x, F.linear(x, joined.weight, joined.bias)
        return self._projected[1].chunk(3, -1)[joined.names.index(name)]

    def _note(self, sites: tuple[LinearSite, ...], x: Tensor) -> None:
        """Keep the input of a sublayer for the adapter beside it."""
        for site in sites:
            if site.reads is not None and site.reads in self._views.beside_sublayers:
                self.inputs[site.reads] = x

    def settle(self) -> None:
        """End the pass: operations update their running statistics with those of the pass."""
        for block in self._blocks:
            block.settle()
        for operation, seen in (self._moments or {}).items():
            operation.settle(seen)

    # Called by the operations.

    def moments_of(self, operation: SlotOperation) -> list[kernels.Moments] | None:
        """The list in which batch norm notes its statistics while it trains; None outside of training."""
        if self._moments is None or operation.weights.running is None:
            return None
        return self._moments.setdefault(operation, [])

    def layer_norm(self, x: Tensor, scale_SD: Tensor, shift_SD: Tensor | None, eps: float) -> Tensor:
        """A layer norm with each row's own scale and shift."""
        if self.gather is not None:
            normal = F.layer_norm(x, x.shape[-1:], eps=eps) * self.gather.per_row(scale_SD, x)
            return self.gather.plus(normal, shift_SD)
        return self.unlay(kernels.layer_norm(self.lay(x), scale_SD, shift_SD, eps, self.route))

    def rms_norm(self, x: Tensor, scale_SD: Tensor, eps: float) -> Tensor:
        """T5's layer norm with each row's own scale."""
        return self.unlay(kernels.rms_norm(self.lay(x), scale_SD, eps, self.route))

    def per_row(self, stacked_SD: Tensor, x: Tensor) -> Tensor:
        """Each row's own vector, to be added to or multiplied with the rows of x, in the precision it is learnt in."""
        if self.gather is not None:
            return self.gather.per_row(stacked_SD, x)
        return kernels.per_row(stacked_SD, self.lay(x), self.route)

    def lay(self, x: Tensor) -> Tensor:
        """Flatten x to the axis that segments count: rows, or the tokens of a pack (one row to the backbone)."""
        return x if self.route.pack is None else x.squeeze(0)

    def unlay(self, x: Tensor) -> Tensor:
        """Undo `lay`: the shape that the backbone expects."""
        return x if self.route.pack is None else x.unsqueeze(0)


class _FirstTokens(PassHooks):
    """The last block of a pass whose heads read only first tokens: keys and values of all tokens, the rest of these.

    It saves 8% (rows of 9 tokens) to 15% (of 35) of a CPU step on a MiniLM. What keys and values are computed of is
    what the block reads, as in every family that is packed.
    """

    def __init__(self, views: Views, firsts: Route, *, is_training: bool) -> None:
        assert firsts.wide is not None
        assert firsts.wide.pack is not None
        super().__init__(views, replace(firsts, wide=None), is_training=is_training)
        self._whole, self._rows = PassHooks(views, firsts.wide, is_training=is_training), firsts.wide.pack
        self._read: Tensor | None = None
        self._kept: dict[str, Tensor] = {}

    @property
    def whole(self) -> PassHooks:
        return self._whole

    def take(self, states: Tensor) -> Tensor:
        return states.index_select(1, self._rows.starts_B)

    def enter(self, hidden: Tensor) -> Tensor | None:
        self._read = super().enter(hidden)
        return None if self._read is None else self.take(self._read)

    def on_linear(self, sites: tuple[LinearSite, ...], inner: Any, x: Tensor, joined: Joined | None = None) -> Tensor:
        name = sites[0].name
        if self._attended is not None or name not in ("key", "value"):
            return super().on_linear(sites, inner, x)
        assert self._read is not None
        self._note(sites, x)
        self._kept[name] = self._whole.on_linear(sites, inner, self._read)
        return x  # the attention module expects this length; its result is not used

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self._attended is not None:
            return super().attend(q, k, v, **options)
        assert not options.pop("dropout", 0.0), "attention with dropout is computed whole"
        k, v = (self._kept.pop(name).view(-1, *q.shape[1:]) for name in ("key", "value"))
        return attend_first(q, k, v, self._rows, **options)
