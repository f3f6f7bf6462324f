"""Several trainers at once, some of them killed: every job is done once, and nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

from postgres_server import IS_POSTGRES
from sqlalchemy import func, select
from state_makers import train

from inlay.service.state import Database, JobQueue, Tenants, Workspace, schema

TRAINER = """
import json, sys, time
from inlay.service.state import Database, JobNote, JobQueue, Publication, StaleLease
home, owner, work_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
db = Database.open(home)
queue = JobQueue(db)
queue.reclaim_of(owner)
idle = 0
while idle < 20:
    cohort = queue.claim(owner, most=3, company_s=0.0)
    if cohort is None:
        idle += 1
        time.sleep(0.05)
        continue
    idle = 0
    for job in cohort.jobs:
        try:
            queue.record(cohort, job.id, JobNote("training", owner))
            time.sleep(work_s)
            said = Publication(job.number, "ab" * 32, 10, True, owner, {})
            queue.publish_live(cohort, job.id, said)
            print(json.dumps([job.id, cohort.id, cohort.token]), flush=True)
        except StaleLease:
            break
"""


def start(home, owner, work_s=0.0):
    words = [sys.executable, "-c", TRAINER, str(home), owner, str(work_s)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_ledger(process):
    out, err = process.communicate(timeout=120)
    return [json.loads(line) for line in out.splitlines() if line.endswith("]")], err


def fill(home, num_jobs):
    db = Database.open(home)
    for name in ("acme", "rival"):
        Tenants(db).add(name)
    ids = [train(Workspace(db, name), f"task-{n % 5}").id for n in range(num_jobs) for name in ("acme", "rival")]
    db.close()
    return ids


def test_of_four_trainers_each_job_goes_to_one(home):
    ids = fill(home, 12)
    trainers = [start(home, f"trainer-{number}") for number in range(4)]
    done = []
    for trainer in trainers:
        ledger, said = read_ledger(trainer)
        assert trainer.returncode == 0, said
        done += ledger
    assert sorted(job for job, _, _ in done) == sorted(ids)
    db = Database.open(home)
    row = schema.job_events.c
    with db.reading() as connection:
        claims = connection.execute(select(func.count()).where(row.kind == "claimed").group_by(row.job)).scalars().all()
        assert claims == [1] * len(ids)
        assert set(connection.execute(select(schema.jobs.c.state)).scalars()) == {"succeeded"}
    db.close()


def test_trainers_that_are_killed_lose_nothing_they_acknowledged(home):
    ids = fill(home, 10)
    chance = random.Random(7)
    acknowledged = {}
    for attempt in range(5):
        trainer = start(home, "trainer-0", 0.02)
        time.sleep(0.9 + chance.random())  # most of it is Python starting
        trainer.kill()
        ledger, _ = read_ledger(trainer)
        for job, cohort, token in ledger:
            assert job not in acknowledged, "done twice"
            acknowledged[job] = (cohort, token, attempt)
    ledger, said = read_ledger(start(home, "trainer-0"))
    assert said == ""
    acknowledged |= {job: (cohort, token, "last") for job, cohort, token in ledger}
    db = Database.open(home)
    row, version = schema.jobs.c, schema.versions.c
    with db.reading() as connection:
        states = dict(connection.execute(select(row.id, row.state)).all())
        assert states.keys() == set(ids)
        assert all(states[job] == "succeeded" for job in acknowledged)
        # A job dies with its trainer three times at most; one whose success nobody heard of has succeeded all the same.
        assert set(states.values()) <= {"succeeded", "failed"}
        succeeded = [job for job, state in states.items() if state == "succeeded"]
        assert connection.execute(select(func.count()).select_from(schema.versions)).scalar() == len(succeeded)
        owners = connection.execute(select(version.job)).scalars().all()
        assert sorted(owners) == sorted(succeeded)
        assert IS_POSTGRES or connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
    db.close()


def test_a_trainer_that_wakes_up_after_its_cohort_went_to_another_changes_nothing(home):
    (first, second) = fill(home, 1)
    sleeper = start(home, "sleeper", 1.0)
    db = Database.open(home)
    queue = JobQueue(db)
    row = schema.job_events.c
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with db.reading() as connection:
            if connection.execute(select(row.id).where(row.kind == "training")).first():
                break
        time.sleep(0.02)
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert len(queue.reclaim_of("sleeper")) == 1  # its lease is over
    cohort = queue.claim("other", company_s=0.0)
    assert cohort is not None
    assert cohort.token == 2
    os.kill(sleeper.pid, signal.SIGCONT)
    ledger, said = read_ledger(sleeper)
    assert (ledger, said) == ([], "")
    assert {job.id for job in cohort.jobs} == {first, second}
    with db.reading() as connection:
        assert set(connection.execute(select(schema.jobs.c.state)).scalars()) == {"running"}
    assert queue.heartbeat(cohort)
    db.close()
