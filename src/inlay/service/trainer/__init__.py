"""The service's trainer: claims cohorts of jobs, trains them in one bank, judges and proves what came of it, goes live.

Names are imported when they are first used: what a job may set needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.service.trainer.job_settings import BATCH_SETTINGS, TRAIN_SETTINGS, check_settings
    from inlay.service.trainer.suggestions import RowToLabel, suggest_rows
    from inlay.service.trainer.trainer import Trainer, serve

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.service.trainer.job_settings": ("BATCH_SETTINGS", "TRAIN_SETTINGS", "check_settings"),
        "inlay.service.trainer.suggestions": ("RowToLabel", "suggest_rows"),
        "inlay.service.trainer.trainer": ("Trainer", "serve"),
    },
)

__all__ = [
    "BATCH_SETTINGS",
    "TRAIN_SETTINGS",
    "RowToLabel",
    "Trainer",
    "check_settings",
    "serve",
    "suggest_rows",
]
