"""The data sets of the additional tasks by name: where their published files lie and what their columns mean.

Houlsby et al. 2019 (section 3.3) take 17 classification sets, each cut at random into 80% training, 10% dev and 10%
test rows; 13 of them are known here, cut the same way by the seed of the config (same texts on one side, which the
paper does not say). Files are read as they were published: their labels are merged or left out as `labels` says.
Further sets that studies read by name (IMDB, CommitmentBank, SciTail, Yelp, SQuAD) come with sides of their own.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from inlay.data.sources import Source, Table, read_table
from inlay.errors import BadConfig, BadData, Missing, UnknownName
from inlay.settings import DataConfig

SHARE = 0.1  # share of the rows for dev, and for test
_STANCES = {"AGAINST:.*": "against", "FOR:.*": "for", "NEUTRAL:.*": "neutral", "NONE OF THE ABOVE:.*": "none"}
_OPINIONS = {r"1\..*": "about the target", r"2\..*": "about something else", r"3\..*": "none"}


@dataclass(frozen=True)
class ExtraSet:
    """One set: its folder, the files of its sides, its columns (by their names' beginnings) and its labels."""

    folder: str
    files: Mapping[str, tuple[str, ...]]
    """side -> files; several are read as one"""
    text: str = "text"
    label: str = "label"
    pair: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """pattern of a cell -> the label it is; a cell that fits none is left out. Empty: cells are labels"""
    is_cut: bool = True
    """dev and test are cut from the rows, as in the paper"""
    names: tuple[str, ...] | None = None
    """names of the columns, where the file has no header"""
    suffix: str | None = None
    """suffix of its format, where the file's name has none"""
    kind: str = "classify"
    note: str = ""


def _crowdflower(folder: str, file: str, label: str, text: str = "text", **more: object) -> ExtraSet:
    return ExtraSet(f"houlsby17/crowdflower_{folder}", {"train": (file,)}, text, label, **more)  # type: ignore[arg-type]


_PROGRESSIVE = ("progressive", "progressive-tweet-sentiment.csv")
_POLITICAL = ("political", "political_media.csv")
EXTRA: dict[str, ExtraSet] = {
    # By-date halves read as one: 18,846 rows, which the paper cuts at random.
    "20-newsgroups": ExtraSet("houlsby17/20_newsgroups", {"train": ("train.parquet", "test.parquet")}),
    "airline": _crowdflower("airline", "Airline-Sentiment-2-w-AA.csv", "airline_sentiment"),
    "disasters": _crowdflower(
        "disasters",
        "socialmedia-disaster-tweets-DFE.csv",
        "choose_one",
        labels={"Relevant": "relevant", "Not Relevant": "not relevant"},
    ),
    "emotion": _crowdflower("emotion", "text_emotion.csv", "sentiment", "content"),
    "global-warming": _crowdflower(
        "global_warming",
        "1377884570_tweet_global_warming.csv",
        "existence",
        "tweet",
        labels={"Y|Yes": "yes", "N|No": "no"},
    ),
    "political-audience": _crowdflower(*_POLITICAL, "audience"),
    "political-bias": _crowdflower(*_POLITICAL, "bias"),
    "political-message": _crowdflower(*_POLITICAL, "message"),
    "primary-emotions": _crowdflower("primary_emotions", "primary-plutchik-wheel-DFE.csv", "emotion", "sentence"),
    "progressive-opinion": _crowdflower(*_PROGRESSIVE, "q2_", "tweet", labels=_OPINIONS),
    "progressive-stance": _crowdflower(*_PROGRESSIVE, "q1_", "tweet", labels=_STANCES),
    "us-economic-performance": _crowdflower(
        "us_economic_performance",
        "us-economic-newspaper.csv",
        "positivity",
        labels={"[1-9]": "relevant", "": "not relevant"},
        note="the copy has no relevance column: an article counts as relevant if its positivity was rated",
    ),
    "sms-spam": ExtraSet(
        "houlsby17/sms_spam_collection", {"train": ("SMSSpamCollection",)}, names=("label", "text"), suffix=".tsv"
    ),
    "imdb": ExtraSet(
        "imdb",
        {"train": ("train.parquet",), "test": ("test.parquet",)},
        labels={"0": "negative", "1": "positive"},
        is_cut=False,
    ),
    "cb": ExtraSet(
        "CB",
        {"train": ("train.jsonl",), "dev": ("val.jsonl",), "test": ("test.jsonl",)},
        "premise",
        pair="hypothesis",
        is_cut=False,
    ),
    "scitail": ExtraSet("SciTail", {"test": ("test.jsonl",)}, "premise", pair="hypothesis", is_cut=False),
    "yelp-polarity": ExtraSet(
        "yelp_polarity",
        {"train": ("train.csv",), "test": ("test.csv",)},
        labels={"1": "negative", "2": "positive"},
        names=("label", "text"),
        is_cut=False,
    ),
    "squad": ExtraSet(
        "SQuAD", {"train": ("train-v1.1.json",), "dev": ("dev-v1.1.json",)}, kind="span", label="", is_cut=False
    ),
}


def open_extra(name: str, config: DataConfig) -> Source:
    """The sides of a set under `config.root` or `$INLAY_DATA`; what the paper cut at random is cut by the seed."""
    entry = EXTRA.get(name.lower())
    if entry is None:
        raise UnknownName("extra data set", name, EXTRA)
    for key in ("text", "pair", "label", "split"):
        if getattr(config, key) is not None:
            raise BadConfig(f"`data.{key}` is set, but `extra/{name}` has its own columns", f"leave out `--{key}`")
    folder = _find_folder(entry, name.lower(), config)
    config = replace(
        config,
        kind=entry.kind if config.kind == "auto" else config.kind,
        test_share=config.test_share or (SHARE if entry.is_cut and config.test is None else 0.0),
    )
    if entry.label:
        config = replace(config, text="text", pair=None if entry.pair is None else "pair", label="label")
    sides = {}
    for side, names in entry.files.items():
        paths = [folder / file for file in names]
        if all(path.is_file() for path in paths):
            sides[side] = _reading(paths, entry, config)
    return Source(f"extra/{name.lower()}", sides, config, str(folder))


def _find_folder(entry: ExtraSet, name: str, config: DataConfig) -> Path:
    root = config.root or os.environ.get("INLAY_DATA")
    if not root:
        raise Missing(f"no folder given for extra/{name}", "give it with `--data-root DIR` or set `$INLAY_DATA`")
    for folder in (Path(root) / entry.folder, Path(root) / Path(entry.folder).name, Path(root) / name):
        if folder.is_dir():
            return folder
    files = ", ".join(file for names in entry.files.values() for file in names)
    raise Missing(f"no folder `{entry.folder}` in `{root}`", f"put the set there as it was published: {files}")


def _reading(paths: list[Path], entry: ExtraSet, config: DataConfig) -> Callable[[], Table]:
    def read() -> Table:
        tables = [read_table(path, config, entry.names, suffix=entry.suffix) for path in paths]
        whole = replace(
            tables[0],
            rows=[row for table in tables for row in table.rows],
            lines=[line for table in tables for line in table.lines],
            notes=tuple(note for table in tables for note in table.notes),
            faults=tuple(fault for table in tables for fault in table.faults),
        )
        return _name_labels(_name_columns(whole, entry), entry) if entry.label else whole

    return read


def _name_columns(table: Table, entry: ExtraSet) -> Table:
    """The table with plain names for its columns, so that all sides of a set agree."""
    names = list(table.header.names)
    for plain, wanted in (("text", entry.text), ("pair", entry.pair), ("label", entry.label)):
        found = next((place for place, name in enumerate(names) if wanted and name.startswith(wanted)), None)
        if found is not None:
            names[found] = plain
        elif wanted is not None and plain != "label":  # unlabelled test rows have none
            hint = f"columns there are: {', '.join(names)}"
            raise BadData(f"no column `{wanted}`", hint, path=table.header.path, line=table.header.line)
    return replace(table, header=table.header._replace(names=tuple(names)))


def _name_labels(table: Table, entry: ExtraSet) -> Table:
    """The table with the labels that the set's patterns give its cells, without the rows that fit none."""
    notes = (*table.notes, *((entry.note,) if entry.note else ()))
    if not entry.labels or "label" not in table.header.names:
        return replace(table, notes=notes)
    patterns = [(re.compile(pattern, re.DOTALL), label) for pattern, label in entry.labels.items()]
    place = table.header.names.index("label")
    rows, lines, dropped = [], [], Counter[str]()
    for row, line in zip(table.rows, table.lines, strict=True):
        cell = "" if row[place] is None else str(row[place]).strip()
        label = next((label for pattern, label in patterns if pattern.fullmatch(cell)), None)
        if label is None:
            dropped[cell] += 1
            continue
        rows.append([*row[:place], label, *row[place + 1 :]])
        lines.append(line)
    if dropped:
        shown = ", ".join(f"`{cell}` ({count})" for cell, count in dropped.most_common(5))
        notes = (*notes, f"{sum(dropped.values())} rows left out, whose label is {shown}")
    return replace(table, rows=rows, lines=lines, notes=notes)
