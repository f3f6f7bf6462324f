"""GLUE sets by name, in the official layout."""

import pytest

from inlay.data import load_task, read_split, stream_rows
from inlay.data.published_sets import GLUE
from inlay.errors import BadConfig, BadData, Missing, UnknownName
from inlay.settings.run_config import DataConfig

FILES = {
    "CoLA/train.tsv": 'gj04\t1\t\tA "good one.\ngj04\t0\t*\tBad a one.\n',
    "CoLA/dev.tsv": "gj04\t0\t*\tOne bad.\n",
    "CoLA/test.tsv": "index\tsentence\n0\tBill left.\n",
    "SST-2/train.tsv": "sentence\tlabel\nfine \t1\nawful \t0\n",
    "SST-2/dev.tsv": "sentence\tlabel\nok \t1\n",
    "MRPC/train.tsv": 'Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe said "so\t" So it is\n0\t9\t5\ta\tc\n',
    "MRPC/dev.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\te\tf\n",
    "MRPC/test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tg\th\n",
    "STS-B/train.tsv": "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\ta\tb\t5.000\n1\tx\tc\td\t1\n",
    "STS-B/dev.tsv": "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\te\tf\t2.5\n",
    "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta?\tb?\t0\n2\t4\t5\tc?\td?\t1\n",
    "QQP/dev.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\te?\tf?\t0\n",
    "QNLI/dev.tsv": "index\tquestion\tsentence\tlabel\n0\tq?\ts.\tentailment\n",
    "RTE/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n1\tc\td\tnot_entailment\n",
    "RTE/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\te\tf\tentailment\n",
    "wnli/train.tsv": "index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n1\tc\td\t0\n",
    "wnli/dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\te\tf\t1\n",
    "MNLI/train_subset_3.jsonl": "".join(
        f'{{"premise": "p{n}", "hypothesis": "h{n}", "label": "{label}"}}\n'
        for n, label in enumerate(("neutral", "entailment", "contradiction"))
    ),
    "MNLI/dev_matched.tsv": "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\ta\tb\tneutral\tentailment\n",
}


@pytest.fixture
def root(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("name", "metric", "labels", "text", "pair", "targets"),
    [
        ("cola", "matthews", ("0", "1"), 'A "good one.', None, [1, 0]),
        ("sst2", "accuracy", ("0", "1"), "fine ", None, [1, 0]),
        ("mrpc", "f1", ("0", "1"), 'He said "so', '" So it is', [1, 0]),
        ("stsb", "spearman", (), "a", "b", [5.0, 1.0]),
        ("qqp", "f1", ("0", "1"), "a?", "b?", [0, 1]),
        ("rte", "accuracy", ("entailment", "not_entailment"), "a", "b", [0, 1]),
        ("wnli", "accuracy", ("0", "1"), "a", "b", [1, 0]),
        ("mnli", "accuracy", ("contradiction", "entailment", "neutral"), "p0", "h0", [2, 1, 0]),
    ],
)
def test_official_files_are_read(root, name, metric, labels, text, pair, targets):
    task = load_task(DataConfig(source=f"glue/{name}", root=root), name)
    assert (task.metric, task.labels) == (metric, labels)
    assert task.train.texts[0] == text
    assert (task.train.pairs[0] if task.train.pairs else None) == pair
    assert task.train.targets.tolist() == targets
    assert len(task.dev) == 1
    assert task.test is None
    assert task.bounds == ((0, 5) if name == "stsb" else None)


def test_mnli_reads_the_gold_label_and_says_which_file(root):
    task = load_task(DataConfig(source="glue/mnli", root=root), "mnli")
    assert task.labels[task.dev.targets[0]] == "entailment"
    assert "rows read from train_subset_3.jsonl" in task.notes


def test_unlabelled_test_rows_are_left_out_but_can_be_predicted(root):
    task = load_task(DataConfig(source="glue/cola", root=root), "cola")
    assert any("test.tsv have no labels: left out" in note for note in task.notes)
    ((row,),) = stream_rows(f"{root}/CoLA/test.tsv")
    assert row.text == "Bill left."
    ((row,),) = stream_rows(f"{root}/MRPC/test.tsv")
    assert (row.text, row.pair) == ("g", "h")


def test_dev_rows_are_what_a_task_is_evaluated_on(root):
    split = read_split("glue/cola", ("0", "1"), "classify", DataConfig(root=root))
    assert (split.texts, split.targets.tolist(), split.lines) == (["One bad."], [0], [1])
    assert read_split("glue/qnli", ("entailment", "no"), "classify", DataConfig(root=root)).pairs == ["s."]


def test_root_comes_from_the_environment(root, monkeypatch):
    monkeypatch.setenv("INLAY_DATA", root)
    assert len(load_task(DataConfig(source="glue/sst2"), "sst2").train) == 2
    monkeypatch.delenv("INLAY_DATA")
    with pytest.raises(Missing, match=r"no folder given for glue/sst2.*--data-root.*INLAY_DATA"):
        load_task(DataConfig(source="glue/sst2"), "sst2")


def test_what_is_missing_is_said(root):
    with pytest.raises(Missing, match=r"glue/qnli: no train rows in .*QNLI.*found there: dev\.tsv"):
        load_task(DataConfig(source="glue/qnli", root=root), "qnli")
    with pytest.raises(Missing, match="glue/mnli-mm: no dev rows"):
        load_task(DataConfig(source="glue/mnli-mm", root=root), "mm")
    with pytest.raises(UnknownName, match="did you mean `stsb`"):
        load_task(DataConfig(source="glue/stsbb", root=root), "x")
    with pytest.raises(Missing, match="no folder `CoLA`"):
        load_task(DataConfig(source="glue/cola", root=root + "/RTE"), "x")


def test_columns_of_a_glue_set_cannot_be_renamed(root):
    with pytest.raises(BadConfig, match="leave out `--text`"):
        load_task(DataConfig(source="glue/cola", root=root, text="sentence"), "x")


def test_ragged_line_of_an_official_file_is_named(root):
    with open(f"{root}/QQP/train.tsv", "a") as file:
        file.write("3\t4\tbroken\n")
    with pytest.raises(BadData, match=r"train\.tsv:4: ragged row: 3 fields, but there are 6 columns"):
        load_task(DataConfig(source="glue/qqp", root=root), "qqp")
    task = load_task(DataConfig(source="glue/qqp", root=root, on_bad_row="skip"), "qqp")
    assert len(task.train) == 2
    assert any(note.startswith("skipped 1 bad row of") and "line 4: ragged row" in note for note in task.notes)


def test_every_set_has_a_metric_that_suits_it():
    assert {name: entry.metric for name, entry in GLUE.items()} == {
        **dict.fromkeys(("sst2", "mnli", "mnli-mm", "qnli", "rte", "wnli"), "accuracy"),
        "cola": "matthews",
        "mrpc": "f1",
        "qqp": "f1",
        "stsb": "spearman",
    }
