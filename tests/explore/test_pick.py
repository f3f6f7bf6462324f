"""Rows worth labelling: doubt by its definition, near duplicates once, nothing that has a label."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inlay.data import InputRow
from inlay.errors import BadData, UnknownName
from inlay.explore import PickSettings, VersionReader, pick_rows
from inlay.explore.pick import choose_diverse
from inlay.explore.unlabelled import draw_rows, measure_doubt, spread_numbers, take_shares
from inlay.settings import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish


def test_doubt_is_one_minus_the_lead_or_the_share_of_the_largest_entropy():
    sure, torn = {"label": "a", "probabilities": {"a": 0.8, "b": 0.15, "c": 0.05}}, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    assert measure_doubt(sure) == pytest.approx(1 - (0.8 - 0.15))
    entropy = -sum(value * math.log(value) for value in (0.8, 0.15, 0.05)) / math.log(3)
    assert measure_doubt(sure, "entropy") == pytest.approx(entropy)
    assert measure_doubt({"label": "a", "probabilities": torn}) == pytest.approx(1)
    assert measure_doubt({"label": "a", "probabilities": torn}, "entropy") == pytest.approx(1)
    several = {"labels": ["a"], "probabilities": {"a": 0.9, "b": 0.4}}
    assert measure_doubt(several) == pytest.approx(1 - 0.2), "the decision about b"
    assert measure_doubt({"entities": [], "words": [{"probability": 0.9}, {"probability": 0.6}]}) == pytest.approx(0.4)
    assert measure_doubt({"answer": "here", "probability": 0.7}) == pytest.approx(0.3)
    assert measure_doubt({"value": 3.0}) is None
    with pytest.raises(UnknownName, match="no measure of doubt named `guess`"):
        measure_doubt(sure, "guess")


def test_near_duplicates_are_chosen_once_and_known_rows_not_at_all():
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(6, 16))
    vectors = np.repeat(centres, 10, axis=0) + 0.01 * generator.normal(size=(60, 16))
    chosen = [place for place, _ in choose_diverse(vectors, np.ones(60), 20)]
    assert sorted(place // 10 for place in chosen) == [0, 1, 2, 3, 4, 5]
    weights = np.linspace(1, 2, 60)
    heavy = [place for place, _ in choose_diverse(vectors, weights, 20)]
    assert heavy[0] == 59, "the least sure row comes first"
    left = [place // 10 for place, _ in choose_diverse(vectors, weights, 20, known=centres[[0, 5]])]
    assert sorted(left) == [1, 2, 3, 4]


def test_shares_and_spreads_take_from_everywhere():
    assert spread_numbers([4.0, 0.0, 8.0, 2.0, 6.0], 3) == [1, 0, 2]
    assert take_shares(["a"] * 8 + ["b"] * 2, 4) == [0, 1, 2, 3]
    assert take_shares(["a"] * 30 + ["b"] * 10, 20)[-1] < 30
    assert take_shares(["a"] * 8 + ["b"] * 2, 20) == list(range(10))


def test_rows_are_drawn_from_all_of_a_file(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n" + "".join(f"row number {line},x\n" for line in range(3000)) + ",y\n")
    found, number = draw_rows(path, most=1000)
    assert (len(found), number) == (1000, 3000)
    thirds = [sum(start <= (row.line - 2) / 1000 < start + 1 for row in found) for start in range(3)]
    assert min(thirds) > 250
    assert [row.line for row in found] == [row.line for row in draw_rows(path, most=1000)[0]]
    few = tmp_path / "few.csv"
    few.write_text("text\na\n \nb\n")
    assert [row.text for row in draw_rows(few, most=10)[0]] == ["a", "b"]


@pytest.fixture(scope="module")
def trained(tiny_bert, toy_task, tmp_path_factory):
    store, task = Store(tmp_path_factory.mktemp("store")), toy_task(num_rows=64)
    train = TrainConfig(batch_size=8, max_length=32, epochs=4, lr=5e-3, pooling="mean")
    run = make_run(task, RunConfig(method=MethodConfig(size=8), train=train), tiny_bert)
    (result,) = fit([run], tiny_bert, store.root / "runs")
    return VersionReader(publish(run, result, tiny_bert, store), tiny_bert, store), task


def test_picked_rows_are_new_differ_and_are_less_sure_than_the_others(trained, toy_task):
    reader, task = trained
    fresh = toy_task(num_rows=120, seed=5).train
    texts = [*fresh.texts, *(text.upper() for text in fresh.texts[:20]), *task.train.texts[:30]]
    pool = [InputRow(line, text, record={"text": text}) for line, text in enumerate(texts, 1)]
    found = pick_rows(reader, pool, PickSettings(count=10), task.train)
    assert found.num_known >= 50, "the same text in capitals, and those that have a label"
    assert len(found.rows) == 10
    assert len({row.text.lower() for row in found.rows}) == 10
    assert not {row.text for row in found.rows} & set(task.train.texts)
    doubts = [measure_doubt(answer) for answer in reader.describe(reader.outputs(fresh))]
    assert np.mean([row.doubt for row in found.rows]) > np.mean(doubts)
    assert all(row.distance > 0 for row in found.rows)
    assert found.rows[0].record == {"text": found.rows[0].text}
    assert repr(found) == "PickedRows(toy@1: 10 of 170 rows)"
    assert found._repr_html_().count("<tr>") == 11


def test_pairs_are_refused_by_a_task_of_single_texts(trained):
    with pytest.raises(BadData, match="the row has a pair, but task `toy` reads one text"):
        pick_rows(trained[0], [InputRow(1, "a", "b")])
