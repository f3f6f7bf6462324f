"""A bank in onnxruntime: the answers are Inlay's own, for every family, method and mix of tasks."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch

from inlay.config import MethodConfig
from inlay.data.encode import encode
from inlay.errors import BadConfig, Missing, Unsupported, WrongBackbone
from inlay.exchange import onnx
from inlay.exchange.gathered import Slot, TaskGraph
from inlay.model import Bank, SlotSpec, infer, infer_canonically
from inlay.model.heads import HeadSpec
from inlay.model.route import Row
from inlay.model.sites import FAMILIES
from inlay.store import Manifest, Probe, Store
from inlay.training.publish import describe_backbone

TOLERANCE = 2e-5
"""of logits of a size about 1, against Inlay's own inference in float32"""
TEXTS = ["the movie was good", "free prize call now", "why", "a very bad film , it is awful"]

# One batch of these meets every operation of the graph, and every two slots differ in something.
SPECS = {
    "plain": SlotSpec(MethodConfig("houlsby", 5, 0.3), HeadSpec("classify", 3, "cls")),
    "end": SlotSpec(MethodConfig("pfeiffer", 9, 0.3), HeadSpec("multilabel", 5, "mean")),
    "number": SlotSpec(
        MethodConfig("houlsby", 8, 0.3, "tanh", "none"), HeadSpec("regress", 1, "mean", target_mean=100, target_std=7)
    ),
    "exact": SlotSpec(MethodConfig("pfeiffer", 2, 0.3, "gelu-exact", "encoder"), HeadSpec("classify", 2, "mean")),
}


class Filled(NamedTuple):
    """A bank and a store that hold the same slots, in the order of SPECS."""

    bank: Bank
    store: Store
    specs: dict[str, SlotSpec]

    def rows(self, num_rows: int, longest: int, seed: int = 0) -> list[Row]:
        """Random rows of random tasks."""
        generator, vocabulary = np.random.default_rng(seed), len(self.bank.backbone.tokenizer)
        lengths = [longest, *generator.integers(2, longest + 1, num_rows - 1)]
        slots = generator.integers(len(self.specs), size=num_rows)
        return [
            Row(generator.integers(5, vocabulary, length), int(slot))
            for length, slot in zip(lengths, slots, strict=True)
        ]

    def expected(self, row: Row, logits: torch.Tensor) -> np.ndarray:
        """What the graph must say where Inlay's inference gives `logits`."""
        head = self.specs[list(self.specs)[row.slot]].head
        widest = max(spec.head.num_outputs for spec in self.specs.values())
        own = logits.double().numpy() * head.target_std + head.target_mean
        return np.pad(own, (0, widest - len(own)), constant_values=-np.inf)


def fill(backbone, folder, specs=SPECS) -> Filled:
    """Slots whose every tensor differs from its neutral value, in a bank and published in a store."""
    bank, store = Bank(backbone, len(specs)), Store(folder)
    generator = torch.Generator().manual_seed(0)
    for slot, (name, spec) in enumerate(specs.items()):
        bank.initialise(slot, spec, seed=slot)
        tensors = {
            key: value + 0.2 * torch.randn(value.shape, generator=generator) for key, value in bank.read(slot).items()
        }
        bank.put(slot, spec, tensors)
        publish(backbone, store, name, spec, tensors)
    return Filled(bank, store, dict(specs))


def publish(backbone, store, name, spec, tensors):
    head = spec.head
    encoded = encode(backbone.tokenizer, TEXTS, None, 32)
    answers = infer_canonically(backbone, spec, tensors, [Row(ids, 0, types) for ids, types in encoded])
    manifest = Manifest(
        kind=head.kind,
        labels=() if head.kind == "regress" else tuple(f"{name}-{index}" for index in range(head.num_outputs)),
        metric="accuracy",
        method=dataclasses.asdict(spec.method),
        head=dataclasses.asdict(head),
        max_length=32,
        metrics={"dev": {"accuracy": 0.5}},
        data_digest="data",
        dev_digest="dev",
        backbone=describe_backbone(backbone),
        run_id="run",
        num_parameters=1,
        probes=tuple(
            Probe(text, None, tuple(logits.tolist())) for text, logits in zip(TEXTS, answers, strict=True)
        ),
        config={},
        extra={"pairs": False},
    )
    return store.publish(name, tensors, manifest)


@pytest.fixture(scope="module")
def filled(tiny_bert, tmp_path_factory) -> Filled:
    return fill(tiny_bert, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def exported(filled, tmp_path_factory):
    """The bank of `filled` as a folder, written once."""
    return onnx.export_onnx(
        filled.store, list(filled.specs), filled.bank.backbone, tmp_path_factory.mktemp("onnx") / "tasks"
    )


def check_parity(filled: Filled, session, num_rows: int, longest: int) -> None:
    rows = filled.rows(num_rows, longest, seed=num_rows)
    answers = onnx.answer(session, rows, filled.bank.backbone.pad_id)
    wanted = [filled.expected(row, logits) for row, logits in zip(rows, infer(filled.bank, rows), strict=True)]
    np.testing.assert_allclose(answers, np.stack(wanted), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_in_onnxruntime_equals_inference_at_any_size(family, backbone_of, tmp_path):
    filled = fill(backbone_of(family), tmp_path / "store")
    graph = onnx.export_onnx(filled.store, list(filled.specs), filled.bank.backbone, tmp_path / "onnx")
    session = onnx.open_session(graph.folder)
    for num_rows, longest in ((3, 9), (1, 2), (12, 33), (2, 64)):  # 9 tokens were traced, 64 are all there are
        check_parity(filled, session, num_rows, longest)
