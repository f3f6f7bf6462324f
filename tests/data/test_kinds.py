"""The two tables of kinds say all that differs by kind, and nothing else in the tree does."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from inlay.data.kinds import KINDS, exceeded_levels, find_kind_of_head, find_kind_of_metric, find_scheme
from inlay.data.metrics import METRICS, SAMPLES, decide
from inlay.data.table_shapes import SHAPES
from inlay.data.tasks import load_task
from inlay.data.windows import LAYOUTS
from inlay.errors import BadConfig, BadData
from inlay.model.heads.heads import HEADS
from inlay.settings.run_config import KIND_NAMES, DataConfig
from inlay.training.recipe.linear import FITTERS

SOURCE = Path(__file__).parents[2] / "src" / "inlay"
# The tables; the settings' choices; sets and estimators that say which kind they are.
ALLOWED = (
    *("data/kinds.py", "model/heads/heads.py", "settings/run_config.py", "settings/keywords.py"),
    *("data/published_sets.py", "estimators/text_estimators.py"),
)
OURS_ALONE = {"classify", "multilabel", "regress", "ordinal"}  # words that mean nothing but a kind


def test_the_tables_and_the_settings_have_the_same_kinds():
    assert KINDS.keys() == HEADS.keys()
    assert tuple(KINDS) == KIND_NAMES
    told = next(field for field in dataclasses.fields(DataConfig) if field.name == "kind").metadata["help"]
    assert all(name in told for name in KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_names_what_there_is(name):
    kind = KINDS[name]
    assert kind.layout in LAYOUTS
    assert kind.sample in SAMPLES
    assert {*kind.metrics, kind.default_metric} <= METRICS.keys()
    assert kind.default_metric in kind.metrics
    assert set(kind.shapes) <= SHAPES.keys()
    assert kind.linear is None or kind.linear in FITTERS
    assert (kind.linear is None) == (kind.output_targets is None)


def test_every_metric_is_of_some_kind():
    assert {metric for kind in KINDS.values() for metric in kind.metrics} == METRICS.keys()


@pytest.mark.parametrize(("metric", "num_dims", "kind"), [("accuracy", 1, "classify"), ("accuracy", 2, "multilabel")])
def test_a_metric_of_several_kinds_is_told_by_the_targets(metric, num_dims, kind):
    assert find_kind_of_metric(metric, num_dims) == kind


def test_one_output_of_another_librarys_classifier_is_a_number():
    assert find_kind_of_head("classification", 1) == "regress"
    assert find_kind_of_head("classification", 2) == "classify"
    assert find_kind_of_head("multilabel_classification", 1) == "multilabel"
    assert find_kind_of_head("causal_lm", 2) is None


def kind_literals(path: Path) -> list[str]:
    """Places of a file that name a kind: words that only mean one, comparisons of a kind, and dicts keyed by kinds."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Constant) and node.value in OURS_ALONE:
            found.append(f"{path}:{node.lineno}: {node.value!r}")
        elif isinstance(node, ast.Compare):
            names = [side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "")
                     for side in (node.left, *node.comparators)]  # fmt: skip
            texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)} & KINDS.keys()
            if texts and any(name.endswith("kind") for name in names):
                found.append(f"{path}:{node.lineno}: compares with {sorted(texts)}")
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)} & KINDS.keys()
            if len(keys) > 1:
                found.append(f"{path}:{node.lineno}: a dict keyed by {sorted(keys)}")
    return found


def test_no_other_file_tells_kinds_apart_by_name():
    files = [path for path in SOURCE.rglob("*.py") if not str(path.relative_to(SOURCE)).startswith(ALLOWED)]
    assert [literal for path in files for literal in kind_literals(path)] == []


def test_a_literal_would_be_found(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text('if task.kind == "text": pass\nx = {"tag": 1, "span": 2}\ny = "regress"\n')
    assert len(kind_literals(path)) == 3


def test_levels_are_sorted_as_numbers_or_named_in_their_order():
    config = DataConfig(kind="ordinal")
    assert find_scheme(["10", 2, "1", 2.0], config).labels == ("1", "2", "10")
    with pytest.raises(BadConfig, match="`high`, `low`") as refused:
        find_scheme(["low", "high", "3"], config)
    assert "--labels" in str(refused.value.hint)
    assert find_scheme(["low", "high"], DataConfig(kind="ordinal", labels=("low", "high"))).labels == ("low", "high")


def test_equal_levels_are_one_however_they_are_spelt():
    config = DataConfig(kind="ordinal")
    assert find_scheme(["1", "2", "2.0", 3.0, "2.5"], config).labels == ("1", "2", "2.5", "3")
    with pytest.raises(BadConfig, match="names a label twice: 1, 2, 2"):
        find_scheme(["1", "2"], DataConfig(kind="ordinal", labels=("1", "2", "2.0")))


def test_a_level_is_as_many_as_are_exceeded_in_a_row():
    assert exceeded_levels(np.array([0, 2, 3]), 4).tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert decide("ordinal", exceeded_levels(np.arange(4), 4) - 0.5).tolist() == [0, 1, 2, 3]
    assert decide("ordinal", np.array([[2.0, -1.0, 3.0], [-1.0, 1.0, 1.0]])).tolist() == [1, 0]


def test_dev_levels_that_training_never_saw_are_refused(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"text {row},{row % 3 + 1}\n" for row in range(30)))
    (tmp_path / "dev.csv").write_text("text,label\nother,0\nanother,2\n")
    with pytest.raises(BadData, match="unseen label `0`"):
        load_task(DataConfig(source=str(tmp_path), kind="ordinal"), "ratings")
    skipped = DataConfig(source=str(tmp_path), kind="ordinal", on_bad_row="skip")
    assert load_task(skipped, "ratings").dev.targets.tolist() == [1]
    named = DataConfig(source=str(tmp_path), kind="ordinal", labels=("0", "1", "2", "3"))
    assert load_task(named, "ratings").dev.targets.tolist() == [0, 2]
