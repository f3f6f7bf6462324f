"""Answers that a backbone writes: label texts scored, free texts, rows of several kinds and slots in one batch."""

from __future__ import annotations

import pytest
import torch

from inlay.model import Bank, SlotSpec, infer, infer_canonically
from inlay.model.batch.route import Row, collate
from inlay.model.heads import generation as writing
from inlay.model.heads.generation import Tree
from inlay.model.heads.head_losses import text_losses
from inlay.model.heads.heads import WRITTEN, HeadSpec
from inlay.settings.run_config import MethodConfig
from tiny_backbones import WRITING, random_tensors

TEXTS = ("good", "very bad", "not so quite good movie", "no")
SCORED = HeadSpec("classify", len(TEXTS), WRITTEN, texts=TEXTS)


def make_bank(backbone, heads, trainable=False):
    bank = Bank(backbone, len(heads), trainable=trainable)
    for slot, head in enumerate(heads):
        spec = SlotSpec.of(MethodConfig("mahabadi", 4 + 3 * slot), head)
        bank.put(slot, spec, random_tensors(backbone, spec, slot))
    return bank


def rows_of(backbone, texts, slots, answers=None):
    written = (
        [None] * len(texts) if answers is None else [backbone.tokenizer(answer)["input_ids"] for answer in answers]
    )
    return [
        Row(backbone.tokenizer(text)["input_ids"], slot, written=answer)
        for text, slot, answer in zip(texts, slots, written, strict=True)
    ]


@pytest.mark.parametrize("family", WRITING)
def test_a_labels_score_is_the_sum_of_its_tokens_log_probabilities_with_the_end(backbone_of, texts, family):
    backbone = backbone_of(family)
    bank = make_bank(backbone, [SCORED, SCORED])
    slots = [0, 1, 1, 0, 1]
    for text, slot, scores in zip(texts, slots, infer(bank, rows_of(backbone, texts, slots)), strict=True):
        for answer, score in zip(TEXTS, scores, strict=True):
            batch = collate(rows_of(backbone, [text], [slot], [answer]), backbone.pad_id)
            with torch.no_grad(), bank.routed(batch.route):
                (logits,) = bank.logits(batch)
            tokens = backbone.tokenizer(answer)["input_ids"]
            assert tokens[-1] == backbone.end_id
            each = [logits[0, place].log_softmax(-1)[token] for place, token in enumerate(tokens)]
            torch.testing.assert_close(score, sum(each), atol=1e-4, rtol=1e-5)


def test_a_tree_has_every_beginning_once_and_asks_for_every_token():
    tree = Tree.of([[5, 6, 1], [5, 1], [5, 7, 1], [8, 1]], start=0)
    assert tree.ids == (0, 5, 6, 7, 8)
    assert tree.parents == (-1, 0, 1, 1, 0)
    assert tree.paths == ((0, 1, 2), (0, 1), (0, 1, 3), (0, 4))
    depths, sees = tree.layout(torch.device("cpu"))
    assert depths.tolist() == [0, 1, 2, 2, 1]
    assert [row.nonzero().flatten().tolist() for row in sees] == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4]]


@pytest.mark.parametrize("family", WRITING)
def test_texts_that_begin_alike_and_rows_with_others_are_scored_as_each_alone(backbone_of, texts, family):
    backbone = backbone_of(family)
    numbers = tuple(f"{number / 5:.1f}" for number in range(26))
    sets = [numbers, ("very", "very bad", "very bad movie", "bad"), ("no",)]
    bank = make_bank(backbone, [HeadSpec("classify", len(own), WRITTEN, texts=own) for own in sets])
    slots = [0, 2, 1, 0, 1]
    for text, slot, scores in zip(texts, slots, infer(bank, rows_of(backbone, texts, slots)), strict=True):
        assert len(scores) == len(sets[slot])
        for answer, score in zip(sets[slot], scores, strict=True):
            batch = collate(rows_of(backbone, [text], [slot], [answer]), backbone.pad_id)
            with torch.no_grad(), bank.routed(batch.route):
                (logits,) = bank.logits(batch)
            tokens = backbone.tokenizer(answer)["input_ids"]
            each = [logits[0, place].log_softmax(-1)[token] for place, token in enumerate(tokens)]
            torch.testing.assert_close(score, sum(each), atol=1e-4, rtol=1e-5)


def test_how_many_texts_are_scored_at_a_time_changes_nothing(backbone_of, texts, monkeypatch):
    backbone = backbone_of("t5")
    bank = make_bank(backbone, [SCORED, SCORED])
    rows = rows_of(backbone, texts, [0, 1, 1, 0, 1])
    together = infer(bank, rows)
    monkeypatch.setitem(writing.MOST_SCORED, "cpu", 1)
    for few, many in zip(infer(bank, rows), together, strict=True):
        torch.testing.assert_close(few, many, atol=1e-5, rtol=1e-5)


def test_rows_with_the_same_texts_are_passes_of_the_decoder_together(backbone_of, monkeypatch):
    backbone = backbone_of("t5")
    others = HeadSpec("classify", 2, WRITTEN, texts=("no", "good movie"))
    bank = make_bank(backbone, [SCORED, others])
    texts = [" ".join(["good"] * number) for number in range(1, 17)]
    rows = rows_of(backbone, texts, [0, 1] * 8)
    expected, asked = infer(bank, rows), []
    write = backbone.write
    monkeypatch.setattr(backbone, "write", lambda *args, **options: asked.append(0) or write(*args, **options))
    num_tokens = sum(len(row.ids) for row in rows)
    found = infer(bank, rows, token_budget=-(-num_tokens // 4))
    assert len(asked) <= 6, "four or five passes, of which one at most has rows of both"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_that_are_answered_together_are_padded_to_the_longest_of_them(backbone_of, is_packed):
    backbone = backbone_of("t5")
    rows = [Row([5] * length, slot) for length, slot in ((3, 0), (9, 1), (2, 0), (4, 0))]
    batch = backbone.collate(rows) if is_packed else collate(rows, backbone.pad_id)
    assert (batch.pack is not None) == is_packed
    bank = make_bank(backbone, [SCORED, SCORED])
    with torch.no_grad(), bank.routed(batch.route):
        states = backbone.hidden_layers(batch)[-1]
        whole = backbone.read(batch)
    lengths = [len(rows[index].ids) for index in batch.order]
    read = writing.read_rows(batch, states, [0, 2])
    assert read.states_BTD.shape[:2] == (2, max(lengths[0], lengths[2]) if is_packed else 9)
    for place, row in enumerate((0, 2)):
        assert read.mask_BT[place].sum() == lengths[row]
        own = slice(lengths[row])
        assert torch.equal(read.states_BTD[place, own], whole.states_BTD[row, own])


def test_scored_and_free_texts_with_any_number_of_beams_share_a_batch(backbone_of, texts):
    backbone = backbone_of("mt5")
    heads = [SCORED, *(HeadSpec("text", 0, WRITTEN, beams=beams, max_answer=most) for beams, most in [(1, 6), (4, 5)])]
    bank = make_bank(backbone, heads)
    rows = rows_of(backbone, [*texts, *texts, *texts], [0] * 5 + [1] * 5 + [2] * 5)
    for row, together in zip(rows, infer(bank, rows), strict=True):
        torch.testing.assert_close(together, infer(bank, [row])[0], atol=1e-5, rtol=1e-5)


def test_canonical_answers_of_free_texts_are_those_of_a_batch(backbone_of, texts):
    backbone = backbone_of("t5")
    head = HeadSpec("text", 0, WRITTEN, beams=2, max_answer=6)
    bank = make_bank(backbone, [SCORED, head])
    rows = rows_of(backbone, texts, [1] * 5)
    alone = infer_canonically(backbone, bank.specs[1], bank.read(1), rows)
    assert all(torch.equal(a, b) for a, b in zip(alone, infer(bank, rows), strict=True))


@pytest.mark.parametrize("family", WRITING)
def test_checkpointed_gradients_are_the_same_in_both_stacks(backbone_of, texts, family):
    backbone = backbone_of(family)
    answers = ["good movie", "no", "very very bad plot", "yes", "why"]
    grads = []
    for is_checkpointed in (False, True):
        bank = make_bank(backbone, [SCORED, SCORED], trainable=True)
        batch = collate(rows_of(backbone, texts, [0, 1, 1, 0, 1], answers), backbone.pad_id)
        recomputed = backbone.checkpointed() if is_checkpointed else torch.enable_grad()
        with backbone.training(0.0), recomputed, bank.routed(batch.route):
            sum(logits.square().mean() for logits in bank.logits(batch)).backward()
        grads.append({name: stack.grad for name, stack in bank.stacks.items()})
    assert any(name.startswith(f"adapter.{backbone.anatomy.num_layers - 1}.") for name in grads[0])
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-6, rtol=1e-5, msg=name)


def test_dropout_is_drawn_in_both_stacks_and_in_their_attention(backbone_of):
    backbone = backbone_of("t5")
    with backbone.training(0.3, attention_dropout=0.2):
        modules = dict(backbone.model.named_modules())
        rates = {path: module.p for path, module in modules.items() if isinstance(module, torch.nn.Dropout)}
        assert set(rates.values()) == {0.3}
        assert {path.partition(".")[0] for path in rates} == {"encoder", "decoder"}
        found = [
            module.dropout for path, module in modules.items() if path.endswith(("SelfAttention", "EncDecAttention"))
        ]
        assert found == [0.2] * (3 + 2 * 2)
    assert next(module.p for module in backbone.model.modules() if isinstance(module, torch.nn.Dropout)) == 0.1


def test_smoothed_losses_are_the_mean_over_an_answers_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator)
    targets = torch.tensor([[4, 2, 1], [6, 1, -100]])
    for row, length in enumerate((3, 2)):
        expected = 0.0
        for place in range(length):
            shares = torch.full((7,), 0.1 / 7)
            shares[targets[row, place]] += 0.9
            expected -= float((shares * logits[row, place].log_softmax(-1)).sum()) / length
        assert float(text_losses(logits, targets, 0.1)[row]) == pytest.approx(expected, rel=1e-5)


def test_gradients_over_a_large_vocabulary_are_exact():
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(4, 3, 32128), torch.randint(0, 32128, (4, 3))
    exact = logits.double().requires_grad_()
    shares = exact.log_softmax(-1)
    (-(0.9 * shares.gather(-1, targets[..., None]).squeeze(-1) + 0.1 * shares.mean(-1)).mean(-1).sum()).backward()
    ours = logits.requires_grad_()
    text_losses(ours, targets, 0.1).sum().backward()
    assert float((ours.grad - exact.grad).norm() / exact.grad.norm()) < 2e-5


@pytest.mark.parametrize("beams", [1, 3])
def test_a_text_whose_probabilities_are_nan_is_not_written_and_others_are(backbone_of, texts, beams):
    backbone = backbone_of("t5")
    bank = make_bank(backbone, [HeadSpec("text", 0, WRITTEN, beams=beams, max_answer=6)] * 2)
    rows = rows_of(backbone, texts, [0, 1, 1, 0, 1])
    sound = infer(bank, rows)
    assert all(letters.isfinite().all() for letters in sound)
    for name, stack in bank.stacks.items():
        if name.startswith("adapter."):
            stack[1] = torch.nan
    for row, before, found in zip(rows, sound, infer(bank, rows), strict=True):
        if row.slot == 1:
            assert found.isnan().tolist() == [True]
        else:
            assert torch.equal(found, before)
