"""The sites of a backbone, where a task may write: found in a model (real or on the meta device) by its family's entry.

`wrappers.py` sets thin wrappers there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from inlay.model.backbone.families import Family, Stack, find_family

ATTENTION_LINEARS = ("query", "key", "value", "project")
"""the linear layers of a block's attention"""


@dataclass(frozen=True)
class Site:
    """A submodule whose output a task may rewrite."""

    layer: int
    place: str
    path: str
    """dotted, as `model.get_submodule` takes it"""
    is_norm: bool = False
    """the adapter stands at a layer norm and reads its output (Pfeiffer's place)"""

    @property
    def key(self) -> str:
        """The site's name in stored tensors: free of transformers' module names."""
        return f"{self.layer}.{self.place}"


@dataclass(frozen=True)
class NormSite:
    """A token-wise layer norm."""

    key: str
    """stable name: "embeddings", "3.attention", …"""
    path: str
    layer: int
    """the layer of its block; -1 before the first, the number of layers after the last"""
    width: int
    has_shift: bool

    @property
    def name(self) -> str:
        """The norm's name within its block, or among the outer norms."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class LinearSite:
    """A linear layer of a block, or the outputs `start` to `stop` of one that computes several."""

    layer: int
    name: str
    path: str
    in_width: int
    start: int
    stop: int
    has_bias: bool

    @property
    def key(self) -> str:
        """The site's name in stored tensors."""
        return f"{self.layer}.{self.name}"

    @property
    def out_width(self) -> int:
        return self.stop - self.start

    @property
    def reads(self) -> str | None:
        """The place of the sublayer whose input this layer reads; None for all but one layer of each sublayer."""
        return {"value": "attention", "expand": "feedforward"}.get(self.name)


@dataclass(frozen=True)
class ParameterSite:
    """A parameter of the backbone itself, which full and top-k fine-tuning train a copy of."""

    name: str
    """as transformers has it"""
    shape: tuple[int, ...]
    layer: int
    """the layer of its block; -1 before the first, the number of layers after the last"""
    is_pooler: bool


@dataclass(frozen=True)
class Anatomy:
    """The facts that the methods need about a backbone: its sites and its width."""

    family: str
    blocks: tuple[str, ...]
    """the path of every block, the encoder's, then the decoder's"""
    num_readers: int
    """blocks that read the text; those from here on are a decoder's"""
    hidden_size: int
    sites: tuple[Site, ...]
    norms: tuple[NormSite, ...]
    linears: tuple[LinearSite, ...]
    parameters: tuple[ParameterSite, ...]
    frozen_norms: Mapping[str, str]
    shared_linears: Mapping[str, str]
    num_heads: int

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def has_decoder(self) -> bool:
        return self.num_readers < self.num_layers


def survey(model: nn.Module) -> Anatomy:
    """Return every site and token-wise norm of an unmounted backbone, in forward order."""
    config: Any = model.config
    family = find_family(config.model_type)
    blocks: Blocks = [
        (f"{stack.stack}.{index}", stack)
        for stack in family.stacks
        for index in range(len(model.get_submodule(stack.stack)))  # type: ignore[arg-type]
    ]
    norm_paths = {f"{path}.{norm}" for path, stack in blocks for norm in stack.norms.values()}
    sites = []
    for layer, (block, stack) in enumerate(blocks):
        for place, path in stack.places.items():
            full = f"{block}.{path}".rstrip(".")
            model.get_submodule(full)  # fail here, not in the first forward pass, if transformers renamed it
            sites.append(Site(layer, place, full, is_norm=full in norm_paths))
    found: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        # torch's layer norms, those of transformers that only scale, and apex's
        if isinstance(module, nn.LayerNorm) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    }
    norms = tuple(
        NormSite(key, path, layer, len(found[path].weight), getattr(found[path], "bias", None) is not None)
        for key, path, layer in _norm_paths(family, blocks)
        if path in found  # ModernBERT's first block has none; DeBERTa's convolution is optional
    )
    frozen = {path: why for path, why in family.frozen_norms.items() if path in found}
    unknown = set(found) - {norm.path for norm in norms} - set(frozen)
    assert not unknown, f"layer norms that the family table does not name: {sorted(unknown)}"
    return Anatomy(
        config.model_type,
        tuple(path for path, _ in blocks),
        sum(stack is family for _, stack in blocks),
        config.hidden_size,
        tuple(sites),
        norms,
        tuple(_find_linears(model, blocks)),
        tuple(_find_parameters(model, family, blocks)),
        frozen,
        family.shared_linears,
        config.num_attention_heads,
    )


Blocks = list[tuple[str, Stack]]
"""The path of every block and the stack it is of."""


# Outer norms that do not stand before the first block: DeBERTa's convolution joins in after block 0.
_OUTER_LAYERS = {"convolution": lambda num_layers: 0, "final": lambda num_layers: num_layers}


def _norm_paths(family: Family, blocks: Blocks) -> Iterator[tuple[str, str, int]]:
    for name, path in family.outer_norms.items():
        yield name, path, _OUTER_LAYERS.get(name, lambda num_layers: -1)(len(blocks))
    for layer, (block, stack) in enumerate(blocks):
        for name, path in stack.norms.items():
            yield f"{layer}.{name}", f"{block}.{path}", layer
        is_last = layer + 1 == len(blocks) or blocks[layer + 1][1] is not stack
        if stack.closing and is_last:
            yield f"{layer}.final", stack.closing, layer


def _find_linears(model: nn.Module, blocks: Blocks) -> Iterator[LinearSite]:
    names = {name for name, _ in model.named_modules()}
    for layer, (block, stack) in enumerate(blocks):
        for name, where in stack.linears.items():
            paths, _, part = where.partition(":")
            # The path that the model has; the last choice if it has none of them, so that it fails by name.
            choices = paths.split("|")
            choice = next((choice for choice in choices if f"{block}.{choice}" in names), choices[-1])
            if not choice:
                continue
            path = f"{block}.{choice}"
            module: Any = model.get_submodule(path)
            index, count = map(int, part.split("/")) if part else (0, 1)
            width = module.out_features // count
            has_bias = module.bias is not None
            yield LinearSite(layer, name, path, module.in_features, index * width, (index + 1) * width, has_bias)


def _find_parameters(model: nn.Module, family: Family, blocks: Blocks) -> Iterator[ParameterSite]:
    above = tuple(f"{path}." for path in (family.outer_norms.get("final"), family.pooler, "lm_head") if path)
    ranges = {f"{block}.": layer for layer, (block, _) in enumerate(blocks)}
    ranges |= {f"{path}.": layer for key, path, layer in _norm_paths(family, blocks) if key.endswith(".final")}
    for name, parameter in model.named_parameters():
        is_pooler = family.pooler is not None and name.startswith(f"{family.pooler}.")
        layer = next((layer for prefix, layer in ranges.items() if name.startswith(prefix)), -1)
        if name.startswith(above):
            layer = len(blocks)
        yield ParameterSite(name, tuple(parameter.shape), layer, is_pooler)
