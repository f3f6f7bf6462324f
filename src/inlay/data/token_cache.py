"""Texts tokenised once: a set that this process or an earlier one has read is not read again.

What is remembered is named by everything it depends on: the texts, the words to tag in them, the tokenizer and how it
is asked. So nothing goes stale, and whoever needs a set's windows (training, scoring, plans) may simply ask for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from inlay.data.array_cache import ArrayCache, open_cache
from inlay.data.encode import Encoded, flatten
from inlay.data.tasks import Split
from inlay.data.windows import Progress, Reading, encode_split, find_layout

SMALL_CHARACTERS = 100_000
"""Sets with fewer characters are not worth a file: they are tokenised in a fraction of a second."""
MEMORY_BYTES = 256 << 20
_LATER = {"prompt": "", "pairs": "joined"}  # settings of a reading that came when sets were kept already
_FORMAT = 1  # to be raised with every change of what a text set's windows are


class Memory:
    """The sets of this process that were asked for last, up to a number of bytes."""

    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self._limit_bytes, self._num_bytes = limit_bytes, 0
        self._known: OrderedDict[str, Encoded] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Encoded | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def put(self, key: str, encoded: Encoded) -> None:
        with self._lock:
            if key in self._known:
                return
            self._known[key] = encoded
            self._num_bytes += encoded.num_bytes
            while self._num_bytes > self._limit_bytes:
                self._num_bytes -= self._known.popitem(last=False)[1].num_bytes


_MEMORY = Memory()
_IDENTITIES: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def encode_cached(tokenizer: Any, split: Split, reading: Reading, progress: Progress | None = None) -> Encoded:
    """What `encode_split` gives, remembered in this process and, where a set is large, in the user's cache.

    `progress` hears nothing of a set that is known.
    """
    key = _name_set(tokenizer, split, reading)
    encoded = _MEMORY.get(key)
    if encoded is None:
        size = sum(map(len, split.texts)) + sum(map(len, split.pairs or ()))
        cache = open_tokens() if size >= SMALL_CHARACTERS else None
        encoded = None if cache is None else _read(cache, key)
        if encoded is None:
            encoded = encode_split(tokenizer, split, reading, progress)
            if cache is not None:
                counts = np.array([encoded.num_truncated, encoded.num_lost], dtype=np.int64)
                cache.write(key, {**encoded.arrays(), "counts": counts})
        _MEMORY.put(key, encoded)
    return encoded


def open_tokens() -> ArrayCache:
    """The user's cache of tokenised texts."""
    return open_cache("tokens")


def _read(cache: ArrayCache, key: str) -> Encoded | None:
    arrays = cache.read(key)
    if arrays is None:
        return None
    num_truncated, num_lost = arrays.pop("counts").tolist()
    fields: dict[str, Any] = {"flat_segments": None, **arrays}
    return Encoded(**fields, num_truncated=num_truncated, num_lost=num_lost)


def _name_set(tokenizer: Any, split: Split, reading: Reading) -> str:
    """A sha256 of everything that decides a set's windows."""
    words = find_layout(reading.kind).words
    asked = {
        "format": _FORMAT,
        # What came later: as it was before, what earlier processes kept is still what is asked for.
        "reading": {key: value for key, value in dataclasses.asdict(reading).items() if _LATER.get(key, ...) != value},
        "tokenizer": _identify(tokenizer),
        "tokenizers": importlib.metadata.version("tokenizers"),
        "inputs": list(tokenizer.model_input_names),
        "cut_side": tokenizer.truncation_side,
        "splits_special": bool(tokenizer.split_special_tokens),
        "columns": [split.texts is not None, split.pairs is not None, words is not None],
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    for texts in (split.texts, split.pairs):
        if texts is not None:
            _add_texts(digest, texts)
    for spans in () if words is None else words(split):
        digest.update(f"{len(spans)}:".encode() + flatten(spans).tobytes())
    return digest.hexdigest()


def _add_texts(digest: Any, texts: Sequence[str]) -> None:
    contents = [text.encode("utf8", "surrogatepass") for text in texts]
    lengths = np.array([len(contents), *map(len, contents)], dtype=np.int64)
    digest.update(lengths.tobytes())  # or moving a character from one text to the next would change nothing
    digest.update(b"".join(contents))


def _identify(tokenizer: Any) -> str:
    """A sha256 of all a tokenizer does to a text. Taken once: tokens may be added to a tokenizer, no more."""
    backend = tokenizer.backend_tokenizer
    num_tokens = int(backend.get_vocab_size())
    known = _IDENTITIES.get(tokenizer)
    if known is None or known[0] != num_tokens:
        parts = json.loads(backend.to_str())
        del parts["truncation"], parts["padding"]  # as the last call left them
        known = num_tokens, hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        _IDENTITIES[tokenizer] = known
    return known[1]
