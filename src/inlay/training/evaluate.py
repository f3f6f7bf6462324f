"""Scores: a run on its dev rows, trained tensors on any labelled rows, all through the one inference forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from inlay.data.encode import encode
from inlay.data.metrics import list_metrics, score
from inlay.data.tasks import Split
from inlay.model.backbone import Backbone
from inlay.model.bank import Bank, SlotSpec
from inlay.model.heads import HeadSpec, find_head
from inlay.model.inference import infer
from inlay.model.route import Row
from inlay.training.run import Run


def score_dev(run: Run, logits: Sequence[Tensor]) -> tuple[dict[str, float], float]:
    """Every metric of the task's kind, and the mean loss, from the logits of its dev rows."""
    targets = as_targets(run.task.dev, run.spec.head)
    losses = find_head(run.task.kind).row_losses(torch.stack(list(logits)), targets)
    return _score(run, run.task.dev, read_outputs(run.spec.head, logits)), float(losses.mean())


def as_targets(split: Split, head: HeadSpec) -> Tensor:
    """A split's targets as the head's loss takes them: numbers on the scale the head was trained on."""
    assert split.targets is not None
    if head.kind == "regress":
        return torch.as_tensor(((split.targets - head.target_mean) / head.target_std).astype(np.float32))
    return torch.as_tensor(split.targets)


def score_split(run: Run, tensors: Mapping[str, Tensor], backbone: Backbone, split: Split) -> dict[str, float]:
    """Every metric of the task's kind for trained tensors on labelled rows."""
    logits = predict_split(run.spec, tensors, backbone, split, run.config.train.max_length)
    return _score(run, split, read_outputs(run.spec.head, logits))


def predict_split(
    spec: SlotSpec,
    tensors: Mapping[str, Tensor],
    backbone: Backbone,
    split: Split,
    max_length: int,
    on_batch: Callable[[int], None] | None = None,
) -> list[Tensor]:
    """The logits of every row of a split."""
    bank = Bank(backbone, 1)
    bank.put(0, spec, tensors)
    return infer(bank, encode_rows(backbone, split, max_length), on_batch=on_batch)


def encode_rows(backbone: Backbone, split: Split, max_length: int) -> list[Row]:
    """A split's rows for slot 0, ready for `infer`."""
    encoded = encode(backbone.tokenizer, split.texts, split.pairs, max_length)
    return [Row(ids, 0, segments) for ids, segments in encoded]


def read_outputs(head: HeadSpec, logits: Sequence[Tensor]) -> np.ndarray:
    """Logits as the metrics take them: [n, L], or for regression numbers [n] on the targets' own scale."""
    outputs = torch.stack(list(logits)).double().numpy()
    return outputs[:, 0] * head.target_std + head.target_mean if head.kind == "regress" else outputs


def _score(run: Run, split: Split, outputs: np.ndarray) -> dict[str, float]:
    assert split.targets is not None
    names = list_metrics(run.task.kind, len(run.task.labels))
    return {name: score(name, outputs, split.targets) for name in names}
