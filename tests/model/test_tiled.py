"""All slots in one launch equal the loop over segments, in Triton's interpreter: whole backbones, every method."""

from __future__ import annotations

import pytest
import torch

from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.batch.route import Row, collate
from inlay.model.heads.heads import WRITTEN, HeadSpec
from inlay.model.kernels import launch
from inlay.settings.run_config import MethodConfig

pytestmark = pytest.mark.triton

ROWS = [(3, 2), (21, 0), (1, 0), (17, 2), (17, 2), (2, 1), (5, 1)]
METHODS = [
    *[{"name": name} for name in ("houlsby", "pfeiffer", "parallel", "lora", "ia3", "bitfit", "norms", "head")],
    *[{"depth": 3}, {"inner_norm": "layer"}, {"combine": "multiply"}, {"activation": "swish"}, {"scale": 0.3}],
    *[{"size": 200}, {"form": "parallel"}, {"sharing": "all"}, {"name": "mahabadi"}, {"name": "pal"}],
]


def fill(backbone, methods, *, trainable):
    bank = Bank(backbone, len(methods), trainable=trainable)
    for slot, method in enumerate(methods):
        texts = ("no", "very good", "bad", "so so so")[: 2 + slot]
        head = HeadSpec("classify", 2 + slot, WRITTEN, texts=texts) if backbone.is_seq2seq else None
        spec = SlotSpec.of(method, head or HeadSpec("classify", 2 + slot, "mean"))
        bank.initialise(slot, spec, seed=slot)
        noise = torch.Generator().manual_seed(slot)
        tensors = {key: t + 0.2 * torch.rand(t.shape, generator=noise) for key, t in bank.read(slot).items()}
        bank.put(slot, spec, tensors)
    return bank


def run(backbone, methods, *, trainable, is_padded=False):
    bank = fill(backbone, methods, trainable=trainable)
    answers = [range(9, 10 + index) if trainable and backbone.is_seq2seq else None for index in range(len(ROWS))]
    rows = [
        Row([5 + (3 * i) % 50 for i in range(length)], slot, written=answer and list(answer))
        for (length, slot), answer in zip(ROWS, answers, strict=True)
    ]
    batch = collate(rows, backbone.pad_id) if is_padded else backbone.collate(rows)
    if not trainable:
        with torch.inference_mode(), bank.routed(batch.route):
            return bank.logits(batch), None
    flat = bank.flatten()
    with bank.routed(batch.route):
        logits = bank.logits(batch)
        torch.cat([part.flatten() for part in logits]).pow(3).sum().backward()
    return logits, flat.take_grads()


PAIRS = [
    *[("bert", kind) for kind in METHODS],
    *[(family, METHODS[0]) for family in ("mpnet", "roberta", "distilbert", "electra", "modernbert", "t5")],
    *[("mt5", {"name": name}) for name in ("mahabadi", "lora", "ia3")],
]


@pytest.mark.parametrize(("family", "kind"), PAIRS, ids=str)
def test_a_trained_batch_in_tiles_equals_the_loop(backbone_of, monkeypatch, family, kind):
    backbone = backbone_of(family)
    has_size = kind.get("name", "houlsby") not in ("ia3", "bitfit", "norms", "head", "pal")
    methods = [MethodConfig(**({"size": size} if has_size else {}) | kind) for size in (8, 3, 16)]
    tiled, grads = run(backbone, methods, trainable=True)
    monkeypatch.setattr(launch, "is_available", lambda device: False)
    loop, expected = run(backbone, methods, trainable=True)
    for one, other in zip(tiled, loop, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    scale = expected.abs().max()
    torch.testing.assert_close(grads / scale, expected / scale, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("family", ["bert", "modernbert", "t5"])
def test_slots_of_every_kind_in_one_serving_bank_equal_the_loop(backbone_of, monkeypatch, family):
    backbone = backbone_of(family)
    kinds = [{"activation": "tanh"}, {"depth": 2, "inner_norm": "batch"}, {"name": "lora"}]
    for _ in range(2):
        methods = [MethodConfig(**kind) for kind in kinds]
        with monkeypatch.context() as patch:
            tiled, _ = run(backbone, methods, trainable=False, is_padded=True)
            patch.setattr(launch, "is_available", lambda device: False)
            loop, _ = run(backbone, methods, trainable=False, is_padded=True)
        for one, other in zip(tiled, loop, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
        kinds = [{"name": "pfeiffer"}, {"combine": "multiply", "inner_norm": "layer"}, {"name": "mahabadi"}]


@pytest.mark.parametrize("kind", [{}, {"name": "pfeiffer"}, {"name": "lora"}, {"combine": "multiply"}, {"depth": 2}])
def test_gated_slots_that_share_tensors_equal_the_loop(backbone_of, monkeypatch, kind):
    backbone = backbone_of("bert")

    def answer():
        bank = fill(backbone, [MethodConfig(size=8, **kind)], trainable=False).repeated(0, 4)
        bank.gate(1, [0])
        bank.gate(3, [0, 1, 2])
        batch = backbone.collate([Row([5, 9, 30, 31, 6], slot) for slot in range(4)])
        with torch.inference_mode(), bank.routed(batch.route):
            first = bank.logits(batch)
            bank.gate(0, [2])  # in place, once the views are there
        with torch.inference_mode(), bank.routed(batch.route):
            return torch.cat([*first, *bank.logits(batch)])

    tiled = answer()
    monkeypatch.setattr(launch, "is_available", lambda device: False)
    loop = answer()
    torch.testing.assert_close(tiled, loop, atol=2e-5, rtol=1e-4)
    assert len({tuple(row) for row in (1e3 * loop).round().tolist()}) == 4


@pytest.mark.parametrize("method", ["hyperformer", "hyperformer++", "mahabadi-multi"])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_tasks_of_one_run_in_tiles_equal_the_loop(backbone_of, monkeypatch, family, method):
    backbone = backbone_of(family)

    def compute():
        bank = Bank(backbone, 6, trainable=True, slots_per_run=3)
        for slot in range(6):
            head = HeadSpec("classify", 2, WRITTEN, texts=("no", "good")) if backbone.is_seq2seq else None
            spec = SlotSpec.of(MethodConfig(method, 3), head or HeadSpec("classify", 2, "mean"))
            bank.initialise(slot, spec, slot // 3, f"task-{slot % 3}")
        flats = [bank.flatten(), bank.flatten(shared=True)]
        rows = [Row([5 + i for i in range(length)], slot, written=[9, 10] if backbone.is_seq2seq else None)
                for length, slot in [(3, 5), (9, 0), (4, 3), (2, 5)]]  # fmt: skip
        found = []
        for _ in range(2):  # the second takes what follows from shapes from the first
            batch = backbone.collate(rows)
            with bank.routed(batch.route):
                logits = torch.cat([part.flatten() for part in bank.logits(batch)])
                logits.square().sum().backward()
            found.append([logits.detach(), *(flat.take_grads() for flat in flats)])
        return found

    tiled = compute()
    monkeypatch.setattr(launch, "is_available", lambda device: False)
    for ours, theirs in zip(tiled, compute(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            scale = other.abs().max()
            torch.testing.assert_close(one / scale, other / scale, atol=1e-5, rtol=1e-3)
