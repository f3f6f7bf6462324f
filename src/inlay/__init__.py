"""Inlay: many text tasks on one frozen transformer.

    backbone = inlay.load_backbone("minilm")
    task = inlay.load_task("reviews.csv", name="reviews")
    run = inlay.make_run(task, backbone, size=64, lr=5e-4, epochs=3)
    result, = inlay.fit([run], backbone)
    version = inlay.publish(run, result, backbone)
    answers = inlay.Engine(backbone).predict([inlay.Request("reviews", "Well made.")])

A service that others run: `inlay.Client(url, key).predict("reviews", "Well made.")`.

Several tasks as one run: `make_joint_run`, `fit`, `materialize`, and `publish` for each of them.

Names are imported when they are first used, so that `import inlay` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.api import Engine, fit, load_task, make_joint_run, make_run, materialize, publish, verify
    from inlay.client import Client
    from inlay.errors import InlayError
    from inlay.model import Backbone, load_backbone
    from inlay.serving import Answer, Request
    from inlay.settings.fit_settings import FitSettings
    from inlay.settings.run_config import DataConfig, JointConfig, MethodConfig, RunConfig, TrainConfig
    from inlay.store import Store, Version
    from inlay.training import Result, Run
    from inlay.training.run.joint import JointRun
    from inlay.training.run.run import Trained

_HOMES = {
    "inlay.settings.run_config": ("DataConfig", "JointConfig", "MethodConfig", "RunConfig", "TrainConfig"),
    "inlay.errors": ("InlayError",),
    "inlay.settings.fit_settings": ("FitSettings",),
    "inlay.api": ("Engine", "fit", "load_task", "make_joint_run", "make_run", "materialize", "publish", "verify"),
    "inlay.client": ("Client",),
    "inlay.model": ("Backbone", "load_backbone"),
    "inlay.serving": ("Answer", "Request"),
    "inlay.store": ("Store", "Version"),
    "inlay.training": ("Result", "Run"),
    "inlay.training.run.joint": ("JointRun",),
    "inlay.training.run.run": ("Trained",),
}
__getattr__ = import_lazily(__name__, _HOMES)

__all__ = [
    "Answer",
    "Backbone",
    "Client",
    "DataConfig",
    "Engine",
    "FitSettings",
    "InlayError",
    "JointConfig",
    "JointRun",
    "MethodConfig",
    "Request",
    "Result",
    "Run",
    "RunConfig",
    "Store",
    "TrainConfig",
    "Trained",
    "Version",
    "fit",
    "load_backbone",
    "load_task",
    "make_joint_run",
    "make_run",
    "materialize",
    "publish",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
