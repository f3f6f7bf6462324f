"""Inlay: many text tasks on one frozen transformer.

    inlay.train("reviews.csv")
    inlay.predict("reviews", "Well made.")

Every command is a function of the same name. The same step by step, with a backbone that is loaded once:

    backbone = inlay.load_backbone("minilm")
    task = inlay.load_task("reviews.csv", name="reviews")
    run = inlay.make_run(task, backbone, size=64, lr=5e-4, epochs=3)
    result, = inlay.fit([run], backbone)
    version = inlay.publish(run, result, backbone)
    answers = inlay.Engine(backbone).predict([inlay.Request("reviews", "Well made.")])

A running service is asked with `inlay.Client(url, key).predict("reviews", "Well made.")`.

Several tasks are trained as one run with `make_joint_run`, `fit`, `materialize`, and `publish` for each task.

Names are imported when they are first used, so that `import inlay` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inlay.lazy_imports import import_lazily

if TYPE_CHECKING:
    from inlay.api import (
        BaselineReport,
        Engine,
        baseline,
        drift,
        evaluate,
        explain,
        export,
        fit,
        import_,
        learn_curve,
        load_task,
        make_joint_run,
        make_run,
        materialize,
        pick,
        plan,
        predict,
        publish,
        report,
        suggest,
        sweep,
        train,
        verify,
    )
    from inlay.client import Client
    from inlay.errors import InlayError
    from inlay.estimators import InlayClassifier, InlayRegressor, InlaySearchCV, InlayTagger
    from inlay.model import Backbone, load_backbone
    from inlay.pipeline import EvaluationReport, SweepReport, TrainReport
    from inlay.reports import TaskReport
    from inlay.serving import Answer, Request
    from inlay.settings.fit_settings import FitSettings
    from inlay.settings.joint_config import JointConfig
    from inlay.settings.run_config import DataConfig, MethodConfig, RunConfig, TrainConfig
    from inlay.store import Store, Version
    from inlay.training import Result, Run
    from inlay.training.run.joint import JointRun
    from inlay.training.run.run import Trained

_HOMES = {
    "inlay.settings.joint_config": ("JointConfig",),
    "inlay.settings.run_config": ("DataConfig", "MethodConfig", "RunConfig", "TrainConfig"),
    "inlay.errors": ("InlayError",),
    "inlay.settings.fit_settings": ("FitSettings",),
    "inlay.api": (
        "BaselineReport",
        "Engine",
        "baseline",
        "drift",
        "evaluate",
        "explain",
        "export",
        "fit",
        "import_",
        "learn_curve",
        "load_task",
        "make_joint_run",
        "make_run",
        "materialize",
        "pick",
        "plan",
        "predict",
        "publish",
        "report",
        "suggest",
        "sweep",
        "train",
        "verify",
    ),
    "inlay.client": ("Client",),
    "inlay.estimators": ("InlayClassifier", "InlayRegressor", "InlaySearchCV", "InlayTagger"),
    "inlay.model": ("Backbone", "load_backbone"),
    "inlay.pipeline": ("EvaluationReport", "SweepReport", "TrainReport"),
    "inlay.reports": ("TaskReport",),
    "inlay.serving": ("Answer", "Request"),
    "inlay.store": ("Store", "Version"),
    "inlay.training": ("Result", "Run"),
    "inlay.training.run.joint": ("JointRun",),
    "inlay.training.run.run": ("Trained",),
}
_find = import_lazily(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name != "__version__":
        return _find(name)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("inlay")
    except PackageNotFoundError:
        return "0+checkout"


__all__ = [
    "Answer",
    "Backbone",
    "BaselineReport",
    "Client",
    "DataConfig",
    "Engine",
    "EvaluationReport",
    "FitSettings",
    "InlayClassifier",
    "InlayError",
    "InlayRegressor",
    "InlaySearchCV",
    "InlayTagger",
    "JointConfig",
    "JointRun",
    "MethodConfig",
    "Request",
    "Result",
    "Run",
    "RunConfig",
    "Store",
    "SweepReport",
    "TaskReport",
    "TrainConfig",
    "TrainReport",
    "Trained",
    "Version",
    "__version__",
    "baseline",
    "drift",
    "evaluate",
    "explain",
    "export",
    "fit",
    "import_",
    "learn_curve",
    "load_backbone",
    "load_task",
    "make_joint_run",
    "make_run",
    "materialize",
    "pick",
    "plan",
    "predict",
    "publish",
    "report",
    "suggest",
    "sweep",
    "train",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
