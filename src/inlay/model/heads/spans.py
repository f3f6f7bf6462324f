"""Answers that are places in a text: words with tags joined to entities, and the best passages of a context.

Answers are cut from the text by the characters of their tokens, so an answer is always a part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_ANSWER = 30  # tokens of an answer at most, as published for SQuAD
NUM_BEST = 20  # candidates whose scores are made probabilities
NUM_SHOWN = 5


@dataclass(frozen=True)
class Word:
    """A word and its tag."""

    start: int
    end: int
    text: str
    tag: str
    probability: float


@dataclass(frozen=True)
class Entity:
    """Words that belong together; as sure as the least sure of them."""

    start: int
    end: int
    text: str
    label: str
    probability: float


@dataclass(frozen=True)
class Passage:
    """A candidate answer; its start is None and its text empty where it is that there is none."""

    text: str
    start: int | None
    end: int | None
    score: float
    probability: float


@dataclass(frozen=True)
class Passages:
    """The best candidates first, and by how much the null score is above the best passage's."""

    nbest: tuple[Passage, ...]
    passage: str
    """the best candidate that says something"""
    margin: float


def join_entities(words: Sequence[Word], text: str) -> tuple[Entity, ...]:
    """Return the entities that IOB2 tags spell; an `I-` without its beginning begins one, as seqeval reads it."""
    groups: list[list[Word]] = []
    inside = ""
    for word in words:
        letter, _, kind = word.tag.partition("-")
        if letter not in ("B", "I") or not kind:
            inside = ""
        elif letter == "I" and kind == inside:
            groups[-1].append(word)
        else:
            groups.append([word])
            inside = kind
    return tuple(
        Entity(
            group[0].start,
            group[-1].end,
            text[group[0].start : group[-1].end],
            group[0].tag.partition("-")[2],
            min(word.probability for word in group),
        )
        for group in groups
    )


def find_passages(
    windows: Sequence[tuple[np.ndarray, np.ndarray]], text: str, null_threshold: float | None
) -> Passages:
    """Return the best passages over all windows of a context, each `(logits [T, 2], places [T, 2])`.

    A passage's score is the sum of its start and end logits; the null score is the first token's, the least over all
    windows. Probabilities are the softmax over the best candidates.
    """
    scores: dict[tuple[int, int], float] = {}
    for logits, places in windows:
        for start, end, score in _best_of_window(logits, places):
            scores[start, end] = max(score, scores.get((start, end), -np.inf))
    best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:NUM_BEST]
    null = min(float(logits[0].sum()) for logits, _ in windows)
    found = [(text[start:end], start, end, score) for (start, end), score in best]
    passage, margin = (found[0][0], null - found[0][3]) if found else ("", np.inf)
    silence = ("", None, None, null)
    candidates: list[tuple[str, int | None, int | None, float]] = [*found]
    if null_threshold is not None or not found:
        candidates = sorted([*found, silence], key=lambda item: -item[3])
        is_silent = not found or (null_threshold is not None and margin > null_threshold)
        chosen = silence if is_silent else found[0]
        candidates.remove(chosen)
        candidates.insert(0, chosen)
    values = np.array([item[3] for item in candidates])
    shares = np.exp(values - values.max())
    shares /= shares.sum()
    nbest = tuple(Passage(*item, float(share)) for item, share in zip(candidates, shares, strict=True))
    return Passages(nbest[:NUM_SHOWN], passage, float(margin))


def _best_of_window(logits: np.ndarray, places: np.ndarray) -> list[tuple[int, int, float]]:
    """Return the best passages of one window, as characters: every start with every end up to the longest answer."""
    is_text = places[:, 0] >= 0
    starts = np.where(is_text, logits[:, 0], -np.inf)
    ends = np.concatenate([np.where(is_text, logits[:, 1], -np.inf), np.full(MAX_ANSWER - 1, -np.inf)])
    scores = starts[:, None] + np.lib.stride_tricks.sliding_window_view(ends, MAX_ANSWER)
    flat = scores.ravel()
    chosen = np.argpartition(-flat, min(NUM_BEST, len(flat) - 1))[:NUM_BEST]
    found = []
    for index in chosen[np.isfinite(flat[chosen])]:
        first, length = divmod(int(index), MAX_ANSWER)
        found.append((int(places[first, 0]), int(places[first + length, 1]), float(flat[index])))
    return found
