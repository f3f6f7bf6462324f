"""A method with every setting known: made once by `resolve_method`, and what everything below takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from inlay.settings import MethodConfig


@dataclass(frozen=True)
class ResolvedMethod:
    """A method with every setting filled in: those of a `MethodConfig`, and the method's defaults for the rest."""

    name: str
    size: int | None
    """None where the method has no bottleneck and no rank"""
    init_std: float
    activation: str
    norms: str
    places: tuple[str, ...]
    layers: str
    sharing: str
    depth: int
    inner_norm: str
    form: str
    """`auto` where the method has no bottleneck"""
    combine: str
    scale: float | None
    alpha: float | None
    linears: tuple[str, ...]
    task_size: int | None
    projector: int | None
    writes: str

    @classmethod
    def spelt_by(cls, config: MethodConfig) -> ResolvedMethod:
        """The method of a config that leaves nothing open."""
        return cls(**{item.name: getattr(config, item.name) for item in dataclasses.fields(cls)})

    def as_config(self) -> MethodConfig:
        """The config with every setting spelt out, for a run's identity and for display."""
        return MethodConfig(**{item.name: getattr(self, item.name) for item in dataclasses.fields(self)})
