"""A trainer may be killed or stopped anywhere: the next one goes on, bit by bit, and nothing is done twice."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import pytest
from trainer_bench import make_rows, open_bench_at

from inlay.service.state import Database, JobQueue, JobRequest, Tenants
from inlay.service.trainer import cohort_work, going_live
from inlay.service.trainer.attempts import sweep_runs
from inlay.service.trainer.job_data import prepare_job
from inlay.training import list_stopped

EPOCHS = 3
TENANTS = ("acme", "other")
POINTS = {
    "read": ("inlay.service.state.job_queue.JobQueue.note_path", 2),
    "took over": ("inlay.service.trainer.cohort_work.take_over", 1),
    "first step": ("inlay.training.cohort.cohort.Cohort.step", 1),
    "third step": ("inlay.training.cohort.cohort.Cohort.step", 3),
    "state written": ("inlay.training.cohort.loop.save_state", 2),
    "last state": ("inlay.training.cohort.loop.save_state", EPOCHS),
    "result written": ("inlay.training.cohort.loop.write_result", 1),
    "answers": ("inlay.service.trainer.going_live.choose_rows", 1),
    "published": ("inlay.service.trainer.going_live.publish_result", 1),
    "evaluated": ("inlay.service.trainer.going_live.write_evaluation", 1),
    "live": ("inlay.service.state.job_queue.JobQueue.publish_live", 1),
    "second published": ("inlay.service.trainer.going_live.publish_result", 2),
    "second live": ("inlay.service.state.job_queue.JobQueue.publish_live", 2),
}


WRITING = threading.Lock()


def find(path):
    """The owner and the name of a function, by its whole name."""
    module, _, name = path.rpartition(".")
    try:
        return __import__(module, fromlist=["x"]), name
    except ModuleNotFoundError:
        module, _, owner = module.rpartition(".")
        return getattr(__import__(module, fromlist=["x"]), owner), name


def strike(path, number, signal_number, monkeypatch):
    """Send this process a signal right after a function was called so often."""
    owner, name = find(path)
    original, calls = getattr(owner, name), []

    def call(*given, **more):
        found = original(*given, **more)
        calls.append(1)
        if len(calls) == number:
            with WRITING:  # stopped with the database's lock in its hands, it would stop everybody
                os.kill(os.getpid(), signal_number)
        return found

    monkeypatch.setattr(owner, name, call)


def fork(work):
    """Do work in a child process; return its id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(0)


def submit_all(bench):
    return [
        bench.submit(make_rows(seed=seed), "mail", tenant, settings={"epochs": EPOCHS, "seed": seed})
        for seed, tenant in enumerate(TENANTS)
    ]


def make_home(folder, backbone):
    """A home with two tenants' jobs in the queue; nothing of it is open."""
    bench = open_bench_at(folder, backbone)
    for name in TENANTS:
        Tenants(bench.db).add(name)
    jobs = submit_all(bench)
    bench.db.close()
    return jobs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, backbone_of):
    """The digests that the jobs come to where nothing happens."""
    home = tmp_path_factory.mktemp("undisturbed") / "home"
    make_home(home, backbone_of("bert"))
    bench = open_bench_at(home, backbone_of("bert"))
    bench.train()
    found = {name: bench.store.resolve(f"{name}.mail").digest for name in TENANTS}
    bench.db.close()
    return found


def go_on(home, backbone, jobs, undisturbed):
    """Let a fresh trainer go on, and see that everything is as if nothing had happened."""
    bench = open_bench_at(home, backbone)
    bench.queue.reclaim_of("tester")
    sweep_runs(bench.context)  # as the process does when it starts
    bench.train()
    for job in jobs:
        done = bench.see(job)
        assert done.state == "succeeded", done.error
        assert [info.version.number for info in bench.store.versions(f"{job.tenant}.mail")] == [1]
        assert bench.store.resolve(f"{job.tenant}.mail").digest == undisturbed[job.tenant]
        workspace = bench.workspace(job.tenant)
        assert workspace.live("mail") == 1
        assert len(workspace.history("mail")) == 1
        events = workspace.events(job.id)
        epochs = [event.data["epoch"] for event in events if event.kind == "epoch"]
        assert sorted(set(epochs)) == list(range(1, EPOCHS + 1))
        assert [event.kind for event in events].count("live") == 1
    assert list((bench.db.paths.service / "runs").iterdir()) == []
    bench.db.close()


QUICK_POINTS = ("third step", "state written", "published", "live", "second live", "judged", "an epoch was told")


def choose(points):
    """The points where a kill is most telling; `make test` tries all."""
    return [pytest.param(point, marks=() if point in QUICK_POINTS else pytest.mark.slow) for point in points]


@pytest.mark.parametrize("point", choose(POINTS))
def test_killed_anywhere_the_next_trainer_comes_to_the_same_bits(
    point, tmp_path, backbone_of, undisturbed, monkeypatch
):
    home, backbone = tmp_path / "home", backbone_of("bert")
    jobs = make_home(home, backbone)

    def work():
        strike(*POINTS[point], signal.SIGKILL, monkeypatch)
        open_bench_at(home, backbone).train()

    child = fork(work)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the point was not reached"
    go_on(home, backbone, jobs, undisturbed)


def test_a_stop_saves_and_gives_back_and_the_next_trainer_goes_on(tmp_path, backbone_of, undisturbed):
    home, backbone = tmp_path / "home", backbone_of("bert")
    jobs = make_home(home, backbone)
    bench = open_bench_at(home, backbone)
    record = bench.queue.record

    def stop(cohort, job_id, note):
        record(cohort, job_id, note)
        if note.kind == "epoch":
            bench.trainer.stopping.set()

    bench.queue.record = stop
    assert bench.trainer.train_next(company_s=0.0)
    folder = next((bench.db.paths.service / "runs").glob("*/attempt-1/cohorts"))
    assert [len(members) for members in list_stopped(folder)] == [2]
    assert [bench.see(job).state for job in jobs] == ["queued"] * 2
    assert [bench.see(job).deaths for job in jobs] == [0] * 2
    bench.db.close()
    go_on(home, backbone, jobs, undisturbed)


def test_a_stop_before_training_gives_back_too(tmp_path, backbone_of):
    home, backbone = tmp_path / "home", backbone_of("bert")
    jobs = make_home(home, backbone)
    bench = open_bench_at(home, backbone)
    bench.trainer.stopping.set()
    assert bench.trainer.train_next(company_s=0.0)
    assert [bench.see(job).state for job in jobs] == ["queued"] * 2
    bench.db.close()


def test_a_cancelled_member_does_not_keep_the_others_from_going_on(tmp_path, backbone_of, monkeypatch):
    home, backbone = tmp_path / "home", backbone_of("bert")
    jobs = make_home(home, backbone)

    def work():
        strike("inlay.training.cohort.loop.save_state", 2, signal.SIGKILL, monkeypatch)
        open_bench_at(home, backbone).train()

    os.waitpid(fork(work), 0)
    bench = open_bench_at(home, backbone)
    bench.queue.reclaim_of("tester")
    bench.workspace("other").cancel(jobs[1].id)
    resumed = []
    monkeypatch.setattr(
        cohort_work,
        "note_start",
        lambda *given, is_resumed, start=cohort_work.note_start: (
            resumed.append(is_resumed) or start(*given, is_resumed=is_resumed)
        ),
    )
    bench.train()
    assert resumed == [True]
    assert [bench.see(job).state for job in jobs] == ["succeeded", "cancelled"]
    bench.db.close()


def test_a_job_that_kills_every_trainer_fails_and_says_so(tmp_path, backbone_of, monkeypatch):
    home, backbone = tmp_path / "home", backbone_of("bert")
    jobs = make_home(home, backbone)

    def die(job, context):
        if job.tenant == "other":
            os.kill(os.getpid(), signal.SIGKILL)
        return prepare_job(job, context)

    def work():
        monkeypatch.setattr(cohort_work, "prepare_job", die)
        bench = open_bench_at(home, backbone)
        bench.queue.reclaim_of("tester")
        bench.train()

    for _ in range(5):
        os.waitpid(fork(work), 0)
    bench = open_bench_at(home, backbone)
    bench.queue.reclaim_of("tester")
    bench.train()
    assert [bench.see(job).state for job in jobs] == ["succeeded", "failed"]
    assert bench.see(jobs[1]).error["code"] == "trainer-died"
    bench.db.close()


class Clock:
    """The time of day, which a test may move on."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.time() + self.ahead


def look_at(home):
    """Every file below a home, with its content; of the database what it says of jobs, versions and aliases."""
    files = {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file() and not path.name.startswith("service.db")
    }
    folders = sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_dir())
    db = Database.open(home)
    tables = {}
    with db.reading() as connection:
        for table in ("jobs", "job_events", "versions", "aliases", "alias_moves", "cohorts"):
            rows = connection.exec_driver_sql(f"SELECT * FROM {table} ORDER BY 1").fetchall()
            tables[table] = [tuple(row) for row in rows]
    db.close()
    return files, folders, tables


STOPS = {
    "an epoch was told": ("inlay.service.state.job_queue.JobQueue.record", 6),
    "a step was taken": ("inlay.training.cohort.cohort.Cohort.step", 3),
    "dev rows were answered": ("inlay.service.trainer.going_live.judge_split", 1),
    "about to publish": ("inlay.training.run.publish.canonical_environment", 1),
    "published": ("inlay.service.trainer.going_live.publish_result", 1),
    "evaluated": ("inlay.service.trainer.going_live.write_evaluation", 1),
    "judged": ("inlay.service.trainer.going_live.GoingLive._judge", 1),
}


@pytest.mark.parametrize("point", choose(STOPS))
def test_a_trainer_that_wakes_up_after_it_lost_its_lease_writes_nothing(
    point, tmp_path, backbone_of, undisturbed, monkeypatch
):
    home, backbone = tmp_path / "home", backbone_of("bert")
    jobs = make_home(home, backbone)

    def work():
        strike(*STOPS[point], signal.SIGSTOP, monkeypatch)
        bench = open_bench_at(home, backbone)
        heartbeat = bench.queue.heartbeat

        def beat(cohort):
            with WRITING:
                return heartbeat(cohort)

        bench.queue.heartbeat = beat
        bench.trainer.heartbeat_s, bench.trainer.lease_s = 0.05, 0.8
        bench.trainer.train_next(company_s=0.0)

    zombie = fork(work)
    _, status = os.waitpid(zombie, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "the point was not reached"
    # Its lease runs out, and another trainer takes the cohort over and finishes it.
    clock = Clock()
    bench = open_bench_at(home, backbone)
    bench.db.close()
    bench.db = Database.open(home, clock=clock)
    bench.queue = JobQueue(bench.db)
    lost = []
    for _ in range(3):
        clock.ahead += 60.0
        lost += bench.queue.reclaim_expired()
    assert len(lost) == 1
    clock.ahead = 0.0
    bench.db.close()
    go_on(home, backbone, jobs, undisturbed)
    before = look_at(home)
    os.kill(zombie, signal.SIGCONT)
    _, status = os.waitpid(zombie, 0)
    assert status == 0
    assert look_at(home) == before


def test_a_batch_that_wakes_up_after_it_lost_its_lease_writes_nothing(tmp_path, backbone_of, monkeypatch):
    home, backbone = tmp_path / "home", backbone_of("bert")
    make_home(home, backbone)
    bench = open_bench_at(home, backbone)
    bench.train()
    dataset = bench.upload([{"text": row["text"]} for row in make_rows(600, seed=7)])
    job = bench.workspace().submit(JobRequest("batch", "mail", dataset, {}))
    bench.db.close()

    def work():
        strike("inlay.service.trainer.answering.Answerer._answer_here", 2, signal.SIGSTOP, monkeypatch)
        bench = open_bench_at(home, backbone)
        bench.trainer.heartbeat_s, bench.trainer.lease_s = 60.0, 5.0
        bench.trainer.do_next()

    zombie = fork(work)
    _, status = os.waitpid(zombie, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    bench = open_bench_at(home, backbone)
    assert len(bench.queue.reclaim_of("tester")) == 1
    assert bench.trainer.do_next()
    assert bench.see(job).state == "succeeded"
    bench.db.close()
    before = look_at(home)
    os.kill(zombie, signal.SIGCONT)
    assert os.waitpid(zombie, 0)[1] == 0
    assert look_at(home) == before


def test_a_lease_is_lost_by_a_clock_that_no_one_can_turn(bench):
    from inlay.service.trainer.leases import Lease, read_clock

    bench.submit(make_rows())
    cohort = bench.queue.claim("tester", company_s=0.0)
    lease = Lease(bench.queue, cohort, heartbeat_s=60.0, lease_s=0.5)
    with lease:
        lease.check()
        before = read_clock()
        while read_clock() - before < 0.35:
            time.sleep(0.05)
        with pytest.raises(going_live.InlayError, match="lost its lease"):
            lease.check()


def test_signs_of_life_are_sent_while_the_main_thread_works(bench):
    from inlay.service.trainer.leases import Lease

    bench.submit(make_rows())
    cohort = bench.queue.claim("tester", company_s=0.0)
    beats = []
    heartbeat = bench.queue.heartbeat
    bench.queue.heartbeat = lambda cohort: beats.append(threading.current_thread().name) or heartbeat(cohort)
    with Lease(bench.queue, cohort, heartbeat_s=0.02, lease_s=0.5) as lease:
        time.sleep(0.6)
        lease.check()
    assert set(beats) == {"heartbeat"}
    assert len(beats) > 5
