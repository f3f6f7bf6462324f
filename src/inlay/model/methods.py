"""The methods: which parameters a task adds to a backbone, as one table of entries.

`layout` turns a method and a backbone's anatomy into a list of tensors: what is initialised, counted, trained, stored
and loaded. It needs shapes only, so counts come from models on the meta device too.

Houlsby et al. 2019 put an adapter after both sublayers of every block and train all layer norms; Pfeiffer et al. 2021
put one at the end of each block, reading the normalised sum, `LN(s + f(LN(s)))`, and leave the norms frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from inlay.config import MethodConfig
from inlay.errors import UnknownName
from inlay.model.heads import HeadSpec
from inlay.model.kernels import ACTIVATIONS
from inlay.model.sites import Anatomy, NormSite


@dataclass(frozen=True)
class Method:
    """One row of the table: the places that get a bottleneck, and what the method leaves to `auto`."""

    places: tuple[str, ...]
    activation: str
    norms: str
    summary: str


METHODS: dict[str, Method] = {
    "houlsby": Method(("attention", "feedforward"), "gelu", "all", "two adapters per block, all layer norms"),
    "pfeiffer": Method(("output",), "relu", "none", "one adapter per block, layer norms frozen"),
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a slot."""

    name: str
    shape: tuple[int, ...]
    start: str
    """initial values: "normal" (truncated at two standard deviations), "zeros", or "backbone" (copied from it)"""
    std: float = 0.0
    part: str = "adapters"
    """what `plan` counts it under: adapters, norms or head"""

    @property
    def num_parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices: none on biases and layer norms."""
        return len(self.shape) > 1


def find_method(name: str) -> Method:
    """The table's entry for `name`."""
    if name not in METHODS:
        raise UnknownName("method", name, METHODS)
    return METHODS[name]


def resolve_method(config: MethodConfig) -> MethodConfig:
    """The config with every `auto` replaced by the method's own choice: what is hashed, stored and shown."""
    method = find_method(config.name)
    activation = method.activation if config.activation == "auto" else config.activation
    if activation not in ACTIVATIONS:
        raise UnknownName("activation", activation, ACTIVATIONS)
    norms = method.norms if config.norms == "auto" else config.norms
    return MethodConfig(config.name, config.size, config.init_std, activation, norms)


def layout(anatomy: Anatomy, config: MethodConfig, head: HeadSpec | None = None) -> list[TensorSpec]:
    """Every tensor that a task with this method trains, in a fixed order."""
    config = resolve_method(config)
    specs = [*_adapter_specs(anatomy, config), *_norm_specs(anatomy, config.norms)]
    if head is not None:
        # SEMANTICS: the head starts from a truncated normal of 0.02, as BERT's own classifier.
        specs.append(TensorSpec("head.weight", (head.num_outputs, anatomy.hidden_size), "normal", 0.02, "head"))
        specs.append(TensorSpec("head.bias", (head.num_outputs,), "zeros", part="head"))
    return specs


def trained_norms(anatomy: Anatomy, norms: str) -> list[NormSite]:
    """The layer norms that `norms` (all, encoder, none) trains."""
    return [norm for norm in anatomy.norms if norms == "all" or (norms == "encoder" and norm.is_encoder)]


def _adapter_specs(anatomy: Anatomy, config: MethodConfig) -> Iterator[TensorSpec]:
    width, size = anatomy.hidden_size, config.size
    for site in anatomy.sites:
        if site.place not in find_method(config.name).places:
            continue
        yield TensorSpec(f"adapter.{site.key}.down", (width, size), "normal", config.init_std)
        yield TensorSpec(f"adapter.{site.key}.down_bias", (size,), "zeros")
        yield TensorSpec(f"adapter.{site.key}.up", (size, width), "normal", config.init_std)
        yield TensorSpec(f"adapter.{site.key}.up_bias", (width,), "zeros")


def _norm_specs(anatomy: Anatomy, norms: str) -> Iterator[TensorSpec]:
    for norm in trained_norms(anatomy, norms):
        yield TensorSpec(f"norm.{norm.key}.scale", (norm.width,), "backbone", part="norms")
        if norm.has_shift:
            yield TensorSpec(f"norm.{norm.key}.shift", (norm.width,), "backbone", part="norms")
