"""The published data sets by name: where their files are and what their columns mean.

`glue/NAME`: the test sides are unlabelled, so a GLUE task has no test rows; the files can still be read to predict. If
QNLI's training file is missing and SQuAD is beside it, the training rows are rebuilt from SQuAD, and a note says so.
GLUE made QNLI from SQuAD by pairing questions with sentences of their paragraphs and leaving out pairs with few words
in common. Here every question gives two rows: with the sentence that holds its answer (entailment), and with the other
sentence that has the most words in common with the question (not_entailment); a pair without a common word is left
out. As many rows as GLUE has are kept, chosen by a hash of the row. GLUE's dev rows come from SQuAD's dev articles, so
no dev row can be among them.

`extra/NAME`: Houlsby et al. 2019 (section 3.3) use 17 classification sets, each split at random into 80% training, 10%
dev and 10% test rows; 13 of them are known here, split in the same way by the seed of the config (equal texts stay on
one side, which the paper does not mention). Files are read as they were published: their labels are merged or left out
as `labels` says. More sets that studies read by name (IMDB, CommitmentBank, SciTail, Yelp, SQuAD) have their own
splits.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from inlay.data.columns import Header
from inlay.data.sources import Source, Table, read_table
from inlay.data.squad import read_squad
from inlay.errors import BadConfig, BadData, Missing, UnknownName
from inlay.settings import DataConfig

_NLI = ("sentence1", "sentence2", "label")
_COLA_COLUMNS = ("source", "label", "mark", "sentence")  # columns of the files without a header


@dataclass(frozen=True)
class GlueSet:
    """One GLUE set: its folder, its columns (text, pair, label) and its official metric."""

    folder: str
    columns: tuple[str, str | None, str]
    metric: str = "accuracy"
    kind: str = "classify"
    dev: str = "dev"
    test: str = "test"
    names: tuple[str, ...] | None = None  # columns of train and dev files without a header
    bounds: tuple[float, float] | None = None  # range of its targets


GLUE = {
    "cola": GlueSet("CoLA", ("sentence", None, "label"), metric="matthews", names=_COLA_COLUMNS),
    "sst2": GlueSet("SST-2", ("sentence", None, "label")),
    "mrpc": GlueSet("MRPC", ("#1 String", "#2 String", "Quality"), metric="f1"),
    "stsb": GlueSet("STS-B", ("sentence1", "sentence2", "score"), metric="spearman", kind="regress", bounds=(0.0, 5.0)),
    "qqp": GlueSet("QQP", ("question1", "question2", "is_duplicate"), metric="f1"),
    "mnli": GlueSet("MNLI", ("sentence1", "sentence2", "gold_label"), dev="dev_matched", test="test_matched"),
    "mnli-mm": GlueSet("MNLI", ("sentence1", "sentence2", "gold_label"), dev="dev_mismatched", test="test_mismatched"),
    "qnli": GlueSet("QNLI", ("question", "sentence", "label")),
    "rte": GlueSet("RTE", _NLI),
    "wnli": GlueSet("WNLI", _NLI),
}


SHARE = 0.1  # share of the rows for dev, and for test
_STANCES = {"AGAINST:.*": "against", "FOR:.*": "for", "NEUTRAL:.*": "neutral", "NONE OF THE ABOVE:.*": "none"}
_OPINIONS = {r"1\..*": "about the target", r"2\..*": "about something else", r"3\..*": "none"}


@dataclass(frozen=True)
class ExtraSet:
    """One set: its folder, the files of its sides, the beginnings of its columns' names, and its labels."""

    folder: str
    files: Mapping[str, tuple[str, ...]]
    """side -> files; several are read as one"""
    text: str = "text"
    label: str = "label"
    pair: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """pattern of a cell -> its label; rows whose cell fits no pattern are left out. Empty: cells are labels"""
    is_cut: bool = True
    """whether dev and test are split off the rows, as in the paper"""
    names: tuple[str, ...] | None = None
    """names of the columns, if the file has no header"""
    suffix: str | None = None
    """suffix of its format, if the file's name has none"""
    kind: str = "classify"
    note: str = ""


def _crowdflower(folder: str, file: str, label: str, text: str = "text", **more: object) -> ExtraSet:
    return ExtraSet(f"houlsby17/crowdflower_{folder}", {"train": (file,)}, text, label, **more)  # type: ignore[arg-type]


_PROGRESSIVE = ("progressive", "progressive-tweet-sentiment.csv")
_POLITICAL = ("political", "political_media.csv")
EXTRA: dict[str, ExtraSet] = {
    # Both halves of the split by date, read as one: 18,846 rows, which the paper splits at random.
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


def open_glue(name: str, config: DataConfig) -> Source:
    """Open a GLUE set under `config.root` or `$INLAY_DATA`, as official .tsv or as .jsonl."""
    key = name.lower()
    entry = GLUE.get(key)
    if entry is None:
        raise UnknownName("GLUE set", name, GLUE)
    _refuse_columns(config, "a GLUE set")
    hint = f"put GLUE's {entry.folder} there, as the official zip has it"
    folder = _find_folder(f"glue/{key}", (entry.folder, key), config, hint)
    config = replace(
        config,
        text="text",
        pair=None if entry.columns[1] is None else "pair",
        label="label",
        kind=entry.kind if config.kind == "auto" else config.kind,
        metric=entry.metric if config.metric == "auto" else config.metric,
    )
    sides: dict[str, Callable[[], Table]] = {}
    for side, stem in (("train", "train"), ("dev", entry.dev), ("test", entry.test)):
        # The official file, or a .jsonl whose name begins with it (a published subset says so in its name).
        official = folder / f"{stem}.tsv"
        path = official if official.is_file() else min(folder.glob(f"{stem}*.jsonl"), default=None)
        if path is not None:
            names = entry.names if path == official and side != "test" else None
            sides[side] = partial(_read_glue, path, names, entry, config)
    squad = folder.parent / "SQuAD" / "train-v1.1.json"
    if key == "qnli" and "train" not in sides and squad.is_file():
        sides["train"] = lambda: _name_glue_columns(rebuild_qnli(squad), entry)
    required = ("train", "dev") if config.dev is None else ("train",)  # scores are on the official dev rows only
    return Source(f"glue/{key}", sides, config, str(folder), required, entry.bounds)


def _read_glue(path: Path, names: tuple[str, ...] | None, entry: GlueSet, config: DataConfig) -> Table:
    table = read_table(path, config, names)
    if path.suffix != ".tsv":
        table = replace(table, notes=(*table.notes, f"rows read from {path.name}"))
    return _name_glue_columns(table, entry)


def _name_glue_columns(table: Table, entry: GlueSet) -> Table:
    """Give the columns plain names, so that all files of a set agree: MNLI's differ between .jsonl and .tsv."""
    text, pair, label = entry.columns
    plain = {text: "text", pair: "pair", label: "label"}
    if text not in table.header.names:
        plain |= {"premise": "text", "hypothesis": "pair"}
    names = tuple(plain.get(name, name) for name in table.header.names)
    return replace(table, header=table.header._replace(names=names))


QNLI_ROWS = 104_743  # training rows of GLUE's QNLI
QNLI_NOTE = "QNLI's training rows are a reconstruction from SQuAD v1.1, not GLUE's own file"
_SENTENCE_END = re.compile(r"[.!?][\"”’')\]]*(\s+)(?=[\"“‘'(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(
    r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|vs|No|Jr|Sr|Lt|Gen|Col|Rev|Sgt|Prof|Sen|Gov|Rep|Capt|Hon|Mt|Ft|etc|cf|approx|ca|c|al"
    r"|e\.g|i\.e|Inc|Co|Ltd|Corp|Jan|Feb|Mar|Apr|Aug|Sept|Oct|Nov|Dec|U\.S|a\.m|p\.m)\.$"
)


def rebuild_qnli(squad: Path) -> Table:
    """Return QNLI's training rows as a table with QNLI's columns; a line is a question's number in SQuAD."""
    try:
        questions = list(read_squad(json.loads(squad.read_text(encoding="utf8"))))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        reason = f"not a SQuAD document: {type(error).__name__}: {error}"
        raise BadData(reason, "put SQuAD v1.1's own train-v1.1.json there", path=squad) from None
    found: list[tuple[int, list[str]]] = []  # the line, and question, sentence and label
    known: dict[str, list[_Sentence]] = {}
    for line, record in enumerate(questions, start=1):
        context, question = str(record["context"]), str(record["question"]).strip()
        if context not in known:
            known[context] = [_Sentence(context, *place) for place in split_sentences(context)]
        found += [(line, pair) for pair in _pair_up(question, known[context], record["answers"])]

    def rank(row: int) -> bytes:
        return hashlib.blake2b("\0".join(found[row][1]).encode(), digest_size=16).digest()

    kept = [found[row] for row in sorted(sorted(range(len(found)), key=rank)[:QNLI_ROWS])]
    header = Header(str(squad), ("question", "sentence", "label"), None)
    note = f"{QNLI_NOTE}: {len(kept):,} of {len(found):,} pairs of a question and a sentence"
    return Table(header, [pair for _, pair in kept], [line for line, _ in kept], notes=(note,))


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each sentence."""
    places, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text[max(0, match.start() - 11) : match.start() + 1]):
            places.append((start, match.start(1)))
            start = match.end()
    return [(start, stop) for start, stop in [*places, (start, len(text))] if text[start:stop].strip()]


class _Sentence:
    """A sentence of a context: its place, its text, and its set of words."""

    def __init__(self, context: str, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.text = " ".join(context[start:stop].split())  # in one line, as GLUE's are
        self.words = _words(self.text)


def _pair_up(question: str, sentences: list[_Sentence], answers: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of a question: with the sentence of its answer, and with the most similar other one."""
    if not answers:
        return
    begin, answer, asked = int(answers[0]["answer_start"]), answers[0]["text"], _words(question)
    others = []
    for sentence in sentences:
        num_common = len(asked & sentence.words)
        if sentence.start <= begin < sentence.stop:
            if num_common:
                yield [question, sentence.text, "entailment"]
        elif num_common and answer not in sentence.text:
            others.append((num_common, sentence.text))
    if others:
        yield [question, max(others, key=lambda other: other[0])[1], "not_entailment"]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def open_extra(name: str, config: DataConfig) -> Source:
    """Open a set under `config.root` or `$INLAY_DATA`; what the paper split at random is split by the seed."""
    key = name.lower()
    entry = EXTRA.get(key)
    if entry is None:
        raise UnknownName("extra data set", name, EXTRA)
    _refuse_columns(config, f"`extra/{name}`")
    files = ", ".join(file for names in entry.files.values() for file in names)
    places = (entry.folder, Path(entry.folder).name, key)
    folder = _find_folder(f"extra/{key}", places, config, f"put the set there as it was published: {files}")
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
            sides[side] = partial(_read_extra, paths, entry, config)
    return Source(f"extra/{key}", sides, config, str(folder))


def _refuse_columns(config: DataConfig, owner: str) -> None:
    """Refuse settings that name columns, for a set whose columns are known."""
    for key in ("text", "pair", "label", "split"):
        if getattr(config, key) is not None:
            raise BadConfig(f"`data.{key}` is set, but {owner} has its own columns", f"leave out `--{key}`")


def _find_folder(title: str, places: tuple[str, ...], config: DataConfig, hint: str) -> Path:
    root = config.root or os.environ.get("INLAY_DATA")
    if not root:
        raise Missing(f"no folder given for {title}", "give it with `--data-root DIR` or set `$INLAY_DATA`")
    folder = next((Path(root) / place for place in places if (Path(root) / place).is_dir()), None)
    if folder is None:
        raise Missing(f"no folder `{places[0]}` in `{root}`", hint)
    return folder


def _read_extra(paths: list[Path], entry: ExtraSet, config: DataConfig) -> Table:
    """Read the files of one side as one table, with plain columns and labels."""
    tables = [read_table(path, config, entry.names, suffix=entry.suffix) for path in paths]
    whole = replace(
        tables[0],
        rows=[row for table in tables for row in table.rows],
        lines=[line for table in tables for line in table.lines],
        notes=tuple(note for table in tables for note in table.notes),
        faults=tuple(fault for table in tables for fault in table.faults),
    )
    return _name_labels(_name_extra_columns(whole, entry), entry) if entry.label else whole


def _name_extra_columns(table: Table, entry: ExtraSet) -> Table:
    """Give the columns plain names, so that all sides of a set agree."""
    names = list(table.header.names)
    for plain, wanted in (("text", entry.text), ("pair", entry.pair), ("label", entry.label)):
        found = next((place for place, name in enumerate(names) if wanted and name.startswith(wanted)), None)
        if found is not None:
            names[found] = plain
        elif wanted is not None and plain != "label":  # unlabelled test rows have no labels
            hint = f"columns there are: {', '.join(names)}"
            raise BadData(f"no column `{wanted}`", hint, path=table.header.path, line=table.header.line)
    return replace(table, header=table.header._replace(names=tuple(names)))


def _name_labels(table: Table, entry: ExtraSet) -> Table:
    """Replace label cells by the labels of the patterns that they fit; leave out rows that fit none."""
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
        notes = (*notes, f"{sum(dropped.values())} rows left out because of their label: {shown}")
    return replace(table, rows=rows, lines=lines, notes=notes)
