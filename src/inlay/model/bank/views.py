"""A bank's stacks arranged by place: the operations at each hook of the backbone, and each slot's bottleneck there.

`build_views` makes them of the parts; they are rebuilt whenever a slot becomes of a new kind. `pass_hooks.py` reads
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from inlay.model.backbone.sites import Anatomy
from inlay.model.bank.methods import find_method
from inlay.model.bank.resolved_method import ResolvedMethod
from inlay.model.kernels.bottleneck_weights import Bottleneck, BottleneckShape, SlotForms
from inlay.model.parts import PARTS
from inlay.model.parts.part import Occupants, Operation, SiteShapes, SlotOperation, Stacks, layer_of

_ALIGNED = 8  # numbers of two bytes that programs read at once

TiledLayouts = Mapping[tuple[str, str], SlotForms]
Operations = Mapping[str, tuple[Operation, ...]]
"""place -> the operations there, in order"""


class Copies:
    """Copies of stacks in another type, renewed together; stacks in one piece of memory are copied as one tensor.

    A hypernetwork's output lies so (all sites of a stack of blocks side by side), and a training bank of one slot.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pieces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def add(self, stack: Tensor) -> Tensor:
        """The (still empty) copy of a stack; the same stack gives the same copy."""
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
    _layers: dict[int, Views] = field(default_factory=dict, repr=False)
    _copies: Copies | None = field(default=None, repr=False)
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
        """The same for routes that have tilings; with copies of the adapters in `dtype`, if they are in another.

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

        return Views(_changed(self.linears, change), _changed(self.outputs, change), self.norms, _copies=copies)

    @property
    def molds(self) -> TiledLayouts:
        """The parts of tiled views that follow from the shapes at every site, to be reused."""
        weights = {place: operation.weights for place, operation in self._slotted.items()}
        return {place: own.forms for place, own in weights.items() if own.forms is not None}

    def renew_copies(self) -> None:
        """Copy the current values of the stacks."""
        if self._copies is not None:
            self._copies.renew()

    def beside_own_weights(self) -> Views:
        """The views for slots with their own weights: only the operations beside whole blocks."""
        found = {
            key: tuple(operation for operation in operations if operation.reads_block)
            for key, operations in self.outputs.items()
        }
        return Views(outputs={key: operations for key, operations in found.items() if operations})

    def at(self, layer: int) -> Views:
        """The views of one block."""
        if layer not in self._layers:
            self._layers[layer] = Views(
                _within(layer, self.linears), _within(layer, self.outputs), _within(layer, self.norms)
            )
        return self._layers[layer]


def _changed(operations: Operations, change: Callable[[str, Operation], Operation]) -> Operations:
    return {key: tuple(change(key, operation) for operation in found) for key, found in operations.items()}


def _within(layer: int, operations: Operations) -> Operations:
    prefix = f"{layer}."
    return {name.removeprefix(prefix): found for name, found in operations.items() if name.startswith(prefix)}


Gated = tuple[ResolvedMethod | None, frozenset[int]]
"""A slot's method, None if it is free, and the layers whose adapters are removed from it."""


def site_shapes(anatomy: Anatomy, method: ResolvedMethod | None, removed: frozenset[int] = frozenset()) -> SiteShapes:
    """The bottleneck of a slot of this method at each site; none for a free slot, or in the layers `removed`."""
    if method is None:
        return {}
    found = [item for part in find_method(method.name).parts for item in part.shapes(anatomy, method).items()]
    return {place: shape for place, shape in found if layer_of(place[1]) not in removed}


def build_views(anatomy: Anatomy, stacks: Stacks, slots: Sequence[Gated], *, is_expanded: bool) -> Views:
    """The views of slots with these methods. `is_expanded`: shared adapters stand at every site."""
    known = {slot: site_shapes(anatomy, *slot) for slot in set(slots)}
    by_site: dict[tuple[str, str], list[BottleneckShape | None]] = {}
    for place in dict.fromkeys(place for shapes in known.values() for place in shapes):
        by_site[place] = [known[slot].get(place) for slot in slots]
    occupants = Occupants(tuple(method for method, _ in known if method), by_site, is_expanded)
    hooks: dict[str, dict[str, tuple[Operation, ...]]] = {"linear": {}, "output": {}, "norm": {}}
    for part in PARTS:
        for placed in part.bind(anatomy, stacks, occupants):
            found = hooks[placed.hook]
            found[placed.key] = (*found.get(placed.key, ()), placed.operation)
    return Views(hooks["linear"], hooks["output"], hooks["norm"])
