"""Metric values against plain formulas and peers; intervals; degenerate samples."""

import json
import math
import time

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as peer

from inlay.data.kinds import KINDS
from inlay.data.metrics import (
    METRICS,
    decide,
    evaluate_report,
    find_lost,
    is_better,
    list_metrics,
    resolve_metric,
    score,
    score_all,
)
from inlay.errors import BadConfig, NotFinite, UnknownName

GENERATOR = np.random.default_rng(5)
TRUE3 = GENERATOR.integers(3, size=400)
GUESS3 = np.where(GENERATOR.random(400) < 0.6, TRUE3, GENERATOR.integers(3, size=400))
TRUE2, GUESS2 = (TRUE3 > 0).astype(np.int64), (GUESS3 > 0).astype(np.int64)
SETS, GUESSED_SETS = (GENERATOR.random((300, 5)) < share for share in (0.3, 0.4))
NUMBERS = np.round(GENERATOR.normal(size=500), 1)  # with ties
GUESSED_NUMBERS = np.round(NUMBERS + GENERATOR.normal(size=500), 1)


def test_class_metrics_equal_their_peers():
    for true, guess in ((TRUE2, GUESS2), (TRUE3, GUESS3)):
        assert score("accuracy", guess, true) == pytest.approx(peer.accuracy_score(true, guess))
        assert score("macro_f1", guess, true) == pytest.approx(peer.f1_score(true, guess, average="macro"))
        assert score("matthews", guess, true) == pytest.approx(peer.matthews_corrcoef(true, guess))


def test_f1_and_matthews_of_two_classes_are_the_formulas():
    hit = int(((TRUE2 == 1) & (GUESS2 == 1)).sum())
    false_alarm = int(((TRUE2 == 0) & (GUESS2 == 1)).sum())
    miss = int(((TRUE2 == 1) & (GUESS2 == 0)).sum())
    rest = int(((TRUE2 == 0) & (GUESS2 == 0)).sum())
    precision, recall = hit / (hit + false_alarm), hit / (hit + miss)
    assert score("f1", GUESS2, TRUE2) == pytest.approx(2 * precision * recall / (precision + recall))
    root = math.sqrt((hit + false_alarm) * (hit + miss) * (rest + false_alarm) * (rest + miss))
    assert score("matthews", GUESS2, TRUE2) == pytest.approx((hit * rest - false_alarm * miss) / root)


def test_multilabel_metrics_equal_their_peers():
    true, guess = SETS.astype(np.float32), GUESSED_SETS.astype(np.int64)
    assert score("micro_f1", guess, true) == pytest.approx(peer.f1_score(SETS, GUESSED_SETS, average="micro"))
    assert score("macro_f1", guess, true) == pytest.approx(peer.f1_score(SETS, GUESSED_SETS, average="macro"))
    assert score("accuracy", guess, true) == pytest.approx((SETS == GUESSED_SETS).all(axis=1).mean())


def test_number_metrics_equal_their_peers():
    assert score("pearson", GUESSED_NUMBERS, NUMBERS) == pytest.approx(stats.pearsonr(GUESSED_NUMBERS, NUMBERS)[0])
    assert score("spearman", GUESSED_NUMBERS, NUMBERS) == pytest.approx(stats.spearmanr(GUESSED_NUMBERS, NUMBERS)[0])
    assert score("rmse", GUESSED_NUMBERS, NUMBERS) == pytest.approx(((GUESSED_NUMBERS - NUMBERS) ** 2).mean() ** 0.5)


def test_correlation_survives_a_large_offset():
    assert score("pearson", GUESSED_NUMBERS + 1e6, NUMBERS - 1e6) == pytest.approx(
        stats.pearsonr(GUESSED_NUMBERS, NUMBERS)[0], abs=1e-8
    )


def test_logits_are_decided_before_they_are_scored():
    logits = np.full((400, 3), -1.0)
    logits[np.arange(400), GUESS3] = 2.0
    assert score("accuracy", logits, TRUE3) == score("accuracy", GUESS3, TRUE3)
    set_logits = np.where(GUESSED_SETS, 0.3, -4.0)
    assert score("micro_f1", set_logits, SETS) == score("micro_f1", GUESSED_SETS, SETS)
    assert score("rmse", GUESSED_NUMBERS[:, None], NUMBERS) == score("rmse", GUESSED_NUMBERS, NUMBERS)
    assert decide("multilabel", np.array([[0.2, -0.2]])).tolist() == [[1, 0]]
    assert decide("classify", np.array([[0.1, 0.9], [3.0, 1.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["classify", "multilabel", "regress"])
def test_outputs_that_are_not_finite_are_scored_nan_and_never_as_the_first_class(kind, poison):
    outputs, targets, labels = {
        "classify": (np.zeros((4, 2)), np.zeros(4, dtype=np.int64), ("no", "yes")),
        "multilabel": (np.zeros((4, 2)), np.zeros((4, 2)), ("a", "b")),
        "regress": (np.arange(4.0), np.arange(4.0), ()),
    }[kind]
    assert find_lost(kind, outputs) == []
    outputs.reshape(4, -1)[2, -1] = poison
    assert find_lost(kind, outputs) == [2]
    scores = score_all(kind, labels, targets, outputs)
    assert list(scores) == list_metrics(kind, len(labels))
    assert all(map(math.isnan, scores.values()))
    assert all(math.isnan(score(name, outputs, targets)) for name in scores)
    for refuse in (lambda: decide(kind, outputs), lambda: evaluate_report(kind, labels, targets, outputs)):
        with pytest.raises(NotFinite, match="the outputs of 1 of 4 rows are not finite"):
            refuse()


def test_a_row_without_a_prediction_makes_every_score_nan():
    assert find_lost("text", ["good", None]) == [1]
    assert all(map(math.isnan, score_all("text", (), ["good", "bad"], ["good", None]).values()))
    tags = ("O", "B-X")
    assert all(map(math.isnan, score_all("tag", tags, [((0, 2, 0),)], [None]).values()))
    assert math.isnan(score("accuracy", [np.zeros(2), None], np.zeros(2, dtype=np.int64)))


def kinds_of(metric):
    return [name for name, kind in KINDS.items() if metric in kind.metrics]


@pytest.mark.parametrize("name", [name for name in METRICS if not {"tag", "span"} & set(kinds_of(name))])
def test_degenerate_samples_score_a_number_without_warnings(name):
    if "regress" in kinds_of(name):
        constant, varied = np.full(50, 0.1), NUMBERS[:50]
        expected = {"rmse": pytest.approx(float(np.sqrt(np.mean((varied - 0.1) ** 2))))}.get(name, 0.0)
        assert score(name, constant, varied) == expected
        assert score(name, constant, constant) == 0.0
        if name != "rmse":
            assert score(name, varied, constant) == 0.0
    elif name in ("quadratic_kappa", "mae"):
        constant = np.zeros(40, dtype=np.int64)
        assert score(name, constant, constant) == 0.0
        expected = {"mae": TRUE2[:40].mean()}.get(name, 0.0)
        assert score(name, constant, TRUE2[:40]) == pytest.approx(expected, abs=1e-12)
    elif name == "micro_f1":
        assert score(name, np.zeros((4, 3)), np.zeros((4, 3))) == 0.0
    else:
        constant = np.zeros(40, dtype=np.int64)
        assert score(name, constant, constant) == {"accuracy": 1.0, "macro_f1": 1.0}.get(name, 0.0)
        assert score(name, constant, TRUE2[:40]) == pytest.approx(
            {
                "accuracy": (TRUE2[:40] == 0).mean(),
                "macro_f1": peer.f1_score(TRUE2[:40], constant, average="macro"),
            }.get(name, 0.0)
        )


def test_perfect_predictions_score_one():
    for name in ("accuracy", "macro_f1", "matthews"):
        assert score(name, TRUE3, TRUE3) == pytest.approx(1.0)
    for name in ("pearson", "spearman"):
        assert score(name, NUMBERS, NUMBERS) == pytest.approx(1.0)
        assert score(name, -NUMBERS, NUMBERS) == pytest.approx(-1.0)


def test_class_report_equals_the_peer_and_is_json():
    report = evaluate_report("classify", ("a", "b", "c"), TRUE3, GUESS3)
    precision, recall, f1, support = peer.precision_recall_fscore_support(TRUE3, GUESS3)
    for index, row in enumerate(report.labels):
        assert row.label == "abc"[index]
        assert (row.precision, row.recall, row.f1) == pytest.approx((precision[index], recall[index], f1[index]))
        assert row.support == support[index]
    assert np.array_equal(report.confusion, peer.confusion_matrix(TRUE3, GUESS3))
    assert list(report.metrics) == ["accuracy", "macro_f1", "matthews"]
    data = json.loads(json.dumps(report.to_json()))
    assert data["num_rows"] == 400
    assert data["metrics"]["accuracy"]["value"] == score("accuracy", GUESS3, TRUE3)


def test_label_that_never_occurs_has_a_row_of_zeros():
    report = evaluate_report("classify", ("a", "b", "c", "never"), TRUE3, GUESS3)
    assert (report.labels[3].precision, report.labels[3].f1, report.labels[3].support) == (0.0, 0.0, 0)
    assert report.metrics["macro_f1"].value == pytest.approx(peer.f1_score(TRUE3, GUESS3, average="macro"))


def bootstrap(function, true, guess):
    """The percentile bootstrap written plainly."""
    generator = np.random.default_rng(99)
    values = [function(true[rows], guess[rows]) for rows in generator.integers(len(true), size=(1500, len(true)))]
    return np.quantile(values, [0.025, 0.975])


@pytest.mark.parametrize(
    ("kind", "labels", "true", "guess", "name", "function"),
    [
        ("classify", ("n", "y"), TRUE2, GUESS2, "matthews", lambda true, guess: np.corrcoef(true, guess)[0, 1]),
        ("classify", ("n", "y"), TRUE2, GUESS2, "accuracy", lambda true, guess: (true == guess).mean()),
        ("multilabel", tuple("abcde"), SETS, GUESSED_SETS, "accuracy", lambda t, g: (t == g).all(axis=1).mean()),
        ("regress", (), NUMBERS, GUESSED_NUMBERS, "spearman", lambda true, guess: stats.spearmanr(true, guess)[0]),
        ("regress", (), NUMBERS, GUESSED_NUMBERS, "pearson", lambda true, guess: np.corrcoef(true, guess)[0, 1]),
        ("regress", (), NUMBERS, GUESSED_NUMBERS, "rmse", lambda true, guess: ((true - guess) ** 2).mean() ** 0.5),
    ],
)
def test_interval_is_the_plain_bootstrap_over_rows(kind, labels, true, guess, name, function):
    interval = evaluate_report(kind, labels, true, guess).metrics[name]
    low, high = bootstrap(function, true, guess)
    width = high - low
    assert interval.low == pytest.approx(low, abs=0.12 * width)
    assert interval.high == pytest.approx(high, abs=0.12 * width)
    assert interval.low < interval.value < interval.high


def test_report_is_the_same_every_time_and_fast_for_many_rows():
    true = np.random.default_rng(0).normal(size=10_000)
    guess = true + np.random.default_rng(1).normal(size=10_000)
    start = time.process_time()
    first = evaluate_report("regress", (), true, guess)
    classes = np.arange(10_000) % 50
    many = evaluate_report("classify", tuple(map(str, range(50))), classes, np.roll(classes, 1))
    assert time.process_time() - start < 15
    assert first.to_json() == evaluate_report("regress", (), true, guess).to_json()
    assert many.metrics["accuracy"].value == 0.0


def test_multilabel_report_counts_each_label():
    report = evaluate_report("multilabel", tuple("abcde"), SETS.astype(np.float32), np.where(GUESSED_SETS, 1.0, -1.0))
    precision, recall, _, support = peer.precision_recall_fscore_support(SETS, GUESSED_SETS)
    assert [row.precision for row in report.labels] == pytest.approx(list(precision))
    assert [row.recall for row in report.labels] == pytest.approx(list(recall))
    assert [row.support for row in report.labels] == list(support)
    assert report.confusion is None
    assert set(report.metrics) == {"accuracy", "macro_f1", "micro_f1"}


def test_metric_must_suit_the_task():
    assert resolve_metric("auto", "classify", 2) == "accuracy"
    assert resolve_metric("auto", "multilabel", 4) == "micro_f1"
    assert resolve_metric("auto", "regress", 0) == "spearman"
    assert resolve_metric("f1", "classify", 2) == "f1"
    assert "f1" not in list_metrics("classify", 3)
    with pytest.raises(BadConfig, match="`f1` does not suit a classify task with 3 labels"):
        resolve_metric("f1", "classify", 3)
    with pytest.raises(BadConfig, match="pearson, spearman, rmse"):
        resolve_metric("accuracy", "regress", 0)
    with pytest.raises(UnknownName, match="did you mean `accuracy`"):
        resolve_metric("acuracy", "classify", 2)
    with pytest.raises(UnknownName):
        score("acuracy", GUESS2, TRUE2)


def test_better_knows_the_direction_and_nan_never_wins():
    assert is_better("accuracy", 0.8, 0.7)
    assert not is_better("accuracy", 0.7, 0.7)
    assert is_better("rmse", 0.7, 0.8)
    assert is_better("rmse", 0.7, None)
    assert not is_better("accuracy", math.nan, 0.1)
    assert not is_better("accuracy", math.nan, None)
    assert is_better("accuracy", 0.1, math.nan)


def test_degenerate_samples_of_tags_and_answers_score_a_number():
    nothing = np.empty(1, dtype=object)
    nothing[0] = ((0, 3, 0),)
    outside = score_all("tag", ("O", "B-X", "I-X"), nothing, [("O",)])
    assert outside == {"entity_f1": 0.0, "entity_precision": 0.0, "entity_recall": 0.0, "token_accuracy": 1.0}
    assert score_all("span", (), np.empty(0, dtype=object), []) == {"token_f1": 0.0, "exact_match": 0.0}


@pytest.mark.parametrize(("true", "low", "high"), [([0, 1] * 30, 0.9398, 1.0), ([1, 0] * 30, 0.0, 0.0602)])
def test_a_share_of_all_or_no_rows_has_wilsons_interval(true, low, high):
    """Of 60 rows: z² / (n + z²) on the open side."""
    logits = np.eye(2)[[0, 1] * 30]
    interval = evaluate_report("classify", ("a", "b"), np.array(true), logits).metrics["accuracy"]
    assert (interval.low, interval.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_macro_f1_counts_a_label_that_is_predicted_and_never_true():
    """Of labels 0, 1 and 2 the last is only guessed: its F1 is 0, and one of three."""
    true, guess = np.array([0, 0, 1, 1, 1]), np.array([0, 2, 1, 1, 2])
    assert score("macro_f1", guess, true) == pytest.approx((2 / 3 + 4 / 5 + 0) / 3)


def test_a_label_that_training_never_saw_is_one_that_is_never_predicted():
    labels, unseen = ("a", "b"), ("c", "d")
    true = np.where(np.arange(400) % 4 == 0, 2 + np.arange(400) % 8 // 4, TRUE2)  # a quarter of the rows are c or d
    report = evaluate_report("classify", labels, true, GUESS2, unseen=unseen, num_resamples=50)
    values = {name: found.value for name, found in report.metrics.items()}
    assert values == pytest.approx(
        {
            "accuracy": peer.accuracy_score(true, GUESS2),
            "f1": peer.f1_score(true, GUESS2, labels=[1], average="macro"),
            "macro_f1": peer.f1_score(true, GUESS2, average="macro"),
            "matthews": peer.matthews_corrcoef(true, GUESS2),
        }
    )
    assert score_all("classify", labels, true, GUESS2, unseen) == pytest.approx(values)
    assert [found.low <= found.value <= found.high for found in report.metrics.values()] == [True] * 4
    assert [(item.label, item.recall, item.f1, item.support) for item in report.labels[2:]] == [
        ("c", 0.0, 0.0, 50),
        ("d", 0.0, 0.0, 50),
    ]
    assert np.array_equal(report.confusion, peer.confusion_matrix(true, GUESS2))
    assert report.to_json()["unseen"] == unseen


def test_a_label_of_a_set_that_training_never_saw_is_missed():
    guess = GUESSED_SETS[:, :3].astype(np.int64)
    padded = np.concatenate([GUESSED_SETS[:, :3], np.zeros((300, 2), dtype=bool)], axis=1)
    report = evaluate_report("multilabel", ("a", "b", "c"), SETS, guess, unseen=("d", "e"), num_resamples=20)
    values = {name: found.value for name, found in report.metrics.items()}
    assert values == pytest.approx(
        {
            "accuracy": (padded == SETS).all(axis=1).mean(),
            "macro_f1": peer.f1_score(SETS, padded, average="macro", zero_division=0),
            "micro_f1": peer.f1_score(SETS, padded, average="micro"),
        }
    )
    assert [item.recall for item in report.labels[3:]] == [0.0, 0.0]


def test_an_entity_type_that_training_never_saw_is_missed():
    labels, unseen = ("O", "B-LOC", "I-LOC"), ("B-PER",)
    targets = np.empty(2, dtype=object)
    targets[:] = [((0, 1, 1), (2, 3, 0)), ((0, 1, 3), (2, 3, 1))]
    guesses = [["B-LOC", "O"], ["O", "B-LOC"]]
    report = evaluate_report("tag", labels, targets, guesses, unseen=unseen, num_resamples=20)
    values = {name: found.value for name, found in report.metrics.items()}
    assert values == pytest.approx(
        {"entity_f1": 0.8, "entity_precision": 1.0, "entity_recall": 2 / 3, "token_accuracy": 0.75}
    )
    assert [(item.label, item.recall, item.support) for item in report.labels] == [("LOC", 1.0, 2), ("PER", 0.0, 1)]


def test_levels_are_scored_as_scikit_learn_scores_them():
    generator = np.random.default_rng(3)
    true, predicted = generator.integers(5, size=(2, 200))
    predicted = np.where(generator.random(200) < 0.6, true, predicted)
    from sklearn.metrics import cohen_kappa_score, mean_absolute_error

    assert score("quadratic_kappa", predicted, true) == pytest.approx(
        cohen_kappa_score(true, predicted, weights="quadratic")
    )
    assert score("mae", predicted, true) == pytest.approx(mean_absolute_error(true, predicted))
    report = evaluate_report("ordinal", tuple("12345"), true, predicted)
    for found in report.metrics.values():
        assert found.low < found.value < found.high


def test_a_report_of_many_thousand_labels_is_made_without_their_square():
    generator = np.random.default_rng(0)
    num_labels, num_rows = 40_000, 500
    targets, predictions = (generator.integers(num_labels, size=num_rows) for _ in range(2))
    predictions[:200] = targets[:200]
    outputs = np.zeros((num_rows, num_labels), dtype=np.float32)
    outputs[np.arange(num_rows), predictions] = 1
    report = evaluate_report("classify", tuple(map(str, range(num_labels))), targets, outputs, num_resamples=20)
    assert report.metrics["accuracy"].value == pytest.approx((predictions == targets).mean())
    assert report.confusion is None
    assert sum(label.support for label in report.labels) == num_rows
