"""The rooms that import torch or numpy: each is imported when a command first uses one of its names.

Commands name these rooms at their top and still print their `--help` at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import LazyModule

if TYPE_CHECKING:
    from inlay import data, exchange, explore, model, pipeline, reports, training
else:
    data, exchange, explore, model, pipeline, reports, training = (
        LazyModule(f"inlay.{room}")
        for room in ("data", "exchange", "explore", "model", "pipeline", "reports", "training")
    )

__all__ = ["data", "exchange", "explore", "model", "pipeline", "reports", "training"]
