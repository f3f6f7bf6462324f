"""Inlay's training loop, measured: a cohort stepped as `fit` steps it."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from typing import Any

import numpy as np
import torch
from protocol import say
from torch import Tensor

from inlay.data.tasks import Split, Task
from inlay.model import load_backbone
from inlay.model.backbone.backbone import Backbone
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.threads import Threads
from inlay.training import Run, make_run
from inlay.training.cohort import cohort as cohort_module
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.events import CompileStarted, Event
from inlay.training.step.compiled import MOST_GRAPHED

TOKEN_BUDGET = {"cpu": 16384, "cuda": 131072}
WARM_UP_STEPS = 8
MATRIX = 8192


def announce(event: Event) -> None:
    """Tell whoever asked what is being compiled."""
    if isinstance(event, CompileStarted):
        say(event.what)


class Training:
    """A cohort of runs on the same rows, each with its own seed and rate, stepped as `fit` steps it.

    With `fixed_steps` an epoch is so many steps, and every epoch has the first one's batches: the same few shapes
    return, and two epochs meet them all twice, which is when the last of them is captured.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        if job["eager"]:
            use_eager_steps()
        if job.get("alike"):
            fill_slots_alike()
        self.backbone = open_backbone(job["folder"], job["device"])
        self.fixed_steps: int = job.get("fixed_steps") or 0
        task = read_task(job, num_rows=self.fixed_steps * job["batch_size"])
        say(f"making {job['cohort']} runs")
        runs = [make(task, self.backbone, job, seed) for seed in range(job["cohort"])]
        self.cohort = Cohort(runs, self.backbone, cohort_settings(job), announce)
        self.num_warm_up = job.get("warm_up") or WARM_UP_STEPS
        self.most_threads: int = job["threads"] if job.get("chooses_threads") else 0

    def warm_up(self) -> None:
        """On a GPU a whole epoch, so that every shape is met before anything is measured."""
        if self.backbone.device.type != "cuda":
            self.measure(self.num_warm_up)
        elif self.fixed_steps:
            self.measure(self.fixed_steps * (2 if self.is_captured else 1))
        else:
            self.measure(self.cohort.members[0].steps_per_epoch)

    @property
    def is_captured(self) -> bool:
        """Whether steps become CUDA graphs, which they do when they are met again."""
        mean = sum(member.train.lengths.mean() * member.run.config.train.batch_size for member in self.cohort.members)
        return min(mean, self.cohort.settings.token_budget) <= MOST_GRAPHED

    def measure(self, steps: int) -> int:
        """With `chooses_threads` as `fit` does it: a look before the first step, and others while steps are taken."""
        samples = 0
        threads = Threads(self.most_threads) if self.most_threads else Threads(1)
        if self.most_threads:
            torch.set_num_threads(threads.number)
        with self.cohort.training():
            for _ in range(steps):
                if threads.look_again():
                    torch.set_num_threads(threads.number)
                samples += self.cohort.step()
                for member in self.cohort.members:  # nothing is scored: peers score nothing either
                    assert member.is_active, member.progress.message
                    if member.progress.cursor == member.steps_per_epoch:
                        member.progress.epoch += 0 if self.fixed_steps else 1
                        member.progress.cursor = 0
        return samples

    def describe(self) -> dict[str, Any]:
        spec, train = self.cohort.members[0].run.spec, self.cohort.members[0].run.config.train
        return {
            "trained_parameters": spec.count_parameters(self.backbone.anatomy),
            "dtypes": sorted({str(self.backbone.dtype), *(str(s.dtype) for s in self.cohort.bank.stacks.values())}),
            "matrix_parameters": matrix_parameters(self.backbone),
            "bucket": train.bucket,
            "steps": type(self.cohort.stepper).__name__,
            "settings": dataclasses.asdict(self.cohort.settings),
        }


@functools.cache
def open_backbone(folder: str, device: str) -> Backbone:
    """The backbone of this process, loaded once: with it stays what was compiled for its blocks."""
    say("loading the backbone")
    return load_backbone(folder, device=device)


def read_task(job: dict[str, Any], num_rows: int = 0) -> Task:
    """The rows as a task, or so many of them, of evenly spaced lengths; two are its dev rows too, which nothing
    looks at."""
    with open(job["rows"], encoding="utf8") as file:
        rows = json.load(file)
    targets = np.array(rows["labels"], dtype=np.int64)
    train = Split(rows["texts"], None, targets, list(range(1, len(targets) + 1)))
    if num_rows:
        by_length = np.argsort([len(row) for row in rows["ids"]], kind="stable")
        places = (2 * np.arange(num_rows) + 1) * len(by_length) // (2 * num_rows)
        train = train.take(by_length[places].tolist())
    dev = train.take([0, 1])
    return Task("bench", "classify", ("no", "yes"), "accuracy", train, dev, None, (), job["rows"], job["rows"] + "/dev")


def make(task: Task, backbone: Backbone, job: dict[str, Any], seed: int) -> Run:
    train = TrainConfig(
        lr=1e-4 * (1 + seed % 8),
        seed=seed,
        epochs=1000,
        batch_size=job["batch_size"],
        pooling="cls",  # as the peers' heads read
    )
    return make_run(task, RunConfig(method=MethodConfig(size=job["size"]), train=train), backbone)


def cohort_settings(job: dict[str, Any]) -> CohortSettings:
    budget = job.get("token_budget") or TOKEN_BUDGET[job["device"]]
    return CohortSettings(token_budget=budget, num_threads=job["threads"], save_every=10**9)


def use_eager_steps() -> None:
    """From here on in this process; a cohort compiles its steps where it can, and no setting says otherwise."""
    if hasattr(cohort_module, "can_compile"):
        cohort_module.can_compile = lambda bank, members: False


def fill_slots_alike() -> None:
    """From here on in this process: a slot begins as the first of its kind did. To draw the values of one takes a
    tenth of a second, of a large cohort far longer than its steps, and no speed depends on them."""
    known: dict[SlotSpec, dict[str, Tensor]] = {}
    draw = Bank.initialise

    def initialise(self: Bank, slot: int, spec: SlotSpec, seed: int, task: str = "") -> None:
        if spec not in known:
            draw(self, slot, spec, seed, task)
            known[spec] = {name: tensor.to(self.backbone.device) for name, tensor in self.read(slot).items()}
        else:
            self.put(slot, spec, known[spec])

    if draw.__module__ == Bank.__module__:
        Bank.initialise = initialise  # type: ignore[method-assign]


def matrix_parameters(backbone: Backbone) -> int:
    """Weights of the layers' frozen matrices, which every token is multiplied with."""
    from inlay.model.backbone.families import find_family

    stack = find_family(backbone.anatomy.family).stack
    return sum(
        parameter.numel()
        for name, parameter in backbone.model.named_parameters()
        if name.startswith(f"{stack}.") and parameter.dim() == 2
    )


def matrix_rate() -> dict[str, Any]:
    """Floating-point operations a second of a large bf16 product on random data: the chip's ceiling, measured."""
    left, right = torch.randn(2, MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        left @ right
    torch.cuda.synchronize()
    return {"flops_per_s": 10 * 2 * MATRIX**3 / (time.perf_counter() - began)}
