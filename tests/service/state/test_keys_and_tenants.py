"""Tenants and keys: who may ask; a secret is shown once; nothing tells a stranger which keys there are."""

from __future__ import annotations

import pytest
from sqlalchemy import select
from state_makers import START, store_version, train

from inlay.errors import BadConfig, UnknownName
from inlay.service.state import (
    LOCAL,
    NO_LIMITS,
    Conflict,
    Forbidden,
    Keys,
    TenantLimits,
    Tenants,
    Unauthorized,
    Workspace,
    schema,
)


def test_the_tenant_local_always_is_there(db):
    (local,) = Tenants(db).list()
    assert (local.name, local.prefix) == (LOCAL, "")
    assert Workspace(db, LOCAL).tenant.limits.tokens_per_minute is None


def test_a_tenant_has_the_usual_limits_until_others_are_set(db):
    tenants = Tenants(db)
    assert tenants.add("acme").limits == TenantLimits()
    assert tenants.set_limits("acme", NO_LIMITS, weight=2.5).weight == 2.5
    assert Workspace(db, "acme").tenant.limits == NO_LIMITS
    assert tenants.get("acme").prefix == "acme."


@pytest.mark.parametrize("value", [-1, 1.5, True, "9", 2**63])
def test_a_limit_is_a_whole_number(value):
    with pytest.raises(BadConfig, match="queued_jobs"):
        TenantLimits(queued_jobs=value)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_a_number_above_zero(db, weight):
    with pytest.raises(BadConfig, match="weight"):
        Tenants(db).add("acme", weight=weight)


def test_a_tenants_name_is_given_once(db):
    Tenants(db).add("acme")
    with pytest.raises(Conflict, match="acme"):
        Tenants(db).add("acme")


def test_a_tenant_cannot_take_over_tasks_of_the_store(db):
    store_version(Workspace(db, LOCAL), "acme.mail")
    with pytest.raises(Conflict, match=r"acme\."):
        Tenants(db).add("acme")


def test_a_key_is_found_by_its_text_and_by_nothing_else(db, workspace):
    keys = Keys(db)
    key, text = keys.make("acme", ["predict"], "laptop")
    other, _ = keys.make("acme")
    assert keys.check(text) == key
    wrong = ["", "inl", "inl_", "x", text[:-1], text + "x", text.replace("inl_", "ink_"), f"inl_{other.id}_{text[17:]}"]
    wrong += [
        f"inl_{key.id}_",
        f"inl__{text[17:]}",
        text.upper(),
        "inl_ä_ö",
        "inl_\ud800_\ud800",
        text.replace("_", ""),
    ]
    wrong += [f"inl_{'a' * 12}_{text[17:]}", "inl_" + "_" * 99, f" {text}", f"{text}\n"]
    for attempt in wrong:
        with pytest.raises(Unauthorized):
            keys.check(attempt)


def test_only_the_digest_of_a_secret_is_kept(db, workspace):
    _, text = Keys(db).make("acme")
    secret = text.split("_", 2)[2]
    db.checkpoint()
    kept = b"".join(path.read_bytes() for path in db.paths.service.iterdir() if path.is_file())
    assert secret.encode() not in kept
    assert len(secret) == 43


def test_a_revoked_key_ends_at_once(db, workspace):
    keys = Keys(db)
    key, text = keys.make("acme")
    keys.check(text)
    keys.revoke(key.id)
    with pytest.raises(Unauthorized):
        keys.check(text)
    assert keys.revoke(key.id).revoked_at == START  # again: nothing changes


def test_a_key_ends_when_it_expires(db, clock, workspace):
    keys = Keys(db)
    _, text = keys.make("acme", expires_at=START + 60)
    keys.check(text)
    clock.now += 60
    with pytest.raises(Unauthorized):
        keys.check(text)
    with pytest.raises(BadConfig, match="past"):
        keys.make("acme", expires_at=START)


def test_rotating_gives_a_like_key_and_ends_the_old_one(db, clock, workspace):
    keys = Keys(db)
    old, old_text = keys.make("acme", ["predict"], "laptop")
    new, new_text = keys.rotate(old.id, overlap_s=60)
    assert (new.name, new.scopes, new.tenant) == (old.name, old.scopes, "acme")
    keys.check(old_text)
    clock.now += 61
    assert keys.check(new_text).id == new.id
    with pytest.raises(Unauthorized):
        keys.check(old_text)
    with pytest.raises(Conflict):
        keys.rotate(old.id)


def test_keys_are_needed_from_the_first_on_for_ever(db, workspace):
    keys = Keys(db)
    assert not keys.exist()
    key, _ = keys.make("acme")
    assert keys.exist()
    keys.revoke(key.id)
    assert keys.exist()


def test_a_key_is_of_its_tenant_alone(db, workspace):
    keys = Keys(db)
    key, _ = keys.make(LOCAL)
    for call in (keys.revoke, keys.rotate, keys.get):
        with pytest.raises(UnknownName) as others:
            call(key.id, tenant="acme")
        with pytest.raises(UnknownName) as nobodys:
            call("a" * 12, tenant="acme")
        assert others.value.message.replace(key.id, "") == nobodys.value.message.replace("a" * 12, "")
        assert others.value.hint == nobodys.value.hint
    assert [each.id for each in keys.list(LOCAL)] == [key.id]
    assert keys.list("acme") == []


def test_the_last_use_of_a_key_is_kept_to_the_minute(db, clock, workspace):
    keys = Keys(db)
    _, text = keys.make("acme")
    clock.now += 90
    keys.check(text)
    db.meter.flush()
    (key,) = keys.list("acme")
    assert key.last_used_at == (START + 90) // 60 * 60


def test_a_scope_is_needed_and_known(db, workspace):
    keys = Keys(db)
    with pytest.raises(UnknownName, match="scope"):
        keys.make("acme", ["everything"])
    with pytest.raises(BadConfig, match="scope"):
        keys.make("acme", [])
    key, _ = keys.make("acme", ["predict"])
    key.require("predict")
    with pytest.raises(Forbidden, match="train"):
        key.require("train")


@pytest.mark.parametrize("name", ["a" * 65, "a\nb", "a\0b", "\ud800"])
def test_a_keys_name_is_a_short_line(db, workspace, name):
    with pytest.raises(BadConfig, match="name of a key"):
        Keys(db).make("acme", name=name)


def test_a_key_is_only_made_for_a_tenant_that_is_there(db):
    with pytest.raises(UnknownName, match="tenant"):
        Keys(db).make("nobody")


def test_removing_a_tenant_ends_its_keys_and_hides_it_at_once(db, workspace):
    keys = Keys(db)
    _, text = keys.make("acme")
    train(workspace)
    job = Tenants(db).remove("acme")
    assert (job.kind, job.task) == ("erase", "")
    assert Tenants(db).remove("acme").id == job.id
    with pytest.raises(Unauthorized):
        keys.check(text)
    for call in (lambda: workspace.tenant, workspace.jobs, workspace.limits, lambda: train(workspace)):
        with pytest.raises(UnknownName):
            call()
    with pytest.raises(Conflict, match="local"):
        Tenants(db).remove(LOCAL)


def test_what_an_operator_does_is_noted(db, workspace):
    key, _ = Keys(db, "key:boss").make("acme")
    Keys(db, "key:boss").revoke(key.id)
    row = schema.audit.c
    with db.reading() as connection:
        noted = connection.execute(select(row.actor, row.action, row.target).where(row.tenant == "acme")).all()
    assert [tuple(item) for item in noted] == [
        ("operator", "tenant.add", "acme"),
        ("key:boss", "key.make", key.id),
        ("key:boss", "key.revoke", key.id),
    ]
