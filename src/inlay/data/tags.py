"""Token tagging: words with their tags, from CoNLL columns or spans of characters; entities counted by seqeval.

Tags are kept as IOB2: `B-` begins an entity, `I-` continues it, `O` is outside. IOB1, IOBES and BILOU are converted.
Tags without such letters (parts of speech) stay as they are: such a task has tagged words, but no entities.

A word is `(start, end)` in its text; a target is `(start, end, label)` for each word of the row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from inlay.errors import Missing

OUTSIDE = "O"
Word = tuple[int, int]
Tagged = tuple[int, int, str]

# The letters of IOBES and BILOU as those of IOB2.
_PREFIXES = {"B": "B", "I": "I", "E": "I", "L": "I", "S": "B", "U": "B"}
_TAG = re.compile(r"([BILEUS])-(.+)", re.DOTALL)
# Words are runs of letters and digits, with the signs that join them inside; any other sign is a word of its own, and
# so is every sign of a script that is written without blanks.
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# Accents and vowel signs are not letters for `re`, but they are parts of a word.
_MARKS = (
    "\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06dc\u0900-\u0963\u0966-\u0dff"
    "\u0e00-\u0eff\u1000-\u109f\u200c\u200d\u20d0-\u20f0\ufe20-\ufe2f"
)
_LETTERS = rf"(?:[^\W{UNSPACED}]|[{_MARKS}])+"
_WORD = re.compile(rf"[{UNSPACED}]|{_LETTERS}(?:(?:[-'’.&]|(?<=\d),(?=\d)){_LETTERS})*|[^\w\s]")


def split_words(text: str) -> tuple[Word, ...]:
    """Return the words of a plain text."""
    return tuple(match.span() for match in _WORD.finditer(text))


def join_words(tokens: Sequence[str]) -> tuple[str, tuple[Word, ...]]:
    """Join tokens with blanks; return the text, and the place of each token in it."""
    words, start = [], 0
    for token in tokens:
        words.append((start, start + len(token)))
        start += len(token) + 1
    return " ".join(tokens), tuple(words)


def to_iob2(tags: Sequence[str]) -> tuple[list[str], bool]:
    """Convert the tags of one sentence to IOB2; return them, and whether any was changed."""
    made: list[str] = []
    inside = ""  # the type of the entity that the word before belongs to
    for tag in tags:
        found = _TAG.fullmatch(tag)
        if found is None:
            made.append(tag)
            inside = ""
            continue
        letter, kind = _PREFIXES[found[1]], found[2]
        made.append(f"{'I' if letter == 'I' and inside == kind else 'B'}-{kind}")
        inside = "" if found[1] in "ELSU" else kind
    return made, made != list(tags)


def tag_words(words: Sequence[Word], spans: Iterable[tuple[int, int, str]]) -> tuple[list[str], int]:
    """Return the IOB2 tags of words from labelled spans, and how many spans begin or end inside a word.

    A word that a span touches belongs to it whole. Raises ValueError if two spans touch one word.
    """
    tags, num_widened = [OUTSIDE] * len(words), 0
    for start, end, label in spans:
        inside = [index for index, word in enumerate(words) if word[0] < end and word[1] > start]
        if any(tags[index] != OUTSIDE for index in inside):
            raise ValueError(f"two spans claim the word at {words[inside[0]][0]}")
        for index in inside:
            tags[index] = f"{'B' if index == inside[0] else 'I'}-{label}"
        fits = inside and words[inside[0]][0] == start and words[inside[-1]][1] == end
        num_widened += not fits
    return tags, num_widened


def sort_tags(found: Iterable[str]) -> tuple[str, ...]:
    """Return all labels of a tagger: `O`, tags without a type, then both `B-` and `I-` of each type."""
    found = set(found)
    types = sorted({match[2] for tag in found if (match := _TAG.fullmatch(tag))})
    if not types:
        return tuple(sorted(found, key=lambda tag: (tag != OUTSIDE, tag)))
    plain = sorted(tag for tag in found if tag != OUTSIDE and not _TAG.fullmatch(tag))
    return (OUTSIDE, *plain, *(f"{letter}-{kind}" for kind in types for letter in "BI"))


def find_entities(words: Iterable[Tagged]) -> list[Tagged]:
    """Return the entities of IOB2 tags; an `I-` without a `B-` before it begins an entity, as in seqeval."""
    found: list[Tagged] = []
    inside = ""
    for start, end, tag in words:
        letter, _, kind = tag.partition("-")
        if letter not in ("B", "I") or not kind:
            inside = ""
        elif letter == "I" and kind == inside:
            found[-1] = (found[-1][0], end, kind)
        else:
            found.append((start, end, kind))
            inside = kind
    return found


def entity_types(labels: Iterable[str]) -> tuple[str, ...]:
    """Return the types of entities among the labels, in order; none for plain tags."""
    return tuple(dict.fromkeys(label[2:] for label in labels if label.startswith(("B-", "I-"))))


def require_seqeval() -> Any:
    """Import seqeval's module that finds entities; refuse with a hint if it is missing."""
    try:
        from seqeval.metrics import sequence_labeling
    except ImportError:
        hint = "pip install seqeval, or choose `--metric token_accuracy`"
        raise Missing("entities are scored by the library `seqeval`, which is not installed", hint) from None
    return sequence_labeling


def has_seqeval() -> bool:
    """Return whether seqeval is installed."""
    try:
        require_seqeval()
    except Missing:
        return False
    return True


def count_rows(
    predictions: Sequence[Sequence[str]], targets: Sequence[Sequence[tuple[int, int, int]]], labels: Sequence[str]
) -> tuple[np.ndarray, ...]:
    """Count entities of each row, [rows, types]: found, true and predicted ones; and its right words, and its words.

    Predictions are tags by name, one for each word.
    """
    types = {kind: index for index, kind in enumerate(entity_types(labels))}
    scored = bool(types) and has_seqeval()
    hits, support, predicted = (np.zeros((len(predictions), len(types))) for _ in range(3))
    right, words = np.zeros(len(predictions)), np.zeros(len(predictions))
    for row, (guess, target) in enumerate(zip(predictions, targets, strict=True)):
        truth = [labels[label] for _, _, label in target]
        right[row], words[row] = sum(a == b for a, b in zip(guess, truth, strict=True)), len(truth)
        if scored:
            # seqeval's entities: type, first word, last word
            proposed, there = (set(require_seqeval().get_entities(list(tags))) for tags in (guess, truth))
            for counts, found in ((hits, proposed & there), (support, there), (predicted, proposed)):
                for kind, _, _ in found:
                    counts[row, types[kind]] += 1
    return hits, support, predicted, right, words
