"""The estimators room: tasks as scikit-learn's estimators, for its pipelines, searches and calibration.

A fitted estimator holds its weights in memory and leaves nothing on disk. Pickled, it is a reference to a version in a
store, where its weights are put at that moment; no weights and no texts travel with the pickle.
"""

from __future__ import annotations

from inlay.estimators.fitted_task import BadInput, FittedTask
from inlay.estimators.search import InlaySearchCV
from inlay.estimators.text_estimators import InlayClassifier, InlayRegressor, InlayTagger

__all__ = ["BadInput", "FittedTask", "InlayClassifier", "InlayRegressor", "InlaySearchCV", "InlayTagger"]
