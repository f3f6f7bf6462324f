"""Heads as manifests store them. A version may be damaged or crafted, so every value is checked before a head is made.

Invariant: what `read_head` returns, with labels that `check_labels` lets through, finds an answer in finite outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inlay.errors import StoreDamaged, Unsupported
from inlay.model.backbone.pooling import POOLED
from inlay.model.heads.heads import HEADS, JOINED, TOWERS, WRITTEN, HeadSpec, find_head

_MOST_OUTPUTS, _MOST_WRITTEN = 10_000_000, 10_000


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(fits, value))


# Field of a stored head -> whether a value can be one.
_FITS: dict[str, Callable[[Any], bool]] = {
    "kind": lambda value: type(value) is str and value in HEADS,
    "num_outputs": lambda value: _is_count(value, _MOST_OUTPUTS),
    "pooling": (*POOLED, "tokens", WRITTEN).__contains__,
    "target_mean": _is_number,
    "target_std": lambda value: _is_number(value) and value > 0,
    "temperature": lambda value: _is_number(value) and 1e-4 <= value <= 1e4,  # a fitted one is from 0.01 to 100
    "null_threshold": lambda value: value is None or _is_number(value),
    "thresholds": lambda value: value is None or _is_list(value, _is_number),
    "hidden": ("none", "tanh", "pooler").__contains__,
    "features": ("last", "mix").__contains__,
    "texts": lambda value: _is_list(value, lambda text: type(text) is str),
    "beams": lambda value: _is_count(value, _MOST_WRITTEN) and value > 0,
    "max_answer": lambda value: _is_count(value, _MOST_WRITTEN) and value > 0,
    "prompt": lambda value: type(value) is str,
    "pairs": (JOINED, TOWERS).__contains__,
}


def read_head(fields: Mapping[str, Any]) -> HeadSpec:
    """Return the head that a manifest describes; refuse values that no head can have."""
    for name, value in fields.items():
        if name in _FITS and not _FITS[name](value):
            raise StoreDamaged(f"the version's head has the {name} `{str(value)[:80]}`, which it cannot be")
    try:
        head = HeadSpec(**fields)
    except TypeError as error:
        raise Unsupported(
            f"the version has a setting this Inlay does not know: {error}", "it was made by a newer Inlay: upgrade"
        ) from None
    if problem := _find_contradiction(head):
        raise StoreDamaged(f"the version's head contradicts itself: {problem}")
    return head


def check_labels(head: HeadSpec, labels: Sequence[str]) -> None:
    """Refuse labels that a head's outputs cannot stand for."""
    entry = find_head(head.kind)
    has_labels = entry.num_outputs(1) != entry.num_outputs(2)
    wanted = head.num_outputs if head.is_written else head.num_outputs + 1 - entry.num_outputs(1)
    if len(labels) != (wanted if has_labels else 0):
        raise StoreDamaged(
            f"the version has {len(labels)} labels, but its head (`{head.kind}`) {head.num_outputs} outputs"
        )


def _find_contradiction(head: HeadSpec) -> str:
    """Return in what two fields of a head contradict each other; "" if none do."""
    reads, cuts = HEADS[head.kind].reads, head.thresholds
    own = {"nothing": (WRITTEN,), "tokens": ("tokens",), "pooled": (*POOLED, WRITTEN)}[reads]
    if head.pooling not in own:
        return f"pooling `{head.pooling}` for the kind `{head.kind}`"
    if len(head.texts) != (head.num_outputs if head.is_written else 0) or (head.is_free_text and head.texts):
        return f"{len(head.texts)} texts for {head.num_outputs} outputs"
    if head.has_towers and (reads != "pooled" or head.is_written):
        return f"towers for the kind `{head.kind}` with pooling `{head.pooling}`"
    if head.texts and HEADS[head.kind].is_scaled and not all(map(_is_written_number, head.texts)):
        return "texts that are no numbers"
    if cuts is not None and len(cuts) != HEADS[head.kind].count_cuts(head.num_outputs):
        return f"{len(cuts)} thresholds for {head.num_outputs} outputs"
    return "" if head.num_outputs or reads == "nothing" else "it has no outputs"


def _is_written_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
