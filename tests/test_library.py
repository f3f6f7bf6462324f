"""The Python library as a script uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

import inlay
from inlay.errors import BadConfig, BadData, UnknownName


@pytest.fixture
def frame(toy_task):
    rows = toy_task(num_rows=60).train
    return pandas.DataFrame({"text": rows.texts, "label": [["no", "yes"][target] for target in rows.targets]})


def test_a_script_trains_publishes_and_predicts(tiny_bert, frame, tmp_path, monkeypatch):
    monkeypatch.setenv("INLAY_HOME", str(tmp_path))
    task = inlay.load_task(frame, name="mood", dev_share=0.2)
    runs = [inlay.make_run(task, tiny_bert, size=8, lr=lr, epochs=2, max_length=32) for lr in (1e-3, 1e-2)]
    results = inlay.fit(runs, tiny_bert)
    best, result = max(zip(runs, results, strict=True), key=lambda pair: pair[1].dev_metric)
    version = inlay.publish(best, result, tiny_bert)
    assert version.reference == "mood@1"
    (answer,) = inlay.Engine(tiny_bert).predict([inlay.Request("mood", "good film")])
    assert answer.outcome.label in ("no", "yes")
    (check,) = inlay.verify(tiny_bert)
    assert check.stands
    assert check.version == version


def test_a_script_trains_several_tasks_as_one_run_and_a_new_one_on_what_they_share(tiny_bert, toy_task, tmp_path):
    store = inlay.Store(tmp_path)
    tasks = [toy_task("a", num_rows=24), toy_task("b", num_rows=24, seed=1)]
    quick = {"max_length": 32, "epochs": 1, "batch_size": 8}
    run = inlay.make_joint_run(tasks, tiny_bert, size=4, batches="mixed", steps=2, **quick)
    assert (run.config.method.name, run.config.method.size, run.config.joint.steps) == ("hyperformer++", 4, 2)
    (result,) = inlay.fit([run], tiny_bert, store)
    first, second = inlay.materialize(run, result, tiny_bert)
    assert inlay.publish(second.run, second.result, tiny_bert, store).reference == "b@1"
    more = {"like": ("new=a",), "trained": "task", "steps": 2, "store": store, **quick}
    new = inlay.make_joint_run([toy_task("new", num_rows=24)], tiny_bert, start=run.id, **more)
    assert new.config.method == run.config.method
    assert new.start.of("new")["task.embedding"].equal(result.tensors["a/task.embedding"])
    assert first.run.name == "a"
    with pytest.raises(UnknownName, match="no run of several tasks named `abc`"):
        inlay.make_joint_run(tasks, tiny_bert, start="abc", store=store)
    with pytest.raises(BadConfig, match="`batchs`"):
        inlay.make_joint_run(tasks, tiny_bert, batchs="mixed")


def test_a_file_is_read_as_the_command_line_reads_it(frame, tmp_path):
    frame.to_csv(tmp_path / "mood.csv", index=False)
    task = inlay.load_task(tmp_path / "mood.csv", name="mood", test_share=0.2)
    assert task.labels == ("no", "yes")
    assert len(task.train) + len(task.dev) + len(task.test) == 60


def test_an_unknown_setting_is_an_error_that_names_the_nearest(tiny_bert, toy_task, tmp_path):
    with pytest.raises(BadConfig, match="no setting named `epoch`") as caught:
        inlay.make_run(toy_task(), tiny_bert, epoch=3)
    assert caught.value.hint == "did you mean `epochs`?"
    with pytest.raises(BadConfig, match="`lable`"):
        inlay.load_task(tmp_path / "x.csv", name="x", lable="y")


@pytest.mark.parametrize(
    "given", [None, 5, {"text": "good"}, [None], [5], [{"text": "a"}], [("a",)], [("a", "b", "c")]]
)
def test_rows_that_are_no_texts_are_refused_and_named(given):
    from inlay.api.insight import _read_texts

    with pytest.raises(BadData, match=r"holds no texts|is no text") as caught:
        _read_texts(given, {}, None)
    assert "a list of texts" in caught.value.hint
    assert len(_read_texts(["a", ("b", "c"), ["d", None]], {}, None)) == 3


def test_importing_inlay_imports_nothing_heavy():
    program = "import sys, inlay; print([n for n in ('torch', 'numpy', 'pandas', 'typer') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_documented():
    for name in inlay.__all__:
        assert getattr(inlay, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = inlay.nothing


def test_a_run_of_several_tasks_says_what_it_takes(tiny_bert, toy_task):
    tasks = [toy_task("two"), toy_task("five", num_labels=5, seed=1)]
    ways = [{"two": 2.0}, "two=2.0", ["two=2.0"]]
    assert {inlay.make_joint_run(tasks, tiny_bert, weights=way).config.joint.weights for way in ways} == {("two=2.0",)}
    with pytest.raises(BadConfig, match="was given none"):
        inlay.make_joint_run([], tiny_bert)


def test_a_run_of_several_tasks_is_published_task_by_task(tiny_bert, toy_task, tmp_path):
    tasks, store = [toy_task("two", num_rows=8), toy_task("five", num_rows=8, seed=1)], inlay.Store(tmp_path)
    run, other = (inlay.make_joint_run(tasks, tiny_bert, steps=2, epochs=1, seed=seed, size=4) for seed in range(2))
    (result,) = inlay.fit([run], tiny_bert, store)
    with pytest.raises(BadConfig, match="is published task by task") as caught:
        inlay.publish(run, result, tiny_bert, store)
    assert "materialize" in caught.value.hint
    with pytest.raises(BadConfig, match=f"that of run `{run.id}`, not of `{other.id}`"):
        inlay.materialize(other, result, tiny_bert)
    for item in inlay.materialize(run, result, tiny_bert):
        inlay.publish(item.run, item.result, tiny_bert, store)
        assert len(store.versions(item.run.name)) == 1


def test_one_call_trains_the_run_that_the_command_line_trains(backbone_folder, frame, tmp_path, monkeypatch, capsys):
    from inlay.cli import main

    monkeypatch.setenv("INLAY_HOME", str(tmp_path / "home"))
    frame.to_csv(tmp_path / "mood.csv", index=False)
    path, backbone = str(tmp_path / "mood.csv"), str(backbone_folder("bert"))
    report = inlay.train(path, backbone=backbone, size=4, epochs=1, max_length=32, progress=False)
    assert capsys.readouterr() == ("", ""), "progress=False says nothing"
    with pytest.raises(SystemExit):
        main(["train", path, "--backbone", backbone, "--size", "4", "--epochs", "1", "--max-length", "32", "--json"])
    assert f'"run": "{report.run.id}"' in capsys.readouterr().out
    again = inlay.train(frame, "mood", backbone=backbone, size=4, epochs=1, max_length=32)
    assert again.was_finished
    assert again.version == report.version
    assert "was finished before" in capsys.readouterr().err


def test_a_plan_of_rows_in_memory_needs_no_name_and_a_number_is_no_text(tiny_bert, frame, tmp_path):
    found = inlay.plan(frame, backbone=tiny_bert, store=tmp_path, measure=False, progress=False, size=8, lr=1e-2)
    assert found.inlay.trained_parameters < found.full.trained_parameters
    for texts in (3, ["a text", 3]):
        with pytest.raises(BadData, match="`3` is no text"):
            inlay.predict("mood", texts, store=tmp_path)


def test_dev_and_test_rows_are_given_and_judged(backbone_folder, frame, tmp_path):
    parts = {"dev": frame.tail(20), "test": (frame.text.head(10), frame.label.head(10))}
    where = {"backbone": str(backbone_folder("bert")), "store": tmp_path, "progress": False}
    report = inlay.train(frame.head(40), "mood", **parts, size=4, epochs=1, max_length=32, publish=False, **where)
    assert (len(report.run.task.dev), len(report.run.task.test)) == (20, 10)
    assert report.score == report.metrics["test"]["accuracy"]
    assert report.version is None
    with pytest.raises(inlay.InlayError, match="the task has no name"):
        inlay.train(frame)


def test_a_repr_is_short_and_what_a_notebook_shows_is_escaped(tiny_bert, tmp_path):
    rows = {"text": [f"a text {number}" for number in range(3000)], "label": ["<b>", "no"] * 1500}
    task = inlay.load_task(rows, name="mood")
    run = inlay.make_run(task, tiny_bert, size=8, lr=1e-3)
    for shown in (task, run, task.train, tiny_bert, inlay.Store(tmp_path)):
        assert len(repr(shown)) < 200
    assert repr(task) == "Task(mood: classify, 2 labels, 2,700 train, 300 dev)"
    from inlay.notebook import show_html

    assert "<b>" not in show_html("<b>", {"<b>": "<b>"}, ["<b>"], [["<b>"]])


@pytest.mark.parametrize(
    ("said", "respelt"),
    [
        ("use `--size 64`, or `--on-bad-row skip`", 'use `size=64`, or `on_bad_row="skip"`'),
        ("name it with `--label`", "name it with `label`"),
        ("use `--set train.head_start=probe`", 'use `head_start="probe"`'),
        ("did you mean `train.epochs`?", "did you mean `epochs`?"),
        ("check it with `inlay verify mood --store s`", "check it with `inlay verify mood --store s`"),
    ],
)
def test_hints_speak_of_keywords_in_python(said, respelt):
    from inlay.errors import in_python

    assert in_python(said) == respelt


@pytest.mark.parametrize(("document", "num_examples"), [("python.md", 1), ("estimators.md", 2)])
def test_the_examples_of_the_guide_run(document, num_examples, tiny_bert, tmp_path, monkeypatch, capsys):
    root = Path(__file__).parents[1]
    examples = re.findall(r"^```python\n(.*?)^```$", (root / "docs" / document).read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == num_examples
    monkeypatch.setenv("INLAY_HOME", str(tmp_path))
    monkeypatch.chdir(root)
    monkeypatch.setattr("inlay.pipeline.open_once", lambda name, device="auto": tiny_bert)
    known: dict[str, object] = {}
    for example in examples:
        exec(compile(example, document, "exec"), known)
    assert capsys.readouterr().out
