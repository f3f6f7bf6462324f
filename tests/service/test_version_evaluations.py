"""What a version answered to its dev rows: kept whole, reported by formulas written plainly, compared fairly."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from inlay.data import KINDS, Scheme, Split
from inlay.errors import NotFinite, StoreDamaged, Unsupported
from inlay.model import HEADS, HeadSpec, Output
from inlay.reports import (
    answer_again,
    choose_rows,
    digest_rows,
    evaluate_version,
    find_trained,
    list_errors,
    make_report,
    read_answer,
)
from inlay.service.state import ServicePaths, SharedFiles, SharedFolder
from inlay.service.version_evaluations import NeedsAnswers, compare, find_comparison, read_evaluation, write_evaluation
from inlay.serving import Answer, describe_answer
from inlay.store import Manifest

LABELS = ("billing", "delivery", "praise")


def folder_of(path: Path) -> SharedFolder:
    """A folder as the service has one."""
    return SharedFolder(SharedFiles(ServicePaths(path)), path)


def manifest_of(kind="classify", labels=LABELS, metric="accuracy", dev_digest="dev"):
    about = {"method": {"name": "head"}, "head": {}, "max_length": 128, "backbone": {}, "config": {}}
    return Manifest(
        kind=kind,
        labels=labels,
        metric=metric,
        metrics={"dev": {metric: 0.5}},
        data_digest="data",
        dev_digest=dev_digest,
        run_id="0" * 16,
        num_parameters=1,
        probes=(),
        **about,
    )


def split_of(targets, kind="classify", labels=LABELS, texts=None):
    texts = texts or [f"a row of number {index}" for index in range(len(targets))]
    scheme = Scheme(kind, labels)
    collected = scheme.collect([scheme.read(target) for target in targets])
    return Split(texts, None, collected, list(range(2, len(targets) + 2)))


def say(label, probability=0.8, labels=LABELS):
    others = [each for each in labels if each != label]
    probabilities = {each: (1 - probability) / len(others) for each in others} | {label: probability}
    return {"task": "mail", "version": "mail@1", "label": label, "probabilities": probabilities}


def evaluate(expected, answered, *, version=1, train=("a training row",), texts=None, labels=LABELS, metric="accuracy"):
    dev, answers = split_of(expected, labels=labels, texts=texts), [say(each, labels=labels) for each in answered]
    trained = Split(list(train), None, None, [])
    return evaluate_version(version, manifest_of(labels=labels, metric=metric), dev, answers, trained)


RANDOM_LOGITS = {"classify": (3,), "multilabel": (3,), "regress": (1,), "ordinal": (2,), "tag": (6, 5), "span": (6, 2)}


def outcome_of(kind, seed):
    """An answer read from random logits, as the engine reads it."""
    labels = {"regress": (), "span": (), "tag": ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")}.get(kind, LABELS)
    logits = torch.randn(RANDOM_LOGITS[kind], generator=torch.Generator().manual_seed(seed)) * 2
    text = "abcd efgh ijkl mnop"
    words = tuple((start, start + 4) for start in (0, 5, 10, 15))
    paths = np.array([(-1, -1), *words, (-1, -1)])
    output = Output((logits,), (paths,) if kind in ("tag", "span") else (), text, words if kind == "tag" else ())
    spec = HeadSpec(kind, logits.shape[-1], "mean", null_threshold=0.0 if kind == "span" else None)
    return HEADS[kind].answer(output, spec, labels)


@pytest.mark.parametrize("kind", RANDOM_LOGITS)
@pytest.mark.parametrize("seed", range(4))
def test_an_answer_is_as_sure_as_its_head_says(kind, seed):
    outcome = outcome_of(kind, seed)
    given, confidence = read_answer(describe_answer(Answer("mail", "mail@1", outcome)))
    head = HEADS[kind]
    assert confidence == (None if head.confidence is None else pytest.approx(head.confidence(outcome)))
    said = outcome.label or outcome.value or outcome.answer or ""
    if outcome.words is not None:
        said = [word.tag for word in outcome.words]
    elif outcome.labels is not None:
        said = list(outcome.labels)
    assert given == said


def test_an_error_in_the_place_of_an_answer_is_no_answer():
    with pytest.raises(NotFinite):
        read_answer({"task": "mail", "error": {"code": "not-finite"}})


def test_a_report_has_precision_recall_and_f1_of_every_label():
    expected = ["billing"] * 6 + ["delivery"] * 3 + ["praise"]
    answered = ["billing"] * 4 + ["delivery"] * 2 + ["delivery"] * 2 + ["billing"] + ["billing"]
    report = make_report(evaluate(expected, answered))
    pairs = list(zip(expected, answered, strict=True))
    for score in report["labels"]:
        label = score["label"]
        hits = sum(pair == (label, label) for pair in pairs)
        told, true = answered.count(label), expected.count(label)
        assert score["precision"] == pytest.approx(hits / told if told else 0.0)
        assert score["recall"] == pytest.approx(hits / true)
        assert score["f1"] == pytest.approx(2 * hits / (told + true))
        assert score["support"] == true
    counts = report["confusion"]["counts"]
    assert counts == [[pairs.count((true, told)) for told in LABELS] for true in LABELS]
    low, high = report["interval"]
    assert low < 6 / 10 < high
    assert report["num_rows"] == 10
    assert report["calibration"] == [
        {"confidence": pytest.approx(0.8), "accuracy": pytest.approx(0.6), "count": 10},
    ]
    json.dumps(report)


def test_a_label_that_training_never_saw_is_a_wrong_row():
    dev = dataclasses.replace(split_of(["billing", "praise"], labels=LABELS), unseen=("praise",))
    manifest = manifest_of(labels=LABELS[:2])
    answers = [say("billing", labels=LABELS[:2]), say("billing", labels=LABELS[:2])]
    report = make_report(evaluate_version(1, manifest, dev, answers, Split([], None, None, [])))
    assert report["confusion"] == {"labels": list(LABELS), "counts": [[1, 0, 0], [0, 0, 0], [1, 0, 0]]}


def test_errors_are_the_wrong_rows_the_surest_first():
    expected, answered = ["billing", "billing", "praise", "praise"], ["billing", "praise", "billing", "delivery"]
    dev = split_of(expected)
    answers = [say(each, 0.5 + 0.1 * place) for place, each in enumerate(answered)]
    found = evaluate_version(1, manifest_of(), dev, answers, Split([], None, None, []))
    errors = list_errors(found)
    assert [error["row"] for error in errors] == [3, 2, 1]
    assert errors[0] | {"confidence": 0} == {
        "row": 3,
        "line": 5,
        "text": "a row of number 3",
        "pair": None,
        "expected": "praise",
        "answer": "delivery",
        "confidence": 0,
    }
    assert [error["row"] for error in list_errors(found, expected="praise")] == [3, 2]
    assert [error["row"] for error in list_errors(found, expected="praise", answer="billing")] == [2]
    assert [error["row"] for error in list_errors(found, expected="billing", answer="billing")] == [0]
    assert list_errors(found, expected="delivery") == []


def test_of_numbers_the_worst_come_first():
    dev = split_of([1.0, 2.0, 3.0], "regress", ())
    answers = [{"task": "mail", "value": value} for value in (1.1, 4.0, 2.5)]
    found = evaluate_version(1, manifest_of("regress", (), "rmse"), dev, answers, Split([], None, None, []))
    assert [(error["row"], error["expected"], error["answer"]) for error in list_errors(found)] == [
        (1, "2", "4"),
        (2, "3", "2.5"),
        (0, "1", "1.1"),
    ]
    report = make_report(found)
    assert (report["calibration"], report["confusion"], report["labels"]) == ([], None, [])


def test_sets_and_tags_are_filtered_by_a_label_of_theirs():
    dev = split_of([["billing", "praise"], []], "multilabel")
    answers = [{"labels": ["billing"], "probabilities": {"billing": 0.9, "delivery": 0.1, "praise": 0.4}}] * 2
    sets = evaluate_version(1, manifest_of("multilabel", metric="micro_f1"), dev, answers, Split([], None, None, []))
    assert [error["row"] for error in list_errors(sets, expected="praise")] == [0]
    assert [error["expected"] for error in list_errors(sets)] == ["billing|praise", ""]
    labels = ("O", "B-LOC")
    dev = split_of([((0, 1, "O"), (2, 5, "B-LOC"))], "tag", labels, texts=["a row"])
    words = [{"tag": "O", "probability": 0.9}, {"tag": "O", "probability": 0.9}]
    tags = evaluate_version(
        1, manifest_of("tag", labels, "entity_f1"), dev, [{"words": words, "entities": []}], Split([], None, None, [])
    )
    assert [(error["expected"], error["answer"]) for error in list_errors(tags, expected="B-LOC")] == [
        ("row (LOC)", "")
    ]


def test_a_comparison_says_who_is_better_on_the_same_rows():
    expected = ["billing", "delivery"] * 20
    worse = ["billing"] * 40
    first, second = evaluate(expected, worse), evaluate(expected, expected, version=2)
    found = compare(first, second)
    assert (found["a"], found["b"], found["metric"], found["num_rows"]) == (1, 2, "accuracy", 40)
    assert (found["score_a"], found["score_b"], found["difference"]) == (0.5, 1.0, 0.5)
    assert found["verdict"] == "better"
    assert found["p_value"] == pytest.approx(2 * 0.5**20)
    assert found["same_rows"]
    assert found["num_changed"] == len(found["changed"]) == 20
    assert found["changed"][0]["expected"] == "delivery"
    assert compare(second, first)["verdict"] == "worse"
    assert compare(first, first)["verdict"] == "no-difference"
    json.dumps(found)


def test_rows_that_one_of_the_two_was_trained_on_are_left_out():
    texts = [f"text {row}" for row in range(10)]
    expected = ["billing"] * 10
    old = evaluate(expected, ["billing"] * 5 + ["praise"] * 5, train=texts[:5], texts=texts)
    new = evaluate(expected, ["billing"] * 4 + ["praise"] * 2 + ["billing"] * 4, version=2, texts=texts)
    assert find_trained(old, new.rows) == [True] * 5 + [False] * 5
    found = compare(old, new)
    assert (found["num_rows"], found["num_left_out"]) == (5, 5)
    assert (found["score_a"], found["score_b"]) == (0.0, 0.8)
    with pytest.raises(Unsupported, match="no dev row is left"):
        compare(evaluate(expected, expected, train=texts, texts=texts), new)


def test_a_text_is_known_again_whatever_its_case_and_blanks():
    packed = digest_rows("classify", ["Hello  World", "other"], None)
    assert packed == digest_rows("classify", ["other", "hello world", "HELLO WORLD"], None)


def test_an_older_version_is_compared_on_the_newer_ones_rows(tmp_path):
    old = evaluate(["billing"] * 4, ["billing"] * 4, labels=LABELS[:2])
    new = evaluate(["praise", "billing", "delivery", "praise"], ["praise"] * 4, version=3, texts=list("abcd"))
    for evaluation in (old, new):
        write_evaluation(folder_of(tmp_path), evaluation)
    needed = find_comparison(folder_of(tmp_path), 1, 3, lambda number: pytest.fail("both were evaluated"))
    assert isinstance(needed, NeedsAnswers)
    assert needed.owner.texts == [(text, None) for text in "abcd"]
    filled = needed.fill_in([say("billing", labels=LABELS[:2])] * 4)
    assert (filled.version, filled.rows_of, filled.unseen) == (1, 3, ("praise",))
    assert [row.is_right for row in filled.rows] == [False, True, False, False]
    write_evaluation(folder_of(tmp_path), filled)
    pair = find_comparison(folder_of(tmp_path), 1, 3, lambda number: pytest.fail("both were evaluated"))
    assert pair == (filled, new)
    found = compare(*pair)
    assert (found["score_a"], found["score_b"], found["same_rows"]) == (0.25, 0.5, False)
    backwards = find_comparison(folder_of(tmp_path), 3, 1, lambda number: pytest.fail("both were evaluated"))
    assert backwards == (new, filled)


def test_a_version_that_the_service_did_not_train_answers_the_others_rows(tmp_path):
    new = evaluate(["billing", "praise"], ["billing", "praise"], version=2)
    write_evaluation(folder_of(tmp_path), new)
    needed = find_comparison(folder_of(tmp_path), 1, 2, lambda number: manifest_of())
    assert isinstance(needed, NeedsAnswers)
    assert needed.fill_in([say("praise")] * 2).rows_of == 2
    with pytest.raises(Unsupported, match="neither version 7 nor version 8"):
        find_comparison(folder_of(tmp_path), 7, 8, lambda number: manifest_of())


def test_other_kinds_and_other_levels_are_not_compared():
    first = evaluate(["billing"], ["billing"])
    number = evaluate_version(
        2,
        manifest_of("regress", (), "rmse"),
        split_of([1.0], "regress", ()),
        [{"value": 1.0}],
        Split([], None, None, []),
    )
    with pytest.raises(Unsupported, match="different kinds"):
        compare(first, number)
    levels = dataclasses.replace(first, kind="ordinal")
    with pytest.raises(Unsupported, match="different levels"):
        answer_again(levels, dataclasses.replace(levels, labels=LABELS[:2]), [])


def every_evaluation():
    none = Split([], None, None, [])
    yield evaluate(["billing", "praise"], ["praise", "praise"])
    sets = [{"labels": ["billing"], "probabilities": {"billing": 0.9, "delivery": 0.1, "praise": 0.4}}]
    dev = split_of([["billing", "praise"]], "multilabel")
    yield evaluate_version(1, manifest_of("multilabel", metric="micro_f1"), dev, sets, none)
    yield evaluate_version(
        1, manifest_of("regress", (), "rmse"), split_of([0.1], "regress", ()), [{"value": 1 / 3}], none
    )
    words = {"words": [{"tag": "B-LOC", "probability": 0.9}], "entities": [{"probability": 0.9}]}
    dev = split_of([((0, 1, "O"),)], "tag", ("O", "B-LOC"))
    yield evaluate_version(1, manifest_of("tag", ("O", "B-LOC"), "entity_f1"), dev, [words], none)
    dev = dataclasses.replace(split_of([((2, "row"),)], "span", ()), pairs=["a row"])
    answers = [{"answer": "row", "probability": 0.5, "start": 2, "end": 5, "nbest": []}]
    yield evaluate_version(1, manifest_of("span", (), "token_f1"), dev, answers, none)
    yield evaluate_version(
        1, manifest_of("text", (), "exact_match"), split_of(["good"], "text", ()), [{"answer": ""}], none
    )


@pytest.mark.parametrize("evaluation", list(every_evaluation()), ids=lambda each: each.kind)
def test_an_evaluation_of_every_kind_is_read_back_as_it_was(tmp_path, evaluation):
    write_evaluation(folder_of(tmp_path), evaluation)
    again = read_evaluation(folder_of(tmp_path), 1)
    assert again == evaluation
    assert make_report(again) == make_report(evaluation)
    assert list_errors(again) == list_errors(evaluation)
    assert compare(again, evaluation)["verdict"] == "no-difference"
    assert all((row.is_right is None) == KINDS[again.kind].is_number for row in again.rows)


def test_a_damaged_file_is_an_error_and_an_absent_one_is_none(tmp_path):
    write_evaluation(folder_of(tmp_path), evaluate(["billing"] * 3, ["billing", "praise", "billing"]))
    path = tmp_path / "1.json"
    content = path.read_bytes()
    assert read_evaluation(folder_of(tmp_path), 2) is None
    assert read_evaluation(folder_of(tmp_path), 1, rows_of=2) is None
    for damaged in (
        b"",
        b"{}",
        content[:-10],
        content.replace(b"praise", b"priase", 1),
        content.replace(b":1,", b":2,", 1),
    ):
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(StoreDamaged, match="version 1"):
            read_evaluation(folder_of(tmp_path), 1)
    path.rename(tmp_path / "2.json")
    (tmp_path / "2.json").write_bytes(content)
    with pytest.raises(StoreDamaged, match="another version's"):
        read_evaluation(folder_of(tmp_path), 2)


def test_too_many_rows_are_drawn_the_same_each_time(monkeypatch):
    monkeypatch.setattr("inlay.reports.evaluations.MOST_ROWS", 10)
    dev = split_of(["billing", "praise"] * 20)
    chosen = choose_rows(dev, 3)
    assert len(chosen) == 10
    assert chosen.texts == choose_rows(dev, 3).texts
    monkeypatch.setattr("inlay.reports.evaluations.MOST_LETTERS", 50)
    assert sum(map(len, choose_rows(dev, 3).texts)) <= 50


def test_reports_need_no_torch(tmp_path):
    write_evaluation(folder_of(tmp_path), evaluate(["billing"] * 3, ["billing", "praise", "billing"]))
    program = (
        "import sys; from pathlib import Path\n"
        "from inlay.service.state import ServicePaths, SharedFiles, SharedFolder\n"
        "from inlay.service.version_evaluations import compare, read_evaluation\n"
        "from inlay.reports import list_errors, make_report\n"
        "assert 'numpy' not in sys.modules and 'pandas' not in sys.modules\n"
        "folder = Path(sys.argv[1])\n"
        "found = read_evaluation(SharedFolder(SharedFiles(ServicePaths(folder)), folder), 1)\n"
        "make_report(found), list_errors(found), compare(found, found)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
