"""The heads: `HEADS` has one entry for each kind of task: number of outputs, input, loss and answer.

`inlay.data.kinds.KINDS` has the other half, which needs no torch.

A head is a linear layer, on the pooled vector of a row or on every token. Its kind says how logits become a loss in
training and an answer in use. On a backbone that writes, a head has no layer: its kind says which texts are scored, or
that a free one is written. What training finds out besides weights travels with the head: the scale of regression
targets (standardised while training), the temperature that calibrates probabilities, the margin for giving no answer,
the thresholds of labels.

Invariant: NaN or infinite outputs are never an answer, and no answer has such a number. The argmax of NaN would be the
first class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inlay.errors import NotFinite, UnknownName, Unsupported
from inlay.model.batch.route import IGNORED
from inlay.model.heads.head_losses import (
    batched_passage_losses,
    batched_tag_losses,
    class_losses,
    level_losses,
    number_losses,
    passage_losses,
    set_losses,
    tag_losses,
    text_losses,
)
from inlay.model.heads.spans import Entity, Passage, Passages, Word, find_passages, join_entities

WRITTEN = "text"
"""The pooling of a head whose answers the backbone writes."""
JOINED, TOWERS = "joined", "towers"
"""The two ways to read a pair of texts: as one text, or each by itself."""
_SURE = 1e-9  # probabilities nearer than this to 0 or 1 have the log-odds of it


@dataclass(frozen=True)
class HeadSpec:
    """A slot's head."""

    kind: str
    num_outputs: int
    pooling: str
    target_mean: float = 0.0
    target_std: float = 1.0
    temperature: float = 1.0
    """logits are divided by it before they become probabilities; it changes no label"""
    null_threshold: float | None = None
    """span: there is no answer if the null score is above the best answer's by more than this; None: there always is"""
    thresholds: tuple[float, ...] | None = None
    """multilabel: the least logit of each label that applies; two classes: the margin that the second's logit must
    have over the first's; None: 0. They change no probability"""
    hidden: str = "none"
    """the layer before it: none, tanh, or pooler (a trained copy of the backbone's)"""
    features: str = "last"
    """its input: the last layer, or a learned mix of all"""
    texts: tuple[str, ...] = ()
    """where answers are written: the texts that are scored, one for each output; (): the answer is a free text"""
    beams: int = 1
    """texts that are pursued at a time while a free text is written"""
    max_answer: int = 64
    """tokens of a free text at most"""
    prompt: str = ""
    """where answers are written: the text before every row, so that one backbone can tell its tasks apart"""
    pairs: str = JOINED
    """the way a pair is read: `joined` as one text, or `towers`, each text by itself"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", tuple(self.texts))  # a manifest's JSON has lists
        if self.thresholds is not None:
            object.__setattr__(self, "thresholds", tuple(self.thresholds))

    def to_stored(self) -> dict[str, Any]:
        """Return the head as a manifest stores it, without untuned thresholds, which older manifests do not have."""
        fields = asdict(self)
        if self.thresholds is None:
            del fields["thresholds"]
        return fields

    def shift(self, logits_L: Tensor) -> Tensor:
        """Shift the logits by the thresholds: a label applies from 0 on, and of classes the largest is the answer."""
        if self.thresholds is None:
            return logits_L
        cuts = self.thresholds if self.kind == "multilabel" else (0.0, *self.thresholds)
        return logits_L.double() - torch.tensor(cuts, dtype=torch.float64)

    @property
    def is_finite(self) -> bool:
        """Whether the settings that training found are finite."""
        found = (self.target_mean, self.target_std, self.temperature, self.null_threshold or 0.0)
        return all(map(math.isfinite, (*found, *(self.thresholds or ()))))

    @property
    def layout(self) -> str:
        """The layout of its rows as windows of tokens, by name."""
        return WRITTEN if self.is_written else self.kind

    @property
    def is_written(self) -> bool:
        """Whether the backbone writes the answer; the head then has no layer of its own."""
        return self.pooling == WRITTEN

    @property
    def reads_rows(self) -> bool:
        """Whether it reads one vector of a row, not its tokens."""
        return find_head(self.kind).reads == "pooled"

    @property
    def is_free_text(self) -> bool:
        """Whether the answer is any text that the backbone writes."""
        return find_head(self.kind).reads == "nothing"

    @property
    def has_towers(self) -> bool:
        """Whether it reads the two texts of a pair apart: u, v, |u − v|, u · v and their cosine."""
        return self.pairs == TOWERS

    @property
    def reads_first(self) -> bool:
        """Whether it reads nothing but the last states of a text's first token."""
        return self.reads_rows and self.features == "last" and self.pooling in ("cls", "pooler")


@dataclass(frozen=True)
class Output:
    """A row's logits, window by window; for heads that read tokens, also the part of the text each token stands for."""

    logits: tuple[Tensor, ...]
    """[L], or [T, L] for a head that reads tokens"""
    places: tuple[np.ndarray, ...] = ()
    text: str = ""
    words: tuple[tuple[int, int], ...] = ()

    @property
    def flat(self) -> Tensor:
        """All logits as one vector: what probes keep and proofs compare."""
        return torch.cat([logits.flatten() for logits in self.logits])

    @property
    def is_finite(self) -> bool:
        """Whether no logit is NaN or infinite."""
        return all(bool(logits.isfinite().all()) for logits in self.logits)


def collect_outputs(encoded: Any, logits: Sequence[Tensor], texts: Sequence[str]) -> list[Output]:
    """Collect the output of every row of an encoded set (`inlay.data`) from the logits of all windows."""
    places, words = encoded.places, encoded.words
    outputs = []
    for row, (windows, text) in enumerate(zip(encoded.windows_of_rows(), texts, strict=True)):
        own_logits = tuple(logits[window] for window in windows)
        own_places = () if places is None else tuple(places[window] for window in windows)
        outputs.append(Output(own_logits, own_places, text, () if words is None else words[row]))
    return outputs


@dataclass(frozen=True)
class Outcome:
    """An answer read from logits: `label`, `labels`, `value`, `entities` or `answer`, with probabilities if any.

    An outcome that is too unsure to be given is `abstained`, and keeps its probabilities.
    """

    label: str | None = None
    labels: tuple[str, ...] | None = None
    value: float | None = None
    probabilities: dict[str, float] | None = None
    entities: tuple[Entity, ...] | None = None
    words: tuple[Word, ...] | None = None
    answer: str | None = None
    """"" where the context has none"""
    start: int | None = None
    end: int | None = None
    probability: float | None = None
    nbest: tuple[Passage, ...] | None = None
    abstained: str = ""
    """the field that would have been given, if it were surer"""

    @property
    def is_finite(self) -> bool:
        """Whether all its numbers are finite."""
        found = [self.value, self.probability, *(self.probabilities or {}).values()]
        for items in (self.entities, self.words, self.nbest):
            found += [item.probability for item in items or ()]
        return all(number is None or math.isfinite(number) for number in found)

    def entities_of(self, tags: Sequence[str], text: str) -> tuple[Entity, ...]:
        """Return the entities that the words would make with these tags."""
        return join_entities([replace(word, tag=tag) for word, tag in zip(self.words or (), tags, strict=True)], text)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that this kind of task has, as plain data."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, tuple) and name != "labels":
                found[name] = [vars(item) for item in value]
            elif value is not None and name != "abstained":
                found[name] = value
        silent = {} if self.abstained in ("", *found) else {self.abstained: None}
        return {**silent, **found, **({"abstained": True} if self.abstained else {})}


@dataclass(frozen=True)
class Head:
    """An entry of the table."""

    num_outputs: Callable[[int], int]
    """number of labels -> number of outputs"""
    row_losses: Callable[[Tensor, Tensor], Tensor]
    """logits [n, L] (or [n, T, L]) and targets -> the loss of each row [n], the mean over its labelled tokens"""
    read_answer: Callable[[Output, HeadSpec, Sequence[str]], Outcome]
    """finite outputs -> the answer; `answer` also takes others"""
    read_prediction: Callable[[Output, HeadSpec, Sequence[str]], Any]
    """finite outputs -> the prediction that metrics compare with a target; `predict` also takes others"""
    confidence: Callable[[Outcome], float] | None = None
    """the confidence of an outcome; None: this kind has none"""
    evidence: Callable[[Tensor, HeadSpec, int], Tensor] | None = None
    """logits [..., L] of rows -> one number for each that says how much speaks for a label, by its number: log-odds; or
    the number that is the answer. Differentiable; None: a row has no one answer"""
    reads: str = "pooled"
    """"pooled": one vector per row; "tokens": every token; "nothing": the backbone writes the answer"""
    calibrates: bool = False
    """whether its logits, divided by a temperature, are the log-odds of a decision"""
    count_cuts: Callable[[int], int] = lambda num_outputs: 0
    """number of outputs -> number of thresholds that its decision may have"""
    max_length: int = 128
    """default number of tokens of a row or window"""
    weight: Callable[[Tensor], float] = lambda target: 1.0
    """the weight of a window in a mean, from its tokens' targets"""
    fit_targets: Callable[[np.ndarray], dict[str, Any]] = lambda targets: {}
    """training targets -> the fields of the head's spec that they decide"""
    is_scaled: bool = False
    """whether targets are standardised by `target_mean` and `target_std` while training"""
    batched_losses: Callable[..., Tensor] | None = None
    """the same losses in a compiled step, of rows of any mix of heads; None: there such a head is stepped eagerly.
    Of `RowBatch` for heads that read pooled vectors, of `TokenBatch` for heads that read tokens"""

    def answer(self, output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
        """Read the answer from a row's outputs; refuse outputs, settings and answers that are not finite."""
        if not output.is_finite:
            raise NotFinite("the outputs of a row are not finite", "train the task again with a smaller `--lr`")
        if spec.is_finite:
            outcome = self.read_answer(output, spec, labels)
            if outcome.is_finite:
                return outcome
        raise NotFinite("the answer to a row is not finite", "train the task again with a smaller `--lr`")

    def predict(self, output: Output, spec: HeadSpec, labels: Sequence[str]) -> Any:
        """Read the prediction that metrics compare with a target; None where the outputs are not finite."""
        return self.read_prediction(output, spec, labels) if output.is_finite and spec.is_finite else None

    def abstain(self, outcome: Outcome, min_confidence: float | None) -> Outcome:
        """Return the outcome, or one that abstains if it is less sure than that."""
        if min_confidence is None:
            return outcome
        if self.confidence is None:
            raise Unsupported("a number has no confidence to abstain by", "leave out `--min-confidence`")
        if self.confidence(outcome) >= min_confidence:
            return outcome
        said = next(name for name in ("label", "labels", "answer", "entities") if getattr(outcome, name) is not None)
        if said == "entities":  # each stands for itself
            sure = tuple(entity for entity in outcome.entities or () if entity.probability >= min_confidence)
            return replace(outcome, entities=sure, abstained=said)
        return replace(outcome, label=None, labels=None, answer=None, start=None, end=None, abstained=said)


def _answer_class(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    logits_L = output.logits[0]
    probabilities = torch.softmax(logits_L.double() / spec.temperature, -1).tolist()
    best = int(spec.shift(logits_L).argmax())
    return Outcome(label=labels[best], probabilities=dict(zip(labels, probabilities, strict=True)))


def _answer_level(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    """Answer a level: P(level > k) is the sigmoid of logit k, lowered to the smallest before it, so that none rises."""
    logits_L = torch.cummin(output.logits[0].double(), -1).values
    exceeded = [1.0, *torch.sigmoid(logits_L / spec.temperature).tolist(), 0.0]
    probabilities = [above - below for above, below in itertools.pairwise(exceeded)]
    level = int((logits_L > 0).sum())
    return Outcome(label=labels[level], probabilities=dict(zip(labels, probabilities, strict=True)))


def _answer_labels(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    logits_L = output.logits[0]
    probabilities = torch.sigmoid(logits_L.double() / spec.temperature).tolist()
    chosen = tuple(label for label, logit in zip(labels, spec.shift(logits_L).tolist(), strict=True) if logit >= 0)
    return Outcome(labels=chosen, probabilities=dict(zip(labels, probabilities, strict=True)))


def _log_odds(logits_L: Tensor, spec: HeadSpec, label: int) -> Tensor:
    scaled_L = logits_L.double() / spec.temperature
    others_L = torch.cat([scaled_L[..., :label], scaled_L[..., label + 1 :]], -1)
    return scaled_L[..., label] - others_L.logsumexp(-1)


def _log_odds_of_level(logits_L: Tensor, spec: HeadSpec, label: int) -> Tensor:
    exceeded_L = torch.sigmoid(torch.cummin(logits_L.double(), -1).values / spec.temperature)
    ends = torch.ones_like(exceeded_L[..., :1]), torch.zeros_like(exceeded_L[..., :1])
    exceeded_L = torch.cat([ends[0], exceeded_L, ends[1]], -1)
    return torch.logit(exceeded_L[..., label] - exceeded_L[..., label + 1], eps=_SURE)


def _confidence_of_label(outcome: Outcome) -> float:
    return (outcome.probabilities or {})[outcome.label or ""]


def _confidence_of_set(outcome: Outcome) -> float:
    """Return how sure a set is: as sure as the least sure decision about one of its labels."""
    given = outcome.labels or ()
    return min(p if label in given else 1 - p for label, p in (outcome.probabilities or {}).items())


def _predict_number(output: Output, spec: HeadSpec, labels: Sequence[str]) -> float:
    if spec.texts:
        return float(spec.texts[int(output.logits[0].argmax())])
    return float(output.logits[0][0].double()) * spec.target_std + spec.target_mean


def _predict_logits(output: Output, spec: HeadSpec, labels: Sequence[str]) -> np.ndarray:
    return spec.shift(output.logits[0]).double().numpy()


def _answer_words(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    """Return a tag for every word; a word beyond the last token is outside, and nothing is known of it."""
    found: dict[int, tuple[str, float]] = {}
    for logits_TL, places in zip(output.logits, output.places, strict=True):
        tokens = np.flatnonzero(places[:, 0] >= 0)
        probabilities = torch.softmax(logits_TL[tokens].double() / spec.temperature, -1)
        best = logits_TL[tokens].argmax(-1).tolist()
        for row, (token, label) in enumerate(zip(tokens.tolist(), best, strict=True)):
            found[int(places[token, 0])] = (labels[label], float(probabilities[row, label]))
    words = []
    for start, end in output.words:
        tag, probability = found.get(start, ("O", 0.0))
        words.append(Word(start, end, output.text[start:end], tag, probability))
    return Outcome(entities=join_entities(words, output.text), words=tuple(words))


def find_output_passages(output: Output, null_threshold: float | None) -> Passages:
    """Return the best passages of a row's text."""
    windows = [(logits.double().numpy(), places) for logits, places in zip(output.logits, output.places, strict=True)]
    return find_passages(windows, output.text, null_threshold)


def _answer_passage(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    best = find_output_passages(output, spec.null_threshold).nbest
    chosen = best[0]
    return Outcome(answer=chosen.text, start=chosen.start, end=chosen.end, probability=chosen.probability, nbest=best)


def _predict_text(output: Output, spec: HeadSpec, labels: Sequence[str]) -> str:
    return "".join(chr(int(letter)) for letter in output.logits[0].tolist())


HEADS: dict[str, Head] = {
    "classify": Head(
        num_outputs=lambda num_labels: num_labels,
        row_losses=class_losses,
        read_answer=_answer_class,
        read_prediction=_predict_logits,
        confidence=_confidence_of_label,
        evidence=_log_odds,
        calibrates=True,
        count_cuts=lambda num_outputs: 1 if num_outputs == 2 else 0,
        batched_losses=lambda batch: class_losses(batch.logits_BL, batch.targets_B, batch.own_BL),
    ),
    "multilabel": Head(
        num_outputs=lambda num_labels: num_labels,
        row_losses=set_losses,
        read_answer=_answer_labels,
        read_prediction=_predict_logits,
        confidence=_confidence_of_set,
        evidence=lambda logits_L, spec, label: logits_L[..., label].double() / spec.temperature,
        calibrates=True,
        count_cuts=lambda num_outputs: num_outputs,
        batched_losses=lambda batch: set_losses(batch.logits_BL, batch.labels_BL, batch.own_BL),
    ),
    "regress": Head(
        num_outputs=lambda num_labels: 1,
        row_losses=number_losses,
        read_answer=lambda output, spec, labels: Outcome(value=_predict_number(output, spec, labels)),
        read_prediction=_predict_number,
        evidence=lambda logits_L, spec, label: logits_L[..., 0].double() * spec.target_std + spec.target_mean,
        fit_targets=lambda targets: {
            "target_mean": float(np.mean(targets)),
            "target_std": float(np.std(targets)) or 1.0,
        },
        is_scaled=True,
        batched_losses=lambda batch: number_losses(batch.logits_BL, batch.targets_B),
    ),
    "ordinal": Head(
        num_outputs=lambda num_labels: num_labels - 1,
        row_losses=level_losses,
        read_answer=_answer_level,
        read_prediction=_predict_logits,
        confidence=_confidence_of_label,
        evidence=_log_odds_of_level,
        batched_losses=lambda batch: level_losses(batch.logits_BL, batch.targets_B, batch.own_BL),
    ),
    "tag": Head(
        num_outputs=lambda num_labels: num_labels,
        row_losses=tag_losses,
        read_answer=_answer_words,
        read_prediction=lambda *given: tuple(word.tag for word in _answer_words(*given).words or ()),
        confidence=lambda outcome: min((entity.probability for entity in outcome.entities or ()), default=1.0),
        reads="tokens",
        calibrates=True,
        weight=lambda target: float((target != IGNORED).sum()),
        batched_losses=batched_tag_losses,
    ),
    "span": Head(
        num_outputs=lambda num_labels: 2,
        row_losses=passage_losses,
        read_answer=_answer_passage,
        read_prediction=lambda output, spec, labels: str(_answer_passage(output, spec, labels).answer),
        confidence=lambda outcome: outcome.probability or 0.0,
        reads="tokens",
        max_length=384,
        fit_targets=lambda targets: {"null_threshold": None if all(targets) else 0.0},
        batched_losses=batched_passage_losses,
    ),
    "text": Head(
        num_outputs=lambda num_labels: 0,
        row_losses=partial(text_losses, smoothing=0.0),
        read_answer=lambda output, spec, labels: Outcome(answer=_predict_text(output, spec, labels)),
        read_prediction=_predict_text,
        reads="nothing",
        weight=lambda target: float(len(target)),
    ),
}


def find_head(kind: str) -> Head:
    """Return the table's entry for a kind of task."""
    if kind not in HEADS:
        raise UnknownName("kind of task", kind, HEADS)
    return HEADS[kind]
