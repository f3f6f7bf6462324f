"""The pipeline room: what the commands and the Python library share, from settings to a published version.

Notes and progress go through `inlay.terminal`, which a caller may silence. Nothing here prints data.
"""

from __future__ import annotations

from inlay.pipeline.backbones import (
    check_backbone_name,
    check_device_name,
    device_for_precision,
    find_stored,
    full_name,
    open_backbone,
    open_once,
    open_stored,
)
from inlay.pipeline.evaluation import EvaluationReport, ScoredVersion, evaluate, list_mistakes, read_probe_rows
from inlay.pipeline.preparation import describe_run, describe_task, load_task, name_of, prepare
from inlay.pipeline.progress import TrainingProgress, fit_runs, parse_cluster, write_brief_reports
from inlay.pipeline.time_budget import COLUMNS, Budget, parse_budget, read_budget
from inlay.pipeline.trackers import check_trackers
from inlay.pipeline.train import SweepReport, TrainOptions, TrainReport, sweep_and_publish, train_and_publish

__all__ = [
    "COLUMNS",
    "Budget",
    "EvaluationReport",
    "ScoredVersion",
    "SweepReport",
    "TrainOptions",
    "TrainReport",
    "TrainingProgress",
    "check_backbone_name",
    "check_device_name",
    "check_trackers",
    "describe_run",
    "describe_task",
    "device_for_precision",
    "evaluate",
    "find_stored",
    "fit_runs",
    "full_name",
    "list_mistakes",
    "load_task",
    "name_of",
    "open_backbone",
    "open_once",
    "open_stored",
    "parse_budget",
    "parse_cluster",
    "prepare",
    "read_budget",
    "read_probe_rows",
    "sweep_and_publish",
    "train_and_publish",
    "write_brief_reports",
]
