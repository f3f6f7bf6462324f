"""Dev and test texts that are nearly the same as a training text.

A text is the set of its runs of three words (of one character, in scripts without blanks), in lower case and without
punctuation; two texts are near if the Jaccard similarity of their sets is at least 0.8. A shorter text is one run. Of
each text only the rarest runs are looked up: a near text shares at least one of them, so nothing is missed, and what
all texts have in common (a greeting, a footer) costs nothing. Numbers count as words: texts about amounts may differ in
them alone.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from inlay.data.encode import Pieces
from inlay.data.tags import UNSPACED

LEAST = 0.8
"""least Jaccard similarity of the runs of near texts"""
MOST_WORDS = 200  # words looked at in each text
MOST_OTHERS = 2_000  # dev or test texts looked at, spread over all
MOST_CHARACTERS = 12_000_000  # characters of the training texts looked at, spread over all: about a second of work
MOST_SHARED = 20  # training texts that are compared because of one run
_WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")


Words = defaultdict[str, int]  # word -> its number


class NearDuplicates(NamedTuple):
    """The near duplicates: pairs of (row of the others, row of training), and how many texts were looked at."""

    pairs: list[tuple[int, int]]
    num_others: int
    num_train: int


def find_near(train: Sequence[Sequence[str]], others: Sequence[Sequence[str]]) -> NearDuplicates:
    """Find the others that are near a training text, each with one such text. A row has one text, or a pair's two.

    Of a pair, both texts must be near.
    """
    size = sum(len(text) for texts in train for text in texts)
    trained = _spread(len(train), max(1, int(len(train) * min(1.0, MOST_CHARACTERS / max(size, 1)))))
    rows = _spread(len(others), MOST_OTHERS)
    # 1. the runs of every text; a pair is looked up by the runs of both its texts
    known: Words = defaultdict(itertools.count().__next__)
    ours = _find_runs([" ".join(others[row]) for row in rows], known)
    theirs = _find_runs([" ".join(train[row]) for row in trained], known)
    # 2. an index of the training texts by run
    order = np.argsort(theirs.flat, kind="stable")
    hashes, owners = theirs.flat[order], np.repeat(np.arange(len(theirs)), np.diff(theirs.offsets))[order]
    low, high = (np.searchsorted(hashes, ours.flat, side) for side in ("left", "right"))
    pairs = []
    for place, row in enumerate(rows.tolist()):
        span = slice(ours.offsets[place], ours.offsets[place + 1])
        if span.start == span.stop:
            continue
        # 3. look up the rarest runs of each text: as many as a near text cannot lack all of
        num_runs = span.stop - span.start
        counts = high[span] - low[span]
        rarest = np.argsort(counts, kind="stable")[: num_runs - int(np.ceil(LEAST * num_runs)) + 1] + span.start
        found = [owners[low[run] : min(high[run], low[run] + MOST_SHARED)] for run in rarest]
        # 4. compare whole texts
        match = _find_match(ours[place], theirs, np.unique(np.concatenate(found)))
        if match is None:
            continue
        near = int(trained[match])
        if all(_are_near(one, other, known) for one, other in zip(others[row], train[near], strict=True)):
            pairs.append((row, near))
    return NearDuplicates(pairs, len(rows), len(trained))


def _spread(size: int, most: int) -> np.ndarray:
    """Return at most `most` positions in a list of `size` items, evenly spread."""
    return np.arange(size) if size <= most else np.unique(np.linspace(0, size - 1, most).astype(np.int64))


def _find_runs(texts: Sequence[str], known: Words) -> Pieces:
    """Return the set of runs of every text, sorted, as int64 hashes; `known` numbers the words so far."""
    words: list[int] = []
    lengths = []
    for text in texts:
        own = _WORD.findall(text.casefold())[:MOST_WORDS]
        if own:  # a text of punctuation only is near no other
            own += [""] * (3 - len(own))  # a short text is one run
        words += map(known.__getitem__, own)
        lengths.append(len(own))
    numbers = np.array(words, dtype=np.uint64)
    owners = np.repeat(np.arange(len(texts)), lengths)
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) ^ numbers >> np.uint64(7)
    runs = (mixed[:-2] * np.uint64(3) + mixed[1:-1]) * np.uint64(0xC2B2AE3D27D4EB4F) + mixed[2:]
    is_whole = owners[:-2] == owners[2:]
    runs, owners = runs[is_whole].view(np.int64), owners[:-2][is_whole]
    order = np.lexsort((runs, owners))
    runs, owners = runs[order], owners[order]
    is_first = np.ones(len(runs), dtype=bool)
    is_first[1:] = (runs[1:] != runs[:-1]) | (owners[1:] != owners[:-1])
    runs, owners = runs[is_first], owners[is_first]
    return Pieces(runs, np.searchsorted(owners, np.arange(len(texts) + 1)))


def _find_match(own: np.ndarray, theirs: Pieces, tried: np.ndarray) -> int | None:
    """Return the nearest of some training texts, by number; None if none is near."""
    best, match = LEAST, None
    for row in tried.tolist():
        other = theirs[row]
        if min(len(own), len(other)) < best * max(len(own), len(other)):
            continue
        num_both = len(np.intersect1d(own, other, assume_unique=True))
        jaccard = num_both / (len(own) + len(other) - num_both)
        if jaccard >= best and (match is None or jaccard > best):
            best, match = jaccard, row
    return match


def _are_near(one: str, other: str, known: Words) -> bool:
    """Return whether two texts are near."""
    first, second = _find_runs([one, other], known)
    num_both = len(np.intersect1d(first, second, assume_unique=True))
    return num_both >= LEAST * (len(first) + len(second) - num_both)
