"""Extractive question answering: SQuAD's files, answers as places in a context, and the official exact match and F1.

A target is a tuple of gold answers, each `(start, text)` with `start` in characters of the context; it is empty if the
context has no answer (SQuAD 2.0). Scores are those of the official scripts: lower case, no punctuation, no articles,
blanks joined, the best over the gold answers; without a gold answer only the empty answer is right.

The scripts of 1.1 and 2.0 differ in answers that are empty once normalised, such as "the". If some question has no
answer, all are scored as 2.0's script does, otherwise as 1.1's.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Gold = tuple[int, str]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SQUAD = re.compile(r'\s*\{\s*(?:"version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[\s*\{\s*"(?:title|paragraphs)"')


def is_squad(head: str) -> bool:
    """Return whether a file that begins so is in SQuAD's format: articles with paragraphs with questions."""
    return _SQUAD.match(head) is not None


def read_squad(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the questions of a SQuAD document as flat records. Raises KeyError or TypeError if it is not one."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = [] if question.get("is_impossible") else question.get("answers", [])
                yield {
                    "id": question.get("id"),
                    "question": question["question"],
                    "context": paragraph["context"],
                    "answers": answers,
                }


def read_answers(cell: Any, start: Any, context: str) -> tuple[tuple[Gold, ...], bool]:
    """Return the gold answers of a cell, and whether their places had to be searched in the context.

    Takes SQuAD's list of {text, answer_start} or the hub's {text: [...], answer_start: [...]}, both also as JSON text,
    or one answer as text with its `start`. Raises ValueError with the reason if one is not in the context.
    """
    # 1. every form as a list of {text, answer_start}
    if isinstance(cell, str) and cell.strip()[:1] in ("[", "{"):
        cell = json.loads(cell)
    if isinstance(cell, Mapping):
        texts, starts = cell["text"], cell.get("answer_start", cell.get("start"))
        if isinstance(texts, str):
            texts, starts = [texts], [starts]
        starts = [None] * len(texts) if starts is None else list(starts)
        cell = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    elif cell is None or isinstance(cell, str | int | float):
        # A table has one answer in a cell, or an empty cell for no answer.
        cell = [] if cell is None or not str(cell).strip() else [{"text": str(cell), "answer_start": start}]
    # 2. the place of each answer, which must be in the context
    golds, was_searched = [], False
    for answer in cell:
        text, place = str(answer["text"]), answer.get("answer_start")
        if place is None or str(place).strip() == "":
            place, was_searched = context.find(text), True
        place = int(place)
        if not text or place < 0 or context[place : place + len(text)] != text:
            raise ValueError(f"the answer `{text[:60]}` is not at character {place} of the context")
        golds.append((place, text))
    return tuple(golds), was_searched


def normalise_answer(text: str) -> str:
    """Return an answer as the official script compares it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def has_unanswerable(targets: Sequence[Sequence[Gold]]) -> bool:
    """Return whether some question has no answer, as in SQuAD 2.0 only."""
    return any(len(golds) == 0 for golds in targets)


def score_answer(prediction: str, golds: Sequence[Gold], *, is_squad2: bool) -> tuple[float, float]:
    """Return exact match and F1 of an answer (`""` for none) against the gold answers, the best of each.

    With `is_squad2` as the script of SQuAD 2.0 does: gold answers that are empty once normalised are ignored if there
    are others, and two empty answers have F1 1. Without it as that of 1.1 does: every gold answer counts, and F1 is 0
    unless they share a word.
    """
    predicted = normalise_answer(prediction)
    texts = [normalise_answer(text) for _, text in golds]
    if is_squad2:
        texts = [text for text in texts if text] or [""]
    exact = max(float(predicted == text) for text in texts)
    overlap = max(_overlap(predicted.split(), text.split()) for text in texts)
    # Two empty answers share no word, but are equal.
    return exact, max(exact, overlap) if is_squad2 else overlap


def _overlap(predicted: Sequence[str], true: Sequence[str]) -> float:
    """Return F1 of the words of two normalised answers."""
    num_same = sum((Counter(predicted) & Counter(true)).values())
    if not num_same:
        return 0.0
    precision, recall = num_same / len(predicted), num_same / len(true)
    return 2 * precision * recall / (precision + recall)


def tune_threshold(margins: Sequence[float], answers: Sequence[str], targets: Sequence[Sequence[Gold]]) -> float:
    """Return the margin above which the empty answer is given, for the best F1 over these rows of SQuAD 2.0.

    `margins` are the null scores less those of the best answers, `answers` the best answers. Of equally good margins
    the one is taken that answers most rows.
    """
    order = np.argsort(np.asarray(margins, dtype=np.float64), kind="stable")
    sorted_margins = np.asarray(margins, dtype=np.float64)[order]
    kept = np.array([score_answer(answers[row], targets[row], is_squad2=True)[1] for row in order])
    dropped = np.array([score_answer("", targets[row], is_squad2=True)[1] for row in order])
    # Rows before the cut are answered, those after it are not.
    totals = np.concatenate([[0.0], np.cumsum(kept)]) + np.concatenate([np.cumsum(dropped[::-1])[::-1], [0.0]])
    is_place = np.concatenate([[True], sorted_margins[1:] != sorted_margins[:-1], [True]])  # equals stay together
    best = max(np.flatnonzero(is_place), key=lambda cut: (totals[cut], cut))
    if best == 0:
        return float(sorted_margins[0]) - 1.0
    if best == len(sorted_margins):
        return float(sorted_margins[-1]) + 1.0
    return float((sorted_margins[best - 1] + sorted_margins[best]) / 2)
