"""The bank: the parameters of S slots, stacked in one tensor per name.

A slot holds one task's parameters at its own size, padded to the bank's; a slot without a tensor at some site is that
site's identity (no adapter, the backbone's own norm). `Bank.routed` binds a route to the backbone's wrappers for the
forward passes inside the block. Training banks have gradients, and their slots are of one structure: sites that share
an adapter read one stack. Serving banks grow as versions come in and may mix methods: shared adapters are expanded.

A run may own several slots, one for each of its tasks, that share parameters (a hypernetwork, norms, a copy of the
backbone): those are stacked by run. For every pass, `Expander` makes ordinary per-slot stacks of them; only training
banks have such slots, since a trained task becomes an ordinary one.

A slot with its own copy of the backbone's weights (full and top-k fine-tuning) shares no forward pass with another:
check `is_finetuned`, and send a batch for it alone.

Invariants: reading a slot gives back exactly what was put in it (rounded, where a serving bank holds matrices in
bf16), and no operation on one slot touches another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inlay.errors import StoreDamaged, Unsupported
from inlay.locks import lock_of
from inlay.model.backbone.backbone import Backbone
from inlay.model.bank.flat import FlatBank, lay_flat
from inlay.model.bank.methods import SlotSpec, make_expander, materialized_method
from inlay.model.bank.pass_hooks import Gated, PassHooks, TiledLayouts, Views, build_views, site_shapes
from inlay.model.batch.route import Batch, Route, Segment
from inlay.model.heads import generation as writing
from inlay.model.heads import readout
from inlay.model.heads.heads import HeadSpec
from inlay.model.kernels import launch
from inlay.model.kernels import reference as kernels
from inlay.model.parts import find_part
from inlay.model.parts import head as head_part
from inlay.model.parts.hypernet import Expander
from inlay.model.parts.own_weights import OWN_WEIGHTS
from inlay.model.parts.part import TensorSpec, draw_tensor

_ALIGN = 8  # grouped products want the bottleneck to be a multiple of this


class Bank:
    """Stacked parameters of the slots of one backbone. `stacks[name]` is [S, …]; `specs[s]` is None for a free slot."""

    def __init__(
        self,
        backbone: Backbone,
        num_slots: int,
        *,
        trainable: bool = False,
        dtype: torch.dtype = torch.float32,
        slots_per_run: int = 1,
    ) -> None:
        """Make an empty bank. While it serves, adapter matrices are held in `dtype`; all other tensors are float32.

        In training, `slots_per_run` neighbouring slots belong to one run.
        """
        assert num_slots % slots_per_run == 0
        self.backbone = backbone
        self.slots_per_run = slots_per_run
        self._dtype = torch.float32 if trainable else dtype
        self.anatomy = backbone.anatomy
        self.is_trainable = trainable
        self.specs: list[SlotSpec | None] = [None] * num_slots
        self.stacks: dict[str, Tensor] = {}
        self._layouts: list[dict[str, TensorSpec]] = [{} for _ in range(num_slots)]
        self._own_weights: list[dict[str, Tensor]] = [{} for _ in range(num_slots)]
        self._removed: list[frozenset[int]] = [frozenset()] * num_slots
        self._is_repeated = self._is_flat = False
        self._grown: set[str] = set()
        """leaders of the stacks that grew since their widths were last equalised"""
        self._items: dict[str, TensorSpec] = {}
        self._expander: Expander | None = None
        self._known_views: tuple[Any, Views] | None = None
        self._molds: dict[tuple[Gated, ...], TiledLayouts] = {}
        self._trees: dict[tuple[str, ...], writing.Tree] = {}
        self._views: Views | None = None
        self.num_changes = 0
        """number of times a slot was filled, freed or gated"""

    @property
    def views(self) -> Views:
        """The stacks by place, as the wrappers read them.

        A new object whenever stacks were replaced or a slot became of a new kind. Slots of kinds that occur already are
        changed in place, so that compiled and captured programs stay right.
        """
        if self._views is None:
            slots = [self._slot_method(slot) for slot in range(self.num_slots)]
            views = build_views(self.anatomy, self.stacks, slots, is_expanded=not self.is_trainable)
            if launch.is_available(self.backbone.device):
                with torch.inference_mode(False):  # a pass may be the first to ask; slots are set outside of passes
                    views = views.to_tiled(self.backbone.dtype if self.is_trainable else None)
            self._views = views
        return self._views

    @property
    def layout_key(self) -> object:
        """Key of the bank's memory layout: captured programs stay valid while it compares equal.

        A hypernetwork's output is computed in every pass, from stacks that keep their addresses.
        """
        if self._expander is None or self.is_finetuned(0):
            return self.views
        return tuple(map(self._slot_method, range(self.num_slots)))

    def drop_generated(self) -> None:
        """Forget generated adapters. A replayed graph changes the stacks without changing their version counters."""
        self._known_views = None

    @property
    def num_slots(self) -> int:
        return len(self.specs)

    def run_of(self, slot: int) -> int:
        """Return the number of the run that a slot belongs to."""
        return slot // self.slots_per_run

    def is_finetuned(self, slot: int) -> bool:
        """Tell whether rows of this slot need a pass of their own, with the slot's copy of the backbone's weights."""
        spec = self.specs[slot]
        return spec is not None and spec.is_finetuned

    def put(self, slot: int, spec: SlotSpec, tensors: Mapping[str, Tensor]) -> None:
        """Set a slot to `tensors`, growing the bank where they do not fit. Refuses missing, extra or misshapen ones."""
        expected = {item.name: item for item in spec.layout(self.anatomy)}
        _check_tensors(expected, tensors)
        is_one_run = self.num_slots == self.slots_per_run
        assert not (self.is_trainable and spec.is_finetuned and not is_one_run), (
            "such a slot trains in a bank of one run"
        )
        if spec.is_joint and not self.is_trainable:
            raise Unsupported(
                f"a slot of the method `{spec.method.name}` cannot answer: its tasks share parameters",
                "make it an ordinary one: `inlay materialize`",
            )
        self.free(slot)
        self.specs[slot], self._layouts[slot] = spec, expected
        with torch.no_grad():
            for name, item in expected.items():
                if not find_part(name).is_stacked and not self.is_trainable:
                    self._own_weights[slot][name] = self.backbone.like_own(name, tensors[name])
                    continue
                for place in self._places(spec, name):
                    stack = self._stack_for(place, item)
                    stack[self._row(item, slot)][_corner(item.shape)] = tensors[name].to(stack)
            self._equalise_widths()
        if spec.is_joint:
            self._expander = make_expander(self.anatomy, spec.method, self.slots_per_run)
        self._refresh_views(slot)

    def reserve(self, spec: SlotSpec) -> None:
        """Make the stacks wide enough for `spec`, so that putting it in a slot later does not grow them."""
        with torch.no_grad():
            for item in spec.layout(self.anatomy):
                for place in self._places(spec, item.name):
                    self._stack_for(place, item)
            self._equalise_widths()

    def mark_dynamic(self, hear: Callable[[Tensor, int], None]) -> None:
        """Call `hear(stack, axis)` for every axis that is padded to the size of the largest slot."""
        for name, stack in self.stacks.items():
            for axis in self._items[name].ranks:
                hear(stack, axis + 1)

    def initialise(self, slot: int, spec: SlotSpec, seed: int, task: str = "") -> None:
        """Set a slot to fresh values, which depend on the seed, the site and the slot's own size only.

        Where a run has several tasks, tensors that are not shared also depend on the task's name.
        """
        tensors = {}
        for item in spec.layout(self.anatomy):
            if item.start == "backbone":
                tensors[item.name] = self.backbone.own_tensor(item.name)
            else:
                tensors[item.name] = draw_tensor(item, seed, "" if item.is_shared else task)
        self.put(slot, spec, tensors)

    def free(self, slot: int) -> None:
        """Clear a slot, which becomes the identity again."""
        assert not self._is_repeated, "slots that are one cannot change hands"
        spec = self.specs[slot]
        places = [] if spec is None else [place for name in self._layouts[slot] for place in self._places(spec, name)]
        with torch.no_grad():
            for place in places:
                if place in self.stacks:  # a slot's own weights are not
                    self.stacks[place][self._row(self._items[place], slot)] = self._neutral(place)
        self.specs[slot] = None
        self._layouts[slot] = {}
        self._own_weights[slot] = {}
        self._removed[slot] = frozenset()
        self._refresh_views(slot)

    def gate(self, slot: int, removed: Iterable[int]) -> None:
        """Take the adapters of these layers out of a slot: no update there, while its norms and its head stay.

        Its tensors stay: another gate, or the next task put into the slot, brings the adapters back.
        """
        self._removed[slot] = frozenset(removed)
        self._refresh_views(slot)

    def repeated(self, slot: int, num_slots: int) -> Bank:
        """Return a bank whose slots are all views of this slot's tensors, each to be gated in its own way."""
        assert not self.is_trainable
        assert not self.is_finetuned(slot), "its tensors are not in the stacks"
        bank = Bank(self.backbone, num_slots, dtype=self._dtype)
        bank.stacks = {name: stack[slot].expand(num_slots, *stack.shape[1:]) for name, stack in self.stacks.items()}
        bank.specs, bank._layouts = [self.specs[slot]] * num_slots, [self._layouts[slot]] * num_slots
        bank._is_repeated = True
        return bank

    def read(self, slot: int) -> dict[str, Tensor]:
        """Return the slot's tensors at their own size, as float32 copies on the CPU."""
        spec, tensors = self.specs[slot], {}
        for name, item in self._layouts[slot].items():
            assert spec is not None
            stored = self._own_weights[slot].get(name)
            if stored is None:
                stored = self.stacks[self._places(spec, name)[0]][self._row(item, slot)][_corner(item.shape)]
            tensors[name] = stored.detach().to("cpu", torch.float32, copy=True).contiguous()
        return tensors

    def flatten(self, *, shared: bool = False) -> FlatBank:
        """Lay the slots' own stacks out flat for training, or with `shared` the stacks that the slots of a run share.

        The bank must not grow after it: reserve room for later slots first.
        """
        items = {name: item for name, item in self._items.items() if item.is_shared == shared}
        num_rows = self.num_slots // (self.slots_per_run if shared else 1)
        flat, stacks = lay_flat({name: self.stacks[name] for name in items}, items, num_rows, self.backbone.device)
        self.stacks |= stacks
        self._views, self._is_flat = None, True
        return flat

    @property
    def has_shared(self) -> bool:
        """Whether slots of a run share parameters."""
        return any(item.is_shared for item in self._items.values())

    @contextmanager
    def routed(self, route: Route) -> Iterator[None]:
        """Send every forward pass of the backbone inside the block through the slots of `route`.

        The block is a turn: other threads' passes wait. Running statistics of batch norms move when it ends: call
        `backward` inside it.
        """
        with self.backbone.turn():
            hooks = self._bind(route)
            with self.backbone.mount.routed(hooks):
                yield
            hooks.settle()

    def _bind(self, route: Route) -> PassHooks:
        """Bind a route to the bank's views, for one pass."""
        is_training = self.is_trainable and self.backbone.model.training
        # Does the pass use a slot's own weights? Its norms and biases are among them, so the bank's are not applied.
        # A route for any mix of rows has no segments.
        is_finetuned = self.is_finetuned(route.segments[0].slot if route.segments else 0)
        is_finetuned = is_finetuned and (bool(route.segments) or self.num_slots == self.slots_per_run)
        device = self.backbone.device
        # Choose the views: expanded from shared parameters, beside own weights, or the ordinary ones.
        if self._expander is not None and not is_finetuned:
            views, route = self._expand(self._expander, route)
        else:
            views = self.views.beside_own_weights if is_finetuned else self.views
        # On a GPU, tile the route and the decoder's route.
        if launch.is_available(device) and route.tiling is None:
            num_slots = views.num_slots or self.num_slots
            route = self._tiled(route, num_slots)
            if route.decoder is not None:
                route = replace(route, decoder=self._tiled(route.decoder, num_slots))
        # Copy the adapters to the type of the tokens, and draw a seed of dropout for every layer.
        if views.copies is not None:
            views.copies.renew()
        seeds = None
        if is_training and route.tiling is not None:
            seeds = torch.randint(2**62, (self.anatomy.num_layers,), device=device)
        readers = self.anatomy.num_readers
        return PassHooks(
            views, route, is_training=is_training, seeds=seeds, num_readers=readers, is_finetuned=is_finetuned
        )

    def _tiled(self, route: Route, num_slots: int) -> Route:
        width = 1 if route.mask_BT is None else route.mask_BT.shape[1]
        return route.tiled(num_slots, width, self.backbone.device)

    def logits(
        self, batch: Batch, *, dropout: Mapping[int, float] | None = None, as_vectors: Collection[int] = frozenset()
    ) -> list[Tensor]:
        """Return the logits of each segment of the batch, through backbone, slots and heads.

        They are [n, L], or [n, T, L] with padding where a head reads tokens. Where the backbone writes its answers,
        they are [n, T, V] if the batch has the answers, else the results of `writing.answer`. `dropout` is each slot's
        rate on the vectors that its head reads; for the slots in `as_vectors` these vectors are returned in place of
        logits. Rows have two texts where a head has towers, and nowhere else. Call it, and `backward`, inside
        `routed(batch.route)`.
        """
        # The slots of the batch, their own weights and their heads.
        slots = [segment.slot for segment in batch.route.segments]
        is_one_run = len({self.run_of(slot) for slot in slots}) == 1
        assert is_one_run or not any(map(self.is_finetuned, slots)), "a slot with its own weights shares no batch"
        weights = self.backbone.in_own_type(self.weights_of(slots[0]))
        heads = [self.head_of(slot) for slot in slots]
        # Written answers: score or write them; if the batch has them, return the logits of their tokens.
        if heads[0].is_written:
            assert all(head.is_written for head in heads), "answers of a batch are all written, or none"
            if batch.written_BT is None:
                return writing.answer(self, batch, weights)
            logits_BTV = writing.forced_logits(self, batch, weights)
            # Not by slices: in backward each would fill a tensor of all rows with zeros.
            return list(logits_BTV.split(readout.sizes_of(batch.rows)))
        # The forward pass, and the vectors that the heads read.
        layers = self.backbone.hidden_layers(batch, weights, all_layers=any(head.features == "mix" for head in heads))
        rates = [dropout[slot] if dropout else 0.0 for slot in slots]
        _check_texts(batch, heads)
        read = readout.read(self, batch, layers, rates, weights)
        if as_vectors and all(slot in as_vectors for slot in slots):
            return [seen.vectors for seen in read]
        # All linear heads at once: vectors end to end, a segment for each slot.
        stops = list(itertools.accumulate(seen.states[..., 0].numel() for seen in read))
        segments = tuple(map(Segment, slots, [0, *stops[:-1]], stops))
        num_outputs = [0 if spec is None else spec.head.num_outputs for spec in self.specs]
        vectors = torch.cat([seen.states.flatten(0, -2) for seen in read])
        route = Route(segments)
        if launch.is_available(self.backbone.device):
            route = route.tiled(self.num_slots, 1, self.backbone.device)
        weight, bias = self.stacks[head_part.WEIGHT], self.stacks[head_part.BIAS]
        logits = kernels.linear_heads(vectors, weight, bias, num_outputs, route)
        # Add the features of pairs whose texts are read apart.
        if any(head.has_towers for head in heads):
            pairs = [(slot, seen.pairs_BF) for slot, seen in zip(slots, read, strict=True)]
            logits = kernels.add_pairs(logits, self.stacks[head_part.PAIR_WEIGHT], pairs)
        # Token logits as padded rows; vectors where they were asked for.
        found = []
        for part, seen, head, texts, slot in zip(logits, read, heads, batch.texts, slots, strict=True):
            as_rows = part if head.reads_rows else readout.as_rows(part, seen.states, batch, texts)
            found.append(seen.vectors if slot in as_vectors else as_rows)
        return found

    def head_of(self, slot: int) -> HeadSpec:
        """Return the head of a slot that is taken."""
        spec = self.specs[slot]
        assert spec is not None, f"slot {slot} is free"
        return spec.head

    def tree_of(self, slot: int) -> writing.Tree:
        """Return the tokens of the texts that a slot's answers are scored by."""
        texts = self.head_of(slot).texts
        if texts not in self._trees:
            with lock_of(self.backbone.tokenizer):
                tokens = [list(map(int, self.backbone.tokenizer(text)["input_ids"])) for text in texts]
            self._trees[texts] = writing.Tree.of(tokens, self.backbone.start_id)
        return self._trees[texts]

    def weights_of(self, slot: int) -> dict[str, Tensor] | None:
        """Return the slot's own weights by the backbone's names; None if it goes through the backbone's."""
        if not self.is_finetuned(slot):
            return None
        if not self.is_trainable:
            return {OWN_WEIGHTS.theirs(name): tensor for name, tensor in self._own_weights[slot].items()}
        names = [name for name in self._layouts[slot] if OWN_WEIGHTS.owns(name)]
        return {OWN_WEIGHTS.theirs(name): self.stacks[name].view(self.stacks[name].shape[1:]) for name in names}

    def _expand(self, expander: Expander, route: Route) -> tuple[Views, Route]:
        """Expand parameters that runs share into views for the slots of a route, and renumber the route to match."""
        used = [segment.slot for segment in route.segments]
        if not used:  # a route of any mix
            used = list(range(self.num_slots))
        if not torch.is_grad_enabled():  # the same for all passes until something is trained: once for all slots
            used = [slot for slot, spec in enumerate(self.specs) if spec is not None]
        # A hypernetwork writes the adapters of the slots asked for; without one, all slots are expanded.
        slots = tuple(range(self.num_slots) if expander.net is None else used)
        key = (slots, torch.is_inference_mode_enabled(), *(stack._version for stack in self.stacks.values()))
        if torch.is_grad_enabled() or self._known_views is None or self._known_views[0] != key:
            stacks, gated = expander.expand(self.stacks, slots), tuple(self._slot_method(slot) for slot in slots)
            views = build_views(self.anatomy, stacks, gated, is_expanded=False)
            if launch.is_available(self.backbone.device):
                views = views.to_tiled(self.backbone.dtype, self._molds.get(gated), is_fixed=True)
                if gated not in self._molds:
                    self._molds[gated] = views.molds
            self._known_views = None if torch.is_grad_enabled() else (key, views)
        else:
            views = self._known_views[1]
        return views, route.renumbered(slots)

    def _places(self, spec: SlotSpec, name: str) -> list[str]:
        """Return the stacks that hold a slot's tensor: one, or in a serving bank one for every site that shares it."""
        if self.is_trainable:
            return [name]
        return find_part(name).places(self.anatomy, spec.method, name)

    def _row(self, item: TensorSpec, slot: int) -> int:
        """Return the row of its stack that holds a slot's tensor."""
        return self.run_of(slot) if item.is_shared else slot

    def _neutral(self, name: str) -> Tensor | float:
        value = find_part(name).neutral(name, self.backbone)
        return value.to(self.stacks[name]) if isinstance(value, Tensor) else value

    def _stack_for(self, name: str, item: TensorSpec) -> Tensor:
        """Return the stack of `name`, made or enlarged so that the tensor fits."""
        shape = tuple(-(-n // _ALIGN) * _ALIGN if axis in item.ranks else n for axis, n in enumerate(item.shape))
        old = self.stacks.get(name)
        if old is not None and all(have >= want for have, want in zip(old.shape[1:], shape, strict=True)):
            return old
        assert not self._is_flat, "a stack that grows leaves what is trained"
        if old is not None:
            shape = tuple(max(have, want) for have, want in zip(old.shape[1:], shape, strict=True))
        part = find_part(name)
        dtype = self._dtype if part.is_compact and len(shape) > 1 else torch.float32
        num_rows = self.num_slots // self.slots_per_run if item.is_shared else self.num_slots
        new = torch.zeros(num_rows, *shape, dtype=dtype, device=self.backbone.device)
        if old is not None:
            new[_corner(tuple(old.shape))] = old.detach()
        self.stacks[name] = new
        self._items[name] = item
        self._views = None
        self._grown.add(part.leader(name))
        if old is None:
            new[:] = self._neutral(name)
        return new.requires_grad_(self.is_trainable)

    def _equalise_widths(self) -> None:
        """Make all stacks of an adapter that grew as wide as its widest: programs for all slots read them together."""
        leaders = self._grown - {""}
        for name in [*self.stacks] if leaders else []:
            item, leader = self._items[name], find_part(name).leader(name)
            if leader in leaders and item.ranks and leader in self.stacks:
                width = self.stacks[leader].shape[2]
                shape = tuple(width if axis in item.ranks else n for axis, n in enumerate(item.shape))
                self._stack_for(name, replace(item, shape=shape))
        self._grown = set()

    def _refresh_views(self, slot: int) -> None:
        """Update the views after a slot changed: in place where its kind occurs already, else they are built anew."""
        self.num_changes += 1
        shapes = site_shapes(self.anatomy, *self._slot_method(slot))
        if self._views is not None and not self._views.set_slot(slot, shapes):
            self._views = None

    def _slot_method(self, slot: int) -> Gated:
        spec = self.specs[slot]
        return None if spec is None else materialized_method(spec.method), self._removed[slot]


def _check_tensors(expected: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those a slot is to have, by name and shape: missing, extra or misshapen ones."""
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


def _check_texts(batch: Batch, heads: Sequence[HeadSpec]) -> None:
    for head, rows, texts in zip(heads, batch.rows, batch.texts, strict=True):
        num_texts = (2 if head.has_towers else 1) * (rows.stop - rows.start)
        assert texts.stop - texts.start == num_texts, f"rows of slot {rows.slot} are not of its head's reading of pairs"


def _corner(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)
