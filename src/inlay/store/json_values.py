"""Strict reading of the store's JSON files: finite numbers, and values of the right types.

Anything else is `StoreDamaged`, with the file and the value: the file may be damaged by chance or on purpose.
"""

from __future__ import annotations

import json
import math
from typing import Any

from inlay.errors import StoreDamaged

_MAX_DIGITS = 20  # of a whole number: enough for every counter
MOST_VALUES = 2_000_000
MOST_LEVELS = 50
"""levels of lists and objects in each other; a manifest has about six"""
"""most values of a JSON text: a value of three bytes takes seventy in memory, and is read more than once. So many are
the answers of 8 probes with 512 tokens and 480 tags each"""
_NUMBER, _MAYBE_NUMBER = (int, float), (int, float, type(None))
# The types that commands rely on inside a manifest's objects. A key that ends with `?` may be missing, `*` is any key;
# other keys are allowed. The values of a method and a head are checked further when a slot is built from them.
_NESTED: dict[str, Any] = {
    "backbone": {
        "name": (str,),
        "fingerprint": (str,),
        "num_parameters": (int,),
        "family": (str,),
        "exact_digest?": (str,),
        "precision?": (str,),
    },
    "method": {"name": (str,), "size?": (int, type(None))},
    "head": {"kind?": (str,), "pooling?": (str,), "thresholds?": ([_NUMBER], type(None))},
    "extra": {
        "pairs?": (bool,),
        "merge_labels?": (bool,),
        "joined_text?": (str,),
        "stride?": (int,),
        "from?": [{"reference": (str,), "digest": (str,)}],
        "joint?": {"run": (str,), "method": (str,), "tasks": [(str,)]},
        "folds?": {
            "num_folds": (int,),
            "num_rows": (int,),
            "standard_error": {"*": _MAYBE_NUMBER},
            "pooled": {"*": {"value": _MAYBE_NUMBER, "low": _MAYBE_NUMBER, "high": _MAYBE_NUMBER}},
        },
        "origin?": {"library?": (str,), "format?": (str,), "base?": (str,), "files?": {"*": (str,)}},
    },
    "sidecar": {
        "published_at?": (str,),
        "host?": (str,),
        "seconds?": _NUMBER,
        "commit?": (str, type(None)),
        "peak_memory_bytes?": _MAYBE_NUMBER,
        "environment?": {"*": (str,)},
    },
}


def parse_json(text: str | bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; anything else is `StoreDamaged`."""
    # Too many values are refused before parsing, which would take a lot of memory.
    content = text if isinstance(text, bytes) else text.encode(errors="replace")
    num_values = sum(content.count(mark) for mark in (b",", b"[", b"{"))
    if num_values > MOST_VALUES:
        raise StoreDamaged(f"{where}: about {num_values:,} JSON values, more than {MOST_VALUES:,}")
    try:
        tree = json.loads(text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise StoreDamaged(f"{where}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise StoreDamaged(f"{where}: not a JSON object")
    if is_too_deep(tree):
        raise StoreDamaged(f"{where}: more than {MOST_LEVELS} levels of lists and objects in each other")
    return tree


def is_too_deep(value: Any) -> bool:
    """Return whether lists and objects lie in each other more than `MOST_LEVELS` deep: what prints them recurses."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            part
            for item in level
            if isinstance(item, dict | list)
            for part in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _parse_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:20]} is too large for a float")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def is_nested(name: str) -> bool:
    """Return whether `check_nested` knows the types of the object under a name."""
    return name in _NESTED


def check_nested(value: Any, name: str, where: str, wanted: Any = None) -> None:
    """Refuse a JSON value that does not have the types that `_NESTED` has for its name, or `wanted` for a part."""
    wanted = _NESTED[name] if wanted is None else wanted
    options = wanted if isinstance(wanted, tuple) else (wanted,)
    if type(value) in options:
        return
    # Not a plain value: then a list or an object must be among the options.
    inner = next((option for option in options if type(option) is type(value)), None)
    if isinstance(inner, list):
        for item in value:
            check_nested(item, name, where, inner[0])
    elif isinstance(inner, dict):
        for key, part in inner.items():
            plain = key.removesuffix("?")
            if key == plain != "*" and key not in value:
                raise StoreDamaged(f"{where}: `{name}` lacks `{key}`")
            for own in value if key == "*" else {plain} & value.keys():
                check_nested(value[own], f"{name}.{own}", where, part)
    else:
        raise StoreDamaged(f"{where}: `{name}` is `{str(value)[:80]}`, which it cannot be")
