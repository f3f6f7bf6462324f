"""`InlaySearchCV`: scikit-learn's grid search whose candidates, in all folds, train as one cohort."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sklearn.base import clone, is_classifier
from sklearn.model_selection import GridSearchCV, ParameterGrid, check_cv
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing, indexable

from inlay import model, pipeline, terminal, training
from inlay.errors import InlayError
from inlay.estimators.text_estimators import _QUIET, TRAINED_AHEAD, _TextEstimator


class InlaySearchCV(GridSearchCV):
    """`GridSearchCV`, with the runs of every candidate in every fold trained as one cohort.

    All parameters (`estimator`, `param_grid`, `scoring`, `n_jobs`, `refit`, `cv`, `verbose`, `pre_dispatch`,
    `error_score`, `return_train_score`), attributes and results are those of `GridSearchCV`. The estimator is one of
    Inlay's, or a `Pipeline` that ends with one; of any other, and with `n_jobs` above 1, candidates train one by one.

    It first trains all runs together, and then runs the usual search: `fit` of a candidate finds its trained run by the
    run's id, which follows from rows and settings.

    >>> estimator = inlay.InlayClassifier(backbone.name, **FAST)
    >>> search = inlay.InlaySearchCV(estimator, {"lr": [1e-3, 1e-2]}, cv=2)
    >>> search.fit(texts, ["yes", "no"] * 20).best_params_
    {'lr': ...}
    """

    cv: Any

    def fit(self, X: Any, y: Any = None, **params: Any) -> Self:
        """Search, and fit the best candidate to all rows; `params` go to the splitter (`groups`) and to `fit`."""
        rows, labels = indexable(X, y)
        cv = check_cv(self.cv, labels, classifier=is_classifier(self.estimator))
        splits = list(cv.split(rows, labels, params.get("groups")))  # fixed, so that the search sees the same ones
        given, self.cv = self.cv, splits
        try:
            runs = self._plan_runs(rows, labels, [train for train, _ in splits]) if self.n_jobs in (None, 1) else []
            with _trained_ahead(runs):
                super().fit(X, y, **params)
        finally:
            self.cv = given
        return self

    def _plan_runs(self, X: Any, y: Any, folds: Sequence[Any]) -> list[tuple[training.Run, model.Backbone]]:
        """Return the run of every candidate in every fold; those that fail are left for the search to report."""
        planned = []
        for candidate in ParameterGrid(self.param_grid):
            for fold in folds:
                estimator = clone(self.estimator).set_params(**clone(candidate, safe=False))
                rows, labels = _safe_indexing(X, fold), _safe_indexing(y, fold)
                try:
                    if isinstance(estimator, Pipeline) and isinstance(estimator[-1], _TextEstimator):
                        rows = estimator[:-1].fit_transform(rows, labels) if len(estimator) > 1 else rows
                        estimator = estimator[-1]
                    if isinstance(estimator, _TextEstimator):
                        planned.append(estimator.make_run(rows, labels))
                except (InlayError, ValueError, TypeError):
                    continue
        return planned


@contextmanager
def _trained_ahead(planned: Sequence[tuple[training.Run, model.Backbone]]) -> Iterator[None]:
    """Train runs together, those of one backbone as one cohort; inside the block, `fit` finds their results."""
    found: dict[str, training.Result] = {}
    backbones = {id(backbone): backbone for _, backbone in planned}
    with tempfile.TemporaryDirectory() as folder, terminal.silenced():
        for key, backbone in backbones.items():
            runs = {run.id: run for run, own in planned if id(own) == key}  # settings that mean the same are one run
            results = pipeline.fit_runs(list(runs.values()), backbone, Path(folder), _QUIET)
            found |= {result.run_id: result for result in results}
    token = TRAINED_AHEAD.set({**(TRAINED_AHEAD.get() or {}), **found})
    try:
        yield
    finally:
        TRAINED_AHEAD.reset(token)
