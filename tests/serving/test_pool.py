"""The pool of engines: rows of tasks on several backbones; names are looked up once; a bad row spoils no other."""

from __future__ import annotations

import pytest

from inlay.data import InputRow
from inlay.errors import Missing
from inlay.model import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.serving import EnginePool
from inlay.settings.run_config import MethodConfig
from inlay.store import Manifest, Store

SPEC = SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 2, "mean"))


@pytest.fixture
def kept(backbone_of, publish_random, tmp_path):
    """A store with one task on BERT and one on RoBERTa, and the backbones by name."""
    store = Store(tmp_path)
    backbones = {backbone_of(family).name: backbone_of(family) for family in ("bert", "roberta")}
    for task, backbone in zip(("one", "two"), backbones.values(), strict=True):
        publish_random(store, task, backbone, SPEC)
    return store, backbones


def test_rows_of_one_call_may_stand_on_several_backbones_and_keep_their_order(kept):
    store, backbones = kept
    pool = EnginePool(store, backbones.__getitem__, task="one")
    rows = [InputRow(1, "good", task="two"), InputRow(2, "bad"), InputRow(3, "why", task="two")]
    answers = pool.answer(rows)
    assert [answer.version for answer in answers] == ["two@1", "one@1", "two@1"]
    assert pool.num_tokens > 0


def test_a_bad_row_an_unknown_task_and_a_missing_backbone_spoil_no_other_row(kept, tmp_path):
    store, backbones = kept
    first = next(iter(backbones))

    def open_backbone(name):
        if name != first:
            raise Missing(f"no backbone `{name}`", "get it")
        return backbones[name]

    pool = EnginePool(store, open_backbone, file=tmp_path / "in.csv")
    tasks = ("one", "nope", "two", None, "one")
    texts = ("good", "good", "good", "good", " ")
    rows = [InputRow(line, text, task=task) for line, (task, text) in enumerate(zip(tasks, texts, strict=True), 2)]
    good, *failed = pool.answer(rows)
    assert good.error is None
    assert [answer.error.code for answer in failed] == ["unknown-name", "missing", "bad-data", "bad-data"]
    assert all(
        answer.error.message.startswith(f"{tmp_path / 'in.csv'}:{line}: ") for line, answer in enumerate(failed, 3)
    )


def test_one_text_resolves_its_name_once_and_parses_its_manifest_once(kept, monkeypatch):
    store, backbones = kept
    calls = []
    resolve, parse = Store.resolve, Manifest.from_json
    monkeypatch.setattr(Store, "resolve", lambda self, name: (calls.append("resolve"), resolve(self, name))[1])
    monkeypatch.setattr(Manifest, "from_json", lambda *given: (calls.append("parse"), parse(*given))[1])
    pool = EnginePool(store, backbones.__getitem__, task="one")
    assert not pool.find_version("one").manifest.extra.get("pairs")
    (answer,) = pool.answer([InputRow(1, "good")])
    assert answer.version == "one@1"
    assert calls == ["resolve", "parse"]


def test_a_new_version_answers_from_the_next_call_on(kept, publish_random):
    store, backbones = kept
    pool = EnginePool(store, backbones.__getitem__, task="one")
    assert pool.answer([InputRow(1, "good")])[0].version == "one@1"
    publish_random(store, "one", next(iter(backbones.values())), SPEC, seed=7)
    assert pool.answer([InputRow(1, "good")])[0].version == "one@2"
