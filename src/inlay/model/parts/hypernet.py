"""Hypernetworks: the embeddings of tasks go in, their adapters at every site come out (Mahabadi et al. 2021).

A head is a linear map from an embedding to one tensor of an adapter: `down`, `down_bias`, `up`, `up_bias`, and the
scale and shift of the norm behind them. HyperFormer has heads of its own for every site, and one embedding of the task
for all of them; HyperFormer++ has one set of heads for each stack of blocks, and an embedding of task, layer and place
together. What comes out has the names and shapes of ordinary adapters, so that whatever reads those reads these.

An `Expander` makes the stacks of a training bank whose runs own several slots what those slots read: a hypernetwork
writes the adapters of the slots it is asked for, norms that tasks share are repeated for every slot. Gradients flow
back through it, so that what is shared gets the sum over its slots.

All sites' and all tasks' tensors of a kind come from one product, also those of several networks. Layers are never
looped over.

Shape letters: S slots, G networks (runs), A tasks of each (slots asked for), Z embedding of a task, E what the heads
read, J sites, V values of a head.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.model.backbone.sites import Anatomy, Site
from inlay.model.parts.bottleneck import BLOCK, BOTTLENECK, OUT_NORM, adapter_groups
from inlay.model.parts.head import HEAD
from inlay.model.parts.own_weights import OWN_WEIGHTS
from inlay.model.parts.part import Part, ResolvedMethod, TensorSpec

EMBEDDED = 64
"""The width of the heads' input, and of the embeddings of layers and places."""
LINEAR_STD = 1e-2
"""initial std of linear layers, as published"""
SMALL_STD = 1e-3
"""initial std of the heads on encoders: with LINEAR_STD their output (0.01·√64 = 0.08) would swamp the hidden states"""
_NORM_EPS = 1e-5
_PLACES = ("attention", "feedforward")
_EMBEDDING = "task.embedding"


@dataclass(frozen=True)
class Group:
    """Sites whose adapters are written together: those of one stack of blocks, in forward order."""

    name: str
    sites: tuple[Site, ...]
    layers: range
    """the layers of that stack"""


@dataclass(frozen=True)
class Hypernet:
    """The form of a hypernetwork: everything but its weights."""

    groups: tuple[Group, ...]
    width: int
    size: int
    task_size: int
    projector: int
    """hidden width of the projector; 0: the embedding goes straight into the heads"""
    is_shared: bool
    """HyperFormer++: sites share their group's heads"""
    writes: str = "both"
    """blocks, norms, or both"""
    norm_std: float = LINEAR_STD
    """initial std of the heads that write norms"""

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """The tensors that are generated for every site: name -> shape."""
        shapes = ((self.width, self.size), (self.size,), (self.size, self.width), (self.width,))
        blocks: dict[str, tuple[int, ...]] = dict(zip(BLOCK, shapes, strict=True))
        norms: dict[str, tuple[int, ...]] = dict.fromkeys(OUT_NORM, (self.width,))
        return {"both": blocks | norms, "blocks": blocks, "norms": norms}[self.writes]

    @property
    def input_size(self) -> int:
        """The width of the embedding, with those of layer and place in HyperFormer++."""
        return self.task_size + 2 * EMBEDDED * self.is_shared

    def tensors(self) -> Iterator[TensorSpec]:
        """Yield the tensors that all tasks share, in a fixed order."""
        read_size = EMBEDDED if self.projector else self.input_size
        if not self.is_shared:
            yield from self._projector("hyper")
        for group in self.groups:
            name = f"hyper.{group.name}"
            if self.is_shared:
                yield TensorSpec(f"{name}.layers", (len(group.layers), EMBEDDED), "gaussian", 1.0)
                yield TensorSpec(f"{name}.places", (len(_PLACES), EMBEDDED), "gaussian", 1.0)
                yield from self._projector(name)
                yield TensorSpec(f"{name}.norm.scale", (read_size,), "ones")
                yield TensorSpec(f"{name}.norm.shift", (read_size,), "zeros")
            sites = () if self.is_shared else (len(group.sites),)
            for part, shape in self.parts.items():
                num_values = math.prod(shape)
                weight = (*sites, read_size, num_values)
                std = self.norm_std if part in OUT_NORM else LINEAR_STD
                yield TensorSpec(f"{name}.{part}.weight", weight, "gaussian", std)
                yield TensorSpec(f"{name}.{part}.bias", (*sites, num_values), "zeros")

    def _projector(self, name: str) -> Iterator[TensorSpec]:
        widths = (self.input_size, self.projector, EMBEDDED)
        for index, layer in enumerate(("in", "out") if self.projector else ()):
            yield TensorSpec(f"{name}.{layer}.weight", widths[index : index + 2], "gaussian", LINEAR_STD)
            yield TensorSpec(f"{name}.{layer}.bias", widths[index + 1 : index + 2], "zeros")


def write_adapters(net: Hypernet, shared: Mapping[str, Tensor], tasks_GAZ: Tensor) -> dict[str, Tensor]:
    """Return the adapters of every site for these tasks of each network, by their names: [G·A, …].

    `shared` has the tensors of `net`, of all networks [G, …].
    """
    written: dict[str, Tensor] = {}
    # HyperFormer's heads read the task alone, the same everywhere: [G, 1, A, E].
    of_task = None if net.is_shared else _project(net, "hyper", shared, tasks_GAZ).unsqueeze(1)
    for group in net.groups:
        read = _embed_sites(net, group, shared, tasks_GAZ) if of_task is None else of_task
        for part, shape in net.parts.items():
            name = f"hyper.{group.name}.{part}"
            values_GJAV = _read_heads(read, shared[f"{name}.weight"], shared[f"{name}.bias"])
            # Site by site: one copy here, where there are several networks, instead of one at each site.
            by_site = values_GJAV.transpose(0, 1).flatten(1, 2).unflatten(-1, shape).unbind(0)
            written |= {BOTTLENECK.name(site.key, part): own for site, own in zip(group.sites, by_site, strict=True)}
    return written


def _embed_sites(net: Hypernet, group: Group, shared: Mapping[str, Tensor], tasks_GAZ: Tensor) -> Tensor:
    """Return the input of HyperFormer++'s heads [G, J, A, E]: task, layer and place together, normalised."""
    name, device = f"hyper.{group.name}", tasks_GAZ.device
    layers = tuple(site.layer - group.layers[0] for site in group.sites)
    layers_GJE = shared[f"{name}.layers"][:, numbers_on(device, layers)]
    places = tuple(_PLACES.index(site.place) for site in group.sites)
    places_GJE = shared[f"{name}.places"][:, numbers_on(device, places)]
    sizes = (len(tasks_GAZ), len(group.sites), tasks_GAZ.shape[1], -1)
    parts = (tasks_GAZ.unsqueeze(1), layers_GJE.unsqueeze(2), places_GJE.unsqueeze(2))
    joined = torch.cat([part.expand(sizes) for part in parts], -1)
    read = _project(net, name, shared, joined.flatten(1, 2))
    read = F.layer_norm(read, read.shape[-1:], eps=_NORM_EPS)
    read = read * shared[f"{name}.norm.scale"].unsqueeze(1) + shared[f"{name}.norm.shift"].unsqueeze(1)
    return read.unflatten(1, sizes[1:3])


@functools.lru_cache(4096)
def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Return row indices as a tensor on the device, copied there only once: every copy would wait for the device."""
    with torch.inference_mode(False):  # a gradient may be taken through what reads them
        return torch.tensor(numbers, device=device)


def _project(net: Hypernet, name: str, shared: Mapping[str, Tensor], x_GNE: Tensor) -> Tensor:
    if not net.projector:
        return x_GNE
    weights = [shared[f"{name}.{layer}.{kind}"] for layer in ("in", "out") for kind in ("weight", "bias")]
    hidden = F.relu(torch.baddbmm(weights[1].unsqueeze(1), x_GNE, weights[0]))
    return torch.baddbmm(weights[3].unsqueeze(1), hidden, weights[2])


def _read_heads(read: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a head's values at all sites [G, J, A, V]: one head for all, [G, E, V], or one for each, [G, J, E, V]."""
    if weight.dim() == 3:
        return torch.baddbmm(bias.unsqueeze(1), read.flatten(1, 2), weight).unflatten(1, read.shape[1:3])
    read = read.expand(-1, weight.shape[1], -1, -1)
    values = torch.baddbmm(bias.flatten(0, 1).unsqueeze(1), read.flatten(0, 1), weight.flatten(0, 1))
    return values.unflatten(0, weight.shape[:2])


@dataclass(frozen=True)
class HypernetPart(Part):
    """A hypernetwork that tasks share, and the embedding that each has of its own."""

    shares_heads: bool = False
    """HyperFormer++: its heads are the same for all layers and places"""

    prefix = "hyper."

    def owns(self, name: str) -> bool:
        return name.startswith((self.prefix, "task."))

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        net = self.network(anatomy, method)
        yield TensorSpec(_EMBEDDING, (net.task_size,), "gaussian", 1.0)
        yield from net.tensors()
        if method.writes == "blocks":  # the norms after them are trained as they are
            for site in (site for group in net.groups for site in group.sites):
                yield from BOTTLENECK.norm_behind(anatomy, site.key)

    def network(self, anatomy: Anatomy, method: ResolvedMethod) -> Hypernet:
        """Return the hypernetwork of this method on a backbone."""
        assert method.size is not None
        assert method.task_size is not None
        assert method.projector is not None
        adapted = adapter_groups(anatomy, method)
        sites = [site for site in anatomy.sites if site.key in adapted]
        stacks = {"encoder": range(anatomy.num_readers), "decoder": range(anatomy.num_readers, anatomy.num_layers)}
        groups = [
            Group(name, tuple(site for site in sites if site.layer in layers), layers)
            for name, layers in stacks.items()
        ]
        # The input of HyperFormer++'s heads has size one, their output 0.08: on T5, as published, a small part of its
        # states. An encoder's states would change by their own size, layer by layer.
        is_small = self.shares_heads and not anatomy.has_decoder
        return Hypernet(
            tuple(group for group in groups if group.sites),
            anatomy.hidden_size,
            method.size,
            method.task_size,
            method.projector,
            self.shares_heads,
            method.writes,
            SMALL_STD if is_small else LINEAR_STD,
        )


HYPERNET = HypernetPart()


@dataclass(frozen=True, eq=False)
class Expander:
    """Expands parameters shared by a run's tasks into ordinary per-slot stacks."""

    net: Hypernet | None
    """the hypernetwork that generates their adapters, if there is one"""
    shared: tuple[str, ...]
    """patterns of the tensors that the slots of a run share"""
    slots_per_run: int

    def expand(self, stacks: Mapping[str, Tensor], slots: Sequence[int]) -> dict[str, Tensor]:
        """Return ordinary stacks [A, …] of these slots, given in order; `stacks` are the bank's, by slot or by run."""
        runs = tuple(slot // self.slots_per_run for slot in slots)
        outside = (HYPERNET, HEAD, OWN_WEIGHTS)  # written from, or read by others, slot by slot
        expanded = {
            name: _repeat(stack, runs) if any(fnmatch(name, each) for each in self.shared) else stack
            for name, stack in stacks.items()
            if not any(part.owns(name) for part in outside)
        }
        return expanded if self.net is None else expanded | self._write(self.net, stacks, slots)

    def _write(self, net: Hypernet, stacks: Mapping[str, Tensor], slots: Sequence[int]) -> dict[str, Tensor]:
        """Return the adapters of these slots: a few products for neighbouring runs that ask for equally many."""
        stack = stacks[_EMBEDDING]
        # As kernels do: indexing row by row would make backward add tensors of the whole stack's size.
        embeddings = (stack.view(stack.shape[1:]),) if len(stack) == 1 else stack.unbind(0)
        by_run = [(run, list(own)) for run, own in itertools.groupby(slots, lambda slot: slot // self.slots_per_run)]
        pieces = []
        for _, alike in itertools.groupby(enumerate(by_run), lambda item: (item[1][0] - item[0], len(item[1][1]))):
            runs, own = zip(*(found for _, found in alike), strict=True)
            tasks_GAZ = torch.stack([embeddings[slot] for each in own for slot in each]).unflatten(0, (len(runs), -1))
            # A slice of everything would make backward lay every gradient into zeros of its size.
            shared = {
                name: stack if len(runs) == len(stack) else stack[runs[0] : runs[-1] + 1]
                for name, stack in stacks.items()
                if name.startswith(HYPERNET.prefix)
            }
            pieces.append(write_adapters(net, shared, tasks_GAZ))
        if len(pieces) == 1:
            return pieces[0]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _repeat(stack_G: Tensor, runs: tuple[int, ...]) -> Tensor:
    """Repeat a tensor that a run shares for each of its slots."""
    if len(stack_G) == 1:
        return stack_G.expand(len(runs), *stack_G.shape[1:])
    if runs == tuple(range(len(stack_G))):
        return stack_G
    often = len(runs) // len(stack_G)
    if runs == tuple(run for run in range(len(stack_G)) for _ in range(often)):
        # Expand to all slots: the gradient of an expanded tensor is summed in a fixed order, unlike an indexed one's.
        return stack_G.unsqueeze(1).expand(-1, often, *stack_G.shape[1:]).flatten(0, 1)
    return stack_G[numbers_on(stack_G.device, runs)]
