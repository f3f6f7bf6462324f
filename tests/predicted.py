"""The logits of trained tensors for the rows of a split, one vector per row: what tests compare others with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from inlay.data import Reading, Split, encode_split
from inlay.model import Bank, collect_outputs, infer, make_rows


def predict_split(
    spec: Any, tensors: Mapping[str, Tensor], backbone: Any, split: Split, max_length: int, stride: int = Reading.stride
) -> list[Tensor]:
    """All logits of every row, labelled or not."""
    head, bank = spec.head, Bank(backbone, 1)
    bank.put(0, spec, tensors)
    encoded = encode_split(backbone.tokenizer, split, Reading(head.layout, max_length, stride, head.prompt, head.pairs))
    texts = split.texts if split.pairs is None else split.pairs
    return [output.flat for output in collect_outputs(encoded, infer(bank, make_rows(encoded)), texts)]
