"""Another tenant's things: every method refuses them exactly as it refuses what never was."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from state_makers import DIGEST, make_dataset, store_version, train, train_and_store

from inlay.errors import InlayError, UnknownName
from inlay.service.state import LOCAL, Correction, JobRequest, Tenants, Workspace

Call = Callable[[Workspace, str], object]
# Method -> a call of it with somebody's id or name. Those that take none are below.
BY_DATASET: dict[str, Call] = {
    "dataset": lambda own, found: own.dataset(found),
    "set_reading": lambda own, found: own.set_reading(found, {"notes": []}),
    "delete_dataset": lambda own, found: own.delete_dataset(found),
    "submit": lambda own, found: own.submit(JobRequest("train", "own", found)),
}
BY_JOB: dict[str, Call] = {
    "job": lambda own, found: own.job(found),
    "cancel": lambda own, found: own.cancel(found),
    "events": lambda own, found: own.events(found),
}
BY_TASK: dict[str, Call] = {
    "task": lambda own, found: own.task(found),
    "versions": lambda own, found: own.versions(found),
    "live": lambda own, found: own.live(found),
    "alias": lambda own, found: own.alias(found),
    "resolve": lambda own, found: own.resolve(found),
    "move_alias": lambda own, found: own.move_alias(found, 1),
    "history": lambda own, found: own.history(found),
    "set_policy": lambda own, found: own.set_policy(found, "never"),
    "erase_task": lambda own, found: own.erase_task(found),
    "add_feedback": lambda own, found: own.add_feedback(found, [Correction("a", "b")]),
    "feedback": lambda own, found: own.feedback(found),
    "num_feedback": lambda own, found: own.num_feedback(found),
    "feedback_dataset": lambda own, found: own.feedback_dataset(found),
}
BY_NOTHING = {
    *("datasets", "jobs", "tasks", "usage", "stored_bytes", "limits", "add_dataset", "add_usage"),
    *("begin_call", "finish_call", "abandon_call", "audit"),
}


@pytest.fixture
def owner(db, workspace) -> Workspace:
    """The tenant `acme` with one of everything."""
    dataset = make_dataset(workspace)
    train_and_store(workspace, dataset=dataset.id)
    workspace.add_feedback("mail", [Correction("win", "spam")])
    workspace.add_usage("mail", rows=1, tokens=1)
    db.meter.flush()
    train(workspace)
    return workspace


@pytest.fixture(params=["rival", LOCAL])
def stranger(db, owner, request) -> Workspace:
    if request.param != LOCAL:
        Tenants(db).add(request.param)
    return Workspace(db, request.param, "key:stranger")


def refusal(call: Call, workspace: Workspace, name: str) -> tuple[object, ...]:
    """The error of a call, with the name it was about left out."""
    with pytest.raises(InlayError) as refused:
        call(workspace, name)
    error = refused.value
    return type(error), error.message.replace(name, "…"), error.hint


def snapshot(owner: Workspace) -> tuple[object, ...]:
    return (
        *(owner.datasets(), owner.jobs(), owner.tasks(), owner.usage(), owner.feedback("mail"), owner.history("mail")),
        *(owner.resolve("mail"), owner.stored_bytes()),
    )


def test_every_method_of_the_workspace_is_tried_here():
    methods = {name for name, _ in inspect.getmembers(Workspace, inspect.isfunction) if not name.startswith("_")}
    assert methods == BY_DATASET.keys() | BY_JOB.keys() | BY_TASK.keys() | BY_NOTHING


def test_anothers_datasets_jobs_and_tasks_are_unknown(owner, stranger):
    before = snapshot(owner)
    theirs = [(call, owner.datasets().items[0].id, "ds_" + "a" * 20) for call in BY_DATASET.values()]
    theirs += [(call, job.id, "job_" + "a" * 20) for call in BY_JOB.values() for job in owner.jobs().items]
    theirs += [(call, name, "never") for call in BY_TASK.values() for name in ("mail", "acme.mail")]
    for call, name, unknown in theirs:
        refused = refusal(call, stranger, name)
        assert refused[0] is UnknownName
        assert refused == refusal(call, stranger, unknown)
    assert snapshot(owner) == before


def test_anothers_version_is_unknown(owner, stranger):
    for reference in ("mail@1", "acme.mail@1", "../acme.mail", "rival.mail", "mail\0", "acme.mail@2"):
        with pytest.raises(UnknownName) as refused:
            stranger.resolve(reference)
        assert "acme" not in str(refused.value.hint)


def test_lists_and_counts_are_the_tenants_own(owner, stranger):
    for page in (stranger.datasets(), stranger.jobs(), stranger.tasks()):
        assert page.items == ()
    assert stranger.usage() == []
    assert stranger.stored_bytes() == 0
    assert stranger.limits().queued_jobs == 0
    assert stranger.jobs(task="mail").items == ()


def test_a_task_of_the_same_name_is_another_task(owner, stranger):
    train_and_store(stranger, "mail", seed=5)
    assert stranger.resolve("mail").store_name == stranger.tenant.prefix + "mail"
    assert owner.resolve("mail").store_name == "acme.mail"
    assert stranger.num_feedback("mail") == 0
    stranger.erase_task("mail")
    assert owner.resolve("mail").number == 1


def test_a_job_cannot_use_anothers_dataset_by_a_call_of_its_own(owner, stranger):
    call = stranger.begin_call("once", DIGEST)
    with pytest.raises(UnknownName):
        stranger.submit(JobRequest("train", "own", owner.datasets().items[0].id), call)
    assert stranger.jobs().items == ()
    assert stranger.tasks().items == ()


def test_names_suggested_in_errors_are_the_tenants_own(db, owner, stranger):
    train(owner, "very-secret-project")
    store_version(owner, "very-secret-project")
    for name in ("very-secret-projec", "very-secret-project"):
        with pytest.raises(UnknownName) as refused:
            stranger.task(name)
        assert "known: none yet" in str(refused.value.hint)
