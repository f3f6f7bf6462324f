"""A machine of a cluster that cannot do a service's work is refused, and says what to do."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from inlay.errors import InlayError, StoreUnreachable, Unsupported
from inlay.service.home import prepare_home
from inlay.service.on_ray import fleet_member
from inlay.service.on_ray.fleet_member import check_machine, prepare_machine
from inlay.service.on_ray.fleet_messages import (
    FleetOrder,
    describe_failure,
    find_namespace,
    make_order,
    take_environment,
)
from inlay.service.settings import VARIABLE as SETTINGS_VARIABLE
from inlay.service.settings import ClusterSettings, ServeSettings, read_settings
from inlay.store import ObjectStorage


@pytest.fixture
def settings(tmp_path, monkeypatch) -> ServeSettings:
    monkeypatch.delenv("INLAY_DATABASE", raising=False)
    made = ServeSettings(home=tmp_path / "home", cluster=ClusterSettings(engines=(2, 4), num_gpus=0.5))
    prepare_home(made)
    return made


@pytest.fixture
def on_storage(settings, tmp_path, monkeypatch) -> ServeSettings:
    """A service whose store lies on object storage, here a folder as `file://`."""
    pytest.importorskip("obstore")
    monkeypatch.setenv("INLAY_DATABASE", "postgresql://user@db/inlay")
    monkeypatch.setenv("INLAY_LOCAL", str(tmp_path / "local"))
    return replace(settings, store=f"file://{tmp_path}/bucket")


@pytest.fixture
def order(settings) -> FleetOrder:
    return make_order(settings)


def test_this_machine_does_its_own_work(settings, order):
    check_machine(order, settings)
    assert make_order(settings).mark == order.mark, "started again, the mark stays"


def test_settings_travel_whole(settings, order):
    assert read_settings({SETTINGS_VARIABLE: order.settings}) == settings


def test_other_versions_are_refused_and_named(settings, order):
    with pytest.raises(Unsupported, match=r"and the service inlay 0\.0\.1") as refused:
        check_machine(replace(order, versions=("inlay 0.0.1",)), settings)
    assert "install the same versions" in refused.value.hint


def test_a_folder_that_is_not_shared_is_refused(settings, order):
    with pytest.raises(Unsupported, match="does not see the service's folder"):
        check_machine(replace(order, mark="of another folder"), settings)
    (settings.run_folder / "cluster-mark").unlink()
    with pytest.raises(Unsupported, match="does not see the service's folder"):
        check_machine(order, settings)


def test_with_a_store_on_object_storage_a_machine_has_a_home_of_its_own(on_storage, tmp_path, monkeypatch):
    order = make_order(on_storage)
    monkeypatch.setenv("INLAY_LOCAL", str(tmp_path / "other"))
    elsewhere = replace(order, hostname="another-machine")
    check_machine(elsewhere, on_storage)
    assert make_order(on_storage).mark == order.mark, "another service on this store has the same mark"
    prepared = prepare_machine(on_storage)
    assert prepared.home.is_relative_to(tmp_path / "other")
    assert prepared.run_folder.stat().st_mode & 0o777 == 0o700
    assert prepare_machine(replace(on_storage, store=None)).home == on_storage.home


def test_another_bucket_of_the_same_name_is_refused(on_storage, tmp_path):
    order = make_order(on_storage)
    with pytest.raises(Unsupported, match="has another bucket for `file://") as refused:
        check_machine(replace(order, mark="of another bucket"), on_storage)
    assert "AWS_ENDPOINT_URL" in refused.value.hint
    (tmp_path / "bucket" / "service" / "cluster-mark").unlink()
    with pytest.raises(Unsupported, match="has another bucket"):
        check_machine(order, on_storage)


def test_storage_that_a_machine_cannot_reach_is_refused_and_the_machine_named(on_storage, monkeypatch):
    def refuse(storage: ObjectStorage, key: str) -> bytes:
        raise StoreUnreachable("`s3://x` refuses: 403", "check the credentials")

    order = make_order(on_storage)
    monkeypatch.setattr(ObjectStorage, "get", refuse)
    with pytest.raises(StoreUnreachable, match=f"on machine `{order.hostname}`: `s3://x` refuses: 403") as refused:
        check_machine(order, on_storage)
    assert refused.value.hint == "check the credentials"


def test_a_machine_takes_the_variables_of_storage_but_credentials_only_where_it_has_none(on_storage, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://storage")
    given = make_order(on_storage).environment
    bare = {"AWS_REGION": "eu-west-1", "PATH": "/bin"}
    take_environment(given, bare)
    assert bare == {**given, "AWS_REGION": "eu-west-1", "PATH": "/bin"}
    assert {"AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL"} <= bare.keys()
    own = {"AWS_PROFILE": "mine", "INLAY_DATABASE": "mine"}
    take_environment(given, own)
    assert own["AWS_ENDPOINT_URL"] == "http://storage"
    assert own["INLAY_DATABASE"] == "mine"
    assert "AWS_ACCESS_KEY_ID" not in own, "keys of two accounts do not fit together"
    assert "AWS_ENDPOINT_URL" not in make_order(replace(on_storage, store=None)).environment, "a folder needs none"


def test_a_database_in_a_file_is_refused_on_another_machine(settings, order, monkeypatch):
    elsewhere = replace(order, hostname="another-machine")
    with pytest.raises(Unsupported, match="lies in SQLite") as refused:
        check_machine(elsewhere, settings)
    assert "$INLAY_DATABASE" in refused.value.hint
    monkeypatch.setenv("INLAY_DATABASE", "postgresql://user@db/inlay")
    check_machine(elsewhere, settings)


def test_services_share_a_fleet_only_if_they_want_the_same(settings, order):
    assert make_order(replace(settings, port=1, web_processes=3)).identity == order.identity
    assert make_order(replace(settings, backbone="other")).identity != order.identity
    assert make_order(replace(settings, num_slots=3)).identity != order.identity


def test_services_of_one_bucket_share_a_fleet_whatever_machine_they_run_on(on_storage, order, tmp_path):
    first = make_order(on_storage).identity
    assert make_order(replace(on_storage, home=tmp_path / "of-another-machine")).identity == first
    assert make_order(replace(on_storage, store=f"file://{tmp_path}/other")).identity != first
    assert order.identity != first


def test_a_fleet_is_that_of_a_database_or_of_a_home(settings, tmp_path, monkeypatch):
    own = find_namespace(settings)
    assert own != find_namespace(replace(settings, home=tmp_path / "other"))
    monkeypatch.setenv("INLAY_DATABASE", "postgresql://user@db/inlay")
    shared = find_namespace(settings)
    assert shared != own
    assert shared == find_namespace(replace(settings, home=tmp_path / "other"))


def test_an_error_travels_as_data():
    failure = describe_failure(InlayError("a message", "a hint"))
    assert (failure.message, failure.hint, failure.exit_status) == ("a message", "a hint", InlayError.exit_status)


def test_copies_are_looked_for_at_once_and_again_after_any_error(monkeypatch):
    looked: list[str] = []
    done = threading.Event()

    class PlayedStore:
        def __init__(self, place: str) -> None:
            looked.append(place)

        def forget_gone(self) -> None:
            if len(looked) == 3:
                done.set()
                threading.Event().wait()  # for ever: the thread is a daemon
            raise (StoreUnreachable("no answer", "try later") if len(looked) == 1 else OSError("a file that is gone"))

    monkeypatch.setattr(fleet_member, "Store", PlayedStore)
    monkeypatch.setattr(fleet_member, "SWEEP_S", 0.01)
    fleet_member.keep_forgetting("s3://bucket")
    assert done.wait(10)
