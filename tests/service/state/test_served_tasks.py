"""Tasks: which version answers, moved by compare-and-set with a history; and what `inlay train` left in the store."""

from __future__ import annotations

import shutil

import pytest
from state_makers import DIGEST, go_live, make_dataset, store_version, train, train_and_store

from inlay.errors import BadConfig, UnknownName
from inlay.service.state import LOCAL, Conflict, LiveMoved, Tenants, Workspace


@pytest.fixture
def local(db) -> Workspace:
    return Workspace(db, LOCAL, "local")


def test_the_live_version_answers_and_any_can_be_named(workspace):
    go_live(workspace, number=1)
    go_live(workspace, number=2)
    assert workspace.resolve("mail") == ("acme.mail", 2, DIGEST)
    assert workspace.resolve("mail@1") == ("acme.mail", 1, DIGEST)
    assert workspace.live("mail") == 2
    with pytest.raises(UnknownName, match="mail@3"):
        workspace.resolve("mail@3")


@pytest.mark.parametrize("reference", ["mail@", "mail@0", "mail@best", "mail@1x", "mail@-1", "mail@@1"])
def test_a_reference_is_a_name_or_a_number_of_one(workspace, reference):
    go_live(workspace)
    with pytest.raises(BadConfig):
        workspace.resolve(reference)


def test_a_task_without_a_live_version_says_what_to_do(workspace):
    train(workspace)
    with pytest.raises(Conflict, match="no live version") as caught:
        workspace.resolve("mail")
    assert "wait until its job has succeeded" in str(caught.value.hint)
    assert "mail@1" not in str(caught.value.hint)
    assert workspace.live("mail") is None
    assert workspace.alias("mail") is None


def test_rolling_back_is_a_move_with_a_history(workspace):
    go_live(workspace, number=1)
    go_live(workspace, number=2)
    alias = workspace.alias("mail")
    assert alias.etag == '"2"'
    moved = workspace.move_alias("mail", 1, if_match=2, reason="2 confuses refunds")
    assert (moved.version, moved.counter, moved.moved_by) == (1, 3, "key:test")
    assert workspace.resolve("mail").number == 1
    moves = [(move.from_version, move.to_version, move.reason) for move in workspace.history("mail")]
    assert moves == [(2, 1, "2 confuses refunds"), (1, 2, "first version"), (None, 1, "first version")]


def test_of_two_who_move_an_alias_the_second_looks_again(workspace):
    go_live(workspace, number=1)
    go_live(workspace, number=2)
    workspace.move_alias("mail", 1, if_match=2)
    with pytest.raises(LiveMoved):
        workspace.move_alias("mail", 1, if_match=2)
    with pytest.raises(LiveMoved):
        workspace.move_alias("mail", 2, if_match=0)
    assert workspace.move_alias("mail", 2).version == 2


def test_moving_to_where_it_is_changes_nothing(workspace):
    go_live(workspace)
    before = workspace.alias("mail")
    assert workspace.move_alias("mail", 1, reason="again") == before
    assert len(workspace.history("mail")) == 1


@pytest.mark.parametrize("number", [0, -1, 2, 10**12])
def test_an_alias_only_moves_to_a_version_of_the_task(workspace, number):
    go_live(workspace)
    with pytest.raises(UnknownName, match="version"):
        workspace.move_alias("mail", number)


def test_the_first_move_may_want_that_there_is_no_alias(workspace):
    go_live(workspace, goes_live=False)
    assert workspace.move_alias("mail", 1, if_match=0).counter == 1


def test_policies_are_set_with_compare_and_set(workspace):
    train(workspace)
    task = workspace.task("mail")
    assert task.policy == "if-better"
    changed = workspace.set_policy("mail", "never", if_match=task.counter)
    assert changed.policy == "never"
    assert train(workspace).publish == "never"
    assert train(workspace, publish="always").publish == "always"
    with pytest.raises(LiveMoved):
        workspace.set_policy("mail", "always", if_match=task.counter)
    with pytest.raises(UnknownName, match="policy"):
        workspace.set_policy("mail", "sometimes")


def test_a_task_is_shown_with_its_versions(workspace):
    dataset = make_dataset(workspace)
    train_and_store(workspace, seed=1, dataset=dataset.id)
    train_and_store(workspace, seed=2, dataset=dataset.id)
    store_version(workspace, seed=3)  # a job that was cancelled after it published: no version of the tenant's
    workspace.add_usage("mail", rows=5, tokens=50)
    workspace.db.meter.flush()
    task = workspace.task("mail")
    assert [version.number for version in task.versions] == [1, 2]
    shown = task.to_json()
    assert shown["live"]["version"] == 2
    assert shown["live"]["score"] == 0.52
    assert (shown["kind"], shown["labels"], shown["num_versions"]) == ("classify", ["ham", "spam"], 2)
    assert (shown["rows_today"], shown["follows"]) == (5, "alias")
    version = workspace.versions("mail")[0].to_json()
    assert (version["dataset"], version["is_live"], version["metric"]) == (dataset.id, False, "accuracy")
    with pytest.raises(UnknownName):
        workspace.resolve("mail@3")


def test_tasks_are_listed_by_name_in_pages(workspace):
    for name in ("c", "a", "b"):
        train(workspace, name)
    first = workspace.tasks(limit=2)
    assert [task.name for task in first.items] == ["a", "b"]
    second = workspace.tasks(limit=2, cursor=first.next_cursor)
    assert [task.name for task in second.items] == ["c"]
    assert second.next_cursor is None


def test_what_was_trained_by_hand_is_served_by_its_newest_version(local):
    store_version(local, "spam", seed=1)
    assert local.resolve("spam").number == 1
    store_version(local, "spam", seed=2)
    assert local.resolve("spam").number == 2
    assert local.resolve("spam@1").number == 1
    (task,) = local.tasks().items
    assert (task.name, task.follows, task.live.number) == ("spam", "latest", 2)
    with pytest.raises(UnknownName):
        local.resolve("spam@9")


def test_a_task_trained_by_hand_is_taken_over_as_it_is(local):
    store_version(local, "spam", seed=1)
    train(local, "spam")
    store_version(local, "spam", seed=2)  # the trainer published, and nothing is live yet
    assert local.resolve("spam").number == 1
    assert local.task("spam").follows == "alias"
    assert local.move_alias("spam", 2).counter == 2


def test_moving_the_alias_of_a_task_trained_by_hand_takes_it_over(local):
    store_version(local, "spam", seed=1)
    store_version(local, "spam", seed=2)
    local.move_alias("spam", 1)
    assert local.resolve("spam").number == 1
    store_version(local, "spam", seed=3)
    assert local.resolve("spam").number == 1


def test_local_sees_no_other_tenants_tasks(local, workspace):
    train_and_store(workspace, "mail")
    store_version(local, "eu.mail")  # no tenant is called `eu`
    assert [task.name for task in local.tasks().items] == ["eu.mail"]
    assert local.resolve("eu.mail").store_name == "eu.mail"
    for reference in ("acme.mail", "acme.mail@1", "acme.nothing"):
        with pytest.raises(UnknownName) as refused:
            local.resolve(reference)
        assert "acme.mail`?" not in str(refused.value.hint)
    for call in (local.task, local.erase_task, local.history, local.versions):
        with pytest.raises(UnknownName):
            call("acme.mail")
    with pytest.raises(UnknownName):
        local.move_alias("acme.mail", 1)


def test_a_task_removed_from_the_store_by_hand_is_unknown_without_naming_others(local, workspace):
    train_and_store(workspace, "secret")
    store_version(local, "spam")
    local.resolve("spam")
    local.db.store.remove("spam")
    with pytest.raises(UnknownName) as refused:
        local.resolve("spam")
    assert "secret" not in str(refused.value)


def test_a_store_that_is_gone_does_not_stop_lists(workspace):
    train_and_store(workspace)
    shutil.rmtree(workspace.db.paths.home / "tasks")
    assert workspace.task("mail").versions == ()
    assert workspace.resolve("mail").number == 1  # the engine will say what is missing


def test_resolving_asks_the_database_only_after_a_change(workspace, monkeypatch):
    go_live(workspace)
    workspace.resolve("mail")
    reads = []
    reading = workspace.db.reading
    monkeypatch.setattr(workspace.db, "reading", lambda: reads.append(1) or reading())
    for _ in range(10):
        workspace.resolve("mail")
    assert not reads
    Tenants(workspace.db).add("another")
    reads.clear()
    workspace.resolve("mail")
    workspace.resolve("mail")
    assert len(reads) == 1


def test_a_name_close_to_one_of_the_tenants_own_is_suggested(workspace):
    train(workspace, "refunds")
    with pytest.raises(UnknownName) as refused:
        workspace.task("refund")
    assert refused.value.hint == "did you mean `refunds`?"
