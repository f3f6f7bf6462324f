"""Words that move an answer: occlusion and gradients are what their definitions say, and deletion proves them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inlay.errors import BadData, Missing, UnknownName, Unsupported
from inlay.explore import VersionReader, draw_explanation, explain_answer, find_nearest, find_training_rows
from inlay.explore.gradients import integrate_gradients
from inlay.explore.word_effects import MOST_LETTERS, MOST_WORDS, drop_words, leave_out, measure_effects, place_words
from inlay.model import HeadSpec, Output, SlotSpec, find_head, make_rows, resolve_method
from inlay.settings import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish

TEXT = "good movie and not so bad win a prize now"


HEADS = {
    "regress": HeadSpec("regress", 1, "mean", target_mean=3.0, target_std=2.0),
    "multilabel": HeadSpec("multilabel", 3, "mean"),
    "towers": HeadSpec("classify", 2, "mean", pairs="towers"),
    "tag": HeadSpec("tag", 5, "tokens"),
}


@pytest.fixture(scope="module")
def readers(tiny_bert, toy_task, publish_random, tmp_path_factory):
    """Random versions of several kinds, and `classify`, trained until its words matter."""
    store, task = Store(tmp_path_factory.mktemp("store")), toy_task("classify", num_rows=64)
    train = TrainConfig(batch_size=8, max_length=32, epochs=8, lr=1e-2, pooling="mean")
    run = make_run(task, RunConfig(method=MethodConfig(size=8), train=train), tiny_bert)
    (result,) = fit([run], tiny_bert, store.root / "runs")
    versions = {"classify": publish(run, result, tiny_bert, store)}
    for name, head in HEADS.items():
        spec = SlotSpec.of(resolve_method(MethodConfig(size=8)), head)
        versions[name] = publish_random(store, name, tiny_bert, spec)
    return {name: VersionReader(version, tiny_bert, store) for name, version in versions.items()}, task


def test_leaving_out_a_word_leaves_the_others():
    text = "  one two\nthree  four "
    places = place_words(text)
    assert [text[start:end] for start, end in places] == ["one", "two", "three", "four"]
    assert [rest.split() for rest in leave_out(text, places)] == [
        ["two", "three", "four"], ["one", "three", "four"], ["one", "two", "four"], ["one", "two", "three"],
    ]  # fmt: skip
    assert drop_words(text, [places[3], places[1]]).split() == ["one", "three"]
    assert len(place_words(" ".join(f"w{number}" for number in range(1000)))) <= MOST_WORDS
    assert leave_out("word", place_words("word")) == []
    assert place_words("   ") == []
    effects = measure_effects("x y z", [(0, 1), (2, 3), (4, 5)], 0.9, [0.3, 0.9, 0.96])
    assert [round(effect.change, 2) for effect in effects] == [0.6, 0.0, -0.06]


def test_a_text_that_would_take_minutes_to_explain_is_refused_at_once(readers):
    named, _ = readers
    with pytest.raises(BadData, match=f"a text of 60,000 letters, but at most {MOST_LETTERS:,} are explained"):
        explain_answer(named["classify"], "good " * 12_000)


@pytest.mark.parametrize("kind", ["classify", "ordinal", "multilabel"])
def test_evidence_is_the_log_odds_of_the_probability_that_an_answer_gives(kind):
    head, labels = find_head(kind), ("a", "b", "c")
    spec = HeadSpec(kind, head.num_outputs(3), "mean", temperature=1.7)
    logits = torch.tensor([1.3, -0.4, -1.1][: spec.num_outputs])
    probabilities = head.answer(Output((logits,)), spec, labels).probabilities
    for number, label in enumerate(labels):
        odds = probabilities[label] / (1 - probabilities[label])
        assert float(head.evidence(logits, spec, number)) == pytest.approx(np.log(odds), abs=1e-6)


@pytest.mark.parametrize("name", ["classify", "regress", "multilabel", "towers"])
def test_parts_by_gradients_add_up_to_the_change_of_the_output(readers, name):
    reader = readers[0][name]
    pair = "the cat sat on a mat" if name == "towers" else None
    found = explain_answer(reader, TEXT, pair, by="gradients")
    assert found.completeness.holds
    assert abs(found.completeness.change) > 0.01, "something moved"
    assert sum(word.change for word in found.words) == pytest.approx(found.completeness.total, abs=1e-6)
    assert [word.side for word in found.words] == ["text"] * 10 + ["pair"] * (6 if pair else 0)


def test_integrated_gradients_are_the_riemann_sum_of_their_definition(readers):
    """Sundararajan et al. 2017, equation 1, spelled out: one point of the path at a time, in small steps."""
    reader = readers[0]["classify"]
    row = reader.make_split([TEXT], None)
    found = integrate_gradients(reader, row, 1)
    (ids, segments, _) = next(iter(reader.encode(row)))
    tokenizer, head = reader.backbone.tokenizer, reader.spec.head
    masked = np.where([side is not None for side in found.sides], tokenizer.mask_token_id, ids)
    words = reader.backbone.model.get_input_embeddings().weight
    whole_TE, blank_TE = words[torch.tensor(ids)], words[torch.tensor(masked)]
    batch, steps = reader.backbone.collate(make_rows([(ids, segments, None)])), 60
    total_T = torch.zeros(len(ids))
    for step in range(steps):
        point = (blank_TE + (step + 0.5) / steps * (whole_TE - blank_TE)).detach().requires_grad_()
        with torch.enable_grad(), reader.bank.routed(batch.route):
            with reader.backbone.changing_inputs(lambda given, point=point: point.view_as(given)):
                logits = reader.bank.logits(batch)[0]
            scaled = logits[0].double() / head.temperature
            (gradient,) = torch.autograd.grad(scaled[1] - scaled[0], point)
        total_T += ((whole_TE - blank_TE) * gradient).sum(-1).float() / steps
    np.testing.assert_allclose(found.parts_T, total_T.numpy(), atol=2e-3 * max(1.0, float(total_T.abs().max())))
    reader.backbone.model(torch.tensor([[5]]))  # the hook is gone
    assert len(reader.backbone.model.get_input_embeddings()._forward_hooks) == 0


@pytest.mark.parametrize("by", ["occlusion", "gradients"])
def test_without_the_top_words_the_evidence_falls_further_than_without_random_ones(readers, by):
    found, task = readers
    reader = found["classify"]
    texts = [text for text in task.dev.texts if len(text.split()) >= 8][:6]
    gone = [explain_answer(reader, text, by=by).deletion for text in texts]
    assert len(gone) == 6
    assert np.mean([each.top for each in gone]) > 2 * max(0.05, np.mean([each.random for each in gone]))
    assert sum(each.top > each.random for each in gone) >= 5


def test_occlusion_is_the_difference_from_the_text_asked_without_the_word(readers):
    reader = readers[0]["classify"]
    found = explain_answer(reader, TEXT)
    word = found.words[6]
    assert (word.text, TEXT[word.start : word.end]) == ("win", "win")
    shorter = explain_answer(reader, TEXT.replace("win ", ""), label=found.label)
    assert word.change == pytest.approx(found.evidence - shorter.evidence, abs=1e-4)
    assert word.without == pytest.approx(shorter.evidence, abs=1e-4)
    other = next(label for label in reader.manifest.labels if label != found.label)
    turned = explain_answer(reader, TEXT, label=other)
    assert turned.words[6].change == pytest.approx(-word.change, abs=1e-4), "one label's loss is the other's gain"


def test_the_nearest_training_row_of_a_training_row_is_itself(readers):
    found, task = readers
    train = task.train
    row = train.take([7])
    near = find_nearest(found["classify"], row, task, 3)
    assert near[0].text == train.texts[7]
    assert near[0].cosine == pytest.approx(1.0, abs=1e-5)
    assert near[0].label == task.labels[int(train.targets[7])]
    assert len({each.text for each in near}) == 3
    assert near[0].cosine >= near[1].cosine >= near[2].cosine


@pytest.mark.parametrize("given", [None, 5, float("nan"), {"text": "good"}, b"good", ["good"]])
def test_what_is_no_text_is_refused_and_named(readers, given):
    named, _ = readers
    with pytest.raises(BadData, match="not a text") as refused:
        explain_answer(named["classify"], given)
    assert refused.value.hint == "give a text"
    with pytest.raises(BadData, match="not a text"):
        explain_answer(named["towers"], TEXT, ["good"])


def test_what_cannot_be_explained_is_refused_with_a_clear_word(readers):
    found = readers[0]
    with pytest.raises(Unsupported, match="has an answer for every word"):
        explain_answer(found["tag"], TEXT)
    with pytest.raises(UnknownName, match="no label named `spam`"):
        explain_answer(found["classify"], TEXT, label="spam")
    with pytest.raises(UnknownName, match="no way to explain named `magic`"):
        explain_answer(found["classify"], TEXT, by="magic")
    with pytest.raises(BadData, match="the row has one text, but task `towers` reads a pair"):
        explain_answer(found["towers"], TEXT)
    assert "--by gradients" in explain_answer(found["classify"], "movie").notes[0]


def test_a_page_shows_every_word_and_runs_nothing_of_a_text(readers):
    page = draw_explanation(explain_answer(readers[0]["classify"], 'good <script>alert("x")</script> movie & more now'))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<span") == 6


def test_training_rows_that_are_gone_or_changed_are_refused(tiny_bert, toy_task, tmp_path):
    import pandas

    from inlay.data import load_task

    store, rows = Store(tmp_path / "store"), toy_task(num_rows=60).train
    path = tmp_path / "toy.csv"
    pandas.DataFrame({"text": rows.texts, "label": [f"l{target}" for target in rows.targets]}).to_csv(path, index=False)
    config = RunConfig(
        data=DataConfig(source=str(path)),
        train=TrainConfig(epochs=1, lr=1e-2, max_length=16),
        method=MethodConfig(size=8),
    )
    run = make_run(load_task(config.data, "toy"), config, tiny_bert)
    (result,) = fit([run], tiny_bert, store.root / "runs")
    version = publish(run, result, tiny_bert, store)
    manifest = store.manifest(version)
    assert find_training_rows(version, manifest, store).digest == run.task.digest
    moved = path.rename(tmp_path / "moved.csv")
    with pytest.raises(Missing, match="the training rows of `toy@1` cannot be read") as refusal:
        find_training_rows(version, manifest, store)
    assert "--data FILE" in refusal.value.hint
    assert find_training_rows(version, manifest, store, str(moved)).digest == run.task.digest
    moved.write_text(moved.read_text() + "one more,l0\n")
    with pytest.raises(BadData, match="does not have the rows that `toy@1` was trained on"):
        find_training_rows(version, manifest, store, str(moved))
    with pytest.raises(Missing, match="it is not known where the training rows of `toy@1` are"):
        find_training_rows(version, manifest, Store(tmp_path / "other"))
    settings = store.run_folder(manifest.run_id) / "config.toml"
    settings.write_text(settings.read_text().replace(str(path), "-"))
    with pytest.raises(Missing, match="were read from stdin, and are not kept"):
        find_training_rows(version, manifest, store)


def test_a_notebook_shows_the_strongest_words_first_and_nothing_of_a_text_as_markup(readers):
    found = explain_answer(readers[0]["classify"], "a <b>good</b> film")
    shown = found._repr_html_()
    assert "<b>" not in shown
    strongest = max(found.words, key=lambda word: abs(word.change)).text
    assert f"most by `{strongest}`" in repr(found)
    assert len(repr(found)) < 200
