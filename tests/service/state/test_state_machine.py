"""Random histories of jobs, aliases, keys and quotas, beside a small model of what should come of them.

$INLAY_STATE_EXAMPLES sets the number of histories (and their length with $INLAY_STATE_STEPS): a few in `make test`,
thousands for a long run.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from postgres_server import IS_POSTGRES, drop_database, end_connections, make_database, url_of
from sqlalchemy import event
from state_makers import DIGEST, START, Clock, publication

from inlay.errors import InlayError, StoreUnreachable
from inlay.service.state import (
    Conflict,
    Database,
    Job,
    JobCohort,
    JobNote,
    JobQueue,
    JobRequest,
    Keys,
    LiveMoved,
    OverLimit,
    StaleLease,
    TenantLimits,
    Tenants,
    Unauthorized,
    Workspace,
)

EXAMPLES = int(os.environ.get("INLAY_STATE_EXAMPLES", "12"))
STEPS = int(os.environ.get("INLAY_STATE_STEPS", "25"))
TENANTS = ("acme", "rival")
TASKS, METHODS = st.sampled_from(("mail", "news")), st.sampled_from(("houlsby", "lora"))
NAMES = st.sampled_from(TENANTS)
ONE = st.integers(0, 10**6)
DATABASES: dict[str, str] = {}
TEMPLATE = Path(tempfile.mkdtemp(prefix="inlay-state-"))


@pytest.fixture(scope="module", autouse=True)
def template():
    if IS_POSTGRES:
        DATABASES["template"] = make_database()
        os.environ["INLAY_DATABASE"] = url_of(DATABASES["template"])
    Database.open(TEMPLATE, clock=lambda: START).close()
    yield
    os.environ.pop("INLAY_DATABASE", None)
    if IS_POSTGRES:
        drop_database(DATABASES.pop("template"))
    shutil.rmtree(TEMPLATE)


@dataclass
class ModelJob:
    """What is expected of a job."""

    tenant: str
    task: str
    structure: str
    state: str = "queued"
    deaths: int = 0
    cohort: str | None = None
    is_to_cancel: bool = False


@dataclass
class ModelAlias:
    """What is expected of an alias."""

    live: int | None = None
    counter: int = 0
    moves: int = 0
    versions: set[int] = field(default_factory=set)


class ServiceState(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.home = Path(shutil.copytree(TEMPLATE, tempfile.mkdtemp(prefix="inlay-state-"), dirs_exist_ok=True))
        if IS_POSTGRES:
            DATABASES["own"] = make_database(DATABASES["template"])
            os.environ["INLAY_DATABASE"] = url_of(DATABASES["own"])
        self.clock = Clock()
        self.open()
        self.jobs: dict[str, ModelJob] = {}
        self.aliases: dict[tuple[str, str], ModelAlias] = {}
        self.held: dict[str, JobCohort] = {}
        self.stale: list[JobCohort] = []
        self.keys: dict[str, tuple[str, float] | None] = {}  # text -> tenant and end, None once it was ended
        self.limits = dict.fromkeys(TENANTS, 100)
        self.number = 0
        for name in TENANTS:
            Tenants(self.db).add(name)

    def open(self) -> None:
        self.db = Database.open(self.home, clock=self.clock)
        self.queue, self.api_keys = JobQueue(self.db), Keys(self.db)

    def teardown(self) -> None:
        if hasattr(self, "db"):
            self.db.close()
            shutil.rmtree(self.home)
        if "own" in DATABASES:
            drop_database(DATABASES.pop("own"))

    @precondition(lambda self: IS_POSTGRES)
    @rule()
    def connections_end(self) -> None:
        """A server that fails over, or an administrator, ends every connection; nobody notices."""
        end_connections(DATABASES["own"])

    @precondition(lambda self: IS_POSTGRES)
    @rule(tenant=NAMES, task=TASKS)
    def connection_ends_in_the_middle(self, tenant: str, task: str) -> None:
        """A write that loses its connection is refused and leaves nothing; the next one gets through."""
        lost: list[int] = []

        def lose(connection: object) -> None:
            lost.append(end_connections(DATABASES["own"]))

        engine = self.db._engine
        event.listen(engine, "commit", lose)
        try:
            with pytest.raises(StoreUnreachable):
                self.of(tenant).audit("lost", task)
        finally:
            event.remove(engine, "commit", lose)
        assert lost
        self.of(tenant).audit("kept", task)
        with self.db.reading() as connection:
            actions = set(connection.exec_driver_sql("SELECT action FROM audit").scalars())
        assert "lost" not in actions
        assert "kept" in actions

    def of(self, tenant: str) -> Workspace:
        return Workspace(self.db, tenant, "key:model")

    def pick(self, number: int, state: str) -> str | None:
        found = [job_id for job_id, job in self.jobs.items() if job.state == state]
        return found[number % len(found)] if found else None

    def count(self, tenant: str) -> int:
        return sum(job.tenant == tenant and job.state == "queued" for job in self.jobs.values())

    # keys

    @rule(tenant=NAMES, lasts=st.sampled_from((None, 50.0, 5000.0)))
    def make_key(self, tenant: str, lasts: float | None) -> None:
        ends_at = None if lasts is None else self.clock.now + lasts
        _, text = self.api_keys.make(tenant, expires_at=ends_at)
        self.keys[text] = (tenant, ends_at or float("inf"))

    @precondition(lambda self: self.keys)
    @rule(which=ONE, rotates=st.booleans())
    def end_key(self, which: int, rotates: bool) -> None:
        text = sorted(self.keys)[which % len(self.keys)]
        key_id, kept = text.split("_")[1], self.keys[text]
        if rotates and (kept is None or kept[1] <= self.clock.now):
            with pytest.raises(Conflict):
                self.api_keys.rotate(key_id)
            return
        if rotates:
            _, new = self.api_keys.rotate(key_id)
            self.keys[new] = kept
        else:
            self.api_keys.revoke(key_id)
        self.keys[text] = None

    @invariant()
    def keys_are_as_expected(self) -> None:
        for text, kept in getattr(self, "keys", {}).items():
            if kept is not None and self.clock.now < kept[1]:
                assert self.api_keys.check(text).tenant == kept[0]
            else:
                with pytest.raises(Unauthorized):
                    self.api_keys.check(text)

    # jobs, from the tenants' side

    @rule(tenant=NAMES, most=st.integers(0, 4))
    def limit(self, tenant: str, most: int) -> None:
        Tenants(self.db).set_limits(tenant, TenantLimits(queued_jobs=most))
        self.limits[tenant] = most

    @rule(tenant=NAMES, task=TASKS, method=METHODS, priority=st.integers(-9, 9))
    def submit(self, tenant: str, task: str, method: str, priority: int) -> None:
        request = JobRequest("train", task, settings={"method": method}, priority=priority)
        if self.count(tenant) >= self.limits[tenant]:
            with pytest.raises(OverLimit):
                self.of(tenant).submit(request)
            return
        job = self.of(tenant).submit(request)
        self.jobs[job.id] = ModelJob(tenant, task, f"train:{method}")
        self.aliases.setdefault((tenant, task), ModelAlias())

    @precondition(lambda self: self.jobs)
    @rule(which=ONE)
    def cancel(self, which: int) -> None:
        job_id = list(self.jobs)[which % len(self.jobs)]
        job = self.jobs[job_id]
        self.of(job.tenant).cancel(job_id)
        if job.state == "queued":
            job.state = "cancelled"
        elif job.state == "running":
            job.is_to_cancel = True

    # jobs, from the trainer's side

    @rule(most=st.integers(1, 4))
    def claim(self, most: int) -> None:
        queued = {job_id for job_id, job in self.jobs.items() if job.state == "queued"}
        cohort = self.queue.claim("model", most=most, company_s=0.0)
        if cohort is None:
            assert not queued
            return
        mine = [job.id for job in cohort.jobs]
        assert mine
        assert set(mine) <= queued
        assert {self.jobs[job_id].structure for job_id in mine} == {cohort.structure}
        assert cohort.id not in self.held
        known = {self.jobs[job_id].cohort for job_id in mine}
        assert known in ({None}, {cohort.id})
        if None in known:
            assert len(mine) <= most
            assert len(mine) == 1 or all(self.jobs[job_id].deaths < 2 for job_id in mine)
        for job_id in mine:
            self.jobs[job_id].state, self.jobs[job_id].cohort = "running", cohort.id
        self.held[cohort.id] = cohort

    def running(self, which: int) -> tuple[str, ModelJob, JobCohort] | None:
        job_id = self.pick(which, "running")
        if job_id is None:
            return None
        job = self.jobs[job_id]
        assert job.cohort is not None
        return job_id, job, self.held[job.cohort]

    def close_if_done(self, cohort: str) -> None:
        if not any(job.cohort == cohort and job.state in ("queued", "running") for job in self.jobs.values()):
            self.held.pop(cohort, None)

    @rule(which=ONE, goes_live=st.booleans(), has_looked=st.booleans())
    def publish(self, which: int, goes_live: bool, has_looked: bool) -> None:
        found = self.running(which)
        if found is None:
            return
        job_id, job, cohort = found
        alias = self.aliases[job.tenant, job.task]
        self.number += 1
        live = alias.live or 0
        said = publication(self.number, goes_live=goes_live, compared_with=live if has_looked else live + 1)
        if job.is_to_cancel:
            with pytest.raises(Conflict):
                self.queue.publish_live(cohort, job_id, said)
            return
        if not has_looked:
            with pytest.raises(LiveMoved):
                self.queue.publish_live(cohort, job_id, said)
            return
        self.queue.publish_live(cohort, job_id, said)
        job.state = "succeeded"
        alias.versions.add(self.number)
        if goes_live:
            alias.live, alias.counter, alias.moves = self.number, alias.counter + 1, alias.moves + 1
        self.close_if_done(cohort.id)

    @rule(which=ONE, state=st.sampled_from(("failed", "cancelled")))
    def finish(self, which: int, state: str) -> None:
        found = self.running(which)
        if found is None:
            return
        job_id, job, cohort = found
        self.queue.finish(cohort, job_id, state, error={"message": "x"} if state == "failed" else None)
        job.state = state
        self.close_if_done(cohort.id)

    @precondition(lambda self: self.held)
    @rule(which=ONE)
    def release(self, which: int) -> None:
        cohort = sorted(self.held)[which % len(self.held)]
        self.queue.release(self.held[cohort])
        self.lose(cohort, has_died=False)

    @precondition(lambda self: self.held)
    @rule()
    def fall_silent(self) -> None:
        for cohort in self.held.values():
            assert self.queue.heartbeat(cohort)
        self.clock.now += 21
        assert self.queue.reclaim_expired() == []
        self.clock.now += 11
        assert set(self.queue.reclaim_expired()) == self.held.keys()
        for cohort in list(self.held):
            self.lose(cohort, has_died=True)

    def lose(self, cohort: str, *, has_died: bool) -> None:
        self.stale.append(self.held.pop(cohort))
        for job in self.jobs.values():
            if job.cohort != cohort or job.state != "running":
                continue
            job.deaths += has_died
            job.state = "cancelled" if job.is_to_cancel else "failed" if job.deaths >= 5 else "queued"
            if has_died and job.deaths >= 2 and job.state == "queued":
                job.cohort = None

    @precondition(lambda self: self.stale)
    @rule(which=ONE, how=st.integers(0, 4))
    def wake_a_zombie(self, which: int, how: int) -> None:
        zombie = self.stale[which % len(self.stale)]
        job = zombie.jobs[which % len(zombie.jobs)]
        writes = (
            lambda: self.queue.record(zombie, job.id, JobNote("read")),
            lambda: self.queue.finish(zombie, job.id, "failed", error={"message": "zombie"}),
            lambda: self.queue.publish_live(zombie, job.id, publication(10**6)),
            lambda: self.queue.release(zombie),
            lambda: self.queue.note_path(zombie, job.id, self.db.paths.runs / job.tenant),
        )
        assert not self.queue.heartbeat(zombie)
        if self.jobs[job.id].state in ("queued", "running"):
            with pytest.raises(StaleLease):
                writes[how]()
        else:  # it has ended: the same end again changes nothing, another is refused
            before = self.of(job.tenant).job(job.id)
            with suppress(InlayError):
                writes[how]()
            assert self.of(job.tenant).job(job.id) == before

    @rule(seconds=st.sampled_from((-3600.0, 3600.0, 0.5)))
    def jump(self, seconds: float) -> None:
        self.clock.now += seconds
        assert self.queue.reclaim_expired() == []
        for cohort in self.held.values():
            found = self.queue.heartbeat(cohort)
            assert found
            to_cancel = {name for name, job in self.jobs.items() if job.cohort == cohort.id and job.is_to_cancel}
            assert set(found.cancelled) == {name for name in to_cancel if self.jobs[name].state == "running"}

    # aliases

    @rule(tenant=NAMES, task=TASKS, which=ONE, has_looked=st.booleans())
    def move(self, tenant: str, task: str, which: int, has_looked: bool) -> None:
        alias = self.aliases.get((tenant, task))
        if alias is None or not alias.versions:
            return
        to = sorted(alias.versions)[which % len(alias.versions)]
        if not has_looked:
            with pytest.raises(LiveMoved):
                self.of(tenant).move_alias(task, to, if_match=alias.counter + 1)
            return
        self.of(tenant).move_alias(task, to, if_match=alias.counter)
        if to != alias.live:
            alias.live, alias.counter, alias.moves = to, alias.counter + 1, alias.moves + 1

    @rule()
    def reopen(self) -> None:
        self.db.close()
        self.open()

    @invariant()
    def jobs_are_as_expected(self) -> None:
        for tenant in TENANTS if hasattr(self, "jobs") else ():
            found: dict[str, Job] = {job.id: job for job in self.of(tenant).jobs(limit=200).items}
            expected = {job_id: job for job_id, job in self.jobs.items() if job.tenant == tenant}
            assert {name: job.state for name, job in found.items()} == {n: job.state for n, job in expected.items()}
            assert {name: job.deaths for name, job in found.items()} == {n: job.deaths for n, job in expected.items()}
            places = [job.place for job in found.values() if job.state == "queued"]
            assert None not in places
            assert len(set(places)) == len(places)
            assert self.of(tenant).limits().queued_jobs == self.count(tenant)

    @invariant()
    def aliases_are_as_expected(self) -> None:
        for (tenant, task), alias in getattr(self, "aliases", {}).items():
            workspace = self.of(tenant)
            assert workspace.live(task) == alias.live
            if alias.live is not None:
                assert workspace.resolve(task) == (f"{tenant}.{task}", alias.live, DIGEST)
                assert len(workspace.history(task)) == alias.moves
                assert workspace.alias(task).counter == alias.counter


ServiceState.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
test_any_history_ends_as_the_model_says = ServiceState.TestCase
