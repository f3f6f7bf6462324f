"""The training room: runs, the cohorts they are trained in, and the versions they become."""

from inlay.training.cohort.fit import FitSettings, fit
from inlay.training.run.publish import publish
from inlay.training.run.run import Result, Run, make_run

__all__ = ["FitSettings", "Result", "Run", "fit", "make_run", "publish"]
