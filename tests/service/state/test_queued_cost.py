"""The work that is queued, in seconds of one trainer."""

from __future__ import annotations

import pytest
from state_makers import make_dataset, publication, train

from inlay.service.state import JobQueue, queued_seconds
from inlay.service.state.jobs import _START_S, _USUAL_ROUNDS, _USUAL_S


def test_nothing_queued_is_no_work(db):
    assert queued_seconds(db) == 0.0


def test_jobs_cost_their_rows_and_rounds_by_the_usual_pace(db, workspace):
    small, large = make_dataset(workspace), make_dataset(workspace, num_rows=1000)
    train(workspace, "a", dataset=small.id)
    usual = _START_S + 2 * _USUAL_ROUNDS * _USUAL_S
    assert queued_seconds(db) == pytest.approx(usual)
    train(workspace, "b", dataset=large.id, settings={"method": "houlsby", "epochs": 3})
    assert queued_seconds(db) == pytest.approx(usual + _START_S + 3000 * _USUAL_S)


def test_what_has_ended_gives_the_pace_of_what_is_queued(db, workspace, clock):
    data = make_dataset(workspace, num_rows=100)
    job = train(workspace, "a", dataset=data.id, settings={"method": "houlsby", "epochs": 2})
    queue = JobQueue(db)
    cohort = queue.claim("tests", company_s=0.0)
    assert queued_seconds(db) > 0, "what runs is work too"
    clock.now += 60.0
    queue.publish_live(cohort, job.id, publication())
    assert queued_seconds(db) == 0.0
    train(workspace, "b", dataset=data.id, settings={"method": "houlsby", "epochs": 1})
    assert queued_seconds(db) == pytest.approx(_START_S + 30.0)
