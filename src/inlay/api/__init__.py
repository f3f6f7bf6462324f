"""The Python library: every command as one function call, and the same step by step.

Errors name keyword arguments where those of commands name options. A new function gets a line here and in
`inlay/__init__.py`, a docstring that names its parameters, and an example in it, which a test runs.
"""

from __future__ import annotations

from inlay.api.commands import (
    BaselineReport,
    baseline,
    evaluate,
    export,
    import_,
    plan,
    predict,
    suggest,
    sweep,
    train,
)
from inlay.api.insight import drift, explain, learn_curve, pick, report
from inlay.api.steps import Engine, fit, load_task, make_joint_run, make_run, materialize, publish, verify

__all__ = [
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
]
