"""Hypernetworks: the embeddings of tasks go in, their adapters at every site come out (Mahabadi et al. 2021).

A head is a linear map from an embedding to one tensor of an adapter: `down`, `down_bias`, `up`, `up_bias`, and the
scale and shift of the norm behind them. HyperFormer has heads of its own for every site, and one embedding of the task
for all of them; HyperFormer++ has one set of heads for each stack of blocks, and an embedding of task, layer and place
together. What comes out has the names and shapes of ordinary adapters, so that whatever reads those reads these.

All sites' and all tasks' tensors of a kind come from one product, also those of several networks. Layers are never
looped over.

Shape letters: G networks, A tasks of each, Z embedding of a task, E what the heads read, J sites, V values of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EMBEDDED = 64
"""What the heads read, and how layers and places are embedded."""
LINEAR_STD = 1e-2
"""how linear layers begin, as published"""
SMALL_STD = 1e-3
"""how heads begin whose 0.08 (0.01·√64) a backbone's states would drown in"""
_NORM_EPS = 1e-5
_PLACES = ("attention", "feedforward")
_NORM_PARTS = ("out_scale", "out_shift")


@dataclass(frozen=True)
class HyperTensor:
    """One tensor of a hypernetwork: shared by all tasks, except the embedding of each."""

    name: str
    shape: tuple[int, ...]
    start: str
    std: float = 0.0


@dataclass(frozen=True)
class Group:
    """Sites whose adapters are written together: those of one stack of blocks, in forward order."""

    name: str
    keys: tuple[str, ...]
    """of the sites"""
    layers: tuple[int, ...]
    """the layer of each site within its stack"""
    num_layers: int
    places: tuple[str, ...]
    """the place of each site"""


@dataclass(frozen=True)
class Hypernet:
    """What a hypernetwork is, besides its weights."""

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
    """how the heads that write norms begin"""

    @property
    def parts(self) -> dict[str, tuple[int, ...]]:
        """What is written for every site: name -> shape."""
        blocks: dict[str, tuple[int, ...]] = {
            "down": (self.width, self.size),
            "down_bias": (self.size,),
            "up": (self.size, self.width),
            "up_bias": (self.width,),
        }
        norms: dict[str, tuple[int, ...]] = dict.fromkeys(_NORM_PARTS, (self.width,))
        return {"both": blocks | norms, "blocks": blocks, "norms": norms}[self.writes]

    @property
    def read_size(self) -> int:
        """The width of what the heads read."""
        return EMBEDDED if self.projector else self._input_size

    @property
    def _input_size(self) -> int:
        return self.task_size + 2 * EMBEDDED * self.is_shared

    def task_tensors(self) -> Iterator[HyperTensor]:
        """What each task has of its own."""
        yield HyperTensor("task.embedding", (self.task_size,), "gaussian", 1.0)

    def tensors(self) -> Iterator[HyperTensor]:
        """What all tasks share, in a fixed order."""
        if not self.is_shared:
            yield from self._projector("hyper")
        for group in self.groups:
            name = f"hyper.{group.name}"
            if self.is_shared:
                yield HyperTensor(f"{name}.layers", (group.num_layers, EMBEDDED), "gaussian", 1.0)
                yield HyperTensor(f"{name}.places", (len(_PLACES), EMBEDDED), "gaussian", 1.0)
                yield from self._projector(name)
                yield HyperTensor(f"{name}.norm.scale", (self.read_size,), "ones")
                yield HyperTensor(f"{name}.norm.shift", (self.read_size,), "zeros")
            sites = () if self.is_shared else (len(group.keys),)
            for part, shape in self.parts.items():
                num_values = math.prod(shape)
                weight = (*sites, self.read_size, num_values)
                std = self.norm_std if part in _NORM_PARTS else LINEAR_STD
                yield HyperTensor(f"{name}.{part}.weight", weight, "gaussian", std)
                yield HyperTensor(f"{name}.{part}.bias", (*sites, num_values), "zeros")

    def _projector(self, name: str) -> Iterator[HyperTensor]:
        widths = (self._input_size, self.projector, EMBEDDED)
        for index, layer in enumerate(("in", "out") if self.projector else ()):
            yield HyperTensor(f"{name}.{layer}.weight", widths[index : index + 2], "gaussian", LINEAR_STD)
            yield HyperTensor(f"{name}.{layer}.bias", widths[index + 1 : index + 2], "zeros")


def write_adapters(net: Hypernet, shared: Mapping[str, Tensor], tasks_GAZ: Tensor) -> dict[str, Tensor]:
    """The adapters of every site for these tasks of each network, by their names: [G·A, …].

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
            sites = values_GJAV.transpose(0, 1).flatten(1, 2).unflatten(-1, shape).unbind(0)
            written |= {f"adapter.{key}.{part}": site for key, site in zip(group.keys, sites, strict=True)}
    return written


def _embed_sites(net: Hypernet, group: Group, shared: Mapping[str, Tensor], tasks_GAZ: Tensor) -> Tensor:
    """What HyperFormer++'s heads read [G, J, A, E]: task, layer and place together, normalised."""
    name, device = f"hyper.{group.name}", tasks_GAZ.device
    layers_GJE = shared[f"{name}.layers"][:, numbers_on(device, group.layers)]
    places = tuple(_PLACES.index(place) for place in group.places)
    places_GJE = shared[f"{name}.places"][:, numbers_on(device, places)]
    sizes = (len(tasks_GAZ), len(group.keys), tasks_GAZ.shape[1], -1)
    parts = (tasks_GAZ.unsqueeze(1), layers_GJE.unsqueeze(2), places_GJE.unsqueeze(2))
    joined = torch.cat([part.expand(sizes) for part in parts], -1)
    read = _project(net, name, shared, joined.flatten(1, 2))
    read = F.layer_norm(read, read.shape[-1:], eps=_NORM_EPS)
    read = read * shared[f"{name}.norm.scale"].unsqueeze(1) + shared[f"{name}.norm.shift"].unsqueeze(1)
    return read.unflatten(1, sizes[1:3])


@functools.lru_cache(4096)
def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Indices of rows. They lie on the device from the first time on: a copy would wait for it at every one."""
    with torch.inference_mode(False):  # a gradient may be taken through what reads them
        return torch.tensor(numbers, device=device)


def _project(net: Hypernet, name: str, shared: Mapping[str, Tensor], x_GNE: Tensor) -> Tensor:
    if not net.projector:
        return x_GNE
    weights = [shared[f"{name}.{layer}.{kind}"] for layer in ("in", "out") for kind in ("weight", "bias")]
    hidden = F.relu(torch.baddbmm(weights[1].unsqueeze(1), x_GNE, weights[0]))
    return torch.baddbmm(weights[3].unsqueeze(1), hidden, weights[2])


def _read_heads(read: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A head's values at all sites [G, J, A, V]: one head for all, [G, E, V], or one for each, [G, J, E, V]."""
    if weight.dim() == 3:
        return torch.baddbmm(bias.unsqueeze(1), read.flatten(1, 2), weight).unflatten(1, read.shape[1:3])
    read = read.expand(-1, weight.shape[1], -1, -1)
    values = torch.baddbmm(bias.flatten(0, 1).unsqueeze(1), read.flatten(0, 1), weight.flatten(0, 1))
    return values.unflatten(0, weight.shape[:2])
