"""Whether the first row of a table names its columns, and names for the columns of one where none does.

A first row is taken for a header unless something speaks against it: a cell that stands again below it, a number above
numbers, or a sentence in a file of one column. A name that columns of data sets usually have settles it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inlay.data.columns import LABEL_NAMES, PAIR_NAMES, SPLIT_NAMES, TEXT_NAMES, read_number

PEEKED_ROWS = 200
"""rows that are looked at"""
_OTHER_NAMES = (
    *("task", "id", "index", "idx", "words", "word", "tokens", "tags", "tag", "ner_tags", "spans", "entities"),
    *("answers", "answer", "context", "answer_start", "name", "date", "lang", "language", "source", "author", "user"),
)
KNOWN_NAMES = frozenset(
    (*TEXT_NAMES, *LABEL_NAMES, *SPLIT_NAMES, *_OTHER_NAMES, *(name for pair in PAIR_NAMES for name in pair))
)
_FEWEST_WORDS = 4  # of a first row in a file of one column that is a text and no name
_LONGER = 2  # times longer than labels are texts at least


def find_values(first: Sequence[str], rows: Sequence[Sequence[str]], roles: Collection[str] = ()) -> str | None:
    """Return why the first row holds values and no names, in words; None if nothing says so."""
    cells = [cell.strip() for cell in first]
    if any(cell.lower() in KNOWN_NAMES or cell in roles for cell in cells):
        return None
    if cells == [str(number) for number in range(len(cells))]:  # how pandas writes columns without names
        return None
    columns = [[row[place].strip() for row in rows if len(row) == len(cells)] for place in range(len(cells))]
    for cell, column in zip(cells, columns, strict=True):
        if cell and cell in column:
            return f"`{cell[:30]}` stands in the first row and again below it"
    for cell, column in zip(cells, columns, strict=True):
        filled = [value for value in column if value]
        if filled and read_number(cell) is not None and all(read_number(value) is not None for value in filled):
            return f"`{cell[:30]}` in the first row is a number, as are those below it"
    if len(cells) == 1 and len(cells[0].split()) >= _FEWEST_WORDS:
        return "its first row is a text"
    return None


def name_columns(first: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Names for columns without any: `text` and `label` where there are two and one is far longer, else by number."""
    if len(first) == 1:
        return ("text",)
    if len(first) == 2:
        table = [first, *(row for row in rows if len(row) == 2)]
        left, right = (sum(len(row[place]) for row in table) for place in (0, 1))
        if max(left, right) >= _LONGER * min(left, right):
            return ("text", "label") if left > right else ("label", "text")
    return tuple(f"column{number}" for number in range(1, len(first) + 1))
