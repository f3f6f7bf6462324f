"""Requests before they are answered: checked, then tokenised. This needs no slot, so a server does it before queueing.

Requests that read the same text in the same way are tokenised once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from inlay.data import Encoded, Reading, Split, encode_split
from inlay.errors import InlayError
from inlay.model import Row, make_rows
from inlay.serving.answers import Answer, Request, Resolved

Window = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""ids, segments if the tokenizer has them, and the ids of a second text that is encoded separately"""


@dataclass(frozen=True, eq=False)
class CheckedRequest:
    """A request with the version that will answer it, and the way that version reads."""

    request: Request
    found: Resolved
    reading: Reading
    scope: str = ""
    """Requests share work only with others of the same scope, such as a tenant: timing could reveal a text."""
    share: float = 0.0
    """the share of the layers that other tasks compute alike for the same text"""

    def fail(self, error: InlayError) -> Answer:
        """Return the answer of a request that failed."""
        return Answer(self.request.task, error=error)


@dataclass(frozen=True, eq=False)
class EncodedText:
    """The tokens of a text (or pair), window by window, and where words and answers are in it."""

    windows: tuple[Window, ...]
    places: tuple[np.ndarray, ...]
    words: tuple[tuple[int, int], ...]
    text: str
    """the text that answers are cut from"""

    @cached_property
    def num_tokens(self) -> int:
        """The tokens of all windows."""
        return sum(len(ids) + (0 if other is None else len(other)) for ids, _, other in self.windows)

    @cached_property
    def keys(self) -> tuple[Hashable, ...]:
        """The tokens of each window as bytes: equal for texts that are encoded alike."""
        return tuple(tuple(None if array is None else array.tobytes() for array in window) for window in self.windows)


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """A request with its tokens: to be answered it needs only its version in a slot."""

    checked: CheckedRequest
    tokens: EncodedText

    @property
    def digest(self) -> str:
        """The digest of the version that will answer."""
        return self.checked.found.version.digest

    @property
    def keys(self) -> list[Hashable]:
        """A key for each of its windows: equal for windows of requests that may share the work on them."""
        return [(self.checked.scope, key) for key in self.tokens.keys]

    def rows(self, slot: int) -> list[Row]:
        """Return its windows as rows that go through a slot."""
        return make_rows(self.tokens.windows, slot)


def encode_requests(tokenizer: Any, group: Sequence[CheckedRequest]) -> list[EncodedRequest]:
    """Tokenise checked requests; a text is tokenised once for all requests that read it in the same way."""
    # 1. group the texts by how they are read
    alike: dict[tuple[Reading, bool], dict[tuple[str, str], list[int]]] = {}
    for index, item in enumerate(group):
        request = item.request
        texts = alike.setdefault((item.reading, request.pair is not None), {})
        texts.setdefault((request.text, request.pair or ""), []).append(index)
    # 2. tokenise each group at once
    found: dict[int, EncodedRequest] = {}
    for (reading, has_pairs), texts in alike.items():
        singles, seconds = [text for text, _ in texts], [pair for _, pair in texts]
        encoded = encode_split(tokenizer, Split(singles, seconds if has_pairs else None, None, []), reading)
        for tokens, indices in zip(_split(encoded, seconds if has_pairs else singles), texts.values(), strict=True):
            found |= {index: EncodedRequest(group[index], tokens) for index in indices}
    return [found[index] for index in range(len(group))]


def _split(encoded: Encoded, texts: Sequence[str]) -> list[EncodedText]:
    """Split an encoded set into its rows."""
    windows = list(encoded)
    places = None if encoded.places is None else list(encoded.places)
    words = encoded.words
    return [
        EncodedText(
            tuple(windows[own.start : own.stop]),
            () if places is None else tuple(places[own.start : own.stop]),
            () if words is None else words[row],
            text,
        )
        for row, (own, text) in enumerate(zip(encoded.windows_of_rows(), texts, strict=True))
    ]
