"""Rows in, tasks out: sources, columns, splits, encoding, batches and metrics.

Nothing here imports torch or transformers: tokenizers come in as objects, and what goes out is numpy. The names below
make and read tasks; `inlay.data.encode` (tokens and batches) and `inlay.data.metrics` (scores and reports) are used by
their own names.
"""

from __future__ import annotations

from inlay.data.sources import InputRow, stream_rows
from inlay.data.tasks import Split, Task, load_task, make_task, read_split

__all__ = ["InputRow", "Split", "Task", "load_task", "make_task", "read_split", "stream_rows"]
