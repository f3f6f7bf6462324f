"""Answers that are places in a text: entities as seqeval reads tags, the best passages of all windows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from inlay.errors import Unsupported
from inlay.model.heads.heads import HEADS, HeadSpec, Output
from inlay.model.heads.spans import MAX_ANSWER, Word, find_passages, join_entities


def words_of(tags, probabilities=None):
    text = " ".join(f"w{n}" for n in range(len(tags)))
    places = [(3 * n, 3 * n + 2) for n in range(len(tags))]
    chances = probabilities or [0.9] * len(tags)
    return text, [
        Word(start, end, text[start:end], tag, chance)
        for (start, end), tag, chance in zip(places, tags, chances, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_entities_are_those_seqeval_finds(seed):
    from seqeval.metrics.sequence_labeling import get_entities

    tags = [str(tag) for tag in np.random.default_rng(seed).choice(["O", "B-A", "I-A", "B-B", "I-B"], size=9)]
    text, words = words_of(tags)
    found = [(entity.label, entity.start // 3, (entity.end - 2) // 3) for entity in join_entities(words, text)]
    assert found == get_entities(tags)


def test_an_entity_is_cut_from_the_text_and_as_sure_as_its_least_sure_word():
    text, words = words_of(["O", "B-A", "I-A"], [0.9, 0.8, 0.6])
    (entity,) = join_entities(words, text)
    assert (entity.text, entity.start, entity.end, entity.probability) == ("w1 w2", 3, 8, 0.6)


def windows_of(seed, num_windows=3, width=12):
    """Overlapping windows over one text: a special token, a question token, then context."""
    generator = np.random.default_rng(seed)
    windows = []
    for window in range(num_windows):
        places = np.full((width, 2), -1)
        first = window * 6
        places[2 : width - 1] = [(2 * n, 2 * n + 1) for n in range(first, first + width - 3)]
        windows.append((generator.normal(size=(width, 2)), places))
    return windows, "".join(chr(97 + n % 26) + " " for n in range(40))


@pytest.mark.parametrize("seed", range(5))
def test_the_best_passage_is_the_best_of_all_starts_and_ends(seed):
    windows, text = windows_of(seed)
    scores = {}
    for logits, places in windows:
        for first, last in itertools.product(range(len(places)), repeat=2):
            if places[first, 0] >= 0 and places[last, 0] >= 0 and 0 <= last - first < MAX_ANSWER:
                key = (places[first, 0], places[last, 1])
                scores[key] = max(scores.get(key, -np.inf), logits[first, 0] + logits[last, 1])
    (start, end), score = max(scores.items(), key=lambda item: item[1])
    found = find_passages(windows, text, None)
    assert (found.nbest[0].start, found.nbest[0].end) == (start, end)
    assert found.nbest[0].score == pytest.approx(score)
    assert found.nbest[0].text == found.passage == text[start:end]
    ranked = sorted(scores.values(), reverse=True)
    assert [passage.score for passage in found.nbest] == pytest.approx(ranked[:5])
    shares = np.exp(ranked[:20]) / np.exp(ranked[:20]).sum()
    assert [passage.probability for passage in found.nbest] == pytest.approx(shares[:5])
    null = min(logits[0].sum() for logits, _ in windows)
    assert found.margin == pytest.approx(null - score)


def test_there_is_no_answer_where_the_null_score_is_above_it_by_more_than_the_threshold():
    windows, text = windows_of(0)
    margin = find_passages(windows, text, None).margin
    silent = find_passages(windows, text, margin - 0.1)
    assert (silent.nbest[0].text, silent.nbest[0].start) == ("", None)
    assert silent.nbest[1].text == silent.passage != ""
    spoken = find_passages(windows, text, margin + 0.1)
    assert spoken.nbest[0].text == spoken.passage
    assert sum(passage.start is None for passage in find_passages(windows, text, 1e9).nbest) <= 1


def test_a_longer_answer_than_the_longest_is_not_given():
    places = np.array([(-1, -1), *((2 * n, 2 * n + 1) for n in range(40))])
    logits = np.zeros((41, 2))
    logits[1, 0] = logits[40, 1] = 50.0
    text = "x " * 40
    best = find_passages([(logits, places)], text, None).nbest[0]
    assert best.end - best.start < 2 * MAX_ANSWER


def test_losses_of_tokens_follow_their_formulas():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, generator=generator)
    targets = torch.tensor([[-100, 2, 0, -100], [-100, 1, -100, -100]])
    shares = logits.log_softmax(-1)
    expected = torch.stack([-(shares[0, 1, 2] + shares[0, 2, 0]) / 2, -shares[1, 1, 1]])
    torch.testing.assert_close(HEADS["tag"].row_losses(logits, targets), expected)
    assert [HEADS["tag"].weight(target) for target in targets] == [2, 1]

    logits = torch.randn(1, 5, 2, generator=generator)
    starts, ends = [0, -100, 1, 0, -100], [0, -100, 0, 1, -100]
    targets = torch.tensor([list(zip(starts, ends, strict=True))])
    allowed = [0, 2, 3]
    start = torch.logsumexp(logits[0, allowed, 0], 0) - logits[0, 2, 0]
    end = torch.logsumexp(logits[0, allowed, 1], 0) - logits[0, 3, 1]
    torch.testing.assert_close(HEADS["span"].row_losses(logits, targets), ((start + end) / 2).unsqueeze(0))
    assert HEADS["span"].weight(targets[0]) == 1


def test_padding_changes_no_loss_and_gets_no_gradient():
    generator = torch.Generator().manual_seed(1)
    for kind, width in (("tag", 3), ("span", 2)):
        logits = torch.randn(1, 4, width, generator=generator)
        target = torch.tensor([[-100, 1, 2, 0]]) if kind == "tag" else torch.tensor([[[0, 0], [1, 0], [0, 1], [0, 0]]])
        padded = torch.cat([logits, torch.randn(1, 3, width, generator=generator)], 1).requires_grad_()
        filled = torch.cat([target, torch.full((1, 3, *target.shape[2:]), -100)], 1)
        losses = HEADS[kind].row_losses(padded, filled)
        torch.testing.assert_close(losses, HEADS[kind].row_losses(logits, target))
        losses.sum().backward()
        assert (padded.grad[:, 4:] == 0).all()
        assert padded.grad.isfinite().all()


def answer(kind, logits, **settings):
    spec = HeadSpec(kind, len(logits), "cls", **settings)
    return HEADS[kind].answer(Output((torch.tensor(logits),)), spec, ("a", "b", "c")[: len(logits)])


def test_a_temperature_changes_probabilities_and_no_decision():
    plain, cool = answer("classify", [1.0, 2.0, 0.0]), answer("classify", [1.0, 2.0, 0.0], temperature=2.0)
    assert plain.label == cool.label == "b"
    expected = torch.softmax(torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64), 0).tolist()
    assert list(cool.probabilities.values()) == pytest.approx(expected)
    plain, cool = answer("multilabel", [-0.1, 0.1, 3.0]), answer("multilabel", [-0.1, 0.1, 3.0], temperature=5.0)
    assert plain.labels == cool.labels == ("b", "c")
    assert cool.probabilities["c"] == pytest.approx(1 / (1 + np.exp(-3.0 / 5)))


def test_an_unsure_outcome_is_silent_and_keeps_its_probabilities():
    head, outcome = HEADS["classify"], answer("classify", [0.0, 0.1, 0.0])
    assert head.abstain(outcome, None) == outcome == head.abstain(outcome, 0.3)
    silent = head.abstain(outcome, 0.5).to_json()
    assert silent == {"label": None, "probabilities": outcome.probabilities, "abstained": True}
    # A set is as sure as its least sure decision: 0.5 here.
    outcome = answer("multilabel", [0.0, 9.0, 9.0])
    assert HEADS["multilabel"].abstain(outcome, 0.6).to_json()["labels"] is None
    assert HEADS["multilabel"].abstain(outcome, 0.5).labels == ("a", "b", "c")
    with pytest.raises(Unsupported, match="has no confidence"):
        HEADS["regress"].abstain(answer("regress", [1.0]), 0.5)


def test_unsure_entities_and_answers_are_left_out():
    places = np.array([(-1, -1), (0, 4), (5, 9)])
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.5, 0.0]])
    output = Output((logits,), (places,), "Oslo Rome", ((0, 4), (5, 9), (10, 12)))
    outcome = HEADS["tag"].answer(output, HeadSpec("tag", 3, "tokens"), ("O", "B-LOC", "I-LOC"))
    assert [entity.text for entity in outcome.entities] == ["Oslo", "Rome"]
    assert outcome.words[2].tag == "O"  # beyond the last token
    sure = HEADS["tag"].abstain(outcome, 0.9)
    assert [entity.text for entity in sure.entities] == ["Oslo"]
    assert sure.to_json()["abstained"] is True
    assert len(sure.words) == 3

    output = Output((torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1]]),), (places,), "Oslo Rome")
    outcome = HEADS["span"].answer(output, HeadSpec("span", 2, "tokens"), ())
    assert outcome.answer == "Oslo Rome"
    silent = HEADS["span"].abstain(outcome, 0.9).to_json()
    assert silent["answer"] is None
    assert silent["abstained"] is True
    assert silent["nbest"][0]["text"] == "Oslo Rome"
