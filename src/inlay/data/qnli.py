"""QNLI's training rows rebuilt from SQuAD, where GLUE's own file is missing: a reconstruction, called so in its notes.

GLUE made QNLI of SQuAD by pairing questions with sentences of their paragraphs and leaving out pairs with few words in
common. Here every question gives two rows: with the sentence that holds its answer (entailment), and with that one of
the others that has the most words in common with the question (not_entailment); a pair without a common word is left
out. As many rows as GLUE has are kept, chosen by a hash of the question. GLUE's dev rows come from SQuAD's dev
articles, so no dev row can be among them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from inlay.data.columns import Header
from inlay.data.sources import Table
from inlay.data.squad import read_squad
from inlay.errors import BadData

NUM_ROWS = 104_743
"""training rows of GLUE's QNLI"""
NOTE = "QNLI's training rows are a reconstruction from SQuAD v1.1, not GLUE's own file"
_END = re.compile(r"[.!?][\"”’')\]]*(\s+)(?=[\"“‘'(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(
    r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|vs|No|Jr|Sr|Lt|Gen|Col|Rev|Sgt|Prof|Sen|Gov|Rep|Capt|Hon|Mt|Ft|etc|cf|approx|ca|c|al"
    r"|e\.g|i\.e|Inc|Co|Ltd|Corp|Jan|Feb|Mar|Apr|Aug|Sept|Oct|Nov|Dec|U\.S|a\.m|p\.m)\.$"
)


class Pair(NamedTuple):
    """A question, a sentence of its paragraph, and whether the answer is in it."""

    question: str
    sentence: str
    label: str


def rebuild_qnli(squad: Path) -> Table:
    """QNLI's training rows as a table with its own columns; a line is a question's number in SQuAD."""
    try:
        questions = list(read_squad(json.loads(squad.read_text(encoding="utf8"))))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        reason = f"no SQuAD document: {type(error).__name__}: {error}"
        raise BadData(reason, "put SQuAD v1.1's own train-v1.1.json there", path=squad) from None
    found = []
    known: dict[str, list[_Sentence]] = {}
    for line, record in enumerate(questions, start=1):
        context, question = str(record["context"]), str(record["question"]).strip()
        if context not in known:
            known[context] = [_read_sentence(context, *place) for place in split_sentences(context)]
        found += [(line, pair) for pair in _pair_up(question, known[context], record["answers"])]
    order = sorted(range(len(found)), key=lambda row: _rank(found[row][1]))
    kept = [found[row] for row in sorted(order[:NUM_ROWS])]
    header = Header(str(squad), Pair._fields, None)
    note = f"{NOTE}: {len(kept):,} of {len(found):,} pairs of a question and a sentence"
    return Table(header, [list(pair) for _, pair in kept], [line for line, _ in kept], notes=(note,))


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Return where each sentence begins and ends."""
    places, start = [], 0
    for match in _END.finditer(text):
        if not _ABBREVIATION.search(text[max(0, match.start() - 11) : match.start() + 1]):
            places.append((start, match.start(1)))
            start = match.end()
    return [(start, stop) for start, stop in [*places, (start, len(text))] if text[start:stop].strip()]


class _Sentence(NamedTuple):
    start: int
    stop: int
    text: str
    words: set[str]


def _read_sentence(context: str, start: int, stop: int) -> _Sentence:
    text = " ".join(context[start:stop].split())  # in one line, as GLUE's are
    return _Sentence(start, stop, text, _words(text))


def _pair_up(question: str, sentences: list[_Sentence], answers: list[dict[str, Any]]) -> Iterator[Pair]:
    if not answers:
        return
    begin, answer, asked = int(answers[0]["answer_start"]), answers[0]["text"], _words(question)
    others = []
    for sentence in sentences:
        num_common = len(asked & sentence.words)
        if sentence.start <= begin < sentence.stop:
            if num_common:
                yield Pair(question, sentence.text, "entailment")
        elif num_common and answer not in sentence.text:
            others.append((num_common, sentence.text))
    if others:
        yield Pair(question, max(others, key=lambda other: other[0])[1], "not_entailment")


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _rank(pair: Pair) -> bytes:
    return hashlib.blake2b("\0".join(pair).encode(), digest_size=16).digest()
