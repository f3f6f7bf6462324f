"""Tasks as scikit-learn's estimators: its own checks, its searches and calibration, labels, pickles."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import Tags
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import validate_data

from inlay.errors import Missing
from inlay.estimators import BadInput, InlayClassifier, InlayRegressor, InlaySearchCV, InlayTagger
from inlay.store import Store
from inlay.training.cohort.cohort import Cohort

FAST: dict[str, Any] = {"size": 2, "lr": 1e-2, "epochs": 1, "batch_size": 16, "max_length": 16}
TEXTS = [f"{word} film {number}" for number in range(12) for word in ("good", "bad")]


@pytest.fixture(scope="module")
def folder(backbone_folder) -> str:
    return str(backbone_folder("bert"))


@pytest.fixture(autouse=True)
def own_store(monkeypatch, tmp_path):
    monkeypatch.setenv("INLAY_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def fitted(folder) -> InlayClassifier:
    return InlayClassifier(folder, **FAST).fit(TEXTS, ["yes", "no"] * 12)


# scikit-learn's own checks. They give numbers, so numbers are written as texts: what is tested is all that is not about
# X itself. docs/python.md lists the exceptions.

NOT_FOR_TEXTS = {
    "check_class_weight_classifiers": 'weights of single classes: only "balanced" is there',
    "check_regressors_no_decision_function": "fits 10 different numbers, too few to split off dev rows",
}


class WrittenNumbers:
    """An estimator whose texts are the numbers of each row, spelt."""

    _is_fitting = False

    def _read_texts(self, X: Any) -> dict[str, list[Any]]:
        rows = validate_data(self, X, reset=self._is_fitting)
        return {"text": [" ".join(f"w{place}{round(3 * value)}" for place, value in enumerate(row)) for row in rows]}

    def make_run(self, X: Any, y: Any, dev: Any = None) -> Any:
        self._is_fitting = True
        try:
            return super().make_run(X, y, dev)  # type: ignore[misc]
        finally:
            self._is_fitting = False

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.two_d_array, tags.input_tags.string = True, False
        for own in (tags.classifier_tags, tags.regressor_tags):
            if own is not None:
                own.poor_score = True  # an epoch of a random backbone
        return tags


class NumberClassifier(WrittenNumbers, InlayClassifier):
    pass


class NumberRegressor(WrittenNumbers, InlayRegressor):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NumberClassifier, NumberRegressor])
def test_the_checks_of_scikit_learn_pass(kind, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks warn of what they skip
        found = check_estimator(kind(folder, **FAST), expected_failed_checks=NOT_FOR_TEXTS, on_fail=None, on_skip=None)
    assert {item["check_name"]: item["exception"] for item in found if item["status"] == "failed"} == {}
    assert len(found) > 40


# Labels and rows


@pytest.mark.parametrize(
    "labels",
    [[True, False], [3, 7], ["yes", "no"], np.array([1.0, 2.0]), np.array(["a ", "a"]), pandas.Series(["x", "y"])],
    ids=["bool", "int", "str", "float", "blanks", "series"],
)
def test_labels_come_back_as_they_went_in(labels, folder):
    given = np.tile(np.asarray(labels), 12)
    y = pandas.Series(given) if isinstance(labels, pandas.Series) else given if hasattr(labels, "dtype") else [*given]
    estimator = InlayClassifier(folder, **FAST).fit(TEXTS, y)
    predicted = estimator.predict(TEXTS)
    assert predicted.dtype == np.unique(given).dtype
    assert set(predicted.tolist()) <= set(given.tolist())
    assert estimator.classes_[estimator.predict_proba(TEXTS).argmax(1)].tolist() == predicted.tolist()
    assert 0 <= estimator.score(TEXTS, given) <= 1


def test_sets_of_labels_and_indicators_come_back_as_they_went_in(folder):
    estimator = InlayClassifier(folder, **FAST).fit(TEXTS, [{"a", "b"}, set()] * 12)
    assert all(own <= {"a", "b"} for own in estimator.predict(TEXTS))
    assert 0 <= estimator.score(TEXTS, [{"a", "b"}, set()] * 12) <= 1
    table = pandas.DataFrame({"a": [1, 0] * 12, "b": [0, 1] * 12, "c": [1, 1] * 12})
    estimator = InlayClassifier(folder, **FAST).fit(TEXTS, table)
    assert estimator.predict(TEXTS).shape == estimator.predict_proba(TEXTS).shape == (24, 3)
    assert estimator.classes_.tolist() == ["a", "b", "c"]


def test_all_forms_of_rows_are_read_alike(fitted, folder):
    expected = fitted.predict_proba(TEXTS)
    for rows in (pandas.Series(TEXTS), np.array(TEXTS, dtype=object), pandas.DataFrame({"any": TEXTS}), tuple(TEXTS)):
        np.testing.assert_array_equal(fitted.predict_proba(rows), expected)
    pairs = [(text, "a second") for text in TEXTS]
    estimator = InlayClassifier(folder, **FAST).fit(pairs, [1, 0] * 12)
    expected = estimator.predict_proba(pairs)
    for rows in (pandas.DataFrame(pairs), np.array(pairs, dtype=object), [list(pair) for pair in pairs]):
        np.testing.assert_array_equal(estimator.predict_proba(rows), expected)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["good", ""], r"X\[1\] is empty"),
        (["good", None], r"X\[1\] is empty"),
        ([1.0, 2.0], r"X\[0\] is a `float`, not a text"),
        ("good", "X is a `str`"),
        ([], r"0 sample\(s\)"),
    ],
)
def test_what_is_no_text_is_a_value_error_that_names_the_row(rows, message, fitted):
    with pytest.raises(ValueError, match=message):
        fitted.predict(rows)


def test_bad_labels_and_settings_are_value_errors_in_the_words_of_python(folder):
    with pytest.raises(ValueError, match="every row has the class"):
        InlayClassifier(folder, **FAST).fit(TEXTS, ["one"] * 24)
    with pytest.raises(BadInput, match=r"did you mean `epochs`"):
        InlayClassifier(folder, settings={"epoch": 3}).fit(TEXTS, [1, 0] * 12)
    with pytest.raises(BadInput, match="for classes use `InlayClassifier`"):
        InlayRegressor(folder, **FAST).fit(TEXTS, ["a", "b"] * 12)


def test_a_tagger_gives_every_word_a_tag(folder):
    sentences, tags = [text.split() for text in TEXTS], [["B-X", "O", "O"], ["O", "O", "O"]] * 12
    tagger = InlayTagger(folder, **FAST).fit(sentences, tags)
    assert tagger.classes_.tolist() == ["O", "B-X", "I-X"]
    assert [len(own) for own in tagger.predict([["a"], ["b", "can't", "x-y", "!"]])] == [1, 4]
    assert 0 <= tagger.score(sentences, tags) <= 1


# scikit-learn's tools


def test_a_pipeline_cross_validation_and_calibration_take_it(folder):
    lower = FunctionTransformer(lambda rows: [row.lower() for row in rows])
    pipeline = Pipeline([("lower", lower), ("task", InlayClassifier(folder, **FAST))])
    assert cross_val_score(pipeline, TEXTS, [1, 0] * 12, cv=2).shape == (2,)
    calibrated = CalibratedClassifierCV(InlayClassifier(folder, **FAST), cv=2).fit(TEXTS, ["y", "n"] * 12)
    assert calibrated.predict_proba(TEXTS).shape == (24, 2)


def test_a_search_trains_its_candidates_as_one_cohort_and_finds_what_grid_search_finds(folder, monkeypatch):
    steps: list[int] = []
    real = Cohort.step

    def counted(self: Cohort, *given: Any) -> Any:
        steps.append(len(self.active))
        return real(self, *given)

    monkeypatch.setattr(Cohort, "step", counted)
    grid, labels = {"lr": [1e-3, 3e-3, 1e-2], "size": [2, 4]}, ["y", "n"] * 12
    estimator = InlayClassifier(folder, **{**FAST, "settings": {"dropout": 0.0, "head_dropout": 0.0}})
    one_by_one = GridSearchCV(estimator, grid, cv=2, refit=False).fit(TEXTS, labels)
    alone, steps[:] = list(steps), []
    together = InlaySearchCV(estimator, grid, cv=2, refit=False).fit(TEXTS, labels)
    assert set(alone) == {1}
    assert set(steps) == {12}, "six candidates in two folds take each step together"
    assert len(steps) * 12 == len(alone)
    for name in ("mean_test_score", "rank_test_score"):
        np.testing.assert_allclose(together.cv_results_[name], one_by_one.cv_results_[name], atol=1e-6)
    assert clone(together).cv == 2


# Pickles


def test_a_pickle_is_a_reference_to_the_store_without_weights_or_texts(fitted, tmp_path):
    content = pickle.dumps(fitted)
    assert len(content) < 2000
    assert b"film" not in content
    (task,) = Store().ledger()
    assert not Store().manifest(task.latest.version).probes, "the store has no texts of it either"
    again = pickle.loads(content)
    np.testing.assert_array_equal(again.predict_proba(TEXTS), fitted.predict_proba(TEXTS))
    assert pickle.dumps(again) == pickle.dumps(pickle.loads(pickle.dumps(again)))


def test_a_pickle_whose_version_is_not_here_says_so(fitted, tmp_path, monkeypatch):
    elsewhere = copy.deepcopy(fitted.fitted_)
    assert elsewhere is fitted.fitted_, "a copy publishes nothing"
    content = pickle.dumps(fitted)
    monkeypatch.setenv("INLAY_HOME", str(tmp_path / "empty"))
    with pytest.raises(Missing, match=r"estimator are version `inlayclassifier-\w+@1` .* not in the store"):
        pickle.loads(content)


def test_fitting_leaves_nothing_behind_and_publishing_is_asked_for(folder, tmp_path):
    estimator = InlayClassifier(folder, **FAST).fit(TEXTS, ["yes", "no"] * 12)
    assert not (tmp_path / "home").exists()
    version = estimator.publish("mood")
    assert Store().manifest(version).labels == ("no", "yes")
