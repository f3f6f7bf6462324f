"""The words of a text, and the effect of leaving out each of them. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inlay.errors import BadData

MOST_WORDS = 80
"""most words that are left out one by one; in longer texts, groups of neighbouring words are left out"""
MOST_LETTERS = 50_000
"""most letters of a text that is explained, as the whole text is read once for each word"""
_WORD = re.compile(r"\S+")
Place = tuple[int, int]
"""the start and the end of a word"""


@dataclass(frozen=True)
class WordEffect:
    """A word (or a few neighbouring words) of a text, and its effect on a measure of the answer."""

    text: str
    change: float
    """the word's part of the measure; below 0, the word speaks against the answer"""
    start: int = 0
    end: int = 0
    side: str = "text"
    """`pair` for a word of the second text"""
    without: float | None = None
    """the measure without the word; None if that was not computed"""


def place_words(text: str) -> list[Place]:
    """Return the start and end of each word of a text, or of groups of neighbours if there are more than MOST_WORDS.

    Refuses a text of more than MOST_LETTERS.
    """
    if len(text) > MOST_LETTERS:
        raise BadData(
            f"a text of {len(text):,} letters, but at most {MOST_LETTERS:,} are explained",
            "cut it: a task reads only as many tokens as its `max_length`",
        )
    places = [match.span() for match in _WORD.finditer(text)]
    size = -(-len(places) // MOST_WORDS) or 1
    return [(group[0][0], group[-1][1]) for group in (places[n : n + size] for n in range(0, len(places), size))]


def leave_out(text: str, places: Sequence[Place]) -> list[str]:
    """Return the text without each of its words in turn; none for a text of one word, as the rest is empty."""
    shortened = [drop_words(text, [place]) for place in places]
    return [rest for rest in shortened if rest] if len(places) > 1 else []


def drop_words(text: str, places: Sequence[Place]) -> str:
    """Return the text without all these words."""
    for start, end in sorted(places, reverse=True):
        text = f"{text[:start]}{text[end:].lstrip()}"
    return text.strip()


def measure_effects(
    text: str, places: Sequence[Place], whole: float, without: Sequence[float], side: str = "text"
) -> list[WordEffect]:
    """Return the effect of each word: the measure of the whole text less the measure without the word."""
    return [
        WordEffect(text[start:end], whole - value, start, end, side, value)
        for (start, end), value in zip(places, without, strict=True)
    ]
