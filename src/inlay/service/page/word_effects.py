"""The words that moved an answer: the text is asked again without each word in turn (leave one word out)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_WORDS = 80
"""words that are left out in turn; a longer text is asked without groups of neighbouring words"""
_WORD = re.compile(r"\S+")
_STRONG, _CLEAR, _SLIGHT = 0.2, 0.05, 0.01


@dataclass(frozen=True)
class WordEffect:
    """A word (or a few) of a text, and how sure the answer is without it."""

    text: str
    without: float
    change: float
    """how much less sure the answer is without it; below 0, the word speaks against the answer"""

    @property
    def look(self) -> str:
        """The class of its mark."""
        size = abs(self.change)
        strength = 3 if size >= _STRONG else 2 if size >= _CLEAR else 1 if size >= _SLIGHT else 0
        return f"{'up' if self.change > 0 else 'down'}{strength}" if strength else ""


def split_words(text: str) -> list[tuple[int, int]]:
    """Return where the words of a text begin and end; neighbours share a place where there are too many."""
    places = [match.span() for match in _WORD.finditer(text)]
    size = -(-len(places) // MOST_WORDS) or 1
    return [(group[0][0], group[-1][1]) for group in (places[n : n + size] for n in range(0, len(places), size))]


def leave_out(text: str, places: Sequence[tuple[int, int]]) -> list[str]:
    """Return the text once without each word. A text of one word leaves an empty one, which nobody answers."""
    shortened = [f"{text[:start]}{text[end:].lstrip()}".strip() for start, end in places]
    return [rest for rest in shortened if rest] if len(places) > 1 else []


def measure_effects(
    text: str, places: Sequence[tuple[int, int]], whole: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> list[WordEffect]:
    """Compare the answers without each word with the answer to the whole text: how sure each is of the same label."""
    label = whole["label"]
    sure = whole["probabilities"][label]
    effects = []
    for (start, end), answer in zip(places, others, strict=True):
        without = answer.get("probabilities", {}).get(label, sure)
        effects.append(WordEffect(text[start:end], without, sure - without))
    return effects
