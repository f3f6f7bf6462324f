"""Windows: rows as token ids of limited length, and targets aligned with the tokens.

A text or pair is one window, truncated if it is too long (if the texts of a pair are read apart, each by itself); a
question with a long context is several windows, which overlap. For heads that read tokens, a window has the part of the
text that each token stands for (its place), so that an answer can be cut from the text and a target assigned to the
right token. A kind of task names its layout; no code outside this file knows how rows are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from inlay.data.encode import (
    Encoded,
    Truncation,
    WindowBuilder,
    chunks,
    encode,
    encode_apart,
    flatten,
    to_offsets,
    tokenize,
)
from inlay.data.kinds import KINDS
from inlay.data.tags import Word, split_words
from inlay.data.targets import IGNORED
from inlay.data.tasks import Split

MAX_QUESTION = 64  # most tokens of a question, as published for SQuAD; the rest of a window is context


Progress = Callable[[int], None]
"""Called with the number of rows done."""


@dataclass(frozen=True)
class Reading:
    """The settings by which a task's rows become windows."""

    kind: str
    max_length: int
    stride: int = 128
    """tokens that neighbouring windows of one context share"""
    prompt: str = ""
    """the text before every text or pair that is read whole"""
    pairs: str = "joined"
    """how a pair is read: `joined` as one text, or `towers`, each text by itself"""


@dataclass(frozen=True)
class Layout:
    """An entry of the table: how rows are encoded, and how their targets are aligned with the tokens."""

    encode: Callable[[Any, Split, Reading, Progress | None], Encoded]
    align: Callable[[Encoded, np.ndarray], list[np.ndarray]] | None = None
    """aligns targets with tokens; None: a target belongs to the whole row"""
    overlaps: bool = False
    """whether a long row becomes several windows"""
    words: Callable[[Split], list[tuple[Word, ...]]] | None = None
    """returns the words of every row that tokens stand for; None: tokens do not stand for words"""


def find_layout(kind: str) -> Layout:
    """Return the layout of the rows of a kind."""
    return LAYOUTS[KINDS[kind].layout]


def encode_split(tokenizer: Any, split: Split, reading: Reading, progress: Progress | None = None) -> Encoded:
    """Encode a split's rows as windows. Words to tag are those of its targets, or else those of the text."""
    return find_layout(reading.kind).encode(tokenizer, split, reading, progress)


def align_targets(kind: str, encoded: Encoded, targets: np.ndarray) -> list[np.ndarray] | None:
    """Align targets with the tokens of every window, for kinds whose heads read tokens.

    tag: int64 [T], the label of a word at its first piece. span: int64 [T, 2] for start and end: 1 at those of the
    answer, 0 at the other tokens of the context; a window without the answer has both at its first token. `IGNORED`
    everywhere else.
    """
    align = find_layout(kind).align
    return None if align is None else align(encoded, targets)


def _encode_whole(tokenizer: Any, split: Split, reading: Reading, progress: Progress | None) -> Encoded:
    if reading.pairs == "towers":
        assert split.pairs is not None, "towers are for pairs"
        return encode_apart(tokenizer, split.texts, split.pairs, reading.max_length, progress=progress)
    texts = [reading.prompt + text for text in split.texts] if reading.prompt else split.texts
    return encode(tokenizer, texts, split.pairs, reading.max_length, progress=progress)


def _encode_words(tokenizer: Any, split: Split, reading: Reading, progress: Progress | None) -> Encoded:
    """Encode each text as one window; the place of a word's first piece is the whole word."""
    encoded = encode(tokenizer, split.texts, None, reading.max_length, with_offsets=True, progress=progress)
    assert encoded.flat_places is not None
    words = find_words(split)
    places = _place_words(words, encoded.flat_places, np.repeat(encoded.owners, encoded.lengths))
    num_placed = int((places[:, 0] >= 0).sum())
    return replace(
        encoded,
        flat_places=places,
        flat_words=flatten(span for own in words for span in own).reshape(-1, 2),
        word_offsets=to_offsets([len(own) for own in words]),
        num_lost=sum(map(len, words)) - num_placed,
    )


def find_words(split: Split) -> list[tuple[Word, ...]]:
    """Return the words to tag of every row: those of the targets, or else those of the text."""
    if split.targets is None:
        return [split_words(text) for text in split.texts]
    return [tuple((start, end) for start, end, _ in target) for target in split.targets]


def _place_words(words: Sequence[Sequence[Word]], offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return places [N, 2]: the word's place for the first piece of each word, -1 for all other tokens.

    `offsets` and `rows` are the place and row of every token. All rows are done at once: a character's row and position
    become one number, which grows from row to row.
    """
    places = np.full(offsets.shape, -1, dtype=np.int32)
    tokens = np.flatnonzero(offsets[:, 1] > offsets[:, 0])
    spans = np.array([span for own in words for span in own], dtype=np.int64).reshape(-1, 2)
    if not len(tokens) or not len(spans):
        return places
    row_length = 1 + max(int(offsets.max()), int(spans.max()))
    shifts = row_length * np.repeat(np.arange(len(words)), [len(own) for own in words])
    # By a piece's last character: byte-level pieces may include the blank before a word.
    last = offsets[tokens, 1] - 1 + row_length * rows[tokens]
    word = np.searchsorted(spans[:, 0] + shifts, last, side="right") - 1
    is_inside = (word >= 0) & (last < (spans[:, 1] + shifts)[word])
    tokens, word = tokens[is_inside], word[is_inside]
    is_first = word > np.concatenate([[-1], np.maximum.accumulate(word)[:-1]])
    places[tokens[is_first]] = spans[word[is_first]]
    return places


def _align_tags(encoded: Encoded, targets: np.ndarray) -> list[np.ndarray]:
    assert encoded.places is not None
    aligned = []
    for owner, places in zip(encoded.owners, encoded.places, strict=True):
        labels = {start: label for start, _, label in targets[owner]}
        aligned.append(np.array([labels.get(start, IGNORED) for start in places[:, 0].tolist()], dtype=np.int64))
    return aligned


def _encode_contexts(tokenizer: Any, split: Split, reading: Reading, progress: Progress | None) -> Encoded:
    """Encode overlapping windows of a question and a part of its context; only the context's tokens have places."""
    assert split.pairs is not None
    longest = min(MAX_QUESTION, reading.max_length // 2)
    # A window must have more room than it shares with the next one; a pair has at most 4 special tokens.
    stride = min(reading.stride, max(0, (reading.max_length - longest - 4) // 2))
    cut = Truncation(reading.max_length, "only_second", stride)
    builder = WindowBuilder(tokenizer)
    owners: list[int] = []
    is_context: list[np.ndarray] = []
    for chunk in chunks(split.texts, split.pairs, progress):
        questions = _cut_texts(tokenizer, split.texts[chunk], longest)
        rows = tokenize(tokenizer, questions, split.pairs[chunk], cut, with_offsets=True)
        windows = [[row, *row.overflowing] for row in rows]
        owners += [row for row, own in enumerate(windows, chunk.start) for _ in own]
        flat = [window for own in windows for window in own]
        builder.add(flat, with_places=True)
        is_context += [np.array(window.sequence_ids, dtype=object) == 1 for window in flat]
    encoded = builder.finish(owners, 0)
    assert encoded.flat_places is not None
    stands = np.concatenate(is_context) & (encoded.flat_places[:, 1] > encoded.flat_places[:, 0])
    return replace(encoded, flat_places=np.where(stands[:, None], encoded.flat_places, np.int32(-1)))


def _cut_texts(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Cut texts to this number of tokens."""
    cut = list(texts)
    # Only a text with more bytes than that can have more tokens.
    long = [row for row, text in enumerate(texts) if len(text.encode()) > max_tokens]
    if long:
        encodings = tokenize(tokenizer, [texts[row] for row in long], None, None, with_offsets=True)
        for row, encoding in zip(long, encodings, strict=True):
            if len(encoding) > max_tokens:
                cut[row] = texts[row][: encoding.offsets[max_tokens - 1][1]]
    return cut


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
    """Return the first and last token of the first gold answer; twice the window's first token if it is not whole."""
    if not golds:
        return 0, 0
    start, text = golds[0]
    start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    inside = np.flatnonzero((places[:, 0] >= 0) & (places[:, 1] > start) & (places[:, 0] < end))
    if not len(inside) or places[inside[0], 0] > start or places[inside[-1], 1] < end:
        return 0, 0
    return int(inside[0]), int(inside[-1])


PAIR_WORDS = ("sentence1: ", "sentence2: ")
"""What is written before each text of a pair that is read as one text, as published for T5."""


def _encode_joined(tokenizer: Any, split: Split, reading: Reading, progress: Progress | None) -> Encoded:
    """Encode pairs as one text, for text-to-text backbones, whose tokenizers end every text with a special token."""
    if split.pairs is None:
        return _encode_whole(tokenizer, split, reading, progress)
    first, second = PAIR_WORDS
    builder, cut, num_truncated = WindowBuilder(tokenizer), Truncation(reading.max_length), 0
    for chunk in chunks(split.texts, split.pairs, progress):
        texts = [reading.prompt + first + text for text in split.texts[chunk]]
        pairs = [second + pair for pair in split.pairs[chunk]]
        rows = tokenize(tokenizer, texts, pairs, cut, with_offsets=True)
        builder.add([_WithoutMiddle(row) for row in rows])
        num_truncated += sum(len(row) == reading.max_length and bool(row.overflowing) for row in rows)
    return builder.finish(np.arange(len(split)), num_truncated)


class _WithoutMiddle:
    """The encoding of a pair without the special token that ends its first text."""

    def __init__(self, encoding: Any) -> None:
        owners = encoding.sequence_ids
        last = max((place for place, owner in enumerate(owners) if owner is not None), default=-1)
        self.ids = [token for place, token in enumerate(encoding.ids) if owners[place] is not None or place > last]
        self.type_ids = [0] * len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


LAYOUTS: dict[str, Layout] = {
    "whole": Layout(_encode_whole),
    "joined": Layout(_encode_joined),
    "words": Layout(_encode_words, _align_tags, words=find_words),
    "contexts": Layout(_encode_contexts, _align_answers, overlaps=True),
}
