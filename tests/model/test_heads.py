"""Outputs that are NaN or infinite are no answer, of whatever kind."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from inlay.errors import NotFinite
from inlay.model.heads.heads import HEADS, WRITTEN, HeadSpec, Output, find_head

PLACES = (np.array([[-1, -1], [0, 2], [3, 5], [-1, -1]], dtype=np.int32),)
TOKENS = {"places": PLACES, "text": "ab cd", "words": ((0, 2), (3, 5))}
# Kind -> a head, its labels, what of a row is not its logits, and their shape.
KINDS = {
    "classify": (HeadSpec("classify", 2, "mean"), ("no", "yes"), {}, (2,)),
    "multilabel": (HeadSpec("multilabel", 2, "mean"), ("a", "b"), {}, (2,)),
    "regress": (HeadSpec("regress", 1, "mean"), (), {}, (1,)),
    "ordinal": (HeadSpec("ordinal", 2, "mean"), ("1", "2", "3"), {}, (2,)),
    "tag": (HeadSpec("tag", 2, "tokens"), ("O", "B-X"), TOKENS, (4, 2)),
    "span": (HeadSpec("span", 2, "tokens"), (), TOKENS, (4, 2)),
    "text": (HeadSpec("text", 0, WRITTEN), (), {}, (3,)),
}


def test_every_kind_is_tried():
    assert KINDS.keys() == HEADS.keys()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_are_not_finite_are_no_answer_of_any_kind(kind, poison):
    head, labels, more, shape = KINDS[kind]
    logits = torch.full(shape, 65.0)
    sound = Output((logits,), **more)
    assert sound.is_finite
    assert find_head(kind).predict(sound, head, labels) is not None
    find_head(kind).answer(sound, head, labels)
    logits = logits.clone()
    logits.view(-1)[-1] = poison
    lost = Output((logits,), **more)
    assert not lost.is_finite
    assert find_head(kind).predict(lost, head, labels) is None
    with pytest.raises(NotFinite, match="are not finite"):
        find_head(kind).answer(lost, head, labels)


@pytest.mark.parametrize(
    ("kind", "settings", "logit"),
    [
        ("classify", {"temperature": math.nan}, 1.0),
        ("classify", {"temperature": 0.0}, 0.0),
        ("classify", {"thresholds": (math.nan,)}, 1.0),
        ("multilabel", {"temperature": 0.0}, 0.0),
        ("multilabel", {"thresholds": (math.nan, 0.0)}, 1.0),
        ("regress", {"target_std": math.nan}, 1.0),
        ("regress", {"target_std": 1e308}, 65.0),
        ("regress", {"target_mean": math.inf}, 1.0),
        ("ordinal", {"temperature": math.inf}, 1.0),
        ("tag", {"temperature": math.nan}, 1.0),
        ("span", {"null_threshold": math.nan}, 1.0),
    ],
)
def test_finite_outputs_make_no_answer_that_is_not(kind, settings, logit):
    head, labels, more, shape = KINDS[kind]
    head = dataclasses.replace(head, **settings)
    with np.errstate(all="ignore"), pytest.raises(NotFinite, match="the answer to a row is not finite"):
        find_head(kind).answer(Output((torch.full(shape, logit),), **more), head, labels)


def test_one_window_that_is_lost_loses_the_row():
    windows = (torch.zeros(4, 2), torch.full((4, 2), torch.nan))
    assert not Output(windows, PLACES * 2, "ab cd").is_finite
    assert Output((torch.empty(0),)).is_finite  # a text of no letters


def test_a_number_among_texts_is_not_the_first_where_scores_are_nan():
    head = HeadSpec("regress", 2, WRITTEN, texts=("0.0", "0.2"))
    assert find_head("regress").predict(Output((torch.tensor([torch.nan, torch.nan]),)), head, ()) is None


def test_the_probability_of_a_level_is_how_much_more_likely_it_is_exceeded_below_than_there():
    """P(y > k) = sigmoid(f_k), each no higher than the one before; P(y = k) = P(y > k - 1) - P(y > k)."""
    head, labels = HeadSpec("ordinal", 3, "mean"), ("1", "2", "3", "4")
    logits = torch.tensor([1.5, -0.5, 0.8])  # the third may not rise above the second
    exceeded = [1.0, *(1 / (1 + math.exp(-value)) for value in (1.5, -0.5, -0.5)), 0.0]
    outcome = find_head("ordinal").answer(Output((logits,)), head, labels)
    assert outcome.label == "2"
    expected = [exceeded[k] - exceeded[k + 1] for k in range(4)]
    assert list(outcome.probabilities.values()) == pytest.approx(expected)
    assert find_head("ordinal").confidence(outcome) == pytest.approx(expected[1])


def test_the_loss_of_a_level_is_the_sum_of_its_binary_cross_entropies():
    logits, levels = torch.tensor([[0.3, -1.2, 0.7], [2.0, 0.1, -0.4]]), torch.tensor([2, 0])
    expected = []
    for row, level in zip(logits.tolist(), levels.tolist(), strict=True):
        shares = [1 / (1 + math.exp(-value)) for value in row]
        expected.append(-sum(math.log(p if level > k else 1 - p) for k, p in enumerate(shares)))
    assert find_head("ordinal").row_losses(logits, levels).tolist() == pytest.approx(expected)
    assert find_head("ordinal").num_outputs(4) == 3
