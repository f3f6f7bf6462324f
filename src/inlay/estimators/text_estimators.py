"""`InlayClassifier`, `InlayRegressor`, `InlayTagger`: tasks as scikit-learn estimators.

Labels may be bool, int, str, sets or an indicator matrix, and predictions have the same form. The settings that
searches vary are parameters; `settings` takes all others. Settings left open are chosen as by `inlay train`, except
that `predict` always returns the likeliest class.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score
from sklearn.preprocessing import MultiLabelBinarizer
from sklearn.utils import Tags, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted

from inlay import data, model, pipeline, terminal, training
from inlay.estimators.fitted_task import BadInput, FittedTask, as_value_errors
from inlay.settings import DataConfig, FitSettings, RunConfig, from_tree, split_settings
from inlay.store import Version

TRAINED_AHEAD: ContextVar[Mapping[str, training.Result] | None] = ContextVar("trained_ahead", default=None)
"""run id -> the result of a run that a search trained together with others (search.py)"""
_QUIET = FitSettings(draw_curves=False, keep_last=False)
_SETTINGS = ("method", "size", "lr", "epochs", "batch_size", "max_length", "dev_share")


class _TextEstimator(BaseEstimator):
    """The parameters and the training that all estimators share."""

    _kind = ""
    _task = ""

    def __init__(
        self,
        backbone: str = "minilm",
        *,
        method: str | None = None,
        size: int | None = None,
        lr: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        dev_share: float | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = 0,
        device: str = "auto",
        store: str | None = None,
        name: str | None = None,
        verbose: bool = False,
    ) -> None:
        self.backbone = backbone
        self.method = method
        self.size = size
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size
        self.max_length = max_length
        self.dev_share = dev_share
        self.settings = settings
        self.random_state = random_state
        self.device = device
        self.store = store
        self.name = name
        self.verbose = verbose

    def fit(self, X: Any, y: Any, *, dev: tuple[Any, Any] | None = None) -> Self:
        """Train on texts (or pairs) and their labels; the epoch is chosen on `dev`, by default on some of the rows."""
        with as_value_errors(), terminal.silenced(not self.verbose):
            run, backbone = self.make_run(X, y, dev)
        result = (TRAINED_AHEAD.get() or {}).get(run.id)
        if result is None:
            with tempfile.TemporaryDirectory() as folder, terminal.silenced(not self.verbose):
                result = pipeline.fit_runs([run], backbone, Path(folder), _QUIET)[0]
        training.check_trained(result)
        self.fitted_ = FittedTask(run, result, self.device, None if self.store is None else str(self.store), self.name)
        self.dev_metrics_ = dict(result.dev_metrics)
        return self

    def make_run(self, X: Any, y: Any, dev: tuple[Any, Any] | None = None) -> tuple[training.Run, model.Backbone]:
        """Return the run that `fit` would train, and its backbone; sets the attributes about the labels."""
        given = {"train": self._as_columns(X, y)}
        if dev is not None:
            given["dev"] = self._as_columns(*dev, is_dev=True)
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        chosen = {name: getattr(self, name) for name in _SETTINGS if getattr(self, name) is not None}
        chosen |= {"seed": int(seed), "split_seed": int(seed)}
        tree = split_settings({**chosen, **self._own_settings(), **(self.settings or {})})
        config = from_tree(RunConfig, {**tree, "task": self._task, "backbone": str(self.backbone)})
        task = data.load_task(config.data, self._task, given)
        backbone = pipeline.open_once(config.backbone, self.device)
        return training.make_run(task, config, backbone), backbone

    def publish(self, name: str, store: str | None = None, *, probes: str = "rows") -> Version:
        """Publish the fitted task in a store under a `name`, for the command line, an engine or the service.

        `store` is a folder, by default the estimator's or the user's own; `probes` are those of `inlay.publish`.
        """
        check_is_fitted(self)
        fitted: FittedTask = self.fitted_
        return fitted.publish(name, store, probes=probes)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        tags.target_tags.required = True
        return tags

    def _own_settings(self) -> dict[str, Any]:
        return {"kind": self._kind}

    def _as_columns(self, X: Any, y: Any, *, is_dev: bool = False) -> dict[str, list[Any]]:
        """Return checked texts and labels as columns that `inlay.data` reads."""
        texts = self._read_texts(X)
        if y is None:
            raise BadInput("requires y to be passed, but the target y is None", "give the labels of the rows")
        num_rows = len(next(iter(texts.values())))
        check_consistent_length(range(num_rows), y)
        if num_rows < 2 and not is_dev:
            raise BadInput(
                f"n_samples={num_rows}: one row is too few to train and to choose an epoch", "give more rows"
            )
        return data.join_labels(texts, self._read_labels(y, is_dev=is_dev))

    def _read_labels(self, y: Any, *, is_dev: bool) -> Any:
        raise NotImplementedError

    def _read_texts(self, X: Any) -> dict[str, list[Any]]:
        """Return the columns of texts; refuse a cell that is not a text, naming its row."""
        if X is None or isinstance(X, str | bytes) or hasattr(X, "toarray"):
            what = "a sparse matrix" if hasattr(X, "toarray") else f"a `{type(X).__name__}`"
            raise BadInput(f"X is {what}, not an array of texts", "give a list of texts, or of pairs of texts")
        columns = data.find_texts(X)
        if not {"text"} <= columns.keys() <= {"text", "pair"}:
            raise BadInput(
                f"X has the columns {', '.join(columns)}", "give texts, or pairs of texts: two columns, or (text, text)"
            )
        if not columns["text"]:
            raise BadInput("Found array with 0 sample(s), while a minimum of 1 is required", "give texts")
        for cells in columns.values():
            for row, cell in enumerate(cells):
                if not isinstance(cell, str) or not cell.strip():
                    what = (
                        "empty" if cell is None or isinstance(cell, str) else f"a `{type(cell).__name__}`, not a text"
                    )
                    raise BadInput(f"X[{row}] is {what}", "each row must be a text, or a pair of texts")
        return columns

    def _answer(self, X: Any) -> list[model.Outcome]:
        check_is_fitted(self)
        with as_value_errors():
            columns = self._read_texts(X)
        lines = list(range(1, len(columns["text"]) + 1))
        fitted: FittedTask = self.fitted_
        return fitted.answer(data.Split(columns["text"], columns.get("pair"), None, lines))


class InlayClassifier(ClassifierMixin, _TextEstimator):
    """A classifier of texts, or of pairs of texts, as an estimator of scikit-learn.

    `X` is a list, Series or array of texts, or of pairs: a frame of two columns, or a list of (text, text). `y` is
    labels, an indicator matrix, or sets of labels; predictions have the same form.

    `backbone` is a name or a folder. `method`, `size`, `lr`, `epochs`, `batch_size`, `max_length` and `dev_share` are
    those of `inlay.train`; `settings` takes any other. `class_weight="balanced"` makes rare classes count more.
    `random_state` seeds initial values, batches and the dev rows. `device` is `cpu` or `cuda`. `store` and `name` say
    where pickling publishes the weights: by default in the user's store, under a name that follows from rows and
    settings.
    `verbose=True` shows progress.

    >>> classifier = inlay.InlayClassifier(backbone.name, **FAST).fit(texts, [True, False] * 20)
    >>> classifier.predict(["good film"])
    array([ True])
    >>> classifier.predict_proba(["good film"]).shape
    (1, 2)
    """

    _kind, _task = "classify", "inlayclassifier"

    def __init__(
        self,
        backbone: str = "minilm",
        *,
        method: str | None = None,
        size: int | None = None,
        lr: float | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        max_length: int | None = None,
        dev_share: float | None = None,
        class_weight: str | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = 0,
        device: str = "auto",
        store: str | None = None,
        name: str | None = None,
        verbose: bool = False,
    ) -> None:
        given = {key: value for key, value in locals().items() if key not in ("self", "class_weight", "__class__")}
        super().__init__(**given)
        self.class_weight = class_weight

    def predict(self, X: Any) -> Any:
        """Return the likeliest class of each row; an indicator matrix or a list of sets if `y` was one."""
        outcomes = self._answer(X)
        if self.target_form_ == "classes":
            places = {name: place for place, name in enumerate(self.fitted_.labels)}
            return self.classes_[[places[str(outcome.label)] for outcome in outcomes]]
        sets = [set(outcome.labels or ()) for outcome in outcomes]
        if self.target_form_ == "indicator":
            return np.array([[int(name in own) for name in self.fitted_.labels] for own in sets])
        named = dict(zip(self.fitted_.labels, self.classes_.tolist(), strict=True))
        return [{named[name] for name in own} for own in sets]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class [n, classes], in the order of `classes_`."""
        rows = [outcome.probabilities or {} for outcome in self._answer(X)]
        return np.array([[row[name] for name in self.fitted_.labels] for row in rows])

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy; for sets and indicator matrices the share of rows with all labels right."""
        if getattr(self, "target_form_", "") != "sets":
            return float(super().score(X, y, sample_weight))
        binarizer = MultiLabelBinarizer().fit([*y, self.classes_.tolist()])
        predicted = binarizer.transform(self.predict(X))
        return float(accuracy_score(binarizer.transform(y), predicted, sample_weight=sample_weight))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def _own_settings(self) -> dict[str, Any]:
        if self.class_weight not in (None, "balanced"):
            raise BadInput(f"`class_weight` is `{self.class_weight}`", 'give "balanced" or None')
        own: dict[str, Any] = {"labels": self._names}
        if self.target_form_ != "classes":
            return {**own, "kind": "multilabel"}
        weights = {} if self.class_weight is None else {"class_weights": self.class_weight}
        return {**own, **weights, "kind": self._kind, "thresholds": "none"}

    def _read_labels(self, y: Any, *, is_dev: bool) -> Any:
        if not is_dev:
            self.target_form_, self.classes_ = _find_classes(y)
            self._names = _name_classes(self.classes_.tolist())
        if self.target_form_ == "indicator":
            table = np.asarray(y.toarray() if hasattr(y, "toarray") else y)
            return [[self._names[place] for place in np.flatnonzero(row)] for row in table]
        names = dict(zip(self.classes_.tolist(), self._names, strict=True))
        cells = data.as_cells(y)
        if self.target_form_ == "sets":
            return [[names[item] for item in own] for own in cells]
        return [names[cell] for cell in data.as_cells(column_or_1d(np.asarray(y)))]


def _find_classes(y: Any) -> tuple[str, np.ndarray]:
    """Return the form of labels (classes, indicator, sets), and the classes in order."""
    if hasattr(y, "__array__") and not hasattr(y, "dtype") and not hasattr(y, "iloc"):
        y = np.asarray(y)
    is_nested = isinstance(y, list | tuple) and len(y) and isinstance(y[0], list | np.ndarray)
    if is_nested and type_of_target(y) == "multilabel-indicator":
        y = np.array(y)
    is_table = getattr(y, "ndim", 1) == 2 and y.shape[1] > 1
    if not is_table and not hasattr(y, "dtype") and any(isinstance(item, set | frozenset | list | tuple) for item in y):
        return "sets", np.unique(np.array([item for own in y for item in own]))
    if is_table:
        if type_of_target(y) != "multilabel-indicator":
            raise BadInput("y has several columns that are not 0 and 1", "give labels, sets of labels, or an indicator")
        return "indicator", np.asarray(getattr(y, "columns", np.arange(y.shape[1])))
    labels = column_or_1d(np.asarray(y), warn=True)
    check_classification_targets(labels)
    classes = np.unique(labels)
    if len(classes) < 2:
        raise BadInput(f"every row has the class {classes[0]!r}", "a classifier needs two classes")
    return "classes", classes


def _name_classes(classes: Sequence[Any]) -> list[str]:
    """Return a name for each class: its text, or numbered names if two texts would be equal or one blank."""
    names = [" ".join(str(item).split()) for item in classes]
    if len(set(names)) == len(names) and all(names) and "nan" not in names:
        return names
    return [f"class {place}" for place in range(len(names))]


class InlayRegressor(RegressorMixin, _TextEstimator):
    """A regressor of numbers from texts, or from pairs of texts, as an estimator of scikit-learn.

    `X` and the parameters are those of `InlayClassifier`: `backbone`, `method`, `size`, `lr`, `epochs`, `batch_size`,
    `max_length`, `dev_share`, `settings`, `random_state`, `device`, `store`, `name`, `verbose`. `y` is numbers.

    >>> regressor = inlay.InlayRegressor(backbone.name, **FAST).fit(texts, [4.5, 1.5] * 20)
    >>> regressor.predict(["good film"]).shape
    (1,)
    """

    _kind, _task = "regress", "inlayregressor"

    def predict(self, X: Any) -> np.ndarray:
        """Return the number of each row."""
        return np.array([outcome.value for outcome in self._answer(X)], dtype=np.float64)

    def _read_labels(self, y: Any, *, is_dev: bool) -> Any:
        numbers = column_or_1d(np.asarray(y), warn=True)
        try:
            numbers = numbers.astype(np.float64)
        except (TypeError, ValueError):
            raise BadInput(
                f"y has `{numbers[0]!r}`, which is not a number", "for classes use `InlayClassifier`"
            ) from None
        if not np.isfinite(numbers).all():
            raise BadInput("y has NaN or infinity", "leave out such rows")
        return numbers


class InlayTagger(_TextEstimator):
    """A tagger of words, as an estimator in the style of scikit-learn.

    `X` is a list of sentences, each a list of words; `y` has a list of tags for each. The parameters are those of
    `InlayClassifier`: `backbone`, `method`, `size`, `lr`, `epochs`, `batch_size`, `max_length`, `dev_share`,
    `settings`, `random_state`, `device`, `store`, `name`, `verbose`. Tags of entities (`B-PER`, `I-PER`, `O`) are read
    in any scheme and come back as IOB2. Words beyond the maximum length are `O`.

    >>> words = [text.split() for text in texts]
    >>> tagger = inlay.InlayTagger(backbone.name, **FAST).fit(words, [["B-PER", "O", "O"]] * 40)
    >>> [len(tags) for tags in tagger.predict([["Anna", "sees"]])]
    [2]
    """

    _kind, _task = "tag", "inlaytagger"

    def predict(self, X: Any) -> list[list[str]]:
        """Return the tags of the words of each sentence."""
        return [[word.tag for word in outcome.words or ()] for outcome in self._answer(X)]

    def score(self, X: Any, y: Any) -> float:
        """Return the F1 of entities, or the accuracy of words if no tag is an entity's."""
        check_is_fitted(self)
        from seqeval.metrics import f1_score

        predicted = self.predict(X)
        if any(tag.startswith("B-") for tag in self.classes_):
            return float(f1_score([list(tags) for tags in y], predicted))
        pairs = [(true, found) for own in zip(y, predicted, strict=True) for true, found in zip(*own, strict=True)]
        return float(np.mean([true == found for true, found in pairs]))

    def fit(self, X: Any, y: Any, *, dev: tuple[Any, Any] | None = None) -> Self:
        """Train on sentences of words and their tags; the epoch is chosen on `dev`, by default on some of the rows."""
        super().fit(X, y, dev=dev)
        self.classes_ = np.array(self.fitted_.labels)
        return self

    def _read_texts(self, X: Any) -> dict[str, list[Any]]:
        columns = data.find_texts(X, has_words=True) if not isinstance(X, str) and hasattr(X, "__iter__") else {}
        for row, words in enumerate(columns.get("tokens", [None])):
            if not isinstance(words, list | tuple | np.ndarray) or not len(words):
                raise BadInput(f"X[{row}] is not a list of words", 'give sentences as lists: [["Anna", "sees"]]')
        return columns

    def _read_labels(self, y: Any, *, is_dev: bool) -> Any:
        return y

    def _answer(self, X: Any) -> list[model.Outcome]:
        check_is_fitted(self)
        fitted: FittedTask = self.fitted_
        with as_value_errors():
            columns = self._read_texts(X)
            any_tag = fitted.labels[-1]  # words are located by their tags, whatever the tags are
            tags = [[any_tag] * len(words) for words in columns["tokens"]]
            rows = data.read_split({**columns, "tags": tags}, fitted.labels, self._kind, DataConfig())
        return fitted.answer(rows)
