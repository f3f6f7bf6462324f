"""The service's trainer: it claims cohorts of jobs, trains each in one bank, judges and proves the versions, goes live.

Names are imported when they are first used: the allowed settings of jobs need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.service.trainer.job_settings import BATCH_SETTINGS, TRAIN_SETTINGS, check_settings
    from inlay.service.trainer.trainer import Trainer, serve

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.service.trainer.job_settings": ("BATCH_SETTINGS", "TRAIN_SETTINGS", "check_settings"),
        "inlay.service.trainer.trainer": ("Trainer", "serve"),
    },
)

__all__ = [
    "BATCH_SETTINGS",
    "TRAIN_SETTINGS",
    "Trainer",
    "check_settings",
    "serve",
]
