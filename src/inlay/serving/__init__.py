"""The serving room: published versions that answer requests, and the proof that they still stand.

Names are imported when they are first used: requests, answers and the pool need no torch, the rest does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.serving.answers import (
        Answer,
        AnswerLike,
        Request,
        Resolved,
        answer_cell,
        answer_words,
        as_error,
        check_confidence,
        describe_answer,
    )
    from inlay.serving.encoded_requests import CheckedRequest, EncodedRequest
    from inlay.serving.engine import Engine, isolate
    from inlay.serving.hot_versions import HotVersion, HotVersions, check_backbone, find_reading, read_slot
    from inlay.serving.pool import EnginePool
    from inlay.serving.precision import Drift, is_changed
    from inlay.serving.verification import Check, ProbeRow, check_through_engine, check_whole, verify

__getattr__ = import_lazily(
    __name__,
    {
        "inlay.serving.answers": (
            "Answer",
            "AnswerLike",
            "Request",
            "Resolved",
            "answer_cell",
            "answer_words",
            "as_error",
            "check_confidence",
            "describe_answer",
        ),
        "inlay.serving.encoded_requests": ("CheckedRequest", "EncodedRequest"),
        "inlay.serving.engine": ("Engine", "isolate"),
        "inlay.serving.hot_versions": ("HotVersion", "HotVersions", "check_backbone", "find_reading", "read_slot"),
        "inlay.serving.pool": ("EnginePool",),
        "inlay.serving.precision": ("Drift", "is_changed"),
        "inlay.serving.verification": ("Check", "ProbeRow", "check_through_engine", "check_whole", "verify"),
    },
)

__all__ = [
    "Answer",
    "AnswerLike",
    "Check",
    "CheckedRequest",
    "Drift",
    "EncodedRequest",
    "Engine",
    "EnginePool",
    "HotVersion",
    "HotVersions",
    "ProbeRow",
    "Request",
    "Resolved",
    "answer_cell",
    "answer_words",
    "as_error",
    "check_backbone",
    "check_confidence",
    "check_through_engine",
    "check_whole",
    "describe_answer",
    "find_reading",
    "is_changed",
    "isolate",
    "read_slot",
    "verify",
]
