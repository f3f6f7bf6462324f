"""The drift of a lower precision: probes are answered again and compared with their published answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from inlay.model import HeadSpec, Outcome, Output, find_head
from inlay.store import Probe


@dataclass(frozen=True)
class Drift:
    """How far the answers to probes moved."""

    num_probes: int = 0
    num_changed: int = 0
    """probes whose label, label set, tags or text changed; numbers always move a little, so they are not counted"""
    largest: float = 0.0
    """the largest change of a logit"""

    @classmethod
    def total(cls, drifts: Iterable[Drift]) -> Drift:
        """Return the drift of several versions taken together."""
        found = list(drifts)
        return cls(
            sum(drift.num_probes for drift in found),
            sum(drift.num_changed for drift in found),
            max((drift.largest for drift in found), default=0.0),
        )


def measure_drift(probes: Sequence[Probe], outputs: Sequence[Output], head: HeadSpec, labels: Sequence[str]) -> Drift:
    """Return how far `outputs` are from the probes' published answers."""
    answer = find_head(head.kind).answer
    num_changed = 0
    largest = 0.0
    for probe, output in zip(probes, outputs, strict=True):
        published = torch.tensor(probe.logits)
        is_other_text = len(published) != output.flat.numel()
        if is_other_text or not (output.is_finite and head.is_finite and published.isfinite().all()):
            num_changed += 1
            largest = math.inf
            continue
        sizes = [window.numel() for window in output.logits]
        parts = published.split(sizes)
        before = dataclasses.replace(
            output, logits=tuple(part.view_as(window) for part, window in zip(parts, output.logits, strict=True))
        )
        num_changed += is_changed(answer(before, head, labels), answer(output, head, labels))
        largest = max(largest, *(output.flat - published).abs().tolist(), 0.0)
    return Drift(len(probes), num_changed, largest)


def is_changed(before: Outcome, after: Outcome) -> bool:
    """Return whether two outcomes differ in their result; probabilities and numbers do not count."""
    return _decision(before) != _decision(after)


def _decision(outcome: Outcome) -> tuple[object, ...]:
    tags = None if outcome.words is None else tuple(word.tag for word in outcome.words)
    return outcome.label, outcome.labels, outcome.answer, tags
