"""Answers to GLUE's test sets, in the official format."""

from __future__ import annotations

import zipfile
from unittest.mock import Mock

import pytest

from inlay.data import load_task
from inlay.errors import BadData, Missing
from inlay.model.bank.bank import Bank
from inlay.model.heads.inference import infer
from inlay.settings.run_config import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.studies.glue_server import Entry, answer_test, list_gone, pack_submission, read_test, write_submission
from inlay.training import fit, make_run
from inlay.training.evaluate import encode_rows

TRAIN = TrainConfig(epochs=2, batch_size=8, lr=3e-3, max_length=32, pooling="mean")


def test_a_file_has_a_header_and_a_line_for_every_row_in_order(tmp_path):
    answers = ["entailment", "not_entailment"] * 1500
    path = write_submission("glue/rte", answers, tmp_path / "new")
    lines = path.read_text().split("\n")
    assert path.name == "RTE.tsv"
    assert lines[:3] == ["index\tprediction", "0\tentailment", "1\tnot_entailment"]
    assert lines[-2:] == ["2999\tnot_entailment", ""]
    assert len(lines) == 3002


def test_numbers_are_within_the_scale_of_the_scores(tmp_path):
    answers = [-0.25, 5.5, 2.34567] + [1.0] * 1376
    lines = write_submission("stsb", answers, tmp_path).read_text().splitlines()
    assert lines[1:5] == ["0\t0.000", "1\t5.000", "2\t2.346", "3\t1.000"]


@pytest.mark.parametrize(
    ("task", "answers", "reason"),
    [
        ("glue/wnli", ["1"] * 145, "145 answers"),
        ("glue/wnli", ["1"] * 145 + ["yes"], "`yes` is no label"),
        ("glue/stsb", [1.0] * 1378 + [float("nan")], "not a number"),
    ],
)
def test_what_the_server_would_refuse_is_refused_here(tmp_path, task, answers, reason):
    with pytest.raises(BadData, match=reason):
        write_submission(task, answers, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_zip_holds_what_is_there(tmp_path):
    write_submission("glue/wnli", ["0"] * 146, tmp_path)
    pack_submission(tmp_path)
    with zipfile.ZipFile(tmp_path / "submission.zip") as archive:
        assert archive.namelist() == ["WNLI.tsv"]


@pytest.fixture
def root(tmp_path):
    """WNLI and STS-B in the official layout, with words the tiny tokenizer knows."""
    words = ["good movie", "bad plot", "free prize", "the cat sat"]
    head = "index\tsentence1\tsentence2"
    for folder, label, values in (("WNLI", "label", "01"), ("STS-B", "score", "15")):
        (tmp_path / folder).mkdir()
        rows = [f"{n}\t{words[n % 4]} {'and so' * (n % 3)}\twe see {words[n % 3]}" for n in range(146)]
        labelled = [f"{row}\t{values[n % 2]}" for n, row in enumerate(rows)]
        (tmp_path / folder / "train.tsv").write_text("\n".join([f"{head}\t{label}", *labelled[:40]]) + "\n")
        (tmp_path / folder / "dev.tsv").write_text("\n".join([f"{head}\t{label}", *labelled[40:50]]) + "\n")
        (tmp_path / folder / "test.tsv").write_text("\n".join([head, *rows]) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", ["wnli", "stsb"])
def test_a_trained_run_answers_every_row_of_the_test_file(root, tiny_bert, name):
    config = DataConfig(source=f"glue/{name}", root=str(root))
    task = load_task(config, f"glue/{name}")
    run = make_run(task, RunConfig(method=MethodConfig(size=8), train=TRAIN), tiny_bert)
    result = fit([run], tiny_bert, root / "runs")[0]
    split = read_test(task.name, config)
    assert (len(split), split.targets, split.texts[0]) == (146, None, "good movie ")
    found = answer_test(tiny_bert, root / "runs" / run.id, task, config)
    bank, head = Bank(tiny_bert, 1), run.spec.head
    bank.put(0, run.spec, result.tensors)
    logits = infer(bank, encode_rows(tiny_bert, split, 32))
    if name == "wnli":
        assert found == [task.labels[int(row.argmax())] for row in logits]
        assert write_submission(task.name, found, root / "out").name == "WNLI.tsv"
    else:
        expected = [float(row) * head.target_std + head.target_mean for row in logits]
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_set_without_a_test_file_is_missing(root, tiny_bert):
    (root / "WNLI" / "test.tsv").unlink()
    with pytest.raises(Missing, match="no test rows"):
        read_test("glue/wnli", DataConfig(root=str(root)))


def test_an_entry_knows_whose_answers_are_there(tmp_path):
    """Of a run that was the best before, until the weights of the new one are there."""
    entry = Entry("full", "glue/wnli", Mock(), Mock(id="b2"), tmp_path / "best.safetensors", tmp_path)
    assert list_gone([entry]) == [entry]
    assert entry.describe_gone() == "glue/wnli b2"
    write_submission("glue/wnli", ["0"] * 146, tmp_path)
    (tmp_path / "runs.json").write_text('{"WNLI.tsv": {"run": "a1"}}')
    assert entry.describe_gone() == "glue/wnli b2 (a1 answers)"
    (tmp_path / "runs.json").write_text('{"WNLI.tsv": {"run": "b2"}}')
    assert entry.is_written
    assert not list_gone([entry])
