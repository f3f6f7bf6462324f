"""Tasks as scikit-learn estimators, for its pipelines, searches and calibration.

A fitted estimator holds its weights in memory and leaves nothing on disk. Pickling it publishes its weights as a
version in a store, and the pickle is a reference to that version; it contains no weights and no texts.
"""

from __future__ import annotations

from inlay.estimators.fitted_task import BadInput, FittedTask
from inlay.estimators.search import InlaySearchCV
from inlay.estimators.text_estimators import InlayClassifier, InlayRegressor, InlayTagger

__all__ = ["BadInput", "FittedTask", "InlayClassifier", "InlayRegressor", "InlaySearchCV", "InlayTagger"]
