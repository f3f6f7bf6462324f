"""A bank's stacks arranged by site: which of them the slots read there, and what each slot is.

`build_views` makes them; they are rebuilt whenever a slot becomes of a new kind. `routed.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from inlay.model.backbone.sites import Anatomy
from inlay.model.kernels import reference as kernels
from inlay.model.kernels import tiled
from inlay.model.parts.tensors import PAL_PARTS, adapted_linears, adapter_groups
from inlay.settings.run_config import MethodConfig

PAL_PLACE = "feedforward"
"""The place of a block whose output what stands beside the whole block is added to"""

_ALIGNED = 8  # numbers of two bytes that programs read at once

Stacks = Mapping[str, Tensor]
TiledLayouts = Mapping[tuple[str, str], tiled.TiledBottleneck]


@dataclass(frozen=True)
class LinearView:
    """What the slots do to one linear layer."""

    lora: kernels.Bottleneck | None = None
    bias_SD: Tensor | None = None
    factor_SD: Tensor | None = None


class Copies:
    """Copies of stacks in another type, renewed together; those that lie in one piece of memory as one tensor.

    What a hypernetwork writes lies so, all sites of a stack of blocks side by side, and a training bank of one slot.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pieces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def add(self, stack: Tensor) -> Tensor:
        """Where the copy of a stack will be, the same for the same stack; nothing is in it yet."""
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
        """Bring the copies up to what was copied."""
        if self._pieces:
            copied, copies = zip(*self._pieces.values(), strict=True)
            torch._foreach_copy_(list(copies), list(copied))


@dataclass(frozen=True, eq=False)
class Views:
    """A bank's stacks by site, or those of one block by the names within it."""

    sequential: Mapping[str, kernels.Bottleneck] = field(default_factory=dict)
    parallel: Mapping[str, kernels.Bottleneck] = field(default_factory=dict)
    norms: Mapping[str, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    """scale and shift [S, D]; None: the backbone's own"""
    linears: Mapping[str, LinearView] = field(default_factory=dict)
    pals: Mapping[str, kernels.Projected] = field(default_factory=dict)
    """what stands beside each block"""
    _layers: dict[int, Views] = field(default_factory=dict, repr=False)
    _copies: Copies | None = field(default=None, repr=False)

    @property
    def num_slots(self) -> int:
        """How many slots the adapters here have; 0 if there are none."""
        return next((len(weights.shapes) for weights in (*self.sequential.values(), *self.parallel.values())), 0)

    def set_slot(self, slot: int, shapes: SiteShapes) -> bool:
        """Make a slot what `shapes` say, in place. False if there is no place for it here: build them anew."""
        places: dict[tuple[str, str], kernels.Bottleneck] = {
            **{("sequential", key): weights for key, weights in self.sequential.items()},
            **{("parallel", key): weights for key, weights in self.parallel.items()},
            **{("lora", key): view.lora for key, view in self.linears.items() if view.lora is not None},
        }
        if not all(place in places and places[place].has_kind(shape) for place, shape in shapes.items()):
            return False
        for place, weights in places.items():
            weights.set_slot(slot, shapes.get(place))
        return True

    def to_tiled(
        self, dtype: torch.dtype | None, molds: TiledLayouts | None = None, *, is_fixed: bool = False
    ) -> Views:
        """The same for routes that have tilings; with copies of the adapters in `dtype`, if they are in another.

        `molds` are those of earlier views with the same shapes at every site. In views that are `is_fixed` no slot will
        change hands.
        """
        molds, copies = molds or {}, None if dtype is None else Copies(dtype)

        def prepare(weights: kernels.Bottleneck, mold: tiled.TiledBottleneck | None = None) -> kernels.Bottleneck:
            tiles = kernels.to_tiled(weights, mold, is_fixed=is_fixed)
            if copies is None or weights.down_SDR.dtype == dtype or not kernels.reads_copies(tiles):
                return tiles
            return kernels.with_copies(tiles, (copies.add(weights.down_SDR), copies.add(weights.up_SRE)))

        linears = {
            key: view if view.lora is None else replace(view, lora=prepare(view.lora))
            for key, view in self.linears.items()
        }
        sequential, parallel = (
            {key: prepare(weights, molds.get((form, key))) for key, weights in found.items()}
            for form, found in (("sequential", self.sequential), ("parallel", self.parallel))
        )
        return Views(sequential, parallel, self.norms, linears, self.pals, _copies=copies)

    @property
    def molds(self) -> TiledLayouts:
        """What follows from the shapes at every site, of views in tiles."""
        by_form = (("sequential", self.sequential), ("parallel", self.parallel))
        return {(form, key): kernels.tiled_layout(weights) for form, found in by_form for key, weights in found.items()}

    def renew_copies(self) -> None:
        """Bring the copies up to what was copied."""
        if self._copies is not None:
            self._copies.renew()

    def at(self, layer: int) -> Views:
        """Those of one block."""
        if layer not in self._layers:
            self._layers[layer] = Views(
                _within(layer, self.sequential),
                _within(layer, self.parallel),
                _within(layer, self.norms),
                _within(layer, self.linears),
                _within(layer, self.pals),
            )
        return self._layers[layer]


def _within(layer: int, views: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{layer}."
    return {name.removeprefix(prefix): view for name, view in views.items() if name.startswith(prefix)}


Gated = tuple[MethodConfig | None, frozenset[int]]
"""A slot's resolved method, None if it is free, and the layers whose adapters are removed from it."""
SiteShapes = Mapping[tuple[str, str], kernels.Shape]
"""What one slot is at each site: (form, site) -> its bottleneck there."""


def site_shapes(anatomy: Anatomy, method: MethodConfig | None, removed: frozenset[int] = frozenset()) -> SiteShapes:
    """What a slot of this resolved method is at each site; nothing for a free slot, or in the layers `removed`."""
    if method is None:
        return {}
    found: dict[tuple[str, str], kernels.Shape] = {}
    if method.form != "auto":
        assert method.size is not None
        assert method.scale is not None
        multiplies = method.combine == "multiply"
        shape = kernels.Shape(method.size, method.activation, method.scale, method.depth, method.inner_norm, multiplies)
        found |= {(method.form, key): shape for key in adapter_groups(anatomy, method)}
    if method.size and method.linears:  # (IA)³ names linear layers too, but has no size: its factors are no bottleneck
        low_rank = kernels.Shape(method.size, scale=1.0 if method.scale is None else method.scale)
        found |= {("lora", linear.key): low_rank for linear in adapted_linears(anatomy, method)}
    return {place: shape for place, shape in found.items() if _layer_of(place[1]) not in removed}


def _layer_of(key: str) -> int:
    """The layer of a site or linear layer, by its key."""
    return int(key.partition(".")[0])


def build_views(anatomy: Anatomy, stacks: Stacks, slots: Sequence[Gated], *, is_expanded: bool) -> Views:
    """The views of slots with these resolved methods. `is_expanded`: shared adapters stand at every site."""
    known = {slot: site_shapes(anatomy, *slot) for slot in set(slots)}
    by_site: dict[tuple[str, str], list[kernels.Shape | None]] = {}
    for place in dict.fromkeys(place for shapes in known.values() for place in shapes):
        by_site[place] = [known[slot].get(place) for slot in slots]
    owners: dict[str, str] = {}
    if not is_expanded:
        groups = [adapter_groups(anatomy, method) for method, _ in known if method and method.form != "auto"]
        assert all(group == groups[0] for group in groups), "slots trained together must share alike"
        owners = groups[0] if groups else {}
    by_form: dict[str, dict[str, kernels.Bottleneck]] = {"sequential": {}, "parallel": {}}
    for site in anatomy.sites:
        for form, found in by_form.items():
            if (form, site.key) in by_site:
                name = f"adapter.{owners.get(site.key, site.key)}"
                found[site.key] = _bottleneck(name, stacks, by_site[form, site.key])
    linears = _linear_views(anatomy, stacks, by_site)
    pals = _pal_views(anatomy, stacks)
    return Views(by_form["sequential"], by_form["parallel"], _norm_views(stacks), linears, pals)


def _bottleneck(name: str, stacks: Stacks, shapes: list[kernels.Shape | None]) -> kernels.Bottleneck:
    depth = max(shape.depth for shape in shapes if shape)

    def pair(first: str, second: str) -> tuple[Tensor, Tensor] | None:
        return (stacks[f"{name}.{first}"], stacks[f"{name}.{second}"]) if f"{name}.{first}" in stacks else None

    out_norm = pair("out_scale", "out_shift")
    down, up = stacks.get(f"{name}.down"), stacks.get(f"{name}.up")
    if down is None or up is None:  # a norm alone at every slot: nothing is read of what stands before it
        assert out_norm is not None
        num_slots, width = out_norm[0].shape
        down, up = (out_norm[0].new_zeros(num_slots, *shape) for shape in ((width, 8), (8, width)))
    return kernels.Bottleneck(
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


def _pal_views(anatomy: Anatomy, stacks: Stacks) -> dict[str, kernels.Projected]:
    found = {}
    for layer in range(anatomy.num_layers):
        if f"pal.{layer}.query" in stacks:
            query, key, value = (stacks[f"pal.{layer}.{name}"] for name in PAL_PARTS)
            encode, decode = stacks["pal.encode"], stacks["pal.decode"]
            heads = kernels.Projected(encode, decode, query, key, value, anatomy.num_heads)
            found[f"{layer}.{PAL_PLACE}"] = heads
    return found


def _norm_views(stacks: Stacks) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    keys = dict.fromkeys(name.removeprefix("norm.").rpartition(".")[0] for name in stacks if name.startswith("norm."))
    return {key: (stacks.get(f"norm.{key}.scale"), stacks.get(f"norm.{key}.shift")) for key in keys}


def _linear_views(
    anatomy: Anatomy, stacks: Stacks, by_site: Mapping[tuple[str, str], list[kernels.Shape | None]]
) -> dict[str, LinearView]:
    views = {}
    for linear in anatomy.linears:
        lora = None
        if ("lora", linear.key) in by_site:
            down, up = stacks[f"lora.{linear.key}.down"], stacks[f"lora.{linear.key}.up"]
            lora = kernels.Bottleneck(down, up, by_site["lora", linear.key])
        view = LinearView(lora, stacks.get(f"bias.{linear.key}"), stacks.get(f"ia3.{linear.key}"))
        if view != LinearView():
            views[linear.key] = view
    return views
