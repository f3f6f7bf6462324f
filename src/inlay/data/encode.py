"""Texts become token ids, and rows become batches: what the training loop and the engine feed the backbone.

Rows are never padded here. An epoch's batches are a pure function of lengths, batch size, seed and epoch, so a resumed
run needs no stored data order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

CHUNK_ROWS = 2000


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids of windows, without padding. A row is one window, or several that lie together."""

    ids: list[np.ndarray]  # int32
    segments: list[np.ndarray] | None  # int32, as long as the ids; None where the tokenizer has none
    lengths: np.ndarray  # int64
    num_truncated: int
    owners: np.ndarray  # int64, the row each window is of
    places: list[np.ndarray] | None = None
    """int32 [T, 2]: where in its text each token's part begins and ends, -1 where it stands for none; None: unasked"""
    words: list[tuple[tuple[int, int], ...]] | None = None
    """of each row, where the tokens stand for words"""
    num_lost: int = 0
    """words beyond the last token"""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        return int(self.owners[-1]) + 1 if len(self.owners) else 0

    def with_places(self, places: list[np.ndarray], words: list[tuple[tuple[int, int], ...]], num_lost: int) -> Encoded:
        """The same windows, whose tokens stand for words."""
        return replace(self, places=places, words=words, num_lost=num_lost)

    def windows_of_rows(self) -> list[range]:
        """The windows of each row."""
        edges = np.searchsorted(self.owners, np.arange(self.num_rows + 1))
        return [range(first, last) for first, last in itertools.pairwise(edges.tolist())]

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """The ids and segments of each row."""
        for row, ids in enumerate(self.ids):
            yield ids, None if self.segments is None else self.segments[row]


@dataclass(frozen=True)
class Example:
    """An encoded row as people check it."""

    tokens: list[str]
    ids: list[int]
    segments: list[int] | None
    label: str | float | list[str] | None

    def to_json(self) -> dict[str, Any]:
        """The example as plain data."""
        return asdict(self)


def encode(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int,
    *,
    with_offsets: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Encoded:
    """Token ids of texts or pairs with a fast Hugging Face tokenizer; the longer of a pair is cut first.

    `with_offsets` keeps where each token stands in the (single) text; special tokens stand nowhere, from 0 to 0.
    `progress` is called with the number of rows done after each chunk.
    """
    ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    places: list[np.ndarray] = []
    num_truncated = 0
    for start in range(0, len(texts), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        batch = tokenizer(
            list(texts[chunk]),
            None if pairs is None else list(pairs[chunk]),
            truncation="longest_first",
            max_length=max_length,
            padding=False,
            return_attention_mask=False,
        )
        ids += [np.array(row, dtype=np.int32) for row in batch["input_ids"]]
        segments += [np.array(row, dtype=np.int32) for row in batch.get("token_type_ids", ())]
        num_truncated += sum(bool(encoding.overflowing) for encoding in batch.encodings)
        if with_offsets:
            places += [np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2) for encoding in batch.encodings]
        if progress is not None:
            progress(len(ids))
    lengths = np.array([len(row) for row in ids], dtype=np.int64)
    owners = np.arange(len(ids), dtype=np.int64)
    return Encoded(ids, segments or None, lengths, num_truncated, owners, places if with_offsets else None)


def describe(
    tokenizer: Any, encoded: Encoded, targets: np.ndarray | None, labels: Sequence[str], num_rows: int = 3
) -> list[Example]:
    """The first rows as people check them: tokens, ids, segments and the label by name."""
    return [
        Example(
            tokens=tokenizer.convert_ids_to_tokens(encoded.ids[row].tolist()),
            ids=encoded.ids[row].tolist(),
            segments=None if encoded.segments is None else encoded.segments[row].tolist(),
            label=None if targets is None else _name_target(targets[encoded.owners[row]], labels),
        )
        for row in range(min(num_rows, len(encoded)))
    ]


def _name_target(target: Any, labels: Sequence[str]) -> str | float | list[str]:
    if isinstance(target, tuple):  # tagged words, or answers
        return [labels[item[2]] if len(item) == 3 else item[1] for item in target]
    if not labels:
        return float(target)
    if np.ndim(target):
        return [label for label, applies in zip(labels, target, strict=True) if applies]
    return labels[int(target)]


def epoch_batches(lengths: np.ndarray, batch_size: int, seed: int, epoch: int, *, bucket: int = 4) -> list[np.ndarray]:
    """The rows of each batch of an epoch: every row once; `bucket` batches at a time share their rows by length."""
    num_rows = len(lengths)
    shuffled = np.random.default_rng([seed % 2**63, epoch]).permutation(num_rows)
    batches: list[np.ndarray] = []
    window = batch_size * bucket
    for start in range(0, num_rows, window):
        rows = shuffled[start : start + window]
        rows = rows[np.argsort(np.asarray(lengths)[rows], kind="stable")]  # stable: equal lengths stay shuffled
        batches += [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
    # Sorted windows would feed short texts first, so the batches are shuffled too, but in an order all seeds share:
    # batch k of a window holds about the same quantile of lengths for every seed, so runs of one task trained together
    # meet equally long batches at the same step and their common batch has little padding. Which rows a batch holds
    # still differs from seed to seed.
    order = np.random.default_rng([epoch, len(batches)]).permutation(len(batches))
    return [batches[index] for index in order]
