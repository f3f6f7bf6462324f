"""The forms of targets: one class for each, and every kind of task has one of them.

A form knows how a label cell is read, which labels it names, how targets are stored in an array, and what splits, notes
and losses need to know about them. A cell that cannot be used raises a `Fault` with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from inlay.data.columns import Fault, as_list, is_missing, name_label, read_number, read_text
from inlay.data.tags import OUTSIDE, find_entities, sort_tags
from inlay.errors import BadConfig

if TYPE_CHECKING:
    from inlay.data.kinds import Scheme

IGNORED = -100
"""The target of a token or row that a loss ignores."""
NUM_BINS = 10  # bins of a regression target, so that both sides of a split cover its range
SEPARATORS = ("|", ";", ",")
_ENTITY_TAG = re.compile(r"([BI]-)(.+)", re.DOTALL)


class TargetForm:
    """A form of targets. This base class is the form of objects, one for each row, without labels."""

    has_labels: ClassVar[bool] = False  # whether targets are labels of a list
    is_one_label: ClassVar[bool] = False  # whether each row has exactly one label
    is_ordered: bool = False  # whether labels are levels, from the lowest to the highest
    num_dims: ClassVar[int] = 1  # dimensions of the array of targets
    unit: ClassVar[str] = "row"  # what has a label: a row or a word
    unseen_note: ClassVar[str] = "as wrong rows"  # how labels that training never saw are counted, for a note

    def read(self, scheme: Scheme, value: Any) -> Any:
        """Return the target of a cell; a cell that cannot be read is a `Fault`."""
        return value

    def collect(self, targets: list[Any], num_labels: int) -> np.ndarray:
        """Return targets as one array."""
        collected = np.empty(len(targets), dtype=object)  # filled one by one: numpy would make a table of equal tuples
        for row, target in enumerate(targets):
            collected[row] = target
        return collected

    def make_cell(self, target: Any, labels: Sequence[str]) -> Any:
        """Return a target as a JSON value from which `read` makes it again, with labels by name."""
        return target

    def spell(self, cell: Any, text: str) -> str:
        """Return such a value in one readable line; `text` is the row's text."""
        return str(cell)

    def describe(self, targets: np.ndarray) -> str:
        """Describe the targets of the training rows for a note; only for forms without labels."""
        raise NotImplementedError

    def list_names(self, scheme: Scheme, value: Any) -> list[str]:
        """List the labels that a cell names, known or not; none if it cannot be read."""
        return []

    def find_labels(self, cells: Sequence[Any], scheme: Scheme) -> tuple[str, ...]:
        """Find the labels of a task in the cells of its training rows, in order."""
        return sort_labels({name for cell in cells for name in self.list_names(scheme, cell)})

    def split_name(self, name: str) -> tuple[str, str]:
        """Split a label into a prefix that is never respelled, and its name."""
        return "", name

    def respell(self, scheme: Scheme, value: Any, spell: Callable[[str], str]) -> Any:
        """Return a cell with `spell` applied to every label; a cell without labels as it is."""
        names = self.list_names(scheme, value)
        return spell(names[0]) if names else value

    def count_labels(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        """Count the rows (or words) of each label."""
        return np.array([len(rows) for rows in self.find_rows(targets, num_labels) or ()])

    def find_rows(self, targets: np.ndarray, num_labels: int) -> list[np.ndarray] | None:
        """Find the rows of each label; None for forms whose rows have no labels of their own."""
        return None

    def find_present(self, values: np.ndarray) -> set[int]:
        """Return the labels that occur in some targets, or in decisions of the same form."""
        return set()

    def find_strata(self, targets: np.ndarray) -> np.ndarray:
        """Return the stratum of each row; splits keep the share of each stratum."""
        return np.array([bool(target) for target in targets], dtype=np.int64)

    def find_single(self, targets: np.ndarray) -> np.ndarray:
        """Find the rows whose label no other row has."""
        return np.zeros(len(targets), dtype=bool)

    def find_known(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        """Find the rows all of whose labels training saw."""
        return np.ones(len(targets), dtype=bool)

    def ignore_unseen(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        """Return targets without labels that training never saw, so that a loss ignores these."""
        return targets


@dataclass(frozen=True)
class LabelTargets(TargetForm):
    """One label for each row: its number, int64 [n]."""

    is_ordered: bool = False
    has_labels = True
    is_one_label = True

    def read(self, scheme: Scheme, value: Any) -> int:
        if is_missing(value):
            raise Fault("missing label", "fill it in or remove the row")
        if as_list(value) is not None:
            raise Fault("the label is a list", "use `--kind multilabel`")
        return scheme.index(self.name(value))

    def name(self, value: Any) -> str:
        """Return a label's name; equal levels have the same, however they are spelled: `2` for `2.0`."""
        number = read_number(value) if self.is_ordered else None
        return name_label(value if number is None else number)

    def collect(self, targets: list[Any], num_labels: int) -> np.ndarray:
        return np.array(targets, dtype=np.int64)

    def make_cell(self, target: Any, labels: Sequence[str]) -> str:
        return labels[int(target)]

    def list_names(self, scheme: Scheme, value: Any) -> list[str]:
        return [] if as_list(value) is not None or is_missing(value) else [self.name(value)]

    def find_labels(self, cells: Sequence[Any], scheme: Scheme) -> tuple[str, ...]:
        labels = super().find_labels(cells, scheme)
        unordered = [f"`{label}`" for label in labels if read_number(label) is None] if self.is_ordered else []
        if unordered:
            raise BadConfig(
                f"levels that are not numbers have no order of their own: {', '.join(unordered)}",
                "name all levels from the lowest to the highest with `--labels`",
            )
        return labels

    def find_rows(self, targets: np.ndarray, num_labels: int) -> list[np.ndarray] | None:
        order = np.argsort(targets, kind="stable")
        counts = np.bincount(targets, minlength=num_labels)
        return np.split(order, np.cumsum(counts)[:-1])

    def find_present(self, values: np.ndarray) -> set[int]:
        return set(values.tolist())

    def find_strata(self, targets: np.ndarray) -> np.ndarray:
        return targets

    def find_single(self, targets: np.ndarray) -> np.ndarray:
        return np.bincount(targets)[targets] == 1

    def find_known(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        return np.asarray(targets < num_labels)

    def ignore_unseen(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        return np.where(targets < num_labels, targets, IGNORED)


class LabelSetTargets(TargetForm):
    """A set of labels for each row: 0 or 1 for every label, float32 [n, labels]."""

    has_labels = True
    num_dims = 2
    unseen_note = "as missed"

    def read(self, scheme: Scheme, value: Any) -> np.ndarray:
        row = np.zeros(len(scheme.labels), dtype=np.float32)
        row[[scheme.index(name) for name in split_labels(value, scheme)]] = 1
        return row

    def collect(self, targets: list[Any], num_labels: int) -> np.ndarray:
        return np.stack(targets) if targets else np.zeros((0, num_labels), dtype=np.float32)

    def make_cell(self, target: Any, labels: Sequence[str]) -> list[str]:
        return [labels[label] for label in np.flatnonzero(target).tolist()]

    def spell(self, cell: Any, text: str) -> str:
        return "|".join(cell)

    def list_names(self, scheme: Scheme, value: Any) -> list[str]:
        try:
            return split_labels(value, scheme)
        except Fault:
            return []

    def respell(self, scheme: Scheme, value: Any, spell: Callable[[str], str]) -> Any:
        names = self.list_names(scheme, value)
        return list(dict.fromkeys(map(spell, names))) if names else value

    def find_rows(self, targets: np.ndarray, num_labels: int) -> list[np.ndarray] | None:
        return [np.flatnonzero(targets[:, label]) for label in range(num_labels)]

    def find_present(self, values: np.ndarray) -> set[int]:
        return set(np.flatnonzero(values.sum(axis=0)).tolist())

    def find_strata(self, targets: np.ndarray) -> np.ndarray:
        """Return the rarest label of each row."""
        if not targets.shape[1]:
            return np.zeros(len(targets))
        rarity = np.where(targets > 0, targets.sum(axis=0), np.inf)
        return np.where(targets.any(axis=1), rarity.argmin(axis=1), -1)

    def find_known(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        return np.logical_not(targets[:, num_labels:].any(axis=1))

    def ignore_unseen(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        return targets[:, :num_labels]


class NumberTargets(TargetForm):
    """One number for each row, float64 [n]."""

    def read(self, scheme: Scheme, value: Any) -> float:
        if is_missing(value):
            raise Fault("missing label", "fill it in or remove the row")
        number = read_number(value)
        if number is None:
            raise Fault(f"non-numeric target `{value}`", "a number such as 3.5; for classes use `--kind classify`")
        return number

    def collect(self, targets: list[Any], num_labels: int) -> np.ndarray:
        return np.array(targets, dtype=np.float64)

    def make_cell(self, target: Any, labels: Sequence[str]) -> float:
        return float(target)

    def spell(self, cell: Any, text: str) -> str:
        return f"{cell:.6g}"

    def describe(self, targets: np.ndarray) -> str:
        return f"targets from {targets.min():g} to {targets.max():g}"

    def find_strata(self, targets: np.ndarray) -> np.ndarray:
        """Return the bin of each row's number."""
        edges = np.quantile(targets, np.linspace(0, 1, NUM_BINS + 1)[1:-1])
        return np.searchsorted(edges, targets, side="right")


class TaggedWordTargets(TargetForm):
    """A label for each word of a row: tuples of (start, end, label), which `table_shapes.py` made of the cells."""

    has_labels = True
    unit = "word"
    unseen_note = "as wrong words"

    def read(self, scheme: Scheme, value: Any) -> tuple[tuple[int, int, int], ...]:
        if value is None:
            raise Fault("missing tags", "give every word a tag, or remove the row")
        return tuple((start, end, scheme.index(tag)) for start, end, tag in value)

    def make_cell(self, target: Any, labels: Sequence[str]) -> list[list[Any]]:
        return [[start, end, labels[label]] for start, end, label in target]

    def spell(self, cell: Any, text: str) -> str:
        """List the entities, or every word with its tag if no tag is of an entity."""
        if any(_ENTITY_TAG.fullmatch(tag) or tag == OUTSIDE for _, _, tag in cell):
            return "|".join(f"{text[start:end]} ({kind})" for start, end, kind in find_entities(cell))
        return " ".join(f"{text[start:end]}/{tag}" for start, end, tag in cell)

    def list_names(self, scheme: Scheme, value: Any) -> list[str]:
        return [tag for _, _, tag in value or ()]

    def find_labels(self, cells: Sequence[Any], scheme: Scheme) -> tuple[str, ...]:
        return sort_tags(tag for cell in cells for tag in self.list_names(scheme, cell))

    def split_name(self, name: str) -> tuple[str, str]:
        """Split off `B-` or `I-`: both tags of an entity type are respelled together."""
        found = _ENTITY_TAG.fullmatch(name)
        return (found[1], found[2]) if found else ("", name)

    def respell(self, scheme: Scheme, value: Any, spell: Callable[[str], str]) -> Any:
        return None if value is None else tuple((start, end, spell(tag)) for start, end, tag in value)

    def count_labels(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        return np.bincount([label for target in targets for _, _, label in target], minlength=num_labels)

    def find_known(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        return np.array([all(tag < num_labels for _, _, tag in words) for words in targets], dtype=bool)

    def ignore_unseen(self, targets: np.ndarray, num_labels: int) -> np.ndarray:
        known = [
            tuple((start, end, tag if tag < num_labels else IGNORED) for start, end, tag in words) for words in targets
        ]
        return self.collect(known, num_labels)


class PassageTargets(TargetForm):
    """Gold answers of a question: tuples of (start in the context, text), which `table_shapes.py` made of the cells."""

    def make_cell(self, target: Any, labels: Sequence[str]) -> list[list[Any]]:
        return [[start, text] for start, text in target]

    def spell(self, cell: Any, text: str) -> str:
        return "|".join(dict.fromkeys(answer for _, answer in cell))

    def describe(self, targets: np.ndarray) -> str:
        num_without = sum(not golds for golds in targets)
        return f"{len(targets):,} questions, {num_without:,} of them without an answer"


class TextTargets(TargetForm):
    """A text for each row, with single blanks."""

    def read(self, scheme: Scheme, value: Any) -> str:
        if is_missing(value):
            raise Fault("missing answer", "fill it in or remove the row")
        return " ".join(read_text(value, "label").split())

    def describe(self, targets: np.ndarray) -> str:
        return f"{len(set(targets)):,} different answers"


def split_labels(value: Any, scheme: Scheme) -> list[str]:
    """Return the label names of a multilabel cell; an empty list or text means no labels."""
    items = as_list(value)
    if items is not None:
        return [name_label(item) for item in items]
    if isinstance(value, str):
        name = value.strip()
        if scheme.separator is None or name in scheme.numbers:
            return [name] if name else []
        return [piece.strip() for piece in name.split(scheme.separator) if piece.strip()]
    if is_missing(value):
        raise Fault("missing label", "write an empty list where no label applies")
    return [name_label(value)]


def find_separator(values: Iterable[Any]) -> str | None:
    """Find the separator between the labels of a cell: the first of `|`, `;` and `,` that occurs in any cell."""
    cells = [value for value in values if isinstance(value, str)]
    return next((separator for separator in SEPARATORS if any(separator in cell for cell in cells)), None)


def sort_labels(names: Iterable[str]) -> tuple[str, ...]:
    """Sort label names: by value if all are numbers, else by letters."""
    names = sorted(names)
    if all(read_number(name) is not None for name in names):
        names.sort(key=float)
    return tuple(names)
