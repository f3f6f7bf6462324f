"""Ablation: dev scores of a trained task without the adapters of some layers, without retraining.

Houlsby et al. 2019 (section 3.6) remove the adapters of every contiguous span of layers and score the dev rows anew.
Here the spans are slots of one bank, all of them the trained task behind gates of its own: rows of all spans go through
the backbone in shared batches, and the task's tensors are there once. Layer norms and head stay as they were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from inlay.data import KINDS, Encoded, Task, encode_cached, entity_types, resolve_metric, score_all
from inlay.errors import Unsupported
from inlay.model import TOKEN_BUDGET, Backbone, Bank, SlotSpec, collect_outputs, infer, make_rows, site_shapes
from inlay.training import read_outputs, read_trained

Span = tuple[int, int]
"""the first and the last layer of a span, both inclusive"""


def list_spans(num_layers: int) -> list[Span]:
    """List every contiguous span of layers: n·(n + 1)/2 of them."""
    return [(first, last) for first in range(num_layers) for last in range(first, num_layers)]


def score_spans(
    backbone: Backbone,
    run_folder: Path,
    task: Task,
    *,
    metric: str | None = None,
    on_rows: Callable[[int], object] = lambda _: None,
) -> dict[Span | None, float]:
    """Score a finished run on dev without the adapters of each span of layers; None is the whole run.

    The score is accuracy for tasks with classes, whatever they were selected by (a majority classifier has a Matthews
    correlation of 0, which says nothing of what is left), and the task's own metric elsewhere, unless `metric` says
    otherwise. `on_rows` hears how many dev rows were just scored, with all spans.
    """
    trained = read_trained(run_folder, task, backbone)
    chosen = _choose_metric(task, metric)
    _require_adapters(trained.spec, backbone)
    spans: list[Span | None] = [None, *list_spans(backbone.anatomy.num_layers)]
    bank = _gate_spans(trained.spec, trained.result.tensors, backbone, spans)
    encoded = encode_cached(backbone.tokenizer, task.dev, trained.run.reading)
    logits = _infer_spans(bank, encoded, on_rows)
    return {
        span: _score(task, trained.spec, encoded, answers, chosen) for span, answers in zip(spans, logits, strict=True)
    }


def _choose_metric(task: Task, metric: str | None) -> str:
    if metric is None:
        return "accuracy" if KINDS[task.kind].is_classifier else task.metric
    return resolve_metric(metric, task.kind, len(task.labels), has_entities=bool(entity_types(task.labels)))


def _require_adapters(spec: SlotSpec, backbone: Backbone) -> None:
    if not site_shapes(backbone.anatomy, spec.method):
        raise Unsupported(
            f"an ablation of method `{spec.method.name}`, which has no adapters to take out",
            "give a run of houlsby, pfeiffer, parallel or lora",
        )


def _gate_spans(spec: SlotSpec, tensors: dict[str, Tensor], backbone: Backbone, spans: Sequence[Span | None]) -> Bank:
    """Build a bank with a slot for every span: the same task, without the adapters of the span's layers."""
    whole = Bank(backbone, 1)
    whole.put(0, spec, tensors)
    bank = whole.repeated(0, len(spans))
    for slot, span in enumerate(spans):
        if span is not None:
            bank.gate(slot, range(span[0], span[1] + 1))
    return bank


def _infer_spans(bank: Bank, encoded: Encoded, on_rows: Callable[[int], object]) -> list[list[Tensor]]:
    """Compute the logits of every window by slot. As many windows at a time as fill a batch with all their spans."""
    answers: list[list[Tensor]] = [[] for _ in range(bank.num_slots)]
    windows = list(encoded)
    mean_length = float(encoded.lengths.mean()) if windows else 1.0
    budget = 4 * TOKEN_BUDGET[bank.backbone.device.type]  # several batches of rows of similar length
    step = max(1, int(budget / (mean_length * bank.num_slots)))
    for start in range(0, len(windows), step):
        some = windows[start : start + step]
        found = infer(bank, [row for slot in range(bank.num_slots) for row in make_rows(some, slot)])
        for slot, answer in enumerate(answers):
            answer += found[slot * len(some) : (slot + 1) * len(some)]
        on_rows(len(some))
    return answers


def _score(task: Task, spec: SlotSpec, encoded: Encoded, logits: Sequence[Tensor], metric: str) -> float:
    assert task.dev.targets is not None
    outputs = collect_outputs(encoded, logits, task.dev.texts if task.dev.pairs is None else task.dev.pairs)
    found = read_outputs(spec.head, task.labels, outputs)
    return score_all(task.kind, task.labels, task.dev.targets, found, task.dev.unseen)[metric]
