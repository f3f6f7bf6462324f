"""Numbers, shares, scores, sizes and times in words, as pages and reports write them."""

from __future__ import annotations

import math

# Metric -> its name in plain words, and whether its values read best as percentages.
_METRICS = {
    "accuracy": ("right answers", True),
    "f1": ("F1", True),
    "macro_f1": ("mean F1 of the labels", True),
    "micro_f1": ("F1 over all labels", True),
    "entity_f1": ("F1 of entities", True),
    "entity_precision": ("precision of entities", True),
    "entity_recall": ("recall of entities", True),
    "token_accuracy": ("right words", True),
    "token_f1": ("F1 of words", True),
    "exact_match": ("exact answers", True),
    "matthews": ("Matthews correlation", False),
    "pearson": ("Pearson correlation", False),
    "spearman": ("rank correlation", False),
    "rmse": ("error, root mean square", False),
    "quadratic_kappa": ("weighted kappa", False),
    "mae": ("mean error", False),
    "ece": ("calibration error", True),
}
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_MANY_HOURS = 3


def show_number(value: float | None) -> str:
    """Write a number with thousands separators; one that is not whole with four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.4g}"


def percent(share: float | None, digits: int = 1) -> str:
    """Write a share as a percentage."""
    if share is None or not math.isfinite(share):
        return "–"
    return f"{100 * share:.{digits}f}%"


def is_share(metric: str) -> bool:
    """Return whether a metric's values are shares from 0 to 1, which read best as percentages."""
    return _METRICS.get(metric, ("", False))[1]


def show_score(value: float | None, metric: str) -> str:
    """Write a score as its metric is usually written."""
    if value is None or not math.isfinite(value):
        return "–"
    return percent(value) if is_share(metric) else f"{value:.3f}"


def metric_words(metric: str | None) -> str:
    """Write a metric's name for people."""
    return "score" if metric is None else _METRICS.get(metric, (metric.replace("_", " "), False))[0]


def capitalize_first(text: str) -> str:
    """Return a text with its first letter large, unless it begins with a file's name."""
    is_name = "." in text.partition(" ")[0][:-1].rstrip(".:")
    return text if is_name else text[:1].upper() + text[1:]


def plural(count: float, noun: str) -> str:
    """Write a count with its noun: `1 row`, `2 rows`."""
    return f"{show_number(count)} {noun}{'' if count == 1 else 's'}"


def show_bytes(size: float | None) -> str:
    """Write a size in kB, MB or GB."""
    if size is None:
        return "–"
    size = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            if unit == "bytes":
                return plural(size, "byte")
            return f"{size:.0f} {unit}" if size >= 10 or size.is_integer() else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError(size)


def duration(seconds: float | None) -> str:
    """Write a length of time in the largest unit that fits, roughly."""
    if seconds is None:
        return "–"
    if seconds < _MINUTE:
        return plural(max(1, round(seconds)), "second")
    if seconds < _HOUR:
        return plural(round(seconds / _MINUTE), "minute")
    if seconds < 2 * _DAY:
        hours = seconds / _HOUR
        return plural(round(hours) if hours >= _MANY_HOURS else round(hours, 1), "hour")
    return plural(round(seconds / _DAY), "day")


def level(value: float, most: float) -> int:
    """Return the step of a colour scale for a value: 0 for nothing, 4 for the largest value."""
    if value <= 0 or most <= 0:
        return 0
    return min(4, max(1, math.ceil(4 * value / most)))
