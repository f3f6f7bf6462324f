"""Inlay answering, measured: the engine on requests, and the bank on rows of many tasks or of one."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from protocol import say
from torch import Tensor

from inlay import Engine
from inlay.model import Bank, infer, load_backbone
from inlay.model.backbone.backbone import Backbone
from inlay.model.bank.methods import SlotSpec
from inlay.model.batch.route import Row
from inlay.model.heads.captured_inference import GraphedForward
from inlay.model.heads.heads import HeadSpec
from inlay.serving import Request
from inlay.settings.run_config import MethodConfig
from inlay.store import Manifest, Store
from inlay.training.run.publish import describe_backbone

DISTINCT = 8  # sets of random weights, put into the slots over and over: values do not matter for speed


class EngineWork:
    """The engine on requests that are texts, tokenising included: a step answers all of them, each by another task."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.backbone = load_backbone(job["folder"], device=job["device"])
        self._place = tempfile.TemporaryDirectory()
        store = Store(Path(self._place.name))
        spec = make_spec(job)
        self.names = names = [f"task-{index}" for index in range(job["tasks"])]
        if job.get("compiled"):
            os.environ.pop("TOKENIZERS_PARALLELISM", None)  # tokenised as for users, by all cores
        say(f"publishing {len(names):,} tasks")
        publish_many(store, names, self.backbone, spec)
        self.engine = Engine(self.backbone, store, num_slots=job["tasks"], is_compiled=job.get("compiled", False))
        texts = read_rows(job)["texts"][: job["requests"]]
        generator = np.random.default_rng(0)
        self.batches = []
        for _ in range(16):  # another mix in every step, where more tasks are held than asked
            chosen = generator.choice(len(names), size=len(texts), replace=len(texts) > len(names))
            self.batches.append([Request(names[index], text) for index, text in zip(chosen, texts, strict=True)])
        self.num_done = 0

    def warm_up(self) -> None:
        self.engine.predict([Request(name, "a") for name in self.names])  # all into their slots
        self.measure(3)

    def measure(self, steps: int) -> int:
        for _ in range(steps):
            answers = self.engine.predict(self.batches[self.num_done % len(self.batches)])
            assert all(answer.error is None for answer in answers)
            self.num_done += 1
        return steps * len(self.batches[0])

    def describe(self) -> dict[str, Any]:
        return {"dtype": str(self.backbone.dtype), "is_compiled": self.engine.is_compiled}


class BankWork:
    """Tokenised rows through a bank that holds many tasks: each row its own task, or all rows one task (`mixed`)."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.backbone = load_backbone(job["folder"], device=job["device"])
        self.bank = fill_bank(self.backbone, job)
        generator, ids = np.random.default_rng(0), read_rows(job)["ids"][: job["requests"]]
        self.batches = []
        for _ in range(16):  # another mix in every step
            slots = generator.choice(job["tasks"], size=len(ids), replace=len(ids) > job["tasks"])
            chosen = slots if job["mixed"] else np.full_like(slots, slots[0])
            self.batches.append([Row(row, int(slot)) for row, slot in zip(ids, chosen, strict=True)])
        self.num_done = 0
        self.graphed = GraphedForward(self.bank) if job.get("compiled") else None

    def warm_up(self) -> None:
        self.measure(8)

    def measure(self, steps: int) -> int:
        for _ in range(steps):
            rows = self.batches[self.num_done % len(self.batches)]
            infer(self.bank, rows) if self.graphed is None else self.graphed.logits(rows)
            self.num_done += 1
        return steps * len(self.batches[0])

    def describe(self) -> dict[str, Any]:
        stacks = self.bank.stacks.values()
        return {
            "dtype": str(self.backbone.dtype),
            "slots_dtype": sorted({str(stack.dtype) for stack in stacks}),
            "slots_bytes": sum(stack.numel() * stack.element_size() for stack in stacks),
        }


def read_rows(job: dict[str, Any]) -> dict[str, Any]:
    with open(job["rows"], encoding="utf8") as file:
        return json.load(file)


def make_spec(job: dict[str, Any]) -> SlotSpec:
    return SlotSpec.of(MethodConfig(size=job["size"]), HeadSpec("classify", 2, "cls"))


def random_tensors(backbone: Backbone, spec: SlotSpec, seed: int) -> dict[str, Tensor]:
    """What a slot holds, away from its neutral values."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for item in spec.layout(backbone.anatomy):
        neutral = backbone.own_tensor(item.name) if item.start == "backbone" else float(item.start == "ones")
        tensors[item.name] = neutral + 0.02 * torch.randn(item.shape, generator=generator)
    return tensors


def fill_bank(backbone: Backbone, job: dict[str, Any]) -> Bank:
    say(f"filling {job['tasks']:,} slots")
    bank, spec = Bank(backbone, job["tasks"], dtype=backbone.dtype), make_spec(job)
    sets = [random_tensors(backbone, spec, seed) for seed in range(min(DISTINCT, job["tasks"]))]
    moved = [{name: tensor.to(backbone.device) for name, tensor in tensors.items()} for tensors in sets]
    for slot in range(job["tasks"]):
        bank.put(slot, spec, moved[slot % len(moved)])
    return bank


def publish_many(store: Store, names: list[str], backbone: Backbone, spec: SlotSpec) -> None:
    """Tasks of few sets of weights, told apart by one number: a version is what its tensors are."""
    sets = [random_tensors(backbone, spec, seed) for seed in range(min(DISTINCT, len(names)))]
    manifest = Manifest(
        kind=spec.head.kind,
        labels=("no", "yes"),
        metric="accuracy",
        method=dataclasses.asdict(spec.method),
        head=dataclasses.asdict(spec.head),
        max_length=min(128, backbone.max_length),
        metrics={},
        data_digest="random",
        dev_digest="",
        backbone=describe_backbone(backbone),
        run_id="random",
        num_parameters=sum(tensor.numel() for tensor in sets[0].values()),
        probes=(),
        config={},
        extra={"pairs": False},
    )

    def publish(index: int) -> None:
        tensors = dict(sets[index % len(sets)])
        tensors["head.bias"] = tensors["head.bias"] + index
        store.publish(names[index], tensors, manifest, {})

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # each waits for the disk
        list(pool.map(publish, range(len(names))))


WORK = {"engine": EngineWork, "bank": BankWork}
