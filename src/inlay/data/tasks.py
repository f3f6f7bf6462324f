"""A task: its kind, labels and metric, and its train, dev and test rows.

Every source (a file, a folder, GLUE, a hub, a DataFrame) goes through the same checks. What was found or decided is
told in the task's notes, so that nothing is silently assumed. The digests cover what was read, not where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from inlay.data import findings
from inlay.data.columns import Columns, Header, find_columns
from inlay.data.data_files import STDIN, hide_secrets, is_url
from inlay.data.in_memory import RowsGiven, open_given, tabulate
from inlay.data.kinds import KINDS, Scheme, find_scheme
from inlay.data.metrics import resolve_metric
from inlay.data.published_sets import open_extra, open_glue
from inlay.data.rows import BadRows, Rows, drop_single_rows, is_side, read_rows, read_targets
from inlay.data.sources import WAYS_IN, Source, Table, open_folder, open_hub, read_table
from inlay.data.splits import DEV, TEST, TRAIN, assign_sides, row_keys
from inlay.data.table_shapes import combine, shape_table
from inlay.data.tags import entity_types
from inlay.data.targets import find_separator, sort_labels
from inlay.errors import BadConfig, BadData, Missing, UnknownName
from inlay.settings import DataConfig

MOST_SINGLE = 20  # if more rows, and most of the rows, are alone in their class, the labels are not classes


@dataclass(frozen=True, eq=False)
class Split:
    """Rows of one side, by column."""

    texts: list[str]
    pairs: list[str] | None  # None: single texts
    # int64 [n], float32 [n, labels] of 0 and 1, float64 [n], tuples or texts; None: unlabelled
    targets: np.ndarray | None
    lines: list[int]  # the line (or row) in `path`, counted from 1
    path: str = ""
    notes: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    """labels that training never saw; targets count them after the task's own, and nothing predicts them"""

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        pairs, labelled = "pairs" if self.pairs is not None else "texts", "" if self.targets is None else ", labelled"
        return f"Split({len(self):,} {pairs}{labelled})"

    def take(self, rows: Sequence[int] | np.ndarray) -> Split:
        """Return the rows at these positions, in this order."""
        return replace(
            self,
            texts=[self.texts[row] for row in rows],
            pairs=None if self.pairs is None else [self.pairs[row] for row in rows],
            targets=None if self.targets is None else self.targets[np.asarray(rows, dtype=np.int64)],
            lines=[self.lines[row] for row in rows],
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Return the text of each row, or both texts of its pair."""
        columns = (self.texts,) if self.pairs is None else (self.texts, self.pairs)
        return list(zip(*columns, strict=True))

    def draw(self, number: int, seed: int) -> Split:
        """Draw some of these rows by a seed; they keep their order."""
        order = np.random.default_rng(seed % 2**63).permutation(len(self))
        return self.take(np.sort(order[:number]))

    def join(self, other: Split) -> Split:
        """Append the labelled rows of another split with the same labels."""
        assert self.targets is not None
        assert other.targets is not None
        return replace(
            self,
            texts=[*self.texts, *other.texts],
            pairs=None if self.pairs is None else [*self.pairs, *(other.pairs or [])],
            targets=np.concatenate([self.targets, other.targets]),
            lines=[*self.lines, *other.lines],
        )


@dataclass(frozen=True, eq=False)
class Task:
    """A task to learn. `metric` picks the best epoch on `dev`; versions with the same `dev_digest` can be compared."""

    name: str
    kind: str
    labels: tuple[str, ...]  # () for regress, span and text
    metric: str
    train: Split
    dev: Split
    test: Split | None
    notes: tuple[str, ...]
    digest: str
    dev_digest: str
    bounds: tuple[float, float] | None = None  # known range of a set's targets; a few rows may not reach its ends
    answers: tuple[str, ...] = ()  # text that is written for each label; (): its name

    def __repr__(self) -> str:
        sides = {"train": self.train, "dev": self.dev} | ({} if self.test is None else {"test": self.test})
        about = [self.kind, f"{len(self.labels):,} labels"] if self.labels else [self.kind]
        return f"Task({self.name}: {', '.join([*about, *(f'{len(rows):,} {side}' for side, rows in sides.items())])})"

    @property
    def written(self) -> tuple[str, ...]:
        """The text of each label where answers are written."""
        return self.answers or self.labels

    def with_sides(self, sides: Mapping[str, Split], note: str) -> Task:
        """Return the task with other rows on some sides, new digests, and one more note."""
        changed: dict[str, Any] = {**sides, "notes": (*self.notes, note)}
        return _with_digests(replace(self, **changed))


def load_task(config: DataConfig, name: str, given: Mapping[str, RowsGiven] = {}) -> Task:
    """Load the task of `config.source`: a file, a folder with train.*, `glue/NAME`, `extra/NAME` or `hub:NAME`.

    `given` has the rows of the sides (train, dev, test) that are in memory already.
    """
    source = open_given(given["train"], config) if "train" in given else open_source(config)
    sides = {side: partial(tabulate, rows, side) for side, rows in given.items() if side != "train"}
    task = _build_task(replace(source, sides={**source.sides, **sides}), name)
    most = {"dev": config.most_dev, "test": config.most_test}
    task = cut_task(task, {side: number for side, number in most.items() if number is not None})
    return task if config.sample is None else take_sample(task, config.sample, config.sample_seed)


def make_task(rows: RowsGiven, name: str, config: DataConfig = DataConfig()) -> Task:
    """Make a task of rows in memory, with the same checks; a line in a message is the row, counted from 1."""
    return load_task(config, name, {"train": rows})


def read_split(source: RowsGiven, labels: Sequence[str], kind: str, config: DataConfig = DataConfig()) -> Split:
    """Read labelled rows to evaluate a trained task on. Rows with a label that is not in `labels` count as wrong.

    From a folder, GLUE, the hub, or a file with a split column these are the test rows if they have labels, otherwise
    dev; from any other file all rows.
    """
    config = replace(config, kind=kind)
    if isinstance(source, str | Path):
        opened = open_source(replace(config, source=str(source)))
    else:
        opened = open_given(source, config)
    # The first side that has labelled rows is used.
    bad = BadRows(config.on_bad_row)
    order = ("train",) if set(opened.sides) == {"train"} and not opened.place else ("test", "dev")
    for side in order:
        if side not in opened.sides:
            continue
        combined = combine(opened.read(side), opened.config, labelled=side != "test")
        table = shape_table(combined.table, combined.config, labelled=side != "test")
        rows = read_rows(table, _find_own_columns(table, combined.config, labelled=side != "test"), bad)
        parts = rows.by_side()
        rows = next((parts[part] for part in ("test", "dev", "train") if part in parts), rows)
        if side == "test" and not rows.is_labelled:
            continue
        scheme = Scheme(kind, tuple(labels), find_separator(rows.labels or []))
        if config.merge_labels:
            known = findings.known_types(scheme.labels, scheme)
            rows = findings.respell(rows, scheme, findings.find_spellings(known))
        split, unseen = _make_judged(rows, scheme, bad)
        note = f"evaluated on {len(split)} of {len(table.rows)} rows of {table.header.path}"
        return replace(split, notes=(*table.notes, note, *unseen, *bad.notes()))
    raise Missing(f"{opened.name}: no labelled dev or test rows", "give a file with labels")


def open_source(config: DataConfig) -> Source:
    """Open the source named in `config`, without reading it yet."""
    name = config.source
    if not name:
        raise BadConfig("no data is named (`data.source` is empty)", f"give {WAYS_IN}")
    for prefix, open_named in _NAMED.items():
        if name.startswith(prefix):
            return open_named(name.removeprefix(prefix), config)
    if name == STDIN or is_url(name):
        return Source(hide_secrets(name), {"train": lambda: read_table(name, config)}, config)
    path = Path(name).expanduser()
    if path.is_dir():
        return open_folder(path, config)
    return Source(name, {"train": lambda: read_table(path, config)}, config)


_NAMED: dict[str, Callable[[str, DataConfig], Source]] = {"glue/": open_glue, "extra/": open_extra, "hub:": open_hub}


def _build_task(source: Source, name: str) -> Task:
    """Read, check and split the rows of a source; note everything that was found or decided."""
    # 1. read the given sides, and the kind that their shape shows
    config, bad = source.config, BadRows(source.config.on_bad_row)
    notes: list[str] = []
    parts, kind = _read_parts(source, bad, notes)
    is_inferred = config.kind == "auto"
    config = replace(config, kind=kind or config.kind)
    shares = (0.0 if "dev" in parts else config.dev_share, 0.0 if "test" in parts else config.test_share)
    if "dev" not in parts and not config.dev_share:
        raise BadConfig("no dev rows", "give a file with `--dev`, or set `data.dev_share` above 0")
    # 2. find the kind and labels from the training rows
    scheme = find_scheme(parts["train"].labels or [], config)
    scheme = _settle_spellings(parts, scheme, config, notes)
    if shares[1] and config.test_from == "dev" and "dev" not in parts:
        raise BadConfig(
            "`data.test_from` is `dev`, but no dev rows are given", "give them with `--dev`, or leave it out"
        )
    # A class of one row cannot be on both sides of a cut: drop it if bad rows are skipped.
    if scheme.targets.is_one_label and any(shares) and config.on_bad_row == "skip":
        labelled, _ = read_targets(parts["train"], scheme, bad)
        parts["train"] = drop_single_rows(labelled, bad)
        scheme = find_scheme(parts["train"].labels or [], config)
    # 3. turn label cells into targets, and note labels that training never saw
    splits = {"train": _make_split(parts["train"], scheme, bad)}
    notes.append(findings.describe_kind(scheme, splits["train"], is_inferred=is_inferred))
    _check_labels(scheme, splits["train"], is_cut=any(shares))
    for side in [side for side in parts if side != "train"]:
        splits[side], unseen = _make_judged(parts[side], scheme, bad)
        notes += unseen
    notes += findings.describe_repeats(splits)
    # 4. split off the sides that were not given
    if any(shares):
        if config.test_from == "dev" and shares[1]:  # for sets whose own test rows have no labels
            halves = _cut_sides(splits["dev"], scheme.kind, (0.0, shares[1]), config, keeps_single=False)
            splits |= {"dev": halves["train"], "test": halves["test"]}
        else:
            splits |= _cut_sides(splits["train"], scheme.kind, shares, config)
        notes.append(findings.describe_split(splits, shares, config))
        notes += findings.describe_unjudged(scheme, splits) if shares[0] else []
    # 5. limit the training rows, and note dev and test texts that are nearly a training text
    train, dev, test = splits["train"], splits["dev"], splits.get("test")
    if config.limit is not None and config.limit < len(train):
        notes.append(f"training on {config.limit} of {len(train)} rows (limit, seed {config.split_seed})")
        train = train.draw(config.limit, config.split_seed)
    notes += findings.describe_near({"train": train, "dev": dev, "test": test})
    # 6. the metric, the texts that stand for labels, and the digests
    has_entities = bool(entity_types(scheme.labels))
    metric = resolve_metric(config.metric, scheme.kind, len(scheme.labels), has_entities=has_entities)
    notes += bad.notes()
    answers = _find_answers(scheme, config.answers)
    about = (name, scheme.kind, scheme.labels, metric)
    return _with_digests(Task(*about, train, dev, test, tuple(notes), "", "", source.bounds, answers))


def _find_answers(scheme: Scheme, given: Sequence[str]) -> tuple[str, ...]:
    """Return the text written for each label; () if that is each label's name. Refuses two labels with one text.

    `given` has `label=text`; if an item begins with several labels, the longest one is meant.
    """
    if given and not KINDS[scheme.kind].is_classifier:
        raise BadConfig(f"`data.answers` is given for a `{scheme.kind}` task", "leave it out: it is for `classify`")
    found = {label: label for label in scheme.labels}
    for item in given:
        label = max((each for each in scheme.labels if item.startswith(f"{each}=")), key=len, default=None)
        if label is None:
            raise UnknownName("label in `data.answers`", item.partition("=")[0], scheme.labels)
        found[label] = item[len(label) + 1 :].strip()
    texts = tuple(found.values())
    counts = Counter(texts)
    twice = next((text for text in texts if counts[text] > 1 or not text), None)
    if twice is not None:
        raise BadConfig(
            f"`data.answers` writes `{twice}` for {counts[twice]} of the labels {', '.join(scheme.labels)}",
            "give each label a text of its own",
        )
    return () if texts == scheme.labels else texts


def _read_parts(source: Source, bad: BadRows, notes: list[str]) -> tuple[dict[str, Rows], str | None]:
    """Return the rows of every given side, and the kind that their shape shows; unlabelled test rows are left out."""
    # 1. the training rows; a column may give other sides too
    combined = combine(source.read("train"), source.config)
    config = combined.config
    table = shape_table(combined.table, config)
    config, kind = replace(config, kind=table.kind or config.kind), table.kind
    columns = _find_own_columns(table, config)
    notes += table.notes if table.kind is not None else [*table.notes, columns.describe()]
    parts = read_rows(table, columns, bad).by_side()
    if "train" not in parts:
        raise BadData("no usable training rows", "check that the file has rows with texts", path=table.header.path)
    # 2. dev and test rows of their own files
    for side in ("dev", "test"):
        given = config.dev if side == "dev" else config.test
        if given is None and side not in source.sides and side not in source.required:
            continue
        if side in parts:
            raise BadConfig(f"{side} rows are given both by column `{columns.split}` and by a file", "give one of them")
        table = source.read(side) if given is None else read_table(given, config)
        table = combine(table, config, has_sets=combined.has_sets, labelled=side == "dev").table
        if kind is not None:
            table = shape_table(table, config, labelled=side == "dev")
        notes += table.notes
        parts[side] = read_rows(table, _match_columns(table.header, columns, config, side), bad)
    if "test" in parts and not parts["test"].is_labelled:
        notes.append(f"test rows of {parts.pop('test').path} have no labels: left out")
    return parts, kind


def _find_own_columns(table: Table, config: DataConfig, *, labelled: bool = True) -> Columns:
    """Find the columns of a table; one called `split` counts only if it was named, or holds only words for sides."""
    if table.kind is not None:
        config = replace(config, text="text", pair="pair" if table.has_pairs else None, label="label")
    if not labelled and config.label is not None and config.label not in table.header.names:
        config = replace(config, label=None)
    columns = find_columns(table.header, config, labelled=labelled)
    if config.split is None and columns.split is not None and not all(map(is_side, table.column(columns.split))):
        return replace(columns, split=None)
    return columns


def _match_columns(header: Header, columns: Columns, config: DataConfig, side: str) -> Columns:
    """Find the columns of a dev or test file: as in the training file, or recognised; only test may lack labels."""
    label = columns.label if columns.label in header.names else None
    has_texts = columns.text in header.names and (columns.pair is None or columns.pair in header.names)
    if has_texts and (label is not None or side == "test"):
        return replace(columns, label=label, split=None)
    config = replace(config, split=None, label=None if side == "test" and label is None else config.label)
    found = replace(find_columns(header, config, labelled=side == "dev"), split=None)
    if (found.pair is None) != (columns.pair is None):
        wanted = "single texts" if columns.pair is None else "pairs"
        hint = f"columns there are: {', '.join(header.names)}"
        raise BadData(f"no {wanted}, unlike the training rows", hint, path=header.path, line=header.line)
    return found


def _make_split(rows: Rows, scheme: Scheme, bad: BadRows) -> Split:
    """Turn rows with label cells into a split with targets; bad rows go to `bad`."""
    path = rows.path
    rows, targets = read_targets(rows, scheme, bad)
    if not len(rows):
        raise BadData("no usable rows", "see what is wrong with them by `--on-bad-row refuse`", path=path)
    return Split(rows.texts, rows.pairs, targets, rows.lines, path)


def _make_judged(rows: Rows, scheme: Scheme, bad: BadRows) -> tuple[Split, list[str]]:
    """Make dev or test rows; labels that training never saw are kept, and noted."""
    names = [scheme.targets.list_names(scheme, value) for value in rows.labels or []]
    found = {name for own in names for name in own}
    unseen = sort_labels(found.difference(scheme.labels))
    if not unseen:
        return _make_split(rows, scheme, bad), []
    if scheme.targets.is_ordered and len(unseen) < len(found):  # a label without a place among the levels: a bad row
        return _make_split(rows, scheme, bad), []
    if len(unseen) == len(found):
        raise BadData(
            f"no row has a label of the task; their labels are {findings.join_some([f'`{name}`' for name in unseen])}",
            f"name the label column with `--label`; the task's labels are {findings.join_some(scheme.labels)}",
            path=rows.path,
        )
    split = _make_split(rows, replace(scheme, labels=(*scheme.labels, *unseen)), bad)
    spellings = findings.find_spellings(scheme.labels)
    return replace(split, unseen=unseen), [findings.describe_unseen(rows, names, unseen, scheme, spellings)]


def _settle_spellings(parts: dict[str, Rows], scheme: Scheme, config: DataConfig, notes: list[str]) -> Scheme:
    """Note labels that are spellings of one another; with `data.merge_labels`, merge them in all `parts`."""
    if not scheme.targets.has_labels:
        return scheme
    counts = findings.count_names(parts["train"], scheme)
    variants = findings.find_variants(counts)
    if not config.merge_labels:
        # A user who names the labels means each of them.
        notes += [findings.describe_variants(variants, counts)] if variants and not config.labels else []
        return scheme
    merged = {name for names in variants for name in names[1:]}
    known = findings.known_types(config.labels, scheme) or [name for name in counts if name not in merged]
    spellings = findings.find_spellings(known)
    for side in parts:
        parts[side] = findings.respell(parts[side], scheme, spellings)
    notes += findings.describe_merged(counts, spellings)
    found = find_scheme(parts["train"].labels or [], replace(config, kind=scheme.kind))
    return replace(found, separator=scheme.separator)


def _check_labels(scheme: Scheme, train: Split, *, is_cut: bool) -> None:
    """Refuse training rows without labels, with one label only, or with labels that cannot be classes."""
    if scheme.targets.has_labels and not scheme.labels:
        raise BadData("no row has a label", "name the label column with `--label`", path=train.path)
    if scheme.targets.is_one_label and len(scheme.labels) == 1:
        hint = "a classifier needs two labels; name another column with `--label`"
        raise BadData(f"every row has the label `{scheme.labels[0]}`", hint, path=train.path)
    if is_cut:
        assert train.targets is not None
        num_single = int(scheme.targets.find_single(train.targets).sum())
        if num_single > MOST_SINGLE and 2 * num_single > len(train):
            raise BadData(
                f"{num_single} of {len(train)} rows have a label that no other row has",
                "name the label column with `--label`; numbers are `--kind regress`, free answers `--kind text`; if "
                "these are classes all the same, give dev rows with `--dev`",
                path=train.path,
            )


def _cut_sides(
    rows: Split, kind: str, shares: tuple[float, float], config: DataConfig, *, keeps_single: bool = True
) -> dict[str, Split]:
    """Split dev, test or both off training rows; rows that are alone in their class stay training rows."""
    assert rows.targets is not None
    keys, form = row_keys(kind, rows.texts, rows.pairs), KINDS[kind].targets
    is_single = form.find_single(rows.targets) if keeps_single else None
    sides = assign_sides(keys, form.find_strata(rows.targets), shares, config.split_seed, is_single)
    cut = {"train": rows.take(np.flatnonzero(sides == TRAIN))}
    for name, side, share in zip(("dev", "test"), (DEV, TEST), shares, strict=True):
        if share and not (sides == side).any():
            hint = f"add rows, or give {name} rows in a file with `--{name}`"
            raise BadData(f"too few different texts to split off {name} rows", hint, path=rows.path)
        if share:
            cut[name] = rows.take(np.flatnonzero(sides == side))
    return cut


def take_sample(task: Task, num_rows: int, seed: int) -> Task:
    """Return the task with `num_rows` of its training rows, drawn by `seed`; with all rows if it has no more."""
    if num_rows >= len(task.train):
        return task
    note = f"training on {num_rows} of {len(task.train)} rows, drawn by the seed {seed}"
    return task.with_sides({"train": task.train.draw(num_rows, seed)}, note)


def cut_task(task: Task, most: Mapping[str, int], seed: int = 0) -> Task:
    """Return the task with at most this many dev and test rows, drawn by `seed`."""
    sides, notes = {}, []
    for side, number in most.items():
        split = task.test if side == "test" else task.dev
        if split is not None and len(split) > number:
            sides[side] = split.draw(number, seed)
            notes.append(f"{number} of {len(split)} {side} rows")
    return task.with_sides(sides, ", ".join(notes)) if notes else task


def _with_digests(task: Task) -> Task:
    """Add the digests of a task's rows. The written texts of labels count for training, not for evaluation."""
    head = [task.kind, *task.labels, task.metric]
    written = ["written", *task.answers] if task.answers else []
    sides = {"train": task.train, "dev": task.dev} | ({"test": task.test} if task.test else {})
    digest = _digest_rows([*head, *written], sides)
    return replace(task, digest=digest, dev_digest=_digest_rows(head, {"dev": task.dev}))


def _digest_rows(head: Iterable[str], splits: dict[str, Split]) -> str:
    """Return the sha256 of kind, labels, metric and rows, each as JSON so that no two tasks give the same bytes."""
    state = hashlib.sha256(json.dumps(list(head)).encode())
    for side, split in splits.items():
        state.update(json.dumps([side, len(split), split.pairs is not None, *split.unseen]).encode())
        assert split.targets is not None
        pairs = split.pairs if split.pairs is not None else [""] * len(split)
        # Sets of labels are listed row by row: all lists at once would be ten times as large.
        targets = split.targets.tolist() if split.targets.ndim == 1 else map(np.ndarray.tolist, split.targets)
        for text, pair, target in zip(split.texts, pairs, targets, strict=True):
            state.update(json.dumps([text, pair, target]).encode())
    return state.hexdigest()
