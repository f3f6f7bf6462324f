"""The words of a text, and what an answer comes to without each (leave one word out). No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inlay.errors import BadData

MOST_WORDS = 80
"""words that are left out in turn; a longer text is asked without groups of neighbouring words"""
MOST_LETTERS = 50_000
"""letters of a text that is explained: it is read whole again without each word"""
_WORD = re.compile(r"\S+")
Place = tuple[int, int]
"""where a word begins and ends"""


@dataclass(frozen=True)
class WordEffect:
    """A word (or a few neighbours) of a text, and how far it moves what is measured of the answer."""

    text: str
    change: float
    """the part of the measure that is the word's; below 0, the word speaks against the answer"""
    start: int = 0
    end: int = 0
    side: str = "text"
    """`pair` for a word of the second text"""
    without: float | None = None
    """the measure where the word is left out; None where that was not tried"""


def place_words(text: str, most: int = MOST_WORDS) -> list[Place]:
    """Return where the words of a text begin and end; neighbours share a place where there are too many.

    Refuses a text of more than `MOST_LETTERS`.
    """
    if len(text) > MOST_LETTERS:
        raise BadData(
            f"a text of {len(text):,} letters, but at most {MOST_LETTERS:,} are explained",
            "cut it: a task reads only as many tokens as its `max_length`",
        )
    places = [match.span() for match in _WORD.finditer(text)]
    size = -(-len(places) // most) or 1
    return [(group[0][0], group[-1][1]) for group in (places[n : n + size] for n in range(0, len(places), size))]


def leave_out(text: str, places: Sequence[Place]) -> list[str]:
    """Return the text once without each word. A text of one word leaves an empty one, which nobody answers."""
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
    """Compare what was measured without each word with the measure of the whole text."""
    return [
        WordEffect(text[start:end], whole - value, start, end, side, value)
        for (start, end), value in zip(places, without, strict=True)
    ]
