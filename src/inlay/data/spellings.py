"""Labels that are spellings of one another: `True` and `true`, `spam` and `spam.`.

Two names have the same key if they differ in case, in blanks, in punctuation at the end, in how Unicode writes the same
letters (NFKC), or in `.0` behind a whole number. Nothing is merged unless the user says so.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from inlay.data.kinds import Scheme
from inlay.data.rows import Rows

_END = " .,;:!?…"
_WHOLE = re.compile(r"([+-]?\d+)\.0+")


def spelling_key(name: str) -> str:
    """What all spellings of a label have in common."""
    plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    if whole := _WHOLE.fullmatch(plain):
        return whole[1]
    return plain.rstrip(_END) or plain


def count_names(rows: Rows, scheme: Scheme) -> dict[str, tuple[int, int]]:
    """Label -> how often it stands in the rows, and on which line first; of tags the types of entities."""
    found: dict[str, tuple[int, int]] = {}
    for value, line in zip(rows.labels or (), rows.lines, strict=False):
        for name in scheme.list_names(value):
            name = scheme.targets.split_name(name)[1]
            count, first = found.get(name, (0, line))
            found[name] = (count + 1, first)
    return found


def find_variants(counts: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Names of one key, where there are several: the most frequent first."""
    groups: dict[str, list[str]] = {}
    for name in sorted(counts, key=lambda name: (-counts[name][0], name)):
        groups.setdefault(spelling_key(name), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def find_spellings(names: Iterable[str]) -> dict[str, str]:
    """Key -> the name that stands for it, where one name alone does."""
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(spelling_key(name), []).append(name)
    return {key: own[0] for key, own in groups.items() if len(own) == 1}


def known_types(labels: Sequence[str], scheme: Scheme) -> list[str]:
    """Labels as `count_names` has them."""
    return [scheme.targets.split_name(label)[1] for label in labels]


def respell(rows: Rows, scheme: Scheme, spellings: Mapping[str, str]) -> Rows:
    """The rows with every label spelled as `spellings` says; one whose key is not there stays as it is."""

    def spell(name: str) -> str:
        prefix, bare = scheme.targets.split_name(name)
        return prefix + spellings.get(spelling_key(bare), bare)

    # A cell that is missing or bad stays as it is: that is said where targets are read.
    labels = [scheme.targets.respell(scheme, value, spell) for value in rows.labels or ()]
    return replace(rows, labels=labels)
