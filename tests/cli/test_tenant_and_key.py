"""`tenant` and `key`: the operator's side of a service, whether it runs or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inlay.service.state import Database, JobQueue, JobRequest, Keys, Tenants, Unauthorized, Workspace

from .conftest import Inlay


def open_home(tmp_path: Path) -> Database:
    return Database.open(tmp_path / "home")


def test_a_tenant_is_added_with_its_limits(inlay: Inlay, tmp_path: Path) -> None:
    ended = inlay("tenant", "add", "acme", "--tokens-per-minute", "1,000", "--stored-bytes", "2GB", "--weight", "2")
    assert ended.status == 0
    assert "inlay key make acme" in ended.err
    db = open_home(tmp_path)
    tenant = Tenants(db).get("acme")
    assert (tenant.limits.tokens_per_minute, tenant.limits.stored_bytes, tenant.weight) == (1000, 2 * 10**9, 2.0)
    assert tenant.limits.queued_jobs == 100
    db.close()


def test_limits_are_shown_and_changed_one_by_one(inlay: Inlay) -> None:
    inlay("tenant", "add", "acme", "--labels", "7")
    assert inlay("tenant", "limit", "acme", "--queued-jobs", "none", "--json").data["limits"] == {
        **inlay("tenant", "limit", "local", "--json").data["limits"],
        "tokens_per_minute": 600_000,
        "stored_bytes": 10 * 2**30,
        "labels": 7,
        "queued_jobs": None,
    }
    assert "  labels: 7\n  stored bytes: 10.7 GB\n" in inlay("tenant", "limit", "acme").out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("tenant", "add", "Acme"), "bad-config"),
        (("tenant", "add", "local"), "bad-config"),
        (("tenant", "add", "acme", "--labels", "-1"), "bad-config"),
        (("tenant", "add", "acme", "--labels", "many"), "bad-config"),
        (("tenant", "add", "acme", "--stored-bytes", "1 yard"), "bad-config"),
        (("tenant", "add", "acme", "--weight", "0"), "bad-config"),
        (("tenant", "limit", "nobody"), "unknown-name"),
        (("tenant", "remove", "nobody", "--yes"), "unknown-name"),
        (("tenant", "remove", "local", "--yes"), "conflict"),
        (("tenant", "remove", "local"), "bad-config"),
        (("key", "make", "nobody"), "unknown-name"),
        (("key", "make", "local", "--scope", "predict,everything"), "unknown-name"),
        (("key", "make", "local", "--expires", "soon"), "bad-config"),
        (("key", "make", "local", "--expires", "xd"), "bad-config"),
        (("key", "make", "local", "--expires", "99999999d"), "bad-config"),
        (("key", "list", "nobody"), "unknown-name"),
        (("key", "revoke", "nothing"), "unknown-name"),
        (("key", "rotate", "nothing"), "unknown-name"),
        (("key", "rotate", "nothing", "--overlap", "-1d"), "bad-config"),
    ],
)
def test_what_makes_no_sense_is_refused(inlay: Inlay, arguments: tuple[str, ...], code: str) -> None:
    ended = inlay(*arguments, "--json")
    assert ended.status not in (0, 1)
    assert json.loads(ended.err.splitlines()[-1])["error"]["code"] == code
    assert ended.out == ""


def test_a_key_is_printed_once_alone_on_stdout(inlay: Inlay, tmp_path: Path) -> None:
    ended = inlay("key", "make", "local", "--name", "laptop")
    (text,) = ended.out.splitlines()
    db = open_home(tmp_path)
    key = Keys(db).check(text)
    assert (key.tenant, key.scopes) == ("local", {"predict", "train", "admin"})
    db.close()
    for shown in (inlay("key", "list"), inlay("key", "list", "--json")):
        assert key.id in shown.out
        assert text.split("_", 2)[2] not in shown.out + shown.err


def test_scopes_and_an_end_are_given_as_words(inlay: Inlay) -> None:
    made = inlay(
        "key", "make", "local", "--scope", "predict, train", "--scope", "operator", "--expires", "90d", "--json"
    )
    assert made.data["scopes"] == ["predict", "train", "operator"]
    assert made.data["expires_at"] > made.data["created_at"]
    assert made.data["key"].startswith(f"inl_{made.data['id']}_")
    assert "ends 20" in inlay("key", "list", "local").out


def test_a_revoked_key_works_no_more(inlay: Inlay, tmp_path: Path) -> None:
    made = inlay("key", "make", "local", "--json").data
    assert inlay("key", "revoke", made["id"]).out == f"revoked {made['id']} of local\n"
    db = open_home(tmp_path)
    with pytest.raises(Unauthorized):
        Keys(db).check(made["key"])
    db.close()
    assert "revoked" in inlay("key", "list").out
    assert inlay("key", "revoke", made["id"], "--json").data["revoked_at"] is not None


def test_a_rotated_key_may_work_for_a_while(inlay: Inlay, tmp_path: Path) -> None:
    old = inlay("key", "make", "local", "--name", "laptop", "--json").data
    new = inlay("key", "rotate", old["id"], "--overlap", "1d", "--json").data
    assert (new["name"], new["scopes"]) == ("laptop", old["scopes"])
    db = open_home(tmp_path)
    Keys(db).check(old["key"])
    Keys(db).check(new["key"])
    db.close()
    at_once = inlay("key", "rotate", new["id"])
    db = open_home(tmp_path)
    Keys(db).check(at_once.out.strip())
    with pytest.raises(Unauthorized):
        Keys(db).check(new["key"])
    db.close()


def test_no_keys_yet_says_how_to_make_one(inlay: Inlay) -> None:
    ended = inlay("key", "list")
    assert (ended.status, ended.out) == (0, "")
    assert "inlay key make local" in ended.err


def test_tenants_are_listed_with_what_they_use(inlay: Inlay, tmp_path: Path) -> None:
    inlay("tenant", "add", "acme")
    inlay("key", "make", "acme")
    db = open_home(tmp_path)
    Workspace(db, "acme").submit(JobRequest("train", "mail"))
    db.close()
    (acme, local) = inlay("tenant", "list", "--json").data["tenants"]
    assert (acme["name"], acme["num_keys"], acme["used"]) == ("acme", 1, {"queued_jobs": 1, "stored_bytes": 0})
    assert local["name"] == "local"
    assert inlay("tenant", "list").out.splitlines()[2].split()[:3] == ["acme", "1", "1"]


def test_removing_a_tenant_needs_a_yes_and_leaves_nothing(inlay: Inlay, tmp_path: Path) -> None:
    inlay("tenant", "add", "acme")
    refused = inlay("tenant", "remove", "acme")
    assert refused.status == 2
    assert "--yes" in refused.err
    db = open_home(tmp_path)
    Workspace(db, "acme").submit(JobRequest("train", "mail"))
    db.close()
    assert inlay("tenant", "remove", "acme", "--yes").out == "removed acme: 0 versions, 0 datasets, 0 files\n"
    assert [each["name"] for each in inlay("tenant", "list", "--json").data["tenants"]] == ["local"]


def test_a_tenant_whose_job_is_trained_is_removed_by_the_service(
    inlay: Inlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inlay("tenant", "add", "acme")
    db = open_home(tmp_path)
    Workspace(db, "acme").submit(JobRequest("train", "mail"))
    queue = JobQueue(db)
    cohort = queue.claim("trainer", company_s=0)
    assert cohort is not None
    monkeypatch.setattr("inlay.service.state.erasure.PATIENCE_S", 0.0)
    ended = inlay("tenant", "remove", "acme", "--yes", "--json")
    assert ended.data == {"tenant": "acme", "state": "removing", "erased": None}
    assert "(being removed)" in inlay("tenant", "list").out
    assert "running service will finish" in inlay("tenant", "remove", "acme", "--yes").err
    queue.finish(cohort, cohort.jobs[0].id, "cancelled")
    assert inlay("tenant", "remove", "acme", "--yes").out.startswith("removed acme")
    db.close()
