"""Explains an answer by the words that influence it most, and by the nearest training rows.

There are two ways to find the words. Occlusion leaves out each word in turn, with many variants in one batch.
Integrated gradients (`gradients.py`) divide the change from a fully masked text among the tokens. Both measure the
change of the evidence: the log-odds of a label, or the number that is the answer.

Both are checked by deletion: without the top words, the evidence must fall further than without as many random words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from inlay.data import Split, Task
from inlay.errors import BadConfig, BadData, UnknownName, Unsupported
from inlay.explore.gradients import Completeness, integrate_gradients
from inlay.explore.version_reader import OnRows, VersionReader
from inlay.explore.word_effects import Place, WordEffect, drop_words, leave_out, measure_effects, place_words
from inlay.model import Output, find_head
from inlay.notebook import show_html
from inlay.serving import answer_words

WAYS = ("occlusion", "gradients")
_RANDOM_DRAWS = 20
_SHARE_DELETED = 0.2
_FEWEST_WORDS = 5  # with fewer words, the top words and random words are too often the same
_SIDES = ("text", "pair")
_MOST_SHOWN = 10  # words shown in a notebook


@dataclass(frozen=True)
class Deletion:
    """How far the evidence falls without the top words, and without as many random words."""

    num_words: int
    top: float
    random: float
    """mean over random draws"""
    answer: str
    """answer without the top words"""


@dataclass(frozen=True)
class NearRow:
    """A training row, with the cosine of its vector and the text's."""

    line: int
    text: str
    pair: str | None
    label: Any
    cosine: float


@dataclass(frozen=True)
class Explanation:
    """An answer, and the words that influence it."""

    reference: str
    kind: str
    by: str
    text: str
    pair: str | None
    answer: dict[str, Any]
    """the answer, as `inlay predict --json` prints it"""
    label: str | None
    """the label whose evidence is explained; None if the answer is a number"""
    evidence: float
    """the log-odds of the label, or the number"""
    words: tuple[WordEffect, ...]
    """in the order of the text, then those of the second text"""
    completeness: Completeness | None
    deletion: Deletion | None
    nearest: tuple[NearRow, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as data."""
        about = asdict(self)
        if self.completeness is not None:
            about["completeness"] |= {"gap": self.completeness.gap, "holds": self.completeness.holds}
        return about

    def __repr__(self) -> str:
        strongest = max(self.words, key=lambda word: abs(word.change), default=None)
        moved = f", most by `{strongest.text}`" if strongest else ""
        return f"Explanation({self.reference}: {answer_words(self.answer)}{moved})"

    def _repr_html_(self) -> str:
        ranked = sorted(self.words, key=lambda word: -abs(word.change))[:_MOST_SHOWN]
        facts = {"answer": answer_words(self.answer), "by": self.by, "evidence": self.evidence}
        shown = [[word.text, word.change] for word in ranked]
        near = [[f"line {row.line}: {row.text} ({row.label})", row.cosine] for row in self.nearest]
        words = show_html(self.reference, facts, ["word", "moves the evidence by"], shown)
        return words + (show_html("", {}, ["nearest training rows", "cosine"], near) if near else "")


def explain_answer(
    reader: VersionReader,
    text: str,
    pair: str | None = None,
    *,
    by: str = "occlusion",
    label: str | None = None,
) -> Explanation:
    """Explain the answer to a text (or pair) by its words; `label` explains another label than the answer's."""
    # 1. check what was asked
    if by not in WAYS:
        raise UnknownName("way to explain", by, WAYS)
    _check_kind(reader, by)
    row = reader.make_split([text], None if pair is None else [pair])
    if not text.strip():
        raise BadData("the text is empty", "give a text with at least one word")
    # 2. the answer, and its evidence
    sides = {side: place_words(words) for side, words in zip(_SIDES, (text, pair or ""), strict=True)}
    (output,) = reader.outputs(row)
    (answer,) = reader.describe([output])
    number = _choose_label(reader, answer, label)
    whole = _measure(reader, output, number)
    # 3. the effect of each word
    notes, completeness = [], None
    if by == "gradients":
        found = integrate_gradients(reader, row, number)
        completeness = found.completeness
        words = _join_tokens(row, sides, found)
        if not completeness.holds:
            notes.append(f"the parts add up to {completeness.total:.3f}, the change is {completeness.change:.3f}")
    else:
        words = _occlude(reader, row, sides, number, whole)
        if not words:
            notes.append("a single word cannot be left out: `--by gradients` can explain it")
    if any(" " in word.text for word in words):
        notes.append("neighbouring words are taken together, as there are many")
    labels = reader.manifest.labels
    return Explanation(
        reference=reader.version.reference,
        kind=reader.manifest.kind,
        by=by,
        text=text,
        pair=pair,
        answer=answer,
        label=labels[number] if labels else None,
        evidence=whole,
        words=tuple(words),
        completeness=completeness,
        deletion=_check_by_deletion(reader, row, words, number, whole),
        notes=tuple(notes),
    )


def find_nearest(
    reader: VersionReader, row: Split, task: Task, number: int = 3, on_rows: OnRows = lambda _: None
) -> tuple[NearRow, ...]:
    """Return the training rows whose vectors have the largest cosine with the row's vector; no text twice."""
    train = task.train
    own, others = reader.vectors(row)[0], reader.vectors(train, on_rows)
    lengths = np.linalg.norm(others, axis=1) * np.linalg.norm(own)
    cosines = others @ own / np.maximum(lengths, 1e-12)
    assert train.targets is not None
    found: dict[tuple[str, ...], NearRow] = {}
    for place in np.argsort(-cosines, kind="stable"):
        if len(found) == number:
            break
        index = int(place)
        second = None if train.pairs is None else train.pairs[index]
        label = _name_target(train.targets[index], task.labels)
        near = NearRow(train.lines[index], train.texts[index], second, label, float(cosines[index]))
        found.setdefault((near.text, near.pair or ""), near)
    return tuple(found.values())


def _check_kind(reader: VersionReader, by: str) -> None:
    """Refuse kinds of task whose rows do not have a single output to explain."""
    head = reader.spec.head
    table = find_head(head.kind)
    if table.evidence is None:
        what = "writes a text" if table.reads == "nothing" else "has an answer for every word"
        hint = "`inlay predict --json` says how sure it is of each part of its answer"
        raise Unsupported(
            f"`explain` for a `{head.kind}` task: it {what}, so there is no single output to explain", hint
        )
    if head.is_written and by == "gradients":
        raise Unsupported("`--by gradients` on a text-to-text backbone", "use `--by occlusion`")
    if head.is_written and not reader.manifest.labels:
        raise Unsupported("`explain` for a number that is written as text", "train the task on an encoder")


def _choose_label(reader: VersionReader, answer: dict[str, Any], asked: str | None) -> int:
    """Return the index of the label to explain: the given one, the answer's, or the likeliest of a set."""
    labels = list(reader.manifest.labels)
    if not labels:
        if asked is not None:
            raise BadConfig(f"`--label {asked}` for a task whose answer is a number", "leave it out")
        return 0
    if asked is not None:
        if asked not in labels:
            raise UnknownName("label", asked, labels)
        return labels.index(asked)
    probabilities = answer["probabilities"]
    return labels.index(
        answer.get("label") or max(answer.get("labels") or labels, key=lambda name: probabilities[name])
    )


def _measure(reader: VersionReader, output: Output, label: int) -> float:
    evidence = find_head(reader.spec.head.kind).evidence
    assert evidence is not None
    return float(evidence(output.logits[0], reader.spec.head, label))


def _occlude(
    reader: VersionReader, row: Split, sides: dict[str, list[Place]], label: int, whole: float
) -> list[WordEffect]:
    """Return the effect of each word: how much the evidence falls without it."""
    text, pair = row.texts[0], None if row.pairs is None else row.pairs[0]
    variants = {"text": [(short, pair) for short in leave_out(text, sides["text"])]}
    if pair is not None:
        variants["pair"] = [(text, short) for short in leave_out(pair, sides["pair"])]
    found = iter(_measure_all(reader, [variant for own in variants.values() for variant in own], label))
    words = []
    for side, own in variants.items():
        values = [next(found) for _ in own]
        source = text if side == "text" else pair or ""
        words += measure_effects(source, sides[side] if own else [], whole, values, side)
    return words


def _measure_all(reader: VersionReader, variants: Sequence[tuple[str, str | None]], label: int) -> list[float]:
    if not variants:
        return []
    pairs = [pair or "" for _, pair in variants] if reader.takes_pairs else None
    rows = Split([text for text, _ in variants], pairs, None, list(range(len(variants))))
    return [_measure(reader, output, label) for output in reader.outputs(rows)]


def _join_tokens(row: Split, sides: dict[str, list[Place]], found: Any) -> list[WordEffect]:
    """Add up the parts of each word's tokens; a token that touches two words counts for the first."""
    words = []
    for number, (side, places) in enumerate(sides.items()):
        text = row.texts[0] if side == "text" else (row.pairs or [""])[0]
        totals = np.zeros(len(places))
        ends = np.array([end for _, end in places])
        for part, own, (start, _) in zip(found.parts_T, found.sides, found.places, strict=True):
            if own == number:
                totals[min(int(np.searchsorted(ends, start, side="right")), len(places) - 1)] += part
        words += [
            WordEffect(text[start:end], float(total), start, end, side)
            for (start, end), total in zip(places, totals, strict=True)
        ]
    return words


def _check_by_deletion(
    reader: VersionReader, row: Split, words: Sequence[WordEffect], label: int, whole: float
) -> Deletion | None:
    """Leave out the words that speak most for the answer, and as many random words; None if there are few words."""
    if len(words) < _FEWEST_WORDS:
        return None
    num_words = max(1, round(_SHARE_DELETED * len(words)))
    top = sorted(range(len(words)), key=lambda place: -words[place].change)[:num_words]
    generator = np.random.default_rng(0)
    draws = [top, *(generator.permutation(len(words))[:num_words].tolist() for _ in range(_RANDOM_DRAWS))]
    text, pair = row.texts[0], None if row.pairs is None else row.pairs[0]
    variants = []
    for draw in draws:
        dropped = {side: [(words[n].start, words[n].end) for n in draw if words[n].side == side] for side in _SIDES}
        short = drop_words(text, dropped["text"]), None if pair is None else drop_words(pair, dropped["pair"])
        variants.append((short[0] or " ", None if short[1] is None else short[1] or " "))
    values = _measure_all(reader, variants, label)
    first = reader.make_split([variants[0][0]], None if pair is None else [variants[0][1] or " "])
    (answer,) = reader.describe(reader.outputs(first))
    return Deletion(num_words, whole - values[0], whole - float(np.mean(values[1:])), answer_words(answer))


def _name_target(target: Any, labels: Sequence[str]) -> Any:
    """Return a target as the names of its labels, or as a number."""
    if not labels:
        return float(target)
    if np.ndim(target):
        return [label for label, applies in zip(labels, target, strict=True) if applies]
    return labels[int(target)]
