"""The queue: cohorts by structure, tenants in turn, leases that are fenced, and bad jobs that spoil no other."""

from __future__ import annotations

import pytest
from state_makers import START, make_dataset, publication, train

from inlay.errors import BadConfig, UnknownName
from inlay.service.state import (
    LEASE_S,
    Conflict,
    JobNote,
    JobRequest,
    LiveMoved,
    OverLimit,
    StaleLease,
    TenantLimits,
    Tenants,
    Workspace,
)

LEASE, GRACE = 20.0, 10.0


@pytest.fixture
def rival(db, workspace) -> Workspace:
    Tenants(db).add("rival")
    return Workspace(db, "rival", "key:rival")


def claim_now(queue, **wished):
    return queue.claim("trainer", **{"company_s": 0.0, **wished})


def lose(queue, clock):
    """The trainer says nothing for long: two looks, and its cohorts are taken back."""
    clock.now += LEASE + 1
    queue.reclaim_expired()
    clock.now += GRACE + 1
    return queue.reclaim_expired()


def test_a_job_waits_two_seconds_for_company(queue, workspace, clock):
    first = train(workspace)
    assert queue.claim("trainer") is None
    clock.now += 1
    second = train(workspace, "other")
    clock.now += 1
    cohort = queue.claim("trainer")
    assert cohort.members == (first.id, second.id)
    assert queue.claim("trainer") is None


def test_a_full_cohort_waits_for_nobody(queue, workspace):
    for _ in range(3):
        train(workspace)
    assert len(queue.claim("trainer", most=3).jobs) == 3


def test_a_cohort_has_one_structure(queue, workspace):
    lora = train(workspace, settings={"method": "lora"})
    houlsby = train(workspace, settings={"method": "houlsby"})
    again = train(workspace, settings={"method": "lora"})
    assert claim_now(queue).members == (lora.id, again.id)
    assert claim_now(queue).members == (houlsby.id,)


def test_an_unripe_structure_does_not_hold_up_a_ripe_one(queue, workspace, clock):
    ripe = train(workspace, settings={"method": "lora"})
    clock.now += 1.5
    train(workspace, settings={"method": "houlsby"}, priority=9)
    clock.now += 0.5
    assert queue.claim("trainer").members == (ripe.id,)


def test_tenants_take_turns_however_much_one_brings(queue, workspace, rival):
    many = [train(workspace) for _ in range(6)]
    few = [train(rival) for _ in range(2)]
    cohort = claim_now(queue, most=4)
    assert [job.id for job in cohort.jobs] == [many[0].id, few[0].id, many[1].id, few[1].id]


def test_a_tenant_of_twice_the_weight_comes_twice_as_often(db, queue, workspace, rival):
    Tenants(db).set_limits("rival", weight=2.0)
    for _ in range(9):
        train(workspace)
        train(rival)
    tenants = [job.tenant for job in claim_now(queue, most=9).jobs]
    assert (tenants.count("acme"), tenants.count("rival")) == (3, 6)


def test_idling_saves_up_no_turns(queue, workspace, rival):
    for _ in range(4):
        train(workspace)
    claim_now(queue, most=2)
    [train(rival) for _ in range(4)]
    tenants = [job.tenant for job in claim_now(queue, most=4).jobs]
    assert sorted(tenants) == ["acme", "acme", "rival", "rival"]


def test_priority_counts_among_a_tenants_own_jobs_only(queue, workspace, rival):
    low, high = train(workspace), train(workspace, priority=5)
    other = train(rival, priority=-5)
    assert [job.id for job in claim_now(queue).jobs] == [high.id, other.id, low.id]


def test_places_are_the_order_in_which_jobs_come(queue, workspace, rival):
    jobs = [train(workspace), train(workspace, priority=1), train(rival)]
    places = {job.id: ws.job(job.id).place for ws, job in zip((workspace, workspace, rival), jobs, strict=True)}
    assert sorted(places.values()) == [1, 2, 3]
    order = [job.id for job in claim_now(queue).jobs]
    assert sorted(places, key=places.__getitem__) == order
    assert workspace.job(jobs[0].id).place is None


def test_every_write_of_a_lost_attempt_is_refused(queue, workspace, clock):
    job = train(workspace)
    old = claim_now(queue)
    assert lose(queue, clock) == [old.id]
    new = claim_now(queue)
    assert (new.id, new.token) == (old.id, old.token + 1)
    writes = [
        lambda: queue.record(old, job.id, JobNote("read")),
        lambda: queue.note_path(old, job.id, workspace.db.paths.runs / "acme"),
        lambda: queue.finish(old, job.id, "succeeded", result={}),
        lambda: queue.publish_live(old, job.id, publication()),
        lambda: queue.release(old),
    ]
    for write in writes:
        with pytest.raises(StaleLease):
            write()
    assert not queue.heartbeat(old)
    assert queue.heartbeat(new)
    queue.publish_live(new, job.id, publication())
    assert workspace.job(job.id).state == "succeeded"


def test_a_stale_trainer_is_refused_while_nobody_has_claimed_again(queue, workspace, clock):
    job = train(workspace)
    old = claim_now(queue)
    lose(queue, clock)
    with pytest.raises(StaleLease):
        queue.publish_live(old, job.id, publication())
    assert workspace.job(job.id).state == "queued"


def test_a_heartbeat_keeps_the_lease(queue, workspace, clock):
    train(workspace)
    cohort = claim_now(queue)
    for _ in range(20):
        clock.now += LEASE - 1
        assert queue.heartbeat(cohort)
        assert queue.reclaim_expired() == []


def test_a_clock_that_jumps_ahead_takes_no_lease_away(queue, workspace, clock):
    job = train(workspace)
    cohort = claim_now(queue)
    clock.now += 3600
    assert claim_now(queue) is None
    assert queue.heartbeat(cohort)
    assert claim_now(queue) is None
    queue.finish(cohort, job.id, "failed", error={"message": "bad rows"})


def test_a_clock_that_jumps_back_neither_doubles_a_lease_nor_makes_it_last(queue, workspace, clock):
    train(workspace)
    cohort = claim_now(queue)
    clock.now -= 3600
    assert claim_now(queue) is None
    assert queue.heartbeat(cohort)
    clock.now -= 3600
    assert queue.reclaim_expired() == []
    assert lose(queue, clock) == [cohort.id]  # within 30 seconds, not 2 hours


def test_jobs_queued_before_the_clock_jumped_back_do_not_wait_for_it(queue, workspace, clock):
    train(workspace)
    clock.now -= 3600
    assert queue.claim("trainer") is not None


def test_a_lost_cohort_goes_on_with_the_same_members(queue, workspace, clock):
    done, left = train(workspace), train(workspace, "other")
    cohort = claim_now(queue)
    queue.publish_live(cohort, done.id, publication())
    lose(queue, clock)
    again = claim_now(queue)
    assert again.id == cohort.id
    assert again.members == (done.id, left.id)
    assert [job.id for job in again.jobs] == [left.id]
    assert [job.id for job in again.others] == [done.id]


def test_a_job_that_kills_its_trainer_is_trained_alone_and_fails_at_the_fifth_death(queue, workspace, clock):
    bad, good = train(workspace), train(workspace, "good")
    claim_now(queue)
    lose(queue, clock)
    assert len(claim_now(queue).jobs) == 2
    lose(queue, clock)
    for deaths in (2, 3, 4):
        assert (workspace.job(bad.id).state, workspace.job(bad.id).deaths) == ("queued", deaths)
        alone = claim_now(queue)
        assert [job.id for job in alone.jobs] == [bad.id]
        lose(queue, clock)
    failed = workspace.job(bad.id)
    assert (failed.state, failed.error["code"], failed.deaths) == ("failed", "trainer-died", 5)
    spared = claim_now(queue)
    assert [job.id for job in spared.jobs] == [good.id]
    queue.publish_live(spared, good.id, publication())
    assert workspace.job(good.id).state == "succeeded"
    assert claim_now(queue) is None


def test_a_cohort_given_back_goes_on_without_blame(queue, workspace):
    job = train(workspace)
    for attempt in range(1, 6):
        cohort = claim_now(queue)
        assert cohort.token == attempt
        queue.release(cohort)
    assert (workspace.job(job.id).deaths, workspace.job(job.id).state) == (0, "queued")


def test_the_successor_of_a_dead_trainer_needs_not_wait(queue, workspace, clock):
    train(workspace)
    cohort = queue.claim("trainer-0", company_s=0)
    assert queue.reclaim_of("trainer-1") == []
    assert queue.reclaim_of("trainer-0") == [cohort.id]
    assert queue.claim("trainer-0").token == cohort.token + 1


def test_a_queued_job_is_cancelled_at_once(queue, workspace):
    job = train(workspace)
    assert workspace.cancel(job.id).state == "cancelled"
    assert claim_now(queue) is None
    assert workspace.cancel(job.id).state == "cancelled"
    assert [event.kind for event in workspace.events(job.id)] == ["queued", "cancelled"]


def test_a_running_job_is_cancelled_by_its_trainer(queue, workspace):
    job, other = train(workspace), train(workspace, "other")
    cohort = claim_now(queue)
    assert workspace.cancel(job.id).state == "running"
    assert queue.heartbeat(cohort).cancelled == (job.id,)
    with pytest.raises(Conflict):
        queue.publish_live(cohort, job.id, publication())
    assert queue.finish(cohort, job.id, "cancelled").state == "cancelled"
    assert workspace.job(other.id).state == "running"


def test_a_job_to_be_cancelled_is_so_when_its_trainer_dies(queue, workspace, clock):
    job = train(workspace)
    claim_now(queue)
    workspace.cancel(job.id)
    lose(queue, clock)
    assert workspace.job(job.id).state == "cancelled"
    assert claim_now(queue) is None


def test_a_waiting_member_of_a_lost_cohort_can_be_cancelled(queue, workspace):
    job = train(workspace)
    queue.release(claim_now(queue))
    assert workspace.cancel(job.id).state == "cancelled"
    assert claim_now(queue) is None


def test_ending_a_job_twice_is_the_same_or_refused(queue, workspace):
    job, other = train(workspace), train(workspace)
    cohort = claim_now(queue)
    error = {"code": "bad-data", "message": "no rows", "hint": None}
    assert queue.finish(cohort, job.id, "failed", error=error).error == error
    assert queue.finish(cohort, job.id, "failed", error=error).state == "failed"
    with pytest.raises(Conflict):
        queue.finish(cohort, job.id, "succeeded", result={})
    with pytest.raises(Conflict):
        queue.record(cohort, job.id, JobNote("read"))
    assert queue.finish(cohort, other.id, "cancelled").has_ended
    assert not queue.heartbeat(cohort)  # nothing is left to hold


def test_a_trainer_writes_to_its_own_jobs_only(queue, workspace):
    train(workspace, settings={"method": "lora"})
    theirs = train(workspace, settings={"method": "houlsby"})
    cohort = claim_now(queue)
    claim_now(queue)
    with pytest.raises(StaleLease):
        queue.finish(cohort, theirs.id, "failed", error={})


def test_progress_and_events_are_seen_in_order(queue, workspace):
    job = train(workspace)
    cohort = claim_now(queue)
    for epoch in range(3):
        note = JobNote("epoch", f"epoch {epoch}", {"epoch": epoch}, progress={"epoch": epoch, "epochs": 3})
        queue.record(cohort, job.id, note)
    assert workspace.job(job.id).progress == {"epoch": 2, "epochs": 3}
    events = workspace.events(job.id)
    assert [event.kind for event in events] == ["queued", "claimed", "epoch", "epoch", "epoch"]
    assert workspace.events(job.id, after=events[2].id) == events[3:]
    assert workspace.events(job.id, after=events[-1].id) == []
    assert events[0].to_json()["at"] == "2027-01-15T08:00:00.000Z"


def test_what_was_compared_with_a_version_that_is_not_live_any_more_is_compared_again(queue, workspace):
    first, second = train(workspace), train(workspace)
    cohort = claim_now(queue)
    queue.publish_live(cohort, first.id, publication(1, compared_with=0))
    with pytest.raises(LiveMoved):
        queue.publish_live(cohort, second.id, publication(2, compared_with=0))
    assert workspace.job(second.id).state == "running"
    queue.publish_live(cohort, second.id, publication(2, compared_with=1))
    assert workspace.live("mail") == 2


def test_publishing_again_after_an_unheard_answer_changes_nothing(queue, workspace):
    job = train(workspace)
    cohort = claim_now(queue)
    first = queue.publish_live(cohort, job.id, publication())
    assert queue.publish_live(cohort, job.id, publication()) == first
    assert len(workspace.history("mail")) == 1


def test_a_version_that_stays_back_says_why(queue, workspace):
    first, second = train(workspace), train(workspace)
    cohort = claim_now(queue)
    queue.publish_live(cohort, first.id, publication(1))
    job = queue.publish_live(cohort, second.id, publication(2, goes_live=False, reason="worse than 1"))
    assert job.result == {"version": 2, "is_live": False, "reason": "worse than 1"}
    assert workspace.live("mail") == 1
    assert workspace.events(second.id)[-1].kind == "kept"


def test_batches_come_alone_and_only_to_who_asks_for_them(queue, workspace):
    dataset = make_dataset(workspace)
    job = train(workspace)
    queue.publish_live(claim_now(queue), job.id, publication())
    batches = [workspace.submit(JobRequest("batch", "mail", dataset.id)) for _ in range(2)]
    assert claim_now(queue) is None
    for batch in batches:
        assert queue.claim("web", kinds=("batch",)).members == (batch.id,)


def test_the_number_of_queued_jobs_is_limited(db, queue, workspace):
    Tenants(db).set_limits("acme", TenantLimits(queued_jobs=2))
    train(workspace)
    train(workspace)
    with pytest.raises(OverLimit, match="2 queued jobs") as refused:
        train(workspace)
    assert refused.value.http_status == 429
    claim_now(queue)
    train(workspace)


def test_a_request_that_makes_no_sense_is_refused(workspace):
    for bad in (JobRequest("erase", "mail"), JobRequest("train", "mail", publish="perhaps")):
        with pytest.raises(UnknownName):
            workspace.submit(bad)
    for bad in (JobRequest("train", "mail", priority=10), JobRequest("train", "a.b"), JobRequest("train", "")):
        with pytest.raises(BadConfig):
            workspace.submit(bad)
    with pytest.raises(BadConfig, match="at most 59"):
        train(workspace, "m" * 60)
    train(workspace, "m" * 59)
    with pytest.raises(UnknownName, match="dataset"):
        train(workspace, dataset="ds_nothing")
    with pytest.raises(UnknownName, match="task"):
        workspace.submit(JobRequest("batch", "never-trained"))
    assert [job.task for job in workspace.jobs().items] == ["m" * 59]


def test_the_queue_tells_how_long_it_is(queue, workspace, rival, clock):
    train(workspace)
    claim_now(queue)
    train(workspace)
    train(rival)
    clock.now = START + 7
    stats = queue.stats()
    assert (stats.queued, stats.running, stats.oldest_wait_s) == (2, 1, 7.0)
    assert stats.by_tenant == {"acme": {"queued": 1, "running": 1}, "rival": {"queued": 1, "running": 0}}
    assert LEASE_S == LEASE + GRACE
