"""What the slots of runs that own several read: ordinary stacks, a row per slot, computed from what a run shares.

A hypernetwork writes the adapters of the slots it is asked for; norms that tasks share are repeated for every slot.
Gradients flow back through it, so that what is shared gets the sum over its slots.

Shape letters: S slots, G runs, A the slots asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase as fnmatch
from functools import cached_property

import torch
from torch import Tensor

from inlay.model.backbone.sites import Anatomy
from inlay.model.bank.methods import find_hypernet, find_method
from inlay.model.batch.route import Route, Segment
from inlay.model.parts.hypernet import Hypernet, numbers_on, write_adapters
from inlay.settings.run_config import MethodConfig

_WRITTEN = ("hyper.", "task.")
_OUTSIDE = ("head.", "weight.")  # read by others, slot by slot


@dataclass(frozen=True, eq=False)
class Expander:
    """How the stacks of a training bank become those its slots read."""

    anatomy: Anatomy
    method: MethodConfig
    """resolved"""
    slots_per_run: int

    @property
    def is_generated(self) -> bool:
        """Whether a hypernetwork writes for the slots asked for alone; otherwise all slots are there anyway."""
        return self.method.task_size is not None

    @cached_property
    def _net(self) -> Hypernet:
        return find_hypernet(self.anatomy, self.method)

    def _is_shared(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in find_method(self.method.name).shared)

    def expand(self, stacks: Mapping[str, Tensor], slots: Sequence[int]) -> dict[str, Tensor]:
        """Ordinary stacks [A, …] of these slots, which are in order; `stacks` are the bank's, by slot or by run."""
        runs = tuple(slot // self.slots_per_run for slot in slots)
        expanded = {
            name: _repeat(stack, runs) if self._is_shared(name) else stack
            for name, stack in stacks.items()
            if not name.startswith((*_WRITTEN, *_OUTSIDE))
        }
        if self.is_generated:
            expanded |= self._write(stacks, slots)
        return expanded

    def _write(self, stacks: Mapping[str, Tensor], slots: Sequence[int]) -> dict[str, Tensor]:
        """The adapters of these slots: a few products for neighbouring runs that ask for equally many."""
        embeddings = _rows(stacks["task.embedding"])
        by_run = [(run, list(own)) for run, own in itertools.groupby(slots, lambda slot: slot // self.slots_per_run)]
        pieces = []
        for _, alike in itertools.groupby(enumerate(by_run), lambda item: (item[1][0] - item[0], len(item[1][1]))):
            runs, own = zip(*(found for _, found in alike), strict=True)
            tasks_GAZ = torch.stack([embeddings[slot] for each in own for slot in each]).unflatten(0, (len(runs), -1))
            shared = {
                name: _neighbours(stack, runs[0], runs[-1] + 1)
                for name, stack in stacks.items()
                if name.startswith("hyper.")
            }
            pieces.append(write_adapters(self._net, shared, tasks_GAZ))
        if len(pieces) == 1:
            return pieces[0]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def renumber(route: Route, slots: Sequence[int]) -> Route:
    """The route with slots counted among these."""
    places = {slot: place for place, slot in enumerate(slots)}
    segments = tuple(Segment(places[slot], start, stop) for slot, start, stop in route.segments)
    if segments == route.segments:
        return route
    decoder, wide = (other and renumber(other, slots) for other in (route.decoder, route.wide))
    return replace(route, segments=segments, decoder=decoder, wide=wide)


def _repeat(stack_G: Tensor, runs: tuple[int, ...]) -> Tensor:
    """What each slot has of what its run shares."""
    if len(stack_G) == 1:
        return stack_G.expand(len(runs), *stack_G.shape[1:])
    if runs == tuple(range(len(stack_G))):
        return stack_G
    often = len(runs) // len(stack_G)
    if runs == tuple(run for run in range(len(stack_G)) for _ in range(often)):
        # Of all slots: the gradient of an expanded tensor is a sum in order, that of an indexed one is not.
        return stack_G.unsqueeze(1).expand(-1, often, *stack_G.shape[1:]).flatten(0, 1)
    return stack_G[numbers_on(stack_G.device, runs)]


def _neighbours(stack_G: Tensor, start: int, stop: int) -> Tensor:
    # A slice of everything would make backward lay every gradient into zeros of its size.
    return stack_G if stop - start == len(stack_G) else stack_G[start:stop]


def _rows(stack: Tensor) -> Sequence[Tensor]:
    # As kernels do: indexing row by row would make backward add tensors of the whole stack's size.
    return (stack.view(stack.shape[1:]),) if len(stack) == 1 else stack.unbind(0)
