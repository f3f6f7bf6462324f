"""Notes on the rows of a task: repeated texts, similar labels, labels without dev rows, foreign scripts.

Notes change no row; only `data.merge_labels` does. Labels that are spellings of one another (`True` and `true`, `spam`
and `spam.`) have the same key: they differ in case, in blanks, in punctuation at the end, in how Unicode writes the
same letters (NFKC), or in `.0` after a whole number.

Lines are those of the file a row was read from, or rows of a frame, counted from 1.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from inlay.data.encode import tokenize
from inlay.data.kinds import KINDS, Scheme
from inlay.data.near_duplicates import find_near
from inlay.data.rows import Rows
from inlay.data.splits import find_repeats, group_keys
from inlay.settings import DataConfig

if TYPE_CHECKING:
    from inlay.data.tasks import Split, Task

MOST_LABELS = 10  # named in a note


def describe_kind(scheme: Scheme, train: Split, *, is_inferred: bool) -> str:
    """Describe the kind of a task and its targets."""
    kind = f"kind: {scheme.kind}{' (inferred)' if is_inferred else ''}"
    assert train.targets is not None
    if not scheme.targets.has_labels:
        return f"{kind}, {scheme.targets.describe(train.targets)}"
    counts = scheme.targets.count_labels(train.targets, len(scheme.labels))
    shown = [f"{label} ({count})" for label, count in zip(scheme.labels, counts, strict=True)]
    more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
    separator = f", separated by `{scheme.separator}`" if scheme.separator else ""
    return f"{kind}, {len(shown)} labels{separator}: {', '.join(shown[:20])}{more}"


def describe_split(splits: dict[str, Split], shares: tuple[float, float], config: DataConfig) -> str:
    """Describe the sizes of the splits, and how those that were not given were made."""
    made = " and ".join(side for side, share in zip(("dev", "test"), shares, strict=True) if share)
    sizes = ", ".join(f"{len(splits[side])} {side}" for side in ("train", "dev", "test") if side in splits)
    return f"split: {sizes} rows; {made} made with seed {config.split_seed}, stratified, same texts on one side"


def describe_unjudged(scheme: Scheme, splits: dict[str, Split]) -> list[str]:
    """Note labels without a dev row after a split: a label with one row, or one text, stays in training."""
    train, dev = splits["train"], splits["dev"]
    assert train.targets is not None
    assert dev.targets is not None
    train_rows = scheme.targets.find_rows(train.targets, len(scheme.labels))
    dev_rows = scheme.targets.find_rows(dev.targets, len(scheme.labels))
    if train_rows is None or dev_rows is None:
        return []
    # Describe each label with training rows but no dev row.
    shown = []
    for label, name in enumerate(scheme.labels):
        rows = train_rows[label]
        if not len(rows) or len(dev_rows[label]):
            continue
        own = train.take(rows)
        found = f"1 row, line {own.lines[0]}"
        if len(own) > 1:
            is_one_text = len(set(group_keys(own.texts, own.pairs))) == 1
            found = f"{len(own)} rows{' of one text' if is_one_text else ''}, first on line {min(own.lines)}"
        shown.append(f"`{name}` ({found})")
    if not shown:
        return []
    what = "1 label has" if len(shown) == 1 else f"{len(shown)} labels have"
    return [f"{what} training rows but no dev row, so nothing judges {_them(shown)}: {join_some(shown)}"]


def describe_unpredicted(task: Task, names: Sequence[str], *, is_balanced: bool) -> list[str]:
    """Note labels that a trained task never predicts on its dev rows, and what to try."""
    if not names:
        return []
    assert task.train.targets is not None
    assert task.dev.targets is not None
    form, shown = KINDS[task.kind].targets, []
    num_train = form.count_labels(task.train.targets, len(task.labels))
    num_dev = form.count_labels(task.dev.targets, len(task.labels))
    for name in names:
        label = task.labels.index(name)
        rows = "row" if num_dev[label] == 1 else "rows"
        shown.append(f"`{name}` ({num_dev[label]} dev {rows}, {num_train[label]} in training)")
    advice = f"more rows of {_them(shown)}, or more epochs"
    if KINDS[task.kind].is_classifier and not is_balanced:
        advice = f"`--class-weights balanced`, {advice}"
    return [f"never predicted on dev: {join_some(shown)}; try {advice}"]


def describe_suspects(suspects: Mapping[str, Any], command: str) -> list[str]:
    """Note training rows that may be labelled wrongly, and the command that lists them."""
    if not suspects:
        return []
    number, lines = suspects["num_rows"], [str(line) for line in suspects["lines"]]
    which = f"that on line {lines[0]}" if number == 1 else f"such as those on lines {', '.join(lines)}"
    rows = "1 row" if number == 1 else f"{number} rows"
    return [f"{rows} may be labelled wrongly, {which}: `{command}` lists them"]


def _them(items: Sequence[str]) -> str:
    return "it" if len(items) == 1 else "them"


def join_some(items: Sequence[str], separator: str = ", ") -> str:
    """Join the first items of a list, and say how many more there are."""
    more = f" and {len(items) - MOST_LABELS} more" if len(items) > MOST_LABELS else ""
    return separator.join(items[:MOST_LABELS]) + more


def describe_variants(variants: Sequence[Sequence[str]], counts: Mapping[str, tuple[int, int]]) -> str:
    """Note labels that are spellings of one another, and how to read them as one."""
    counted = {name: f"`{name}` ({number}, first on line {line})" for name, (number, line) in counts.items()}
    shown = [" and ".join(counted[name] for name in names) for names in variants]
    return (
        f"labels that differ only in case, blanks or punctuation: {join_some(shown, '; ')}; read them as one with "
        "`--set data.merge_labels=true`"
    )


def describe_merged(counts: Mapping[str, tuple[int, int]], spellings: Mapping[str, str]) -> list[str]:
    """Note labels that were merged into another spelling."""
    shown = []
    for name, (number, line) in counts.items():
        known = spellings.get(spelling_key(name), name)
        if known != name:
            shown.append(f"`{name}` ({number}, first on line {line}) as `{known}`")
    return [f"labels read as one: {join_some(shown)}"] if shown else []


def describe_unseen(
    rows: Rows, names: Sequence[Sequence[str]], unseen: Sequence[str], scheme: Scheme, spellings: Mapping[str, str]
) -> str:
    """Note labels that training never saw, with their number of rows and first line.

    `names` has the labels of every row; `spellings` maps the key of a spelling to the known label.
    """
    counts = _count(names, rows.lines)
    noun = scheme.targets.unit
    shown = []
    for name in sorted(unseen, key=lambda name: -counts[name][0]):
        count, line = counts[name]
        known = spellings.get(spelling_key(name))
        also = "" if known is None else f"; training has `{known}`, see `data.merge_labels`"
        number = f"{count} {noun}{'' if count == 1 else 's'}"
        shown.append(f"`{name}` ({number}, first on line {line}{also})")
    what = "1 label" if len(shown) == 1 else f"{len(shown)} labels"
    how = scheme.targets.unseen_note
    return f"{rows.path} has {what} that training never saw, counted {how}: {join_some(shown)}"


def describe_repeats(splits: dict[str, Split]) -> list[str]:
    """Note repeated texts, texts whose labels conflict, and given dev or test texts that are trained on."""
    notes, train = [], splits["train"]
    assert train.targets is not None
    keys = group_keys(train.texts, train.pairs)
    num_repeats, conflicts = find_repeats(keys, train.targets)
    if num_repeats:
        what = "1 row repeats" if num_repeats == 1 else f"{num_repeats} rows repeat"
        notes.append(f"{what} the text of an earlier row")
    if conflicts:
        shown = ", ".join(f"{train.lines[first]} and {train.lines[second]}" for first, second in conflicts[:3])
        what = "1 text has" if len(conflicts) == 1 else f"{len(conflicts)} texts have"
        notes.append(f"{what} conflicting labels, such as in lines {shown}")
    trained: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        trained.setdefault(key, []).append(row)
    for side in ("dev", "test"):
        if side in splits:
            notes += _describe_shared(side, splits[side], train, trained)
    return notes


def _describe_shared(side: str, split: Split, train: Split, trained: Mapping[str, list[int]]) -> list[str]:
    """Note texts of dev or test rows that are also trained on, and those whose label differs there."""
    notes, conflicts = [], []
    assert split.targets is not None
    assert train.targets is not None
    keys = group_keys(split.texts, split.pairs)
    shared = [row for row, key in enumerate(keys) if key in trained]
    if shared:
        notes.append(f"{len(shared)} of {len(split)} {side} texts are also in the training rows")
    for row in shared:
        rows = trained[keys[row]]
        if not any(_is_same(split.targets[row], train.targets[other]) for other in rows):
            conflicts.append((row, rows[0]))
    if conflicts:
        what = "1 of them has" if len(conflicts) == 1 else f"{len(conflicts)} of them have"
        notes.append(f"{what} another label there, such as {_say_pairs(side, split, train, conflicts)}")
    return notes


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two targets are the same; `one` may have columns for labels that training never saw."""
    if np.ndim(one) == 1 and isinstance(one, np.ndarray):
        return np.array_equal(one[: len(other)], other) and not one[len(other) :].any()
    return np.array_equal(one, other)


def _say_pairs(side: str, split: Split, train: Split, pairs: Sequence[tuple[int, int]]) -> str:
    """Name the first few pairs of a side's row and a training row by their lines."""
    return ", ".join(f"{side} line {split.lines[row]} and training line {train.lines[near]}" for row, near in pairs[:3])


def describe_near(splits: Mapping[str, Split | None]) -> list[str]:
    """Note dev and test texts that are nearly a training text; `describe_repeats` finds exact repeats."""
    notes, train = [], splits["train"]
    assert train is not None
    known = set(group_keys(train.texts, train.pairs))
    for side in ("dev", "test"):
        split = splits[side]
        if split is None:
            continue
        keys = group_keys(split.texts, split.pairs)
        other = split.take([row for row, key in enumerate(keys) if key not in known])
        found = find_near(train.rows(), other.rows())
        if not found.pairs:
            continue
        what = "text is" if len(found.pairs) == 1 else "texts are"
        shown = _say_pairs(side, other, train, found.pairs)
        if (found.num_others, found.num_train) != (len(other), len(train)):
            shown += (
                f" (looked at {found.num_others:,} of {len(other):,} {side} and {found.num_train:,} of {len(train):,} "
                "training texts)"
            )
        notes.append(f"{len(found.pairs)} {side} {what} nearly the same as a training text, such as {shown}")
    return notes


_END = " .,;:!?…"
_WHOLE = re.compile(r"([+-]?\d+)\.0+")


def spelling_key(name: str) -> str:
    """Return the key that all spellings of a label share."""
    plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    if whole := _WHOLE.fullmatch(plain):
        return whole[1]
    return plain.rstrip(_END) or plain


def count_names(rows: Rows, scheme: Scheme) -> dict[str, tuple[int, int]]:
    """Count labels: label -> its number of occurrences in the rows, and the first line; for tags, by entity type."""
    named = (scheme.targets.list_names(scheme, value) for value in rows.labels or ())
    return _count([[scheme.targets.split_name(name)[1] for name in own] for own in named], rows.lines)


def _count(names: Iterable[Sequence[str]], lines: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Count names: name -> its number of occurrences in the rows, and the first line."""
    found: dict[str, tuple[int, int]] = {}
    for own, line in zip(names, lines, strict=False):
        for name in own:
            count, first = found.get(name, (0, line))
            found[name] = (count + 1, first)
    return found


def find_variants(counts: Mapping[str, tuple[int, int]]) -> list[list[str]]:
    """Return the groups of names that share a key, each with the most frequent name first."""
    groups = _group_by_key(sorted(counts, key=lambda name: (-counts[name][0], name)))
    return [names for names in groups.values() if len(names) > 1]


def find_spellings(names: Iterable[str]) -> dict[str, str]:
    """Return key -> name, for keys that one name alone has."""
    return {key: own[0] for key, own in _group_by_key(dict.fromkeys(names)).items() if len(own) == 1}


def _group_by_key(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(spelling_key(name), []).append(name)
    return groups


def known_types(labels: Sequence[str], scheme: Scheme) -> list[str]:
    """Return labels as `count_names` names them: of tags, the entity types."""
    return [scheme.targets.split_name(label)[1] for label in labels]


def respell(rows: Rows, scheme: Scheme, spellings: Mapping[str, str]) -> Rows:
    """Spell every label of the rows as `spellings` says; a label whose key is not there stays as it is."""

    def spell(name: str) -> str:
        prefix, bare = scheme.targets.split_name(name)
        return prefix + spellings.get(spelling_key(bare), bare)

    # A cell that is missing or bad stays as it is: reading targets reports it.
    labels = [scheme.targets.respell(scheme, value, spell) for value in rows.labels or ()]
    return replace(rows, labels=labels)


NUM_ROWS = 400  # looked at, spread over all
NUM_CHARACTERS = 300  # characters looked at in each text
MOST_UNKNOWN = 0.05  # share of tokens
LEAST_FOREIGN = 0.2  # least share of the letters that a script must have to be noted
_LATIN = "LATIN"
_FEWEST_LETTERS = 1.5  # per token, in an alphabet that the tokenizer knows: measured 4.6 for English, 1.0 for Russian
_FEWEST_SIGNS = 0.9  # per token, in a script with many signs
_MANY_SIGNS = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")
_NAMES = {"CJK": "Chinese characters", "HANGUL": "Korean letters"}
ADVICE = "use a multilingual backbone, such as `--backbone FacebookAI/xlm-roberta-base`"


class _Text(NamedTuple):
    """One text: its tokens, the unknown ones among them, and its letters by script."""

    line: int
    num_tokens: int
    unknown: list[str]  # the text at every unknown token
    letters: Counter[str]


def describe_unknown(tokenizer: Any, split: Split, backbone: str) -> list[str]:
    """Note that a tokenizer does not know the letters of the texts; at most 400 rows are looked at."""
    rows = _look_at(tokenizer, split)
    num_tokens = sum(row.num_tokens for row in rows)
    letters = sum((row.letters for row in rows), Counter[str]())
    if not num_tokens:
        return []
    # 1. the script other than Latin that has most of the letters, if they are many.
    number, script = max(((number, script) for script, number in letters.items() if script != _LATIN), default=(0, ""))
    if number < LEAST_FOREIGN * letters.total():
        script = ""
    script_name = _NAMES.get(script, script.capitalize())
    # 2. tokens that are unknown to the tokenizer
    pieces = Counter(piece for row in rows for piece in row.unknown)
    share = pieces.total() / num_tokens
    if share >= MOST_UNKNOWN:
        lines = [str(row.line) for row in rows if row.unknown][:3]
        shown = ", ".join(f"`{piece[:20]}`" for piece, _ in pieces.most_common(3))
        where = f"line{'' if len(lines) == 1 else 's'} {', '.join(lines)}"
        advice = f"many letters are {script_name}: {ADVICE}" if script else "it cannot tell them apart"
        return [f"{share:.0%} of the tokens are unknown to `{backbone}`, such as {shown} ({where}); {advice}"]
    if not script:
        return []
    # 3. tokens that are single letters or less, in rows of that script
    own = [row for row in rows if row.letters[script] * 2 > row.letters.total()]
    per_token = sum(row.letters.total() for row in own) / max(1, sum(row.num_tokens for row in own))
    if not own or per_token >= (_FEWEST_SIGNS if script in _MANY_SIGNS else _FEWEST_LETTERS):
        return []
    return [
        f"many letters are {script_name}, of which `{backbone}` has hardly a word ({per_token:.1f} letters a token, "
        f"such as in line {own[0].line}): {ADVICE}"
    ]


def _look_at(tokenizer: Any, split: Split) -> list[_Text]:
    """Tokenize some texts of the rows, spread over all of them, and count their letters by script."""
    chosen = np.unique(np.linspace(0, len(split) - 1, min(NUM_ROWS, len(split))).astype(np.int64)).tolist()
    texts = [split.texts[row][:NUM_CHARACTERS] for row in chosen]
    lines = [split.lines[row] for row in chosen]
    if split.pairs is not None:
        texts += [split.pairs[row][:NUM_CHARACTERS] for row in chosen]
        lines += lines
    # The script of a letter, or of a sign that goes with letters, is the first word of its name.
    scripts = {
        character: unicodedata.name(character, "").partition(" ")[0]
        for character in set().union(*texts)
        if unicodedata.category(character)[0] in "LM"
    }
    rows = []
    encodings = tokenize(tokenizer, texts, None, None, with_offsets=True)
    for text, line, encoding in zip(texts, lines, encodings, strict=True):
        places = [place for place, token in enumerate(encoding.ids) if token == tokenizer.unk_token_id]
        unknown = [text[slice(*encoding.offsets[place])] for place in places]
        letters = Counter(script for character in text if (script := scripts.get(character)))
        rows.append(_Text(line, len(encoding.ids), unknown, letters))
    return rows
