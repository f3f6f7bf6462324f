"""A bank's slots in a forward pass: the operations at each place, and what they share while a route is bound.

`build_views` arranges a bank's stacks by place: the operations of the parts at each hook of the backbone (linear
layers, outputs of sublayers, norms), and each slot's bottleneck there. Views are built anew whenever a slot becomes of
a new kind.

A `PassHooks` is views with a route bound. It lives for one pass and keeps state of it: inputs of sublayers, statistics
of batch norm. `at` gives the one of a block, which the wrappers of that block call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.backbone.sites import ATTENTION_LINEARS, Anatomy, LinearSite
from inlay.model.backbone.wrappers import Joined
from inlay.model.bank.methods import find_method
from inlay.model.batch.route import Pack, Route
from inlay.model.kernels import reference as kernels
from inlay.model.kernels.attention import attend_first
from inlay.model.kernels.bottleneck_weights import Bottleneck, BottleneckShape, SlotForms
from inlay.model.kernels.select import Gather
from inlay.model.parts import PARTS
from inlay.model.parts.part import Occupants, Operation, ResolvedMethod, SiteShapes, SlotOperation, Stacks

_ALIGNED = 8  # numbers of two bytes that programs read at once

TiledLayouts = Mapping[tuple[str, str], SlotForms]
Operations = Mapping[str, tuple[Operation, ...]]
"""place -> the operations there, in order"""
Gated = tuple[ResolvedMethod | None, frozenset[int]]
"""A slot's method, None if it is free, and the layers whose adapters are removed from it."""


class Copies:
    """Copies of stacks in another type, renewed together; stacks in one piece of memory are copied as one tensor.

    A hypernetwork's output lies so (all sites of a stack of blocks side by side), and a training bank of one slot.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pieces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def add(self, stack: Tensor) -> Tensor:
        """Return the (still empty) copy of a stack; the same stack gives the same copy."""
        stack, memory = stack.detach(), stack.untyped_storage()
        # Programs read aligned memory faster: a copy that would not be is laid out by itself.
        is_piece = stack.is_contiguous() and stack.storage_offset() % _ALIGNED == 0
        place = (memory.data_ptr(), 0 if is_piece else stack.data_ptr())
        if place not in self._pieces:
            size = memory.nbytes() // stack.element_size()
            whole = stack.as_strided((size,), (1,), 0) if is_piece else stack
            self._pieces[place] = whole, torch.empty(whole.shape, dtype=self._dtype, device=stack.device)
        copy = self._pieces[place][1]
        return copy.as_strided(stack.shape, stack.stride(), stack.storage_offset()) if is_piece else copy

    @torch.no_grad()
    def renew(self) -> None:
        """Copy the current values of the stacks."""
        if self._pieces:
            copied, copies = zip(*self._pieces.values(), strict=True)
            torch._foreach_copy_(list(copies), list(copied))


@dataclass(frozen=True, eq=False)
class Views:
    """The operations of a bank's slots by the place where they act, or those of one block by the names within it."""

    linears: Operations = field(default_factory=dict)
    outputs: Operations = field(default_factory=dict)
    norms: Operations = field(default_factory=dict)
    copies: Copies | None = field(default=None, repr=False)
    """copies of the adapters in the type of the tokens, to be renewed before every pass"""
    _layers: dict[int, Views] = field(default_factory=dict, repr=False)
    beside_sublayers: frozenset[str] = field(init=False, repr=False)
    """the places where an operation stands beside a sublayer, and reads the sublayer's input"""
    has_beside_block: bool = field(init=False, repr=False)
    """whether something stands beside a whole block"""

    def __post_init__(self) -> None:
        # Not when they are first read: that may be inside a program that is being compiled.
        placed = [(key, operation) for key, found in self.outputs.items() for operation in found]
        object.__setattr__(self, "beside_sublayers", frozenset(key for key, each in placed if each.reads_input))
        object.__setattr__(self, "has_beside_block", any(each.reads_block for _, each in placed))

    @property
    def _slotted(self) -> dict[tuple[str, str], SlotOperation]:
        """(form, place) -> the operation there, for operations whose slots may differ in kind."""
        return {
            (operation.form, key): operation
            for found in (self.outputs, self.linears)
            for key, operations in found.items()
            for operation in operations
            if isinstance(operation, SlotOperation)
        }

    @property
    def num_slots(self) -> int:
        """The number of slots of the adapters here; 0 if there are none."""
        return next((len(operation.weights.shapes) for operation in self._slotted.values()), 0)

    def set_slot(self, slot: int, shapes: SiteShapes) -> bool:
        """Give a slot these shapes, in place. False if the views have no room for them and must be built anew."""
        places = self._slotted
        if not all(place in places and places[place].weights.has_kind(shape) for place, shape in shapes.items()):
            return False
        for place, operation in places.items():
            operation.set_slot(slot, shapes.get(place))
        return True

    def to_tiled(
        self, dtype: torch.dtype | None, molds: TiledLayouts | None = None, *, is_fixed: bool = False
    ) -> Views:
        """Return the same for routes that have tilings; with copies of the adapters in `dtype`, if they are in another.

        `molds` are those of earlier views with the same shapes at every site. In views that are `is_fixed` no slot will
        change hands.
        """
        molds, copies = molds or {}, None if dtype is None else Copies(dtype)

        def prepare(mold: SlotForms | None, weights: Bottleneck) -> Bottleneck:
            tiles = weights.with_forms(mold, is_fixed=is_fixed)
            if copies is None or weights.down_SDR.dtype == dtype or not tiles.is_fused:
                return tiles
            return replace(tiles, copies=(copies.add(weights.down_SDR), copies.add(weights.up_SRE)))

        def change(key: str, operation: Operation) -> Operation:
            if not isinstance(operation, SlotOperation):
                return operation
            return operation.with_weights(partial(prepare, molds.get((operation.form, key))))

        linears, outputs = (
            {key: tuple(change(key, operation) for operation in found) for key, found in operations.items()}
            for operations in (self.linears, self.outputs)
        )
        return Views(linears, outputs, self.norms, copies)

    @property
    def molds(self) -> TiledLayouts:
        """The parts of tiled views that follow from the shapes at every site, to be reused."""
        weights = {place: operation.weights for place, operation in self._slotted.items()}
        return {place: own.forms for place, own in weights.items() if own.forms is not None}

    @cached_property
    def beside_own_weights(self) -> Views:
        """The views for slots with their own weights: only the operations beside whole blocks."""
        found = {
            key: tuple(operation for operation in operations if operation.reads_block)
            for key, operations in self.outputs.items()
        }
        return Views(outputs={key: operations for key, operations in found.items() if operations})

    def at(self, layer: int) -> Views:
        """Return the views of one block."""
        if layer not in self._layers:
            prefix = f"{layer}."
            linears, outputs, norms = (
                {name.removeprefix(prefix): found for name, found in hook.items() if name.startswith(prefix)}
                for hook in (self.linears, self.outputs, self.norms)
            )
            self._layers[layer] = Views(linears, outputs, norms)
        return self._layers[layer]


def site_shapes(anatomy: Anatomy, method: ResolvedMethod | None, removed: frozenset[int] = frozenset()) -> SiteShapes:
    """Return the bottleneck of a slot of this method at each site; none for a free slot, or in the layers `removed`."""
    if method is None:
        return {}
    found = [item for part in find_method(method.name).parts for item in part.shapes(anatomy, method).items()]
    return {(form, key): shape for (form, key), shape in found if int(key.partition(".")[0]) not in removed}


def build_views(anatomy: Anatomy, stacks: Stacks, slots: Sequence[Gated], *, is_expanded: bool) -> Views:
    """Return the views of slots with these methods. `is_expanded`: shared adapters stand at every site."""
    known = {slot: site_shapes(anatomy, *slot) for slot in set(slots)}
    by_site: dict[tuple[str, str], list[BottleneckShape | None]] = {}
    for place in dict.fromkeys(place for shapes in known.values() for place in shapes):
        by_site[place] = [known[slot].get(place) for slot in slots]
    occupants = Occupants(tuple(method for method, _ in known if method), by_site, is_expanded)
    hooks: dict[str, dict[str, tuple[Operation, ...]]] = {"linear": {}, "output": {}, "norm": {}}
    for part in PARTS:
        for hook, key, operation in part.bind(anatomy, stacks, occupants):
            hooks[hook][key] = (*hooks[hook].get(key, ()), operation)
    return Views(hooks["linear"], hooks["output"], hooks["norm"])


class PassHooks:
    """A bank's views with a route bound: what wrappers call, and what operations read and note."""

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
        self.views, self._is_training, self._seeds, self._is_solo = views, is_training, seeds, is_finetuned
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
        """Return the same for the wrappers of one block."""
        views, is_training = self.views.at(layer), self._is_training
        if is_last and self._firsts is not None:
            block: PassHooks = _FirstTokens(views, self._firsts, is_training=is_training)
        else:
            solo, gather = self._is_solo, self.gather
            block = PassHooks(views, self.route, is_training=is_training, is_finetuned=solo, gather=gather)
        block.seed = None if self._seeds is None else self._seeds[layer : layer + 1]
        block._layer = layer
        if self._num_readers is not None and layer >= self._num_readers and self.route.decoder is not None:
            block.route = self.route.decoder
        if self.route.prefix is not None and self.route.prefix.reach.layer == layer:
            attended = self.route.prefix.attended
            block._attended = None if attended is None else block.take(attended)
        self._blocks.append(block)
        return block

    @property
    def whole(self) -> PassHooks:
        """The pass over all tokens, also where this block computes a few."""
        return self

    def take(self, states: Tensor) -> Tensor:
        """Return the part of all tokens' states that this block computes."""
        return states

    @property
    def pack(self) -> Pack | None:
        """The layout of the packed rows; None if they are padded."""
        return self.route.pack

    # Called by the wrappers.

    def enter(self, hidden: Tensor) -> Tensor | None:
        """Return the input of this block: `hidden`, or the cached states; None if the pass begins above."""
        prefix = self.route.prefix
        read: Tensor | None = hidden
        if prefix is not None and self._layer <= prefix.reach.layer:
            read = prefix.hidden if self._layer == prefix.reach.layer else None
        self.entered = read if self.views.has_beside_block else None
        return read

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Compute the attention of each packed row to itself."""
        if self._attended is not None:
            return q  # nothing reads it
        if self._projected is None:
            return kernels.attend(q, k, v, self.route, **options)
        projected, self._projected = self._projected[1], None
        return kernels.attend_joined(projected.view(-1, 3, *q.shape[1:]), self.route, **options)

    def on_linear(self, sites: tuple[LinearSite, ...], inner: Any, x: Tensor, joined: Joined | None = None) -> Tensor:
        """Apply a linear layer with the slots' operations; `joined` are the layers that may be computed with it.

        It may be several sites side by side, each with operations of its own.
        """
        self._note(sites, x)
        if self._attended is not None and sites[0].name in ATTENTION_LINEARS:
            return self._attended if sites[0].name == "project" else x  # the other results are not read
        found = [self.views.linears.get(site.name, ()) for site in sites]
        if not any(found):
            projected = None if joined is None else self._project(joined, sites[0].name, x)
            return inner(x) if projected is None else projected
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

    def _note(self, sites: tuple[LinearSite, ...], x: Tensor) -> None:
        """Keep the input of a sublayer for the adapter beside it."""
        for site in sites:
            if site.reads is not None and site.reads in self.views.beside_sublayers:
                self.inputs[site.reads] = x

    def _project(self, joined: Joined, name: str, x: Tensor) -> Tensor | None:
        """Return one of query, key and value; the first call computes all three.

        None unless they are the backbone's own and go through our packed attention kernels.
        """
        is_ours = self.route.tiling is not None and self.route.pack is not None
        if name not in joined.names or self._is_solo or not is_ours:
            return None
        if any(other in self.views.linears for other in joined.names):
            return None
        if self._projected is None or self._projected[0] is not x:
            self._projected = x, F.linear(x, joined.weight, joined.bias)
        return self._projected[1].chunk(3, -1)[joined.names.index(name)]

    def settle(self) -> None:
        """End the pass: operations update their running statistics with those of the pass."""
        for block in self._blocks:
            block.settle()
        for operation, seen in (self._moments or {}).items():
            operation.settle(seen)

    # Called by the operations.

    def moments_of(self, operation: SlotOperation) -> list[kernels.Moments] | None:
        """Return the list in which batch norm notes its statistics while it trains; None outside of training."""
        if self._moments is None or operation.weights.running is None:
            return None
        return self._moments.setdefault(operation, [])

    def per_row(self, stacked_SD: Tensor, x: Tensor) -> Tensor:
        """Return each row's own vector, to be added to or multiplied with the rows of x, in its own precision."""
        if self.gather is not None:
            return self.gather.per_row(stacked_SD, x)
        return kernels.per_row(stacked_SD, self.lay(x), self.route)

    def lay(self, x: Tensor) -> Tensor:
        """Flatten x to the axis that segments count: rows, or the tokens of a pack (one row to the backbone)."""
        return x if self.route.pack is None else x.squeeze(0)

    def unlay(self, x: Tensor) -> Tensor:
        """Undo `lay`: return the shape that the backbone expects."""
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
