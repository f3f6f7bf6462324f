"""The packages of Inlay that import torch or numpy, imported lazily: when a command first uses one of their names.

So commands can import them from here at the top of the file and still print their `--help` at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import LazyModule

if TYPE_CHECKING:
    from inlay import data, exchange, explore, model, pipeline, reports, training
else:
    data, exchange, explore, model, pipeline, reports, training = (
        LazyModule(f"inlay.{name}")
        for name in ("data", "exchange", "explore", "model", "pipeline", "reports", "training")
    )

__all__ = ["data", "exchange", "explore", "model", "pipeline", "reports", "training"]
