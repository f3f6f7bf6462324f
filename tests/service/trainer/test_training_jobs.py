"""Jobs become versions: several tenants in one bank, bad ones alone, better ones live."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from trainer_bench import LABELS, make_rows

from inlay.errors import Diverged
from inlay.reports import make_report
from inlay.service.state import Correction, JobQueue
from inlay.service.trainer import going_live
from inlay.service.trainer.job_settings import make_tree
from inlay.service.version_evaluations import read_evaluation
from toys import WORDS

HEAD = {"method": "head", "size": None, "epochs": 3, "lr": 0.05}  # without dropout: alone and together are the same


def make_tree_without_dropout(*given):
    tree = make_tree(*given)
    tree["train"] |= {"dropout": 0.0, "head_dropout": 0.0}
    return tree


def say_all(bench, job):
    """All that a job tells its tenant, as one text."""
    workspace = bench.workspace(job.tenant)
    events = [event.to_json() for event in workspace.events(job.id)]
    return json.dumps([bench.see(job).to_json(), events])


def test_a_job_becomes_a_live_version(bench):
    job = bench.submit(make_rows())
    bench.train()
    done = bench.see(job)
    assert done.state == "succeeded", done.error
    assert bench.kinds(job) == [
        *("queued", "claimed", "read", "training", "epoch", "epoch", "published", "notice", "live"),
    ]
    assert bench.workspace().live("mail") == done.result["version"] == 1
    assert done.result["is_live"]
    assert (
        done.result["metrics"]["dev"]["accuracy"]
        == bench.store.manifest(bench.store.resolve("acme.mail")).metrics["dev"]["accuracy"]
    )
    epochs = [event for event in bench.workspace().events(job.id) if event.kind == "epoch"]
    assert [event.data["epoch"] for event in epochs] == [1, 2]
    assert all(0 <= event.data["dev"]["accuracy"] <= 1 for event in epochs)
    assert done.progress["epoch"] == 2
    rows = next(event for event in bench.workspace().events(job.id) if event.kind == "read").data["rows"]
    assert rows == {"train": 54, "dev": 6}


def test_its_answers_to_the_dev_rows_are_kept(bench):
    job = bench.submit(make_rows(100), settings={"dev_share": 0.3})
    bench.train()
    evaluation = read_evaluation(bench.db.files.evaluations("acme", "mail"), 1)
    assert evaluation is not None
    assert len(evaluation.rows) == evaluation.num_dev == 30
    right = sum(row.is_right for row in evaluation.rows)
    assert right / 30 == pytest.approx(bench.see(job).result["metrics"]["dev"]["accuracy"])
    assert make_report(evaluation)["num_rows"] == 30


def test_without_a_rate_the_recipe_is_followed(bench):
    job = bench.submit(make_rows(), settings={"lr": None, "epochs": None, "method": None, "size": None})
    bench.train()
    done = bench.see(job)
    assert done.state == "succeeded", done.error
    assert set(done.result["probe"]) == {"dev"}
    config = bench.store.manifest(bench.store.resolve("acme.mail")).config
    assert config["head_start"] == "probe"
    stages = [event.data["stage"] for event in bench.workspace().events(job.id) if event.kind == "epoch"]
    assert stages[0] == "probe"


def test_two_tenants_train_in_one_bank_and_come_to_what_each_would_alone(bench, monkeypatch):
    # Dropout draws other numbers in a cohort: of the same distribution, but not the same.
    monkeypatch.setattr("inlay.service.trainer.job_data.make_tree", make_tree_without_dropout)
    rows = {"acme": make_rows(seed=1), "other": make_rows(seed=2)}
    alone = {}
    for tenant in rows:
        job = bench.submit(rows[tenant], "alone", tenant, settings=HEAD)
        bench.train()
        alone[tenant] = bench.see(job)
    jobs = {tenant: bench.submit(rows[tenant], "mail", tenant, settings=HEAD) for tenant in rows}
    cohorts = []
    original = JobQueue.claim
    JobQueue.claim = lambda *given, **more: cohorts.append(original(*given, **more)) or cohorts[-1]
    try:
        bench.train()
    finally:
        JobQueue.claim = original
    assert [len(cohort.jobs) for cohort in cohorts if cohort is not None] == [2]
    for tenant, job in jobs.items():
        done = bench.see(job)
        assert done.state == "succeeded", done.error
        for metric, value in alone[tenant].result["metrics"]["dev"].items():
            assert done.result["metrics"]["dev"][metric] == pytest.approx(value, abs=1e-5)
        tensors = [bench.store.load(bench.store.resolve(f"{tenant}.{name}")).tensors for name in ("alone", "mail")]
        for name, tensor in tensors[0].items():
            torch.testing.assert_close(tensors[1][name], tensor, atol=1e-5, rtol=1e-5)
    assert bench.store.resolve("acme.mail").digest != bench.store.resolve("other.mail").digest


def test_a_step_is_one_forward_pass_for_all_tenants(bench, monkeypatch):
    steps = []
    monkeypatch.setattr(
        "inlay.training.cohort.cohort.Cohort.step",
        lambda self, step=__import__("inlay.training.cohort.cohort", fromlist=["Cohort"]).Cohort.step: (
            steps.append(sorted(member.run.name for member in self.active)),
            step(self),
        )[1],
    )
    for tenant in ("acme", "other"):
        bench.submit(make_rows(seed=len(tenant)), f"mail-{tenant}", tenant)
    bench.train()
    assert steps == [["mail-acme", "mail-other"]] * len(steps)
    assert len(steps) == 4  # 54 rows in batches of 32, twice


def test_the_same_rows_of_two_tenants_are_one_run_and_two_versions(bench):
    jobs = [bench.submit(make_rows(), "mail", tenant) for tenant in ("acme", "other")]
    bench.train()
    assert [bench.see(job).state for job in jobs] == ["succeeded"] * 2
    assert bench.store.resolve("acme.mail").digest == bench.store.resolve("other.mail").digest


def test_a_bad_job_fails_alone_and_says_why(bench, monkeypatch):
    diverges = bench.submit(make_rows(seed=5), "diverges", "acme", settings={"seed": 13})
    original = going_live.check_trained

    def fail(result):
        if result.run_id == diverging[0]:
            raise Diverged(f"run `{result.run_id}` diverged", "try a smaller `--lr`, such as a third of it")
        original(result)

    good = [bench.submit(make_rows(seed=1), "mail"), bench.submit(make_rows(seed=2), "mail", "other")]
    bad = {
        "every row has the label": bench.submit([{"text": f"row {n}", "label": "one"} for n in range(20)], "same"),
        "no column named `topic`": bench.submit(make_rows(seed=3), "column", settings={"label": "topic"}),
        "`settings.backbone` is not a setting": bench.submit(
            make_rows(seed=4), "strange", settings={"backbone": "/etc"}
        ),
        "no task named `gone`": bench.submit(make_rows(seed=6), "start", settings={"from": "gone"}),
        "`train.class_weights` is `balanced`": bench.submit(
            [{"text": f"row {n}", "label": n / 7} for n in range(40)], "number", settings={"class_weights": "balanced"}
        ),
    }
    diverging = []
    prepare = __import__("inlay.service.trainer.job_data", fromlist=["x"]).prepare_job

    def note(job, context):
        ready = prepare(job, context)
        if job.id == diverges.id:
            diverging.append(ready.prepared.run.id)
        return ready

    monkeypatch.setattr("inlay.service.trainer.cohort_work.prepare_job", note)
    monkeypatch.setattr(going_live, "check_trained", fail)
    bench.train()
    assert [bench.see(job).state for job in good] == ["succeeded"] * 2
    for words, job in bad.items():
        done = bench.see(job)
        assert done.state == "failed", words
        assert words in done.error["message"]
        assert done.error["detail"] == done.error["message"]
        assert done.error["type"] == f"urn:inlay:problem:{done.error['code']}"
        assert done.error["hint"]
        assert "--" not in done.error["hint"]
        assert bench.kinds(job)[-1] == "failed"
    assert bench.see(diverges).error["code"] == "diverged"
    assert bench.workspace().live("mail") == 1
    for job in (*bad.values(), diverges):
        told = say_all(bench, job)
        assert str(bench.home) not in told
        assert "acme." not in told


def test_what_training_itself_fails_at_fails_the_job_at_fault_alone(bench, monkeypatch):
    jobs = [bench.submit(make_rows(seed=seed), f"mail-{seed}") for seed in (1, 2, 3)]
    module = __import__("inlay.service.trainer.cohort_work", fromlist=["fit"])
    fit = module.fit

    def fail(runs, *given, **more):
        if any(run.name == "mail-2" for run in runs):
            raise RuntimeError("something of mail-2's own")
        return fit(runs, *given, **more)

    monkeypatch.setattr(module, "fit", fail)
    bench.train()
    assert [bench.see(job).state for job in jobs] == ["succeeded", "failed", "succeeded"]
    error = bench.see(jobs[1]).error
    assert (error["code"], error["status"]) == ("unforeseen", 500)
    assert "mail-2" not in error["message"]


def test_limits_of_the_tenant_hold_for_what_is_read(bench):
    from inlay.service.state import TenantLimits, Tenants

    jobs = [bench.submit(make_rows(), "rows"), bench.submit(make_rows(labels=("a", "b", "c")), "labels", "other")]
    Tenants(bench.db).set_limits("acme", TenantLimits(dataset_rows=10))
    Tenants(bench.db).set_limits("other", TenantLimits(labels=2))
    bench.train()
    assert [bench.see(job).error["code"] for job in jobs] == ["over-limit"] * 2
    assert "10 dataset rows" in bench.see(jobs[0]).error["message"]


def test_by_policy_a_version_goes_live_always_or_never(bench):
    first = bench.submit(make_rows(seed=1), publish="never")
    bench.train()
    assert bench.see(first).result["is_live"] is False
    assert bench.workspace().live("mail") is None
    assert bench.kinds(first)[-1] == "kept"
    second = bench.submit(make_rows(seed=2), publish="always")
    bench.train()
    assert bench.workspace().live("mail") == bench.see(second).result["version"] == 2


RECIPE = {"method": "head", "size": None, "epochs": None, "lr": None, "dev_share": 0.3}


def test_a_version_that_learned_little_does_not_go_live_and_says_why(bench):
    bench.submit(make_rows(400, seed=1), settings=RECIPE)
    bench.train()
    few = bench.submit(make_rows(400, seed=2), settings=RECIPE | {"epochs": 1, "lr": 1e-6}, publish="if-better")
    bench.train()
    done = bench.see(few)
    assert (done.state, done.result["is_live"]) == ("succeeded", False)
    assert done.result["reason"].startswith("not live: worse than version 1 by 0.")
    assert done.result["compare"]["verdict"] == "worse"
    assert bench.workspace().live("mail") == 1
    assert bench.kinds(few)[-1] == "kept"


@pytest.mark.parametrize("wrong", [0.5, 0.9])
def test_wrong_labels_do_not_go_live_although_their_own_dev_rows_praise_them(bench, wrong):
    bench.submit(make_rows(400, seed=1), settings=RECIPE)
    bench.train()
    job = bench.submit(make_rows(400, seed=2, wrong=wrong), settings=RECIPE, publish="if-better")
    bench.train()
    done = bench.see(job)
    assert (done.state, done.result["is_live"]) == ("succeeded", False)
    if wrong == 0.9:
        assert done.result["compare"]["verdict"] == "better"
        assert "worse than version 1" in done.result["reason"]
        assert "rows that it was judged by" in done.result["reason"]
    assert bench.workspace().live("mail") == 1


def test_the_live_version_answers_the_new_dev_rows(bench):
    bench.submit(make_rows(100, seed=1), settings=HEAD | {"dev_share": 0.3})
    bench.train()
    second = bench.submit(make_rows(100, seed=2), settings=HEAD | {"dev_share": 0.3}, publish="if-better")
    bench.train()
    compare = bench.see(second).result["compare"]
    assert (compare["a"], compare["b"], compare["same_rows"], compare["num_rows"]) == (1, 2, False, 30)
    folder = bench.db.files.evaluations("acme", "mail")
    moved = read_evaluation(folder, 1, rows_of=2)
    assert moved is not None
    assert [row.text for row in moved.rows] == [row.text for row in read_evaluation(folder, 2).rows]
    assert compare["score_a"] == pytest.approx(sum(row.is_right for row in moved.rows) / 30)


def test_rows_that_trained_the_live_version_are_no_fair_comparison(bench):
    rows = make_rows(100, seed=1)
    bench.submit(rows, settings=HEAD | {"dev_share": 0.1})
    bench.train()
    second = bench.submit(rows, settings=HEAD | {"dev_share": 0.3}, publish="if-better")
    bench.train()
    compare = bench.see(second).result["compare"]
    assert compare["num_rows"] == 10
    assert compare["num_left_out"] == 20


def test_the_same_rows_trained_again_are_the_same_version(bench):
    rows = make_rows()
    for _ in range(2):
        job = bench.submit(rows, publish="if-better")
        bench.train()
    done = bench.see(job)
    assert done.result["version"] == 1
    assert done.result["is_live"]
    assert "the same as version 1" in done.result["reason"]
    assert len(bench.store.versions("acme.mail")) == 1


def test_another_kind_of_task_does_not_go_live_by_itself(bench):
    bench.submit(make_rows())
    bench.train()
    numbers = [{"text": row["text"], "label": index / 3} for index, row in enumerate(make_rows(seed=4))]
    job = bench.submit(numbers, publish="if-better")
    bench.train()
    done = bench.see(job)
    assert (done.state, done.result["is_live"]) == ("succeeded", False)
    assert "different kinds of task" in done.result["reason"]


def test_another_version_that_went_live_meanwhile_is_the_one_to_beat(bench, monkeypatch):
    for seed in (1, 2):
        bench.submit(make_rows(100, seed=seed), settings=HEAD, publish="never" if seed == 2 else "always")
        bench.train()
    third = bench.submit(make_rows(100, seed=3), settings=HEAD, publish="if-better")
    explain = going_live.explain

    def move_first(comparison):
        if comparison["a"] == 1:
            bench.workspace().move_alias("mail", 2, reason="by hand")
        return explain(comparison)

    monkeypatch.setattr(going_live, "explain", move_first)
    bench.train()
    assert bench.see(third).result["compare"]["a"] == 2


def test_corrections_make_a_better_version(bench):
    rows = make_rows(120, seed=1, wrong=0.45)
    first = bench.submit(rows, settings=RECIPE)
    bench.train()
    assert bench.see(first).state == "succeeded"
    groups = [set(WORDS[start::2]) for start in range(2)]
    items = []
    for row in rows:
        right = LABELS[0 if row["text"].split()[0] in groups[0] else 1]
        if right != row["label"]:
            items.append(Correction(row["text"], right, answered=row["label"], version=1))
    assert len(items) > 30
    workspace = bench.workspace()
    workspace.add_feedback("mail", items)
    merged = workspace.feedback_dataset("mail")
    again = bench.submit(merged.id, settings=RECIPE | {"corrections": True}, publish="if-better")
    bench.train()
    done = bench.see(again)
    assert done.state == "succeeded", done.error
    compare = done.result["compare"]
    assert (compare["a"], compare["b"]) == (1, 2)
    assert compare["gain"] > 0, compare
    assert done.result["is_live"]
    assert "better than version 1" in done.result["reason"]
    assert workspace.versions("mail")[-1].dataset == merged.id


def test_a_job_may_start_from_a_task_of_the_tenants_own_only(bench):
    bench.submit(make_rows(seed=1), "base")
    bench.submit(make_rows(seed=2), "secret", "other")
    bench.train()
    fine = bench.submit(make_rows(seed=3), "mail", settings={"from": "base", "method": None, "size": None})
    theirs = [
        bench.submit(make_rows(seed=4), "mail", settings={"from": name, "method": None, "size": None})
        for name in ("secret", "other.secret", "other.secret@1", "../other.secret")
    ]
    bench.train()
    done = bench.see(fine)
    assert done.state == "succeeded", done.error
    started = bench.store.manifest(bench.store.resolve("acme.mail")).extra["from"]
    assert started[0]["reference"] == "acme.base@1"
    assert "acme." not in say_all(bench, fine)
    for job in theirs:
        assert bench.see(job).state == "failed"
        assert "known" not in bench.see(job).error["message"]


def test_cancelled_before_it_begins_a_job_is_not_read(bench):
    kept, dropped = bench.submit(make_rows(seed=1)), bench.submit(make_rows(seed=2), "other-task")
    bench.workspace().cancel(dropped.id)
    bench.train()
    assert (bench.see(kept).state, bench.see(dropped).state) == ("succeeded", "cancelled")
    assert "read" not in bench.kinds(dropped)


def test_cancelled_while_it_trains_a_job_ends_alone_and_publishes_nothing(bench):
    jobs = [bench.submit(make_rows(seed=seed), f"mail-{seed}", settings={"epochs": 6}) for seed in (1, 2)]
    bench.trainer.heartbeat_s = 0.01
    record = bench.queue.record

    def cancel(cohort, job_id, note):
        record(cohort, job_id, note)
        if job_id == jobs[0].id and note.kind == "epoch" and note.data["epoch"] == 1:
            bench.workspace().cancel(job_id)
            __import__("time").sleep(0.2)

    bench.queue.record = cancel
    bench.train()
    assert [bench.see(job).state for job in jobs] == ["cancelled", "succeeded"]
    assert bench.kinds(jobs[0]).count("epoch") < 6
    assert bench.kinds(jobs[1]).count("epoch") == 6
    assert [task.name for task in bench.store.ledger()] == ["acme.mail-2"]


def test_cancelled_while_it_is_published_a_job_leaves_no_version(bench, monkeypatch):
    job = bench.submit(make_rows())
    publish = going_live.publish_result

    def cancel(*given, **more):
        version = publish(*given, **more)
        bench.workspace().cancel(job.id)
        return version

    monkeypatch.setattr(going_live, "publish_result", cancel)
    bench.train()
    assert bench.see(job).state == "cancelled"
    assert bench.store.ledger() == []
    assert bench.workspace().task("mail").versions == ()


def test_nothing_is_left_of_a_cohort_that_is_done(bench):
    bench.submit(make_rows())
    bench.submit([{"text": "a", "label": "b"}], "bad")
    bench.train()
    assert list((bench.db.paths.service / "runs").iterdir()) == []


def test_no_note_has_a_path_or_a_name_of_the_store(bench):
    rows = [*make_rows(40), {"text": "", "label": "billing"}, {"text": "a b c", "label": "Billing"}]
    job = bench.submit(rows, settings={"bad_rows": "skip", "lr": None, "epochs": None})
    bench.train()
    told = say_all(bench, job)
    assert bench.see(job).state == "succeeded"
    assert "skipped 2 bad rows of rows.jsonl" in told
    for secret in (str(bench.home), "acme.", "/service/", "attempt-", "--set", "`inlay ", "`--"):
        assert secret not in told


def test_the_room_is_entered_without_torch():
    program = (
        "import sys\n"
        "from inlay.service.trainer import check_settings\n"
        "assert not {'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_task_that_was_trained_by_hand_is_the_one_to_beat(bench, toy_task):
    from inlay.settings import FitSettings, MethodConfig, RunConfig, TrainConfig
    from inlay.training import PreparedRun, fit, make_run, publish_result

    config = RunConfig("mail", method=MethodConfig("head"), train=TrainConfig(lr=1e-6, epochs=1))
    task = toy_task("mail")
    prepared = PreparedRun(
        make_run(task, config, bench.context.backbone, bench.store), bench.context.backbone, bench.store
    )
    result = fit([prepared.run], bench.context.backbone, bench.home / "runs", FitSettings(draw_curves=False))[0]
    publish_result(prepared, result)
    assert bench.workspace("local").live("mail") == 1
    rows = make_rows(400, labels=task.labels)
    job = bench.submit(rows, "mail", "local", settings=RECIPE, publish="if-better")
    bench.train()
    done = bench.see(job)
    assert done.state == "succeeded", done.error
    assert (done.result["compare"]["a"], done.result["compare"]["b"]) == (1, 2)
    assert done.result["is_live"] == (done.result["compare"]["gain"] > 0)
    assert bench.workspace("local").live("mail") == (2 if done.result["is_live"] else 1)


def test_a_full_disk_fails_the_job_and_what_was_live_stays(bench, monkeypatch):
    first = bench.submit(make_rows(seed=1))
    bench.train()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", fail)  # by which a version gets its name
        job = bench.submit(make_rows(seed=2))
        bench.train()
    assert (bench.see(job).state, bench.see(job).error["code"]) == ("failed", "disk-full")
    assert str(bench.home) not in say_all(bench, job)
    assert bench.workspace().live("mail") == bench.see(first).result["version"] == 1
    again = bench.submit(make_rows(seed=2))
    bench.train()
    assert bench.see(again).result["version"] == 2
