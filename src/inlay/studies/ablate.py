"""Ablation: dev scores of a trained task without the adapters of some layers, without retraining.

Houlsby et al. 2019 (section 3.6) remove the adapters of every contiguous span of layers and score the dev rows again.
Here each span is a slot of one bank with a gate that removes its layers' adapters. The rows of all spans go through the
backbone in shared batches, and the task's tensors are in memory once. Layer norms and head stay as trained.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from inlay.data import KINDS, Encoded, Task, encode_cached, score_all
from inlay.errors import Unsupported
from inlay.model import TOKEN_BUDGET, Backbone, Bank, collect_outputs, infer, make_rows, site_shapes
from inlay.training import read_outputs, read_trained

Span = tuple[int, int]
"""the first and the last layer of a span, both inclusive"""


def list_spans(num_layers: int) -> list[Span]:
    """List every contiguous span of layers: n·(n + 1)/2 of them."""
    return [(first, last) for first in range(num_layers) for last in range(first, num_layers)]


def score_spans(backbone: Backbone, run_folder: Path, task: Task) -> dict[Span | None, float]:
    """Score a finished run on dev without the adapters of each span of layers; None is the whole run.

    The score is accuracy for tasks with classes, whatever their own metric (the Matthews correlation of a majority
    classifier is 0, which does not show what is left), and the task's own metric otherwise.
    """
    trained = read_trained(run_folder, task, backbone)
    spec = trained.spec
    metric = "accuracy" if KINDS[task.kind].is_classifier else task.metric
    if not site_shapes(backbone.anatomy, spec.method):
        raise Unsupported(
            f"an ablation of method `{spec.method.name}`, which has no adapters to remove",
            "use a run of houlsby, pfeiffer, parallel or lora",
        )
    # 1. a bank with the task in a slot for every span, without the adapters of the span's layers
    spans: list[Span | None] = [None, *list_spans(backbone.anatomy.num_layers)]
    whole = Bank(backbone, 1)
    whole.put(0, spec, trained.result.tensors)
    bank = whole.repeated(0, len(spans))
    for slot, span in enumerate(spans):
        if span is not None:
            bank.gate(slot, range(span[0], span[1] + 1))
    # 2. the logits of every slot, and their scores
    encoded = encode_cached(backbone.tokenizer, task.dev, trained.run.reading)
    assert task.dev.targets is not None
    texts = task.dev.texts if task.dev.pairs is None else task.dev.pairs
    scores = {}
    for span, logits in zip(spans, _infer_spans(bank, encoded), strict=True):
        found = read_outputs(spec.head, task.labels, collect_outputs(encoded, logits, texts))
        scores[span] = score_all(task.kind, task.labels, task.dev.targets, found, task.dev.unseen)[metric]
    return scores


def _infer_spans(bank: Bank, encoded: Encoded) -> list[list[Tensor]]:
    """Compute the logits of every window through every slot; as many windows at a time as fill a few batches."""
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
    return answers
