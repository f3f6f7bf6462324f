"""Tokenisation of texts, and batches of rows, for the training loop and the engine.

Rows are never padded here: all tokens of a set of texts lie in one array, so that a batch is one gather and a set is
one file. An epoch's batches are a pure function of lengths, batch size, seed and epoch, so a resumed run needs no
stored data order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from inlay.locks import lock_of

CHUNK_ROWS = 500
"""Rows given to the tokenizer at once: enough for all its threads, few enough that its objects stay in the cache."""

CHUNK_LETTERS = 2_000_000
"""most characters given to the tokenizer at once, where rows are long: its objects are a hundred times as large"""


class Pieces(Sequence[np.ndarray]):
    """A flat array as a sequence of pieces, which are views of it."""

    def __init__(self, flat: np.ndarray, offsets: np.ndarray) -> None:
        self.flat, self.offsets = flat, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]  # nothing asks for a slice
        if not 0 <= index < len(self):
            raise IndexError(f"piece {index} of {len(self)}")
        return self.flat[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        edges = self.offsets.tolist()  # Python's own integers slice faster
        return (self.flat[start:stop] for start, stop in itertools.pairwise(edges))


@dataclass(frozen=True)
class Gathered:
    """The tokens of some windows, laid end to end."""

    ids: np.ndarray  # int32 [N]
    segments: np.ndarray | None  # int32 [N]; None where the tokenizer has none
    lengths: np.ndarray  # int64, of each window


WindowTokens = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""ids, segments if the tokenizer has them, and the ids of the second text if the texts of a pair are read apart"""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids of windows, without padding. A row is one window, or several that follow each other.

    All arrays are flat and read-only: the same set may be in use in several places, and may be a file mapped into
    memory. `ids`, `segments` and `places` give the windows one by one. Where the texts of pairs are read apart, a
    window has the tokens of both end to end, and `firsts` says how many belong to the first text.
    """

    flat_ids: np.ndarray
    """int32 [N]"""
    flat_segments: np.ndarray | None
    """int32 [N]; None where the tokenizer has none"""
    offsets: np.ndarray
    """int64 [windows + 1]: the tokens of window w are those from offsets[w] to offsets[w + 1]"""
    owners: np.ndarray
    """int64, the row of each window"""
    num_truncated: int = 0
    flat_places: np.ndarray | None = None
    """int32 [N, 2]: start and end in the text of what each token stands for, -1 if nothing; None: not computed"""
    flat_words: np.ndarray | None = None
    """int32 [W, 2]: start and end of each word of each row, where tokens stand for words"""
    word_offsets: np.ndarray | None = None
    """int64 [rows + 1]"""
    num_lost: int = 0
    """words cut off with the end of their texts"""
    firsts: np.ndarray | None = None
    """int64, how many tokens of each window belong to its first text; None: windows have one text"""

    def __post_init__(self) -> None:
        for array in self.arrays().values():
            array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[WindowTokens]:
        none: Iterable[None] = itertools.repeat(None)
        if self.firsts is None:
            return zip(self.ids, none if self.segments is None else self.segments, none, strict=False)
        return (self.window(number) for number in range(len(self)))

    def window(self, number: int) -> WindowTokens:
        """Return the ids and segments of one window, and the ids of its second text if it has two."""
        ids, segments = self.ids[number], None if self.segments is None else self.segments[number]
        if self.firsts is None:
            return ids, segments, None
        first = int(self.firsts[number])
        return ids[:first], None if segments is None else segments[:first], ids[first:]

    @property
    def ids(self) -> Pieces:
        return Pieces(self.flat_ids, self.offsets)

    @property
    def segments(self) -> Pieces | None:
        return None if self.flat_segments is None else Pieces(self.flat_segments, self.offsets)

    @property
    def places(self) -> Pieces | None:
        return None if self.flat_places is None else Pieces(self.flat_places, self.offsets)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64, the tokens of each window."""
        return np.diff(self.offsets)

    @cached_property
    def words(self) -> list[tuple[tuple[int, int], ...]] | None:
        """The words of each row, where tokens stand for words."""
        if self.flat_words is None or self.word_offsets is None:
            return None
        spans = list(map(tuple, self.flat_words.tolist()))
        return [tuple(spans[start:stop]) for start, stop in itertools.pairwise(self.word_offsets.tolist())]

    @property
    def num_rows(self) -> int:
        return int(self.owners[-1]) + 1 if len(self.owners) else 0

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by field, without those that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    def gather(self, windows: np.ndarray) -> Gathered:
        """Lay the tokens of some windows end to end, in the given order, without a loop over the windows."""
        starts = self.offsets[windows]
        lengths = self.offsets[np.add(windows, 1)] - starts
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1]) if len(ends) else 0
        # Token k of the result is at k minus its window's start in the result, plus the window's start here.
        tokens = np.arange(num_tokens) + np.repeat(starts - ends + lengths, lengths)
        segments = None if self.flat_segments is None else self.flat_segments[tokens]
        return Gathered(self.flat_ids[tokens], segments, lengths)

    def windows_of_rows(self) -> list[range]:
        """Return the windows of each row."""
        edges = np.searchsorted(self.owners, np.arange(self.num_rows + 1))
        return [range(first, last) for first, last in itertools.pairwise(edges.tolist())]


@dataclass(frozen=True)
class Example:
    """An encoded row in readable form."""

    tokens: list[str]
    ids: list[int]
    segments: list[int] | None
    label: str | float | list[str] | None

    def to_json(self) -> dict[str, Any]:
        """Return the example as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Truncation:
    """The limits of a row: how many tokens it may have, and which text is cut."""

    max_length: int
    strategy: str = "longest_first"
    stride: int = 0  # tokens that the parts of a cut row share


def tokenize(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    cut: Truncation | None,
    *,
    with_offsets: bool = False,
) -> list[Any]:
    """Tokenize rows with a fast Hugging Face tokenizer; special tokens are added only where rows are cut.

    Rows go directly to the tokenizers library, which uses its own threads; transformers would make lists and
    dictionaries of every row first. The library's threads are on unless the user forbids them by
    $TOKENIZERS_PARALLELISM. It is not set here: only while it is unset does the library turn its threads off in a
    forked child, where they no longer exist and would be waited for forever.

    The limits are settings of the library's tokenizer, which other threads share. So they are set under the
    tokenizer's lock, for this call alone, and taken back.
    """
    backend = tokenizer.backend_tokenizer
    rows = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
    run = backend.encode_batch if with_offsets else backend.encode_batch_fast
    with lock_of(tokenizer):
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        if cut is not None:
            side = tokenizer.truncation_side
            backend.enable_truncation(cut.max_length, stride=cut.stride, strategy=cut.strategy, direction=side)
        try:
            encodings: list[Any] = run(rows, add_special_tokens=cut is not None)
        finally:
            backend.no_truncation()
    return encodings


class WindowBuilder:
    """A collector of encodings, which are laid end to end as one `Encoded`."""

    def __init__(self, tokenizer: Any) -> None:
        self._has_segments = "token_type_ids" in tokenizer.model_input_names
        self._ids: list[np.ndarray] = []
        self._segments: list[np.ndarray] = []
        self._places: list[np.ndarray] = []
        self._lengths: list[int] = []

    def add(self, encodings: Sequence[Any], *, with_places: bool = False) -> None:
        """Add more windows; `with_places` keeps the place of each token in its text."""
        self._lengths += map(len, encodings)
        self._ids.append(flatten(encoding.ids for encoding in encodings))
        if self._has_segments:
            self._segments.append(flatten(encoding.type_ids for encoding in encodings))
        if with_places:
            places = flatten(place for encoding in encodings for place in encoding.offsets)
            self._places.append(places.reshape(-1, 2))

    def finish(self, owners: Sequence[int] | np.ndarray, num_truncated: int) -> Encoded:
        """Return all windows added so far."""
        return Encoded(
            np.concatenate([np.zeros(0, np.int32), *self._ids]),
            np.concatenate(self._segments) if self._segments else None,
            to_offsets(self._lengths),
            np.asarray(owners, dtype=np.int64),
            num_truncated,
            np.concatenate(self._places) if self._places else None,
        )


def flatten(rows: Iterable[Iterable[int]]) -> np.ndarray:
    """Join rows of numbers into one int32 array."""
    return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32)


def to_offsets(lengths: Sequence[int]) -> np.ndarray:
    """Return the offsets of pieces of these lengths laid end to end: int64, one more than there are pieces."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def chunks(
    texts: Sequence[str], pairs: Sequence[str] | None, progress: Callable[[int], None] | None
) -> Iterator[slice]:
    """Yield the rows of each call of the tokenizer; after each, `progress` is given the number of rows done."""
    start = 0
    while start < len(texts):
        stop = min(start + CHUNK_ROWS, len(texts))
        lengths = [len(texts[row]) + (0 if pairs is None else len(pairs[row])) for row in range(start, stop)]
        while stop > start + 1 and sum(lengths) > CHUNK_LETTERS:
            stop = start + (stop - start + 1) // 2
            del lengths[stop - start :]
        yield slice(start, stop)
        if progress is not None:
            progress(stop)
        start = stop


def encode(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    *,
    with_offsets: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Encoded:
    """Encode texts or pairs with a fast Hugging Face tokenizer; of a pair the longer text is cut first.

    `with_offsets` keeps the place of each token in the (single) text; special tokens have the place 0 to 0.
    """
    builder, cut, num_truncated = WindowBuilder(tokenizer), Truncation(max_length), 0
    for chunk in chunks(texts, pairs, progress):
        own = None if pairs is None else pairs[chunk]
        encodings = tokenize(tokenizer, texts[chunk], own, cut, with_offsets=with_offsets)
        builder.add(encodings, with_places=with_offsets)
        # Reading `overflowing` copies it, so it is read for full rows only.
        num_truncated += sum(len(row) == max_length and bool(row.overflowing) for row in encodings)
    return builder.finish(np.arange(len(texts)), num_truncated)


def encode_apart(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str],
    max_length: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> Encoded:
    """Encode pairs whose texts are read apart: each text is encoded, and cut, like a single text."""
    builder, cut, num_truncated = WindowBuilder(tokenizer), Truncation(max_length), 0
    firsts: list[int] = []
    lengths: list[int] = []
    for chunk in chunks(texts, pairs, progress):
        sides = [tokenize(tokenizer, side[chunk], None, cut) for side in (texts, pairs)]
        rows = list(zip(*sides, strict=True))
        builder.add([text for row in rows for text in row])
        firsts += [len(first) for first, _ in rows]
        lengths += [len(first) + len(second) for first, second in rows]
        num_truncated += sum(any(len(text) == max_length and text.overflowing for text in row) for row in rows)
    laid = builder.finish(np.arange(len(texts)), num_truncated)
    return replace(laid, offsets=to_offsets(lengths), firsts=np.array(firsts, dtype=np.int64))


def describe(
    tokenizer: Any, encoded: Encoded, targets: np.ndarray | None, labels: Sequence[str], num_rows: int = 3
) -> list[Example]:
    """Describe the first rows in readable form: tokens, ids, segments and the label by name."""
    examples = []
    for row in range(min(num_rows, len(encoded))):
        ids, segments = encoded.ids[row].tolist(), None if encoded.segments is None else encoded.segments[row].tolist()
        label = None if targets is None else _name_target(targets[encoded.owners[row]], labels)
        examples.append(Example(tokenizer.convert_ids_to_tokens(ids), ids, segments, label))
    return examples


def _name_target(target: Any, labels: Sequence[str]) -> str | float | list[str]:
    if isinstance(target, str):
        return target
    if isinstance(target, tuple):  # tagged words, or answers
        return [labels[item[2]] if len(item) == 3 else item[1] for item in target]
    if not labels:
        return float(target)
    if np.ndim(target):
        return [label for label, applies in zip(labels, target, strict=True) if applies]
    return labels[int(target)]


def epoch_batches(lengths: np.ndarray, batch_size: int, seed: int, epoch: int, *, bucket: int = 4) -> list[np.ndarray]:
    """Return the rows of each batch of an epoch, every row once; `bucket` batches at a time are sorted by length."""
    num_rows = len(lengths)
    shuffled = np.random.default_rng([seed % 2**63, epoch]).permutation(num_rows)
    batches: list[np.ndarray] = []
    window = batch_size * bucket
    for start in range(0, num_rows, window):
        rows = shuffled[start : start + window]
        rows = rows[np.argsort(np.asarray(lengths)[rows], kind="stable")]  # stable: equal lengths stay shuffled
        batches += [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
    # Sorted rows would give short texts first, so the batches are shuffled too, but in an order that all seeds share:
    # batch k of a bucket has about the same quantile of lengths for every seed, so runs of one task trained together
    # have equally long batches at the same step, and their common batch has little padding. The rows of a batch still
    # differ from seed to seed.
    order = np.random.default_rng([epoch, len(batches)]).permutation(len(batches))
    return [batches[index] for index in order]
