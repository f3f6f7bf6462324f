"""The cluster room: runs trained on the machines of a Ray cluster. Nothing else of Inlay touches Ray."""

from __future__ import annotations

from inlay.cluster.on_ray import RaySettings, fit_on_ray

__all__ = ["RaySettings", "fit_on_ray"]
