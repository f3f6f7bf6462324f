"""Rows become windows of tokens, and targets lie beside the tokens they are about.

A text or pair is one window, cut where it is too long; a question with a long context is several, which overlap. For
heads that read tokens every window says which part of the text each token stands for (its place), so that an answer can
be cut from the text and a target laid on the right token. Nothing outside this file knows how a kind is laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inlay.data.encode import CHUNK_ROWS, Encoded, encode
from inlay.data.tags import Word, split_words
from inlay.data.tasks import Split

IGNORED = -100
"""The target of a token that says nothing: no part of the loss."""
MAX_QUESTION = 64  # tokens of a question at most, as published for SQuAD; the rest of a window is context


@dataclass(frozen=True)
class Reading:
    """How the rows of a task become windows."""

    kind: str
    max_length: int
    stride: int = 128
    """tokens that neighbouring windows of one context share"""


@dataclass(frozen=True)
class Layout:
    """One row of the table: how a kind's rows are encoded, and how its targets lie beside the tokens."""

    encode: Callable[[Any, Split, Reading], Encoded]
    align: Callable[[Encoded, np.ndarray], list[np.ndarray]] | None = None
    """None: a target is the whole row's"""
    overlaps: bool = False
    """whether a long row becomes several windows"""


def encode_split(tokenizer: Any, split: Split, reading: Reading) -> Encoded:
    """The windows of a split's rows. Words to tag are those of its targets, or else those of the text."""
    return LAYOUTS[reading.kind].encode(tokenizer, split, reading)


def align_targets(kind: str, encoded: Encoded, targets: np.ndarray) -> list[np.ndarray] | None:
    """The targets of every window, token by token, for kinds whose heads read tokens.

    tag: int64 [T], the label of a word at its first piece. span: int64 [T, 2] for start and end, 1 at the answer's and
    0 where it could have been; a window without the answer has it at its first token. `IGNORED` everywhere else.
    """
    align = LAYOUTS[kind].align
    return None if align is None else align(encoded, targets)


def _encode_whole(tokenizer: Any, split: Split, reading: Reading) -> Encoded:
    return encode(tokenizer, split.texts, split.pairs, reading.max_length)


def _encode_words(tokenizer: Any, split: Split, reading: Reading) -> Encoded:
    """One window per text; the first piece of a word has the whole word for its place."""
    encoded = encode(tokenizer, split.texts, None, reading.max_length, with_offsets=True)
    assert encoded.places is not None
    words = _find_words(split)
    places = [_place_words(spans, offsets) for spans, offsets in zip(words, encoded.places, strict=True)]
    num_lost = sum(len(spans) - int((place[:, 0] >= 0).sum()) for spans, place in zip(words, places, strict=True))
    return encoded.with_places(places, words, num_lost)


def _find_words(split: Split) -> list[tuple[Word, ...]]:
    if split.targets is None:
        return [split_words(text) for text in split.texts]
    return [tuple((start, end) for start, end, _ in target) for target in split.targets]


def _place_words(words: Sequence[Word], offsets: np.ndarray) -> np.ndarray:
    """Places [T, 2] where each word's first piece stands for the word; -1 for all other tokens."""
    places = np.full(offsets.shape, -1, dtype=np.int32)
    starts = np.array([start for start, _ in words], dtype=np.int64)
    taken = -1
    for token in np.flatnonzero(offsets[:, 1] > offsets[:, 0]):
        # By its last character: byte-level pieces may count the blank before a word as theirs.
        last = offsets[token, 1] - 1
        word = int(np.searchsorted(starts, last, side="right")) - 1
        if word > taken and last < words[word][1]:
            places[token], taken = words[word], word
    return places


def _align_tags(encoded: Encoded, targets: np.ndarray) -> list[np.ndarray]:
    assert encoded.places is not None
    aligned = []
    for owner, places in zip(encoded.owners, encoded.places, strict=True):
        labels = {start: label for start, _, label in targets[owner]}
        aligned.append(np.array([labels.get(int(start), IGNORED) for start in places[:, 0]], dtype=np.int64))
    return aligned


def _encode_contexts(tokenizer: Any, split: Split, reading: Reading) -> Encoded:
    """Overlapping windows of a question and a part of its context; the places are those of the context's tokens."""
    assert split.pairs is not None
    longest = min(MAX_QUESTION, reading.max_length // 2)
    ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    owners: list[int] = []
    places: list[np.ndarray] = []
    # A window must have more room than it shares, or it would never end; 4 is the most special tokens a pair has.
    stride = min(reading.stride, max(0, (reading.max_length - longest - 4) // 2))
    for start in range(0, len(split), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        batch = tokenizer(
            _cut_texts(tokenizer, split.texts[chunk], longest),
            split.pairs[chunk],
            truncation="only_second",
            max_length=reading.max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_attention_mask=False,
            padding=False,
        )
        ids += [np.array(row, dtype=np.int32) for row in batch["input_ids"]]
        segments += [np.array(row, dtype=np.int32) for row in batch.get("token_type_ids", ())]
        owners += [start + row for row in batch["overflow_to_sample_mapping"]]
        places += [_place_context(encoding) for encoding in batch.encodings]
    order = np.array(owners, dtype=np.int64)
    lengths = np.array([len(row) for row in ids], dtype=np.int64)
    return Encoded(ids, segments or None, lengths, 0, order, places)


def _cut_texts(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Texts of at most so many tokens; only one with more bytes than that can have more tokens."""
    cut = list(texts)
    long = [row for row, text in enumerate(texts) if len(text.encode()) > max_tokens]
    if long:
        batch = tokenizer([texts[row] for row in long], add_special_tokens=False, return_attention_mask=False)
        for row, encoding in zip(long, batch.encodings, strict=True):
            if len(encoding.ids) > max_tokens:
                cut[row] = texts[row][: encoding.offsets[max_tokens - 1][1]]
    return cut


def _place_context(encoding: Any) -> np.ndarray:
    places = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    is_context = np.array([sequence == 1 for sequence in encoding.sequence_ids], dtype=bool)
    places[~is_context | (places[:, 1] <= places[:, 0])] = -1
    return places


def _align_answers(encoded: Encoded, targets: np.ndarray) -> list[np.ndarray]:
    assert encoded.places is not None
    aligned = []
    for owner, places in zip(encoded.owners, encoded.places, strict=True):
        target = np.where(places >= 0, 0, IGNORED).astype(np.int64)
        target[0] = 0
        first, last = _find_answer(places, targets[owner])
        target[first, 0] = target[last, 1] = 1
        aligned.append(target)
    return aligned


def _find_answer(places: np.ndarray, golds: Sequence[tuple[int, str]]) -> tuple[int, int]:
    """The first and last token of the first gold answer; the window's first token where it is not whole in it."""
    if not golds:
        return 0, 0
    start, text = golds[0]
    start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    inside = np.flatnonzero((places[:, 0] >= 0) & (places[:, 1] > start) & (places[:, 0] < end))
    if not len(inside) or places[inside[0], 0] > start or places[inside[-1], 1] < end:
        return 0, 0
    return int(inside[0]), int(inside[-1])


LAYOUTS: dict[str, Layout] = {
    "classify": Layout(_encode_whole),
    "multilabel": Layout(_encode_whole),
    "regress": Layout(_encode_whole),
    "tag": Layout(_encode_words, _align_tags),
    "span": Layout(_encode_contexts, _align_answers, overlaps=True),
}
