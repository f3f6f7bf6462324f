"""The heads: `HEADS` has one entry for each kind of task: how many outputs, what they read, which loss, which answer.

`inlay.data.kinds.KINDS` has the other half, which needs no torch.

A head is a linear layer, on the pooled vector of a row or on every token. Its kind says how logits become a loss in
training and an answer in use. On a backbone that writes, a head has no layer: its kind says which texts are scored, or
that a free one is written. What training finds out besides weights travels with the head: the scale of regression
targets (standardised while training), the temperature that makes probabilities honest, the margin of saying nothing,
the thresholds of labels.

What always holds: outputs that are NaN or infinite are no answer. The argmax of NaN would be the first class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.errors import NotFinite, UnknownName, Unsupported
from inlay.model.heads.spans import Entity, Passage, Passages, Word, find_passages, join_entities

WRITTEN = "text"
"""The pooling of a head whose answers the backbone writes."""
JOINED, TOWERS = "joined", "towers"
"""How a pair of texts is read: as one text, or each by itself."""
_IGNORED = -100  # the target of a token that says nothing


@dataclass(frozen=True)
class HeadSpec:
    """A slot's head."""

    kind: str
    num_outputs: int
    pooling: str
    target_mean: float = 0.0
    target_std: float = 1.0
    temperature: float = 1.0
    """what logits are divided by before they become probabilities; it changes no label"""
    null_threshold: float | None = None
    """span: there is no answer if the null score is above the best answer's by more than this; None: there always is"""
    thresholds: tuple[float, ...] | None = None
    """multilabel: what each label's logit must reach; of two classes, what the second's must exceed the first's by;
    None: 0. Probabilities are the same with them"""
    hidden: str = "none"
    """the layer before it: none, tanh, or pooler (a trained copy of the backbone's)"""
    features: str = "last"
    """what it reads: the last layer, or a learned mix of all"""
    texts: tuple[str, ...] = ()
    """where answers are written: those that are scored, one for each output; none: the answer is a free text"""
    beams: int = 1
    """texts that are pursued at a time while a free text is written"""
    max_answer: int = 64
    """tokens of a free text at most"""
    prompt: str = ""
    """where answers are written: what stands before every text, so that one backbone can tell its tasks apart"""
    pairs: str = JOINED
    """how a pair is read: `joined` as one text, or `towers`, each text by itself"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", tuple(self.texts))  # a manifest's JSON has lists
        if self.thresholds is not None:
            object.__setattr__(self, "thresholds", tuple(self.thresholds))

    def to_stored(self) -> dict[str, Any]:
        """As a manifest has it. Thresholds that nobody tuned are left out, as versions before them have none."""
        fields = asdict(self)
        if self.thresholds is None:
            del fields["thresholds"]
        return fields

    def shift(self, logits_L: Tensor) -> Tensor:
        """Logits of which a label applies from 0 on, or of classes the largest is the answer."""
        if self.thresholds is None:
            return logits_L
        cuts = self.thresholds if self.kind == "multilabel" else (0.0, *self.thresholds)
        return logits_L.double() - torch.tensor(cuts, dtype=torch.float64)

    @property
    def layout(self) -> str:
        """The name of how its rows become windows of tokens."""
        return WRITTEN if self.is_written else self.kind

    @property
    def is_written(self) -> bool:
        """Whether the backbone writes the answer; there is no layer of the head's own then."""
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
    """A row's logits, window by window, and for heads that read tokens what of its text each token stands for."""

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
        """Whether it says anything: no logit is NaN or infinite."""
        return all(bool(logits.isfinite().all()) for logits in self.logits)


class Windows(Protocol):
    """Encoded rows, as far as outputs need them."""

    @property
    def places(self) -> Sequence[np.ndarray] | None: ...

    @property
    def words(self) -> list[tuple[tuple[int, int], ...]] | None: ...

    def windows_of_rows(self) -> list[range]: ...


def collect_outputs(encoded: Windows, logits: Sequence[Tensor], texts: Sequence[str]) -> list[Output]:
    """The output of every row from the logits of all windows; `texts` are those the places are in."""
    places, words = encoded.places, encoded.words
    return [
        Output(
            tuple(logits[window] for window in windows),
            () if places is None else tuple(places[window] for window in windows),
            text,
            () if words is None else words[row],
        )
        for row, (windows, text) in enumerate(zip(encoded.windows_of_rows(), texts, strict=True))
    ]


@dataclass(frozen=True)
class Outcome:
    """What logits say: `label`, `labels`, `value`, `entities` or `answer`, with probabilities where there are any.

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

    def entities_of(self, tags: Sequence[str], text: str) -> tuple[Entity, ...]:
        """Return the entities that the words would make with these tags."""
        words = [replace(word, tag=tag) for word, tag in zip(self.words or (), tags, strict=True)]
        return join_entities(words, text)

    def to_json(self) -> dict[str, Any]:
        """Only the fields that this kind of task has."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, tuple) and name != "labels":
                found[name] = [vars(item) for item in value]
            elif value is not None and name != "abstained":
                found[name] = value
        silent = {} if self.abstained in ("", *found) else {self.abstained: None}
        return {**silent, **found, **({"abstained": True} if self.abstained else {})}


@dataclass(frozen=True)
class RowBatch:
    """Logits and targets of rows of any mix of heads, for a compiled step."""

    logits_BL: Tensor
    targets_B: Tensor
    """classes or numbers, as a head has them; other heads' are any number"""
    labels_BL: Tensor
    """which labels apply"""
    own_BL: Tensor
    """which logits are the row's own; the others count nothing"""


@dataclass(frozen=True)
class TokenBatch:
    """Logits and targets of the tokens of rows of any mix of heads, for a compiled step."""

    logits_NL: Tensor
    marks_N2: Tensor
    """a token's class first; for passages whether it is the start and the end, 0 or 1; `_IGNORED`: it says nothing"""
    rows_N: Tensor
    num_outputs_B: Tensor

    def add_up(self, values_N: Tensor) -> Tensor:
        """Sum values of tokens by row [B]."""
        num_rows = len(self.num_outputs_B)
        return values_N.new_zeros(num_rows, *values_N.shape[1:]).index_add(0, self.rows_N, values_N)


@dataclass(frozen=True)
class Head:
    """An entry of the table."""

    num_outputs: Callable[[int], int]
    """of the number of labels"""
    row_losses: Callable[[Tensor, Tensor], Tensor]
    """logits [n, L] (or [n, T, L]) and targets -> the loss of each row [n], the mean over its labelled tokens"""
    read_answer: Callable[[Output, HeadSpec, Sequence[str]], Outcome]
    """of finite outputs; `answer` is for all"""
    read_prediction: Callable[[Output, HeadSpec, Sequence[str]], Any]
    """what the metrics compare with a target, of finite outputs; `predict` is for all"""
    confidence: Callable[[Outcome], float] | None = None
    """how sure an outcome is; None: this kind cannot say"""
    reads: str = "pooled"
    """"pooled": one vector per row; "tokens": every token; "nothing": the backbone writes the answer"""
    calibrates: bool = False
    """whether its logits, divided by a temperature, are the log-odds of a decision"""
    max_length: int = 128
    """tokens of a row or window where nobody asks for a number"""
    weight: Callable[[Tensor], float] = lambda target: 1.0
    """how much a window counts in a mean, from its tokens' targets"""
    fit_targets: Callable[[np.ndarray], dict[str, Any]] = lambda targets: {}
    """training targets -> what of the head's specification they decide"""
    is_scaled: bool = False
    """whether targets are standardised by `target_mean` and `target_std` while training"""
    batched_losses: Callable[..., Tensor] | None = None
    """the same losses in a compiled step, of rows of any mix of heads; None: there such a head is stepped eagerly.
    Of `RowBatch` for heads that read pooled vectors, of `TokenBatch` for heads that read tokens"""

    def answer(self, output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
        """What a row's outputs say; refuses outputs that are not finite."""
        if not output.is_finite:
            raise NotFinite("the outputs of a row are not finite", "train the task again with a smaller `--lr`")
        return self.read_answer(output, spec, labels)

    def predict(self, output: Output, spec: HeadSpec, labels: Sequence[str]) -> Any:
        """What the metrics compare with a target; None where the outputs are not finite."""
        return self.read_prediction(output, spec, labels) if output.is_finite else None

    def abstain(self, outcome: Outcome, min_confidence: float | None) -> Outcome:
        """The outcome, or its silence if it is less sure than that."""
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


def _answer_labels(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    logits_L = output.logits[0]
    probabilities = torch.sigmoid(logits_L.double() / spec.temperature).tolist()
    chosen = tuple(label for label, logit in zip(labels, spec.shift(logits_L).tolist(), strict=True) if logit >= 0)
    return Outcome(labels=chosen, probabilities=dict(zip(labels, probabilities, strict=True)))


def _confidence_of_set(outcome: Outcome) -> float:
    """A set is as sure as the least sure decision about one of its labels."""
    given = outcome.labels or ()
    return min(p if label in given else 1 - p for label, p in (outcome.probabilities or {}).items())


def _answer_number(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    return Outcome(value=_predict_number(output, spec, labels))


def _predict_number(output: Output, spec: HeadSpec, labels: Sequence[str]) -> float:
    if spec.texts:
        return float(spec.texts[int(output.logits[0].argmax())])
    return float(output.logits[0][0].double()) * spec.target_std + spec.target_mean


def _predict_logits(output: Output, spec: HeadSpec, labels: Sequence[str]) -> np.ndarray:
    return spec.shift(output.logits[0]).double().numpy()


def _answer_words(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    """A tag for every word; a word beyond the last token is outside, and nothing is known of it."""
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


def _predict_tags(output: Output, spec: HeadSpec, labels: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.tag for word in _answer_words(output, spec, labels).words or ())


def find_output_passages(output: Output, null_threshold: float | None) -> Passages:
    """The best passages of a row's text."""
    windows = [(logits.double().numpy(), places) for logits, places in zip(output.logits, output.places, strict=True)]
    return find_passages(windows, output.text, null_threshold)


def _answer_passage(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    best = find_output_passages(output, spec.null_threshold).nbest
    chosen = best[0]
    return Outcome(answer=chosen.text, start=chosen.start, end=chosen.end, probability=chosen.probability, nbest=best)


def _predict_answer(output: Output, spec: HeadSpec, labels: Sequence[str]) -> str:
    return str(_answer_passage(output, spec, labels).answer)


def _predict_text(output: Output, spec: HeadSpec, labels: Sequence[str]) -> str:
    return "".join(chr(int(letter)) for letter in output.logits[0].tolist())


def _answer_text(output: Output, spec: HeadSpec, labels: Sequence[str]) -> Outcome:
    return Outcome(answer=_predict_text(output, spec, labels))


def text_losses(logits_nTV: Tensor, targets_nT: Tensor, smoothing: float) -> Tensor:
    """The mean cross-entropy of each answer's tokens, `smoothing` of every target spread over the vocabulary."""
    # Not as [n, V, T]: torch sums over a vocabulary that is not last several times slower, and less exactly.
    losses = F.cross_entropy(
        logits_nTV.float().flatten(0, 1),
        targets_nT.flatten(),
        reduction="none",
        ignore_index=_IGNORED,
        label_smoothing=smoothing,
    )
    losses_nT = losses.view_as(targets_nT)
    return losses_nT.sum(-1) / (targets_nT != _IGNORED).sum(-1).clamp(min=1)


def _set_losses(logits_nL: Tensor, targets_nL: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits_nL, targets_nL, reduction="none").mean(-1)


def _tag_losses(logits_nTL: Tensor, targets_nT: Tensor) -> Tensor:
    losses_nT = F.cross_entropy(logits_nTL.transpose(1, 2), targets_nT, reduction="none", ignore_index=_IGNORED)
    return losses_nT.sum(-1) / (targets_nT != _IGNORED).sum(-1).clamp(min=1)


def _passage_losses(logits_nT2: Tensor, targets_nT2: Tensor) -> Tensor:
    """The mean of the start's and the end's cross-entropy over the tokens that can be one."""
    shares_nT2 = logits_nT2.masked_fill(targets_nT2 == _IGNORED, -torch.inf).log_softmax(1)
    return -shares_nT2.masked_fill(targets_nT2 != 1, 0.0).sum(1).mean(-1)


# The same in a compiled step. No row that is padding, or of another head, may bring NaN or infinity into a gradient.

_NEVER = -1e9  # a score that no softmax sees; finite, so that its gradient is


def _batched_class_losses(batch: RowBatch) -> Tensor:
    num_labels = batch.logits_BL.shape[1]
    classes_B = batch.targets_B.long().clamp(0, num_labels - 1)  # other kinds' numbers are no classes
    return F.cross_entropy(batch.logits_BL.masked_fill(~batch.own_BL, -math.inf), classes_B, reduction="none")


def _batched_set_losses(batch: RowBatch) -> Tensor:
    losses_BL = F.binary_cross_entropy_with_logits(batch.logits_BL, batch.labels_BL, reduction="none")
    return torch.where(batch.own_BL, losses_BL, 0.0).sum(1) / batch.own_BL.sum(1)


def _batched_number_losses(batch: RowBatch) -> Tensor:
    return (batch.logits_BL[:, 0] - batch.targets_B).square()


def _batched_tag_losses(batch: TokenBatch) -> Tensor:
    logits_NL, num_labels = batch.logits_NL, batch.logits_NL.shape[1]
    own_N = batch.num_outputs_B[batch.rows_N]
    own_NL = torch.arange(num_labels, device=logits_NL.device) < own_N.unsqueeze(1)
    marks_N = batch.marks_N2[:, 0]
    classes_N = marks_N.long().clamp(0, num_labels - 1)
    losses_N = F.cross_entropy(logits_NL.masked_fill(~own_NL, _NEVER), classes_N, reduction="none")
    is_said_N = marks_N != _IGNORED
    return batch.add_up(torch.where(is_said_N, losses_N, 0.0)) / batch.add_up(is_said_N.float()).clamp(min=1)


def _batched_passage_losses(batch: TokenBatch) -> Tensor:
    scores_N2 = batch.logits_NL[:, :2].masked_fill(batch.marks_N2 == _IGNORED, _NEVER)
    rows_N2 = batch.rows_N.long().unsqueeze(1).expand(-1, 2)
    largest_B2 = scores_N2.new_full((len(batch.num_outputs_B), 2), _NEVER)
    largest_B2.scatter_reduce_(0, rows_N2, scores_N2.detach(), "amax")
    away_N2 = scores_N2 - largest_B2.index_select(0, batch.rows_N)
    # A row without tokens, which nobody reads, has no sum to take a logarithm of.
    logs_B2 = batch.add_up(away_N2.exp()).clamp(min=1e-30).log()
    shares_N2 = away_N2 - logs_B2.index_select(0, batch.rows_N)
    return -batch.add_up(torch.where(batch.marks_N2 == 1, shares_N2, 0.0)).mean(-1)


def _fit_scale(targets: np.ndarray) -> dict[str, Any]:
    return {"target_mean": float(np.mean(targets)), "target_std": float(np.std(targets)) or 1.0}


HEADS: dict[str, Head] = {
    "classify": Head(
        num_outputs=lambda num_labels: num_labels,
        row_losses=lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"),
        read_answer=_answer_class,
        read_prediction=_predict_logits,
        confidence=lambda outcome: (outcome.probabilities or {})[outcome.label or ""],
        calibrates=True,
        batched_losses=_batched_class_losses,
    ),
    "multilabel": Head(
        num_outputs=lambda num_labels: num_labels,
        row_losses=_set_losses,
        read_answer=_answer_labels,
        read_prediction=_predict_logits,
        confidence=_confidence_of_set,
        calibrates=True,
        batched_losses=_batched_set_losses,
    ),
    "regress": Head(
        num_outputs=lambda num_labels: 1,
        row_losses=lambda logits, targets: F.mse_loss(logits[:, 0], targets, reduction="none"),
        read_answer=_answer_number,
        read_prediction=_predict_number,
        fit_targets=_fit_scale,
        is_scaled=True,
        batched_losses=_batched_number_losses,
    ),
    "tag": Head(
        num_outputs=lambda num_labels: num_labels,
        row_losses=_tag_losses,
        read_answer=_answer_words,
        read_prediction=_predict_tags,
        confidence=lambda outcome: min((entity.probability for entity in outcome.entities or ()), default=1.0),
        reads="tokens",
        calibrates=True,
        weight=lambda target: float((target != _IGNORED).sum()),
        batched_losses=_batched_tag_losses,
    ),
    "span": Head(
        num_outputs=lambda num_labels: 2,
        row_losses=_passage_losses,
        read_answer=_answer_passage,
        read_prediction=_predict_answer,
        confidence=lambda outcome: outcome.probability or 0.0,
        reads="tokens",
        max_length=384,
        fit_targets=lambda targets: {"null_threshold": None if all(targets) else 0.0},
        batched_losses=_batched_passage_losses,
    ),
    "text": Head(
        num_outputs=lambda num_labels: 0,
        row_losses=partial(text_losses, smoothing=0.0),
        read_answer=_answer_text,
        read_prediction=_predict_text,
        reads="nothing",
        weight=lambda target: float(len(target)),
    ),
}


def find_head(kind: str) -> Head:
    """The table's entry for a kind of task."""
    if kind not in HEADS:
        raise UnknownName("kind of task", kind, HEADS)
    return HEADS[kind]
