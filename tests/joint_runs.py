"""Runs of several small tasks, for the tests of training them and of what becomes of them."""

from __future__ import annotations

import dataclasses

from inlay.model.bank.methods import JOINT_METHODS as METHOD_TABLE
from inlay.settings import JointConfig, MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import CohortSettings
from inlay.training.run.joint import make_joint_run

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 32, "epochs": 3, "weight_decay": 0.0}
METHODS = ["hyperformer", "hyperformer++", "mahabadi-multi", "full-multi", "pal-published"]


def make_tasks(toy_task):
    number = toy_task("number", kind="regress", num_rows=24, seed=2)
    return [
        toy_task("two", num_labels=2, num_rows=40),
        toy_task("five", num_labels=5, num_rows=32, seed=1),
        dataclasses.replace(number, metric="pearson"),
    ]


def make_joint(backbone, toy_task, method="hyperformer++", seed=0, joint=None, **train):
    size = 4 if METHOD_TABLE[method].size else None
    config = RunConfig(
        method=MethodConfig(method, size),
        train=TrainConfig(**{"lr": 3e-3, **QUIET, "seed": seed, **train}),
        joint=JointConfig(**(joint or {})),
    )
    return make_joint_run(make_tasks(toy_task), config, backbone)


def take_steps(cohort, num_steps):
    with cohort.training():
        for _ in range(num_steps):
            cohort.step()
            cohort.backbone.model.eval()
            cohort.finish_epochs()
            cohort.backbone.model.train()
