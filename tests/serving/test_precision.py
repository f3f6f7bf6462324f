"""What another precision changes, counted on rows whose outputs are written down here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inlay.model.heads.heads import HeadSpec, Outcome, Output
from inlay.serving.precision import Drift, is_changed, measure_drift
from inlay.store import Probe


def test_a_label_that_changed_is_counted_and_the_largest_change_of_a_logit_kept():
    probes = [Probe("a", None, (1.0, 0.0)), Probe("b", None, (0.2, 0.1)), Probe("c", None, (-3.0, 3.0))]
    found = [torch.tensor([1.5, 0.0]), torch.tensor([0.1, 0.2]), torch.tensor([-3.0, 2.25])]
    head = HeadSpec("classify", 2, "mean")
    drift = measure_drift(probes, [Output((logits,)) for logits in found], head, ("no", "yes"))
    assert drift == Drift(num_probes=3, num_changed=1, largest=0.75)


def test_tags_of_a_row_count_once_however_many_changed():
    places = (np.array([[-1, -1], [0, 2], [3, 5], [-1, -1]], dtype=np.int32),)
    output = Output(
        (torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]),), places, "ab cd", ((0, 2), (3, 5))
    )
    before = (0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)  # both words were outside
    drift = measure_drift([Probe("ab cd", None, before)], [output], HeadSpec("tag", 2, "mean"), ("O", "B-X"))
    assert drift == Drift(num_probes=1, num_changed=1, largest=1.0)


def test_a_number_moves_and_changes_nothing():
    head = HeadSpec("regress", 1, "mean", target_mean=10.0, target_std=2.0)
    drift = measure_drift([Probe("a", None, (0.5,))], [Output((torch.tensor([0.75]),))], head, ())
    assert drift == Drift(num_probes=1, num_changed=0, largest=0.25)
    assert not is_changed(Outcome(value=1.0), Outcome(value=2.0))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_an_answer_that_is_not_finite_any_more_has_changed(poison):
    probes = [Probe("a", None, (1.0, 0.0)), Probe("b", None, (1.0, 0.0))]
    found = [Output((torch.tensor([poison, 0.0]),)), Output((torch.tensor([1.0, 0.0]),))]
    assert measure_drift(probes, found, HeadSpec("classify", 2, "mean"), ("no", "yes")) == Drift(2, 1, torch.inf)


def test_how_sure_an_answer_is_does_not_matter():
    assert not is_changed(Outcome(label="a", probabilities={"a": 0.6}), Outcome(label="a", probabilities={"a": 0.9}))
    assert is_changed(Outcome(labels=("a", "b")), Outcome(labels=("a",)))
    assert is_changed(Outcome(answer="ten"), Outcome(answer=""))


def test_drifts_of_several_versions_add_up():
    assert Drift.total([Drift(8, 1, 0.5), Drift(4, 0, 0.75)]) == Drift(12, 1, 0.75)
    assert Drift.total([]) == Drift() == Drift(0, 0, pytest.approx(0.0))
