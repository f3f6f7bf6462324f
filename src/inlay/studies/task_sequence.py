"""Learns tasks one after another, and scores all earlier tasks after each step.

With full and top-k fine-tuning, one network learns all tasks in turn: each task starts from the weights that the one
before left, and keeps its own head. After every step the network is scored on all tasks so far, which shows what it has
forgotten. With any other method, each task has a slot on the frozen backbone. The steps are the same, scored through
one bank with all tasks so far. That earlier tasks do not change is proved by their answers to a few dev rows on the
canonical path (one row at a time, float32, CPU), which must be the same to the last bit.

Each step has its own folder, named after all runs up to it, and a finished step is never repeated. Of a network's
weights only those of the last step are kept on disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.data import Task, encode_cached, score_all
from inlay.model import Backbone, Bank, SlotSpec, canonical_backbone, infer_canonically, make_rows
from inlay.model import head as head_part
from inlay.settings import RunConfig, digest
from inlay.store import write_atomically
from inlay.training import (
    DIVERGED,
    Emit,
    FitSettings,
    Result,
    Run,
    Start,
    answer_slot,
    fit,
    ignore,
    is_finished,
    make_run,
    read_result,
    read_tensors,
    score_split,
    write_tensors,
)

NUM_PROBES = 4
"""dev rows of a task that are answered on the canonical path after every step"""


@dataclass(frozen=True)
class _Learned:
    """A learnt task: its slot, and its own tensors at that time (in a shared network, only the head)."""

    run: Run
    spec: SlotSpec
    tensors: Mapping[str, Tensor]
    probes: list[Tensor]
    """answers to the probes right after it was learnt"""


def train_sequence(
    backbone: Backbone,
    tasks: Sequence[Task],
    config: RunConfig,
    folder: Path,
    emit: Emit = ignore,
    *,
    settings: FitSettings = FitSettings(),
) -> list[dict[str, Any]]:
    """Learn the tasks in order, each with the settings of `config`; return a record's fields for each step.

    `extra["after"]` is the dev score of every task so far (each by its own metric). `extra["total_parameters"]` counts
    everything that must be kept to answer them. `extra["moved"]` is the largest change of a probe's logit since its
    task was learnt (None for a shared network, whose answers do change). A step that diverges ends the sequence.
    """
    walk = _Walk(backbone, folder, emit, settings)
    runs = [
        make_run(task, config, backbone) for task in tasks
    ]  # all at first, to refuse impossible runs before training
    steps = []
    for number in range(len(runs)):
        steps.append(walk.take_step(runs[: number + 1]))
        if steps[-1]["status"] == DIVERGED:
            break
    walk.drop_weights()
    return steps


class _Walk:
    """The state of a sequence."""

    def __init__(self, backbone: Backbone, folder: Path, emit: Emit, settings: FitSettings) -> None:
        self._backbone, self._folder, self._emit, self._settings = backbone, folder, emit, settings
        self._learned: list[_Learned] = []
        self._body: dict[str, Tensor] = {}
        """the shared weights that tasks train one after another; empty if each task has its own"""
        self._spent: list[Path] = []
        """run folders whose weights can be deleted after the next step"""

    def take_step(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Learn the task of the last run and score all tasks, or read the result of an earlier session."""
        run = runs[-1]
        place = self._folder / f"{len(runs):02d}-{digest([each.id for each in runs])[:12]}"
        kept = place / "step.json"
        if not kept.is_file():
            own = set(self._body) & {item.name for item in run.spec.layout(self._backbone.anatomy)}
            start = Start({name: self._body[name] for name in own})
            fit([replace(run, start=start)], self._backbone, place, self._settings, self._emit)
        result = read_result(place / run.id)
        assert result is not None
        self._learn(place, run, result)
        if not kept.is_file():
            step = self._describe(run, result)
            write_atomically(kept, json.dumps(step, indent=1).encode())
        if run.spec.is_finetuned:
            self.drop_weights()
            self._spent = [place / run.id]
        return json.loads(kept.read_text(encoding="utf8"))

    def drop_weights(self) -> None:
        """Delete weights that no later step starts from: a copy of the backbone for each step would fill the disk."""
        for folder in self._spent:
            assert is_finished(folder)
            for name in ("best.safetensors", "last.safetensors"):
                (folder / name).unlink(missing_ok=True)

    def _learn(self, place: Path, run: Run, result: Result) -> None:
        """Take the tensors that a step trained, from its result or from the file that an earlier session kept."""
        own = place / "own.safetensors"
        if result.tensors and run.spec.is_finetuned:
            self._body |= {name: tensor for name, tensor in result.tensors.items() if not head_part.is_of_head(name)}
        if not result.tensors and not own.is_file():
            return  # diverged before its first weights
        if not own.is_file():
            tensors = {name: tensor for name, tensor in result.tensors.items() if name not in self._body}
            probes = [] if run.spec.is_finetuned else self._answer_probes(run, result.spec(run), tensors)
            noted = {f"probe.{number}": probe for number, probe in enumerate(probes)}
            write_tensors(own, {**tensors, **noted})
        found = read_tensors(own)
        probes = [found.pop(f"probe.{number}") for number in range(sum(name.startswith("probe.") for name in found))]
        self._learned.append(_Learned(run, result.spec(run), found, probes))

    def _describe(self, run: Run, result: Result) -> dict[str, Any]:
        task, anatomy = run.task, self._backbone.anatomy
        is_lost = result.status == DIVERGED or not result.tensors
        test = None
        if task.test is not None and task.test.targets is not None and not is_lost:
            test = score_split(run, result, self._backbone, task.test)
        own = sum(tensor.numel() for learned in self._learned for tensor in learned.tensors.values())
        moves = [0.0]
        if not run.spec.is_finetuned:
            for learned in self._learned:
                now = self._answer_probes(learned.run, learned.spec, learned.tensors)
                moves += [float((a - b).abs().max()) for a, b in zip(now, learned.probes, strict=True)]
        return {
            "task": task.name,
            "trained_parameters": run.spec.count_parameters(anatomy),
            "num_train": len(task.train),
            "metric": task.metric,
            "dev": result.dev_metrics,
            "test": test,
            "status": DIVERGED if is_lost else "finished",
            "curve": [[line["epoch"], line["dev"][task.metric]] for line in result.history],
            "seconds": result.seconds,
            "extra": {
                "after": {} if is_lost else self._score(),
                "total_parameters": self._backbone.num_parameters + own,
                "moved": None if run.spec.is_finetuned else max(moves),
            },
        }

    def _score(self) -> dict[str, float]:
        """Score every task so far on dev, with the current network or with one bank of all tasks."""
        if self._learned[0].spec.is_finetuned:
            scores = {}
            for learned in self._learned:
                names = {item.name for item in learned.spec.layout(self._backbone.anatomy)}
                body = {name: self._body[name] for name in names & self._body.keys()}
                bank = Bank(self._backbone, 1)
                bank.put(0, learned.spec, {**learned.tensors, **body})
                scores[learned.run.task.name] = _score_slot(bank, 0, learned)
            return scores
        bank = Bank(self._backbone, len(self._learned))
        for slot, learned in enumerate(self._learned):
            bank.put(slot, learned.spec, learned.tensors)
        return {learned.run.task.name: _score_slot(bank, slot, learned) for slot, learned in enumerate(self._learned)}

    def _answer_probes(self, run: Run, spec: SlotSpec, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        backbone = canonical_backbone(self._backbone)
        dev = run.task.dev.take(range(min(NUM_PROBES, len(run.task.dev))))
        rows = make_rows(encode_cached(backbone.tokenizer, dev, run.reading))
        return [answer.to(torch.float32).contiguous() for answer in infer_canonically(backbone, spec, tensors, rows)]


def _score_slot(bank: Bank, slot: int, learned: _Learned) -> float:
    task = learned.run.task
    assert task.dev.targets is not None
    found = answer_slot(bank, slot, task.dev, learned.run.reading, task.labels)
    return score_all(task.kind, task.labels, task.dev.targets, found, task.dev.unseen)[task.metric]
