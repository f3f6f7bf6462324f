"""The kinds of task: `KINDS` has one entry for each, with everything that differs by kind and needs no torch.

`inlay.model.heads.heads.HEADS` has the other half: outputs, loss, decision and confidence. A new kind is one entry in
each. No code outside these tables compares a kind with a name: what differs is looked up.

An entry refers to entries of other tables by name: `layout` to `windows.LAYOUTS`, `sample` to `metrics.SAMPLES`,
`shapes` to `table_shapes.SHAPES`, `linear` to `training.recipe.linear.FITTERS`, `metrics` to `metrics.METRICS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from inlay.data.columns import Fault, as_list, is_missing, read_number
from inlay.data.squad import Gold, has_unanswerable, score_answer
from inlay.data.targets import (
    LabelSetTargets,
    LabelTargets,
    NumberTargets,
    PassageTargets,
    TaggedWordTargets,
    TargetForm,
    TextTargets,
    find_separator,
)
from inlay.errors import BadConfig, UnknownName
from inlay.settings import DataConfig

if TYPE_CHECKING:
    from inlay.data.tasks import Task

MOST_CLASSES_OF_NUMBERS = 20  # more different whole numbers than this are a scale, not classes
LEAST_SHARE_OF_NUMBERS = 0.9  # of the cells of a scale; the other cells are bad rows

CLASSIFICATION = "classification"
"""AdapterHub's type of a classifier's head; with one output it is a regression."""

Mistake = dict[str, Any] | None
"""The expected and the given answer of a row; None if they are the same."""
Mistakes = Callable[[Sequence[Any], np.ndarray, tuple[str, ...], Sequence[str]], list[Mistake]]
"""outcomes, targets, labels, texts -> the mistake of each row"""


@dataclass(frozen=True)
class Kind:
    """An entry of the table: the facts about one kind of task that need no torch."""

    targets: TargetForm
    """the form of its targets, read from label cells"""
    layout: str
    """the layout of rows as windows of tokens, by name"""
    metrics: tuple[str, ...]
    default_metric: str
    sample: str
    """the way metrics summarise rows, by name"""
    find_mistakes: Mistakes
    """finds the rows that an evaluated version got wrong"""
    decide: Callable[[np.ndarray], np.ndarray] | None = None
    """outputs [n, L] (or decisions [n]) -> decisions [n]; None: outputs are texts or tags, and need none"""
    shapes: tuple[str, ...] = ()
    """shapes of the tables that this kind is read from; (): a text and a label column"""
    reads_conll: bool = False
    """whether its plain text files are CoNLL columns"""
    groups_by_pair: bool = False
    """whether rows with the same second text stay on one side of a split: a context seen in training is half known"""
    labels_note: str = "none"
    """what `inlay show` prints in place of labels, for kinds without labels"""

    is_classifier: bool = False
    """whether each label has one logit, and the largest is the answer"""
    is_number: bool = False
    """whether its answers are numbers"""
    has_cuts: Callable[[int], bool] = lambda num_labels: False
    """number of labels -> whether thresholds tuned on dev rows can move its decisions"""
    finds_label_errors: bool = False
    """whether rows that may be labelled wrongly can be found"""
    raises_fresh_rate: bool = False
    """whether a fresh head trains at a higher rate while rows are few (training/recipe/recipe.py)"""

    linear: str | None = None
    """the linear model that replaces its head in baselines, probes and at the start of training; None: no model can"""
    output_targets: Callable[[np.ndarray, int], np.ndarray] | None = None
    """targets, number of labels -> the desired outputs [n, outputs]; None where there is no linear model"""
    output_cut: float = 0.0
    """the threshold of an output that is fitted to `output_targets` directly"""

    spell_answers: Callable[[Task], tuple[str, ...]] | None = None
    """the texts that a text-to-text backbone scores; (): it may write any text; None: it cannot do such a task"""
    match_answers: Callable[[np.ndarray, Sequence[str]], np.ndarray] = lambda targets, texts: targets
    """targets, scored texts -> the index of each target's text"""

    onnx: str | None = None
    """how to read the logits of an ONNX graph; None: a graph cannot hold them, as they are not one row"""
    head_type: str | None = None
    """AdapterHub's name for such a head; None: other libraries have no such head"""
    hub_task: str = "text-classification"
    """the `pipeline_tag` that model cards have"""


@dataclass(frozen=True)
class Scheme:
    """The kind and labels of one task, which decide how its label cells become targets."""

    kind: str
    labels: tuple[str, ...]
    separator: str | None = None  # between the labels of one cell, for multilabel tasks read from text

    @property
    def targets(self) -> TargetForm:
        """The form of its targets."""
        return KINDS[self.kind].targets

    def read(self, value: Any) -> Any:
        """Return the target of a cell; a cell that cannot be read is a `Fault`."""
        return self.targets.read(self, value)

    def collect(self, targets: list[Any]) -> np.ndarray:
        """Return targets as one array."""
        return self.targets.collect(targets, len(self.labels))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each label."""
        return {label: number for number, label in enumerate(self.labels)}

    def index(self, name: str) -> int:
        """Return the number of a label; an unknown label is a `Fault`."""
        try:
            return self.numbers[name]
        except KeyError:
            shown = ", ".join(self.labels[:30]) + (", …" if len(self.labels) > 30 else "")
            raise Fault(f"unseen label `{name}`", f"known labels: {shown}") from None


def find_scheme(cells: Sequence[Any], config: DataConfig) -> Scheme:
    """Find the kind and labels of a task from the label cells of its training rows and what `config` sets."""
    kind = config.kind
    if kind == "auto":
        kind = infer_kind([cell for cell in cells if not (as_list(cell) is None and is_missing(cell))])
        if config.labels and not KINDS[kind].targets.has_labels:
            kind = "classify"  # a user who names labels wants classes
    form = find_kind(kind).targets
    if not form.has_labels:
        if config.labels:
            raise BadConfig(f"`data.labels` is set for a {kind} task", "leave it out, or use `--kind classify`")
        return Scheme(kind, ())
    given = tuple(map(form.name, config.labels)) if isinstance(form, LabelTargets) else config.labels
    if len(set(given)) < len(given):
        raise BadConfig(f"`data.labels` names a label twice: {', '.join(given)}", "name each label once")
    # Where targets are sets, one cell names several labels.
    scheme = Scheme(kind, given, find_separator(cells) if form.num_dims == 2 else None)
    return Scheme(kind, given or form.find_labels(cells, scheme), scheme.separator)


def infer_kind(cells: Sequence[Any]) -> str:
    """Infer the kind of a task from its labels: lists are multilabel, a scale of numbers is regress, else classify."""
    if any(as_list(cell) is not None for cell in cells):
        return "multilabel"
    numbers = [number for number in map(read_number, cells) if number is not None]
    if len(numbers) < LEAST_SHARE_OF_NUMBERS * len(cells):
        return "classify"
    is_scale = any(not number.is_integer() for number in numbers) or len(set(numbers)) > MOST_CLASSES_OF_NUMBERS
    return "regress" if is_scale else "classify"


def find_kind(name: str) -> Kind:
    """Return the table's entry for a kind of task."""
    if name not in KINDS:
        raise UnknownName("kind of task", name, KINDS)
    return KINDS[name]


def find_kind_of_metric(metric: str, num_dims: int) -> str:
    """Find the kind that a metric is for; if there are several, the one whose targets have `num_dims` dimensions."""
    kinds = [name for name, kind in KINDS.items() if metric in kind.metrics]
    return next((name for name in kinds if KINDS[name].targets.num_dims == num_dims), kinds[0])


def find_kind_of_head(head_type: str | None, num_outputs: int) -> str | None:
    """Find the kind of another library's head; None if there is none. A classifier with one output gives a number."""
    kinds = [name for name, kind in KINDS.items() if kind.head_type is not None and kind.head_type == head_type]
    is_number = num_outputs == 1 and any(KINDS[name].is_number for name in kinds)
    return next((name for name in kinds if KINDS[name].is_number == is_number), None)


# Decisions


def _decide_class(outputs: np.ndarray) -> np.ndarray:
    return outputs.argmax(axis=-1) if outputs.ndim == 2 else outputs.astype(np.int64)


def _decide_level(outputs: np.ndarray) -> np.ndarray:
    """Count the levels that are exceeded: cumulative logits above 0, each no higher than the one before."""
    if outputs.ndim == 1:
        return outputs.astype(np.int64)
    return (np.minimum.accumulate(outputs, axis=-1) > 0).sum(axis=-1)


def exceeded_levels(targets: np.ndarray, num_labels: int) -> np.ndarray:
    """Return which levels but the last each target exceeds, 0 or 1 [n, levels - 1]."""
    return (targets[:, None] > np.arange(num_labels - 1)).astype(np.float64)


# Mistakes


def _by_row(find: Callable[[Any, Any, tuple[str, ...], str], Mistake]) -> Mistakes:
    """Turn a function of one row (outcome, target, labels, text) into a function of all rows."""

    return lambda outcomes, targets, labels, texts: [
        find(outcome, target, labels, text) for outcome, target, text in zip(outcomes, targets, texts, strict=True)
    ]


def _mistake_of_class(outcome: Any, target: Any, labels: tuple[str, ...], text: str) -> Mistake:
    true = labels[int(target)]
    if outcome.label is None or outcome.label == true:
        return None
    return {"label": true, "predicted": outcome.label, "probability": outcome.probabilities[outcome.label]}


def _mistake_of_set(outcome: Any, target: Any, labels: tuple[str, ...], text: str) -> Mistake:
    true = tuple(label for label, applies in zip(labels, target, strict=True) if applies)
    return None if true == outcome.labels else {"label": "|".join(true), "predicted": "|".join(outcome.labels or ())}


def _mistake_of_tags(outcome: Any, target: Any, labels: tuple[str, ...], text: str) -> Mistake:
    words = list(outcome.words or ())
    true = [labels[label] for _, _, label in target]
    if [word.tag for word in words] == true:
        return None
    wrong = [f"{word.text}: {word.tag}, not {tag}" for word, tag in zip(words, true, strict=True) if word.tag != tag]
    expected = _show_entities(outcome.entities_of(true, text))
    predicted = _show_entities(outcome.entities_of([word.tag for word in words], text))
    return {"label": expected, "predicted": predicted, "words": "; ".join(wrong)}


def _show_entities(entities: Sequence[Any]) -> str:
    return "|".join(f"{entity.text} ({entity.label})" for entity in entities)


def _mistakes_of_passages(
    outcomes: Sequence[Any], targets: np.ndarray, labels: tuple[str, ...], texts: Sequence[str]
) -> list[Mistake]:
    # All rows together decide which of SQuAD's two scripts is used.
    is_squad2 = has_unanswerable(list(targets))
    return [_mistake_of_answer(outcome, golds, is_squad2) for outcome, golds in zip(outcomes, targets, strict=True)]


def _mistake_of_answer(outcome: Any, golds: Sequence[Gold], is_squad2: bool) -> Mistake:
    exact, overlap = score_answer(outcome.answer or "", golds, is_squad2=is_squad2)
    if exact:
        return None
    shown = "|".join(dict.fromkeys(gold for _, gold in golds))
    return {"label": shown, "predicted": outcome.answer, "probability": outcome.probability, "token_f1": overlap}


# Numbers as texts, for text-to-text backbones

_STEP = 0.2  # numbers are rounded to multiples of it, as published for STS-B
_FEWEST_STEPS = 10  # if targets span fewer steps, a tenth of the step is taken
_MOST_DECIMALS = 6
_MOST_NUMBERS = 500


def _spell_numbers(task: Task) -> tuple[str, ...]:
    """List the numbers, as texts, that a backbone may write for a task: from its lowest to its highest, in steps.

    Steps are of 0.2, or of 0.02 and so on where all targets lie within a few steps.
    """
    assert task.train.targets is not None
    targets = np.append(task.train.targets, task.bounds or ())
    span = float(targets.max() - targets.min())
    decimals = 1
    while 0 < span < _FEWEST_STEPS * _STEP * 10.0 ** (1 - decimals) and decimals < _MOST_DECIMALS:
        decimals += 1
    step = _STEP * 10.0 ** (1 - decimals)
    first = math.floor(targets.min() / step + 1e-9)
    last = math.ceil(targets.max() / step - 1e-9)
    if last - first >= _MOST_NUMBERS:
        raise BadConfig(
            f"task `{task.name}`: targets from {targets.min():g} to {targets.max():g} are {last - first + 1:,} texts "
            f"in steps of {step:g}",
            f"scale them to a range of at most {_MOST_NUMBERS * _STEP:g}, or use a backbone that does not write",
        )
    return tuple(f"{number * step:.{decimals}f}" for number in range(first, last + 1))


KINDS: dict[str, Kind] = {
    "classify": Kind(
        targets=LabelTargets(),
        layout="whole",
        metrics=("accuracy", "f1", "macro_f1", "matthews"),
        default_metric="accuracy",
        sample="classes",
        decide=_decide_class,
        find_mistakes=_by_row(_mistake_of_class),
        is_classifier=True,
        has_cuts=lambda num_labels: num_labels == 2,
        finds_label_errors=True,
        linear="classes",
        output_targets=lambda targets, num_labels: np.eye(num_labels)[targets],
        spell_answers=lambda task: task.written,
        onnx="the label of the largest logit; probabilities are softmax(logits / temperature). Where a task has "
        "thresholds, its second label is the answer if its logit exceeds the first one's by more than that number",
        head_type=CLASSIFICATION,
    ),
    "multilabel": Kind(
        targets=LabelSetTargets(),
        layout="whole",
        metrics=("accuracy", "macro_f1", "micro_f1"),
        default_metric="micro_f1",
        sample="sets",
        decide=lambda outputs: (outputs > 0).astype(np.int64),
        find_mistakes=_by_row(_mistake_of_set),
        has_cuts=lambda num_labels: True,
        finds_label_errors=True,
        linear="labels",
        output_targets=lambda targets, num_labels: targets.astype(np.float64),
        output_cut=0.5,
        onnx="a label applies if its logit is at least 0, or its own number in the task's thresholds where there "
        "are some; its probability is sigmoid(logit / temperature)",
        head_type="multilabel_classification",
    ),
    "regress": Kind(
        targets=NumberTargets(),
        layout="whole",
        metrics=("pearson", "spearman", "rmse"),
        default_metric="spearman",
        sample="numbers",
        decide=lambda outputs: outputs.reshape(len(outputs)).astype(np.float64),
        find_mistakes=_by_row(
            lambda outcome, target, labels, text: {"label": float(target), "predicted": outcome.value}
        ),
        labels_note="none: it answers with a number",
        is_number=True,
        linear="number",
        output_targets=lambda targets, num_labels: targets.astype(np.float64)[:, None],
        spell_answers=_spell_numbers,
        match_answers=lambda targets, texts: np.abs(np.array(texts, dtype=float) - targets[:, None]).argmin(1),
        onnx="the first logit is the number, on the scale of the task's own targets",
        head_type=CLASSIFICATION,
    ),
    "ordinal": Kind(  # cumulative logits: output k says by how much the level exceeds level k
        targets=LabelTargets(is_ordered=True),
        layout="whole",
        metrics=("quadratic_kappa", "mae"),
        default_metric="quadratic_kappa",
        sample="numbers",
        decide=_decide_level,
        find_mistakes=_by_row(_mistake_of_class),
        linear="labels",
        output_targets=exceeded_levels,
        output_cut=0.5,
        onnx="logit k says whether the level exceeds label k: lower each to the smallest before it, and as many labels "
        "are exceeded as logits are above 0; sigmoid(logit) is the probability that label k is exceeded, and what it "
        "falls by from one to the next that of the label between them",
    ),
    "tag": Kind(
        targets=TaggedWordTargets(),
        layout="words",
        metrics=("entity_f1", "entity_precision", "entity_recall", "token_accuracy"),
        default_metric="entity_f1",
        sample="tags",
        find_mistakes=_by_row(_mistake_of_tags),
        shapes=("words", "spans"),
        reads_conll=True,
        raises_fresh_rate=True,
        hub_task="token-classification",
    ),
    "span": Kind(
        targets=PassageTargets(),
        layout="contexts",
        metrics=("token_f1", "exact_match"),
        default_metric="token_f1",
        sample="passages",
        find_mistakes=_mistakes_of_passages,
        shapes=("questions",),
        groups_by_pair=True,
        labels_note="none: it answers with a passage",
        hub_task="question-answering",
    ),
    "text": Kind(
        targets=TextTargets(),
        layout="joined",
        metrics=("token_f1", "exact_match"),
        default_metric="exact_match",
        sample="texts",
        find_mistakes=_by_row(
            lambda outcome, target, labels, text: _mistake_of_answer(outcome, ((0, target),), is_squad2=True)
        ),
        labels_note="none: it writes its answer",
        hub_task="text2text-generation",
        spell_answers=lambda task: (),
    ),
}
WHOLE_ROW = "classify"
"""The kind whose rows are each read as one window: for reading rows without a task."""
PASSAGES = "span"
"""The kind whose answers are passages of a context, like SQuAD's."""
WRITTEN_TEXT = "text"
"""The kind whose answers are texts that the backbone writes."""
