"""The parts: the kinds of task parameters, with all that is known of each (see `part.py`)."""

from __future__ import annotations

from inlay.model.parts.bottleneck import BOTTLENECK
from inlay.model.parts.head import HEAD
from inlay.model.parts.hypernet import HYPERNET
from inlay.model.parts.linears import BIASES, DORA, FACTORS, LORA
from inlay.model.parts.norms import NORMS
from inlay.model.parts.own_weights import OWN_WEIGHTS
from inlay.model.parts.pal import PALS
from inlay.model.parts.part import Part

PARTS: tuple[Part, ...] = (BOTTLENECK, PALS, LORA, DORA, BIASES, FACTORS, NORMS, OWN_WEIGHTS, HYPERNET, HEAD)
"""The parts in the order in which they act at one place."""


def find_part(name: str) -> Part:
    """Return the part that a tensor belongs to, by its name."""
    return next(part for part in PARTS if part.owns(name))
