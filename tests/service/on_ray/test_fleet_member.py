"""A machine of a cluster that cannot do a service's work is refused, and says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inlay.errors import InlayError, Unsupported
from inlay.service.home import prepare_home
from inlay.service.on_ray.fleet_member import check_machine
from inlay.service.on_ray.fleet_messages import FleetOrder, describe_failure, find_namespace, make_order
from inlay.service.settings import VARIABLE as SETTINGS_VARIABLE
from inlay.service.settings import ClusterSettings, ServeSettings, read_settings


@pytest.fixture
def settings(tmp_path, monkeypatch) -> ServeSettings:
    monkeypatch.delenv("INLAY_DATABASE", raising=False)
    made = ServeSettings(home=tmp_path / "home", cluster=ClusterSettings(engines=(2, 4), num_gpus=0.5))
    prepare_home(made)
    return made


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


def test_with_versions_on_object_storage_no_folder_is_shared(settings, order, monkeypatch):
    monkeypatch.setenv("INLAY_DATABASE", "postgresql://user@db/inlay")
    (settings.run_folder / "cluster-mark").unlink()
    check_machine(replace(order, hostname="another-machine"), replace(settings, store="s3://bucket/prefix"))


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
    remote = replace(settings, store="s3://bucket/prefix")
    assert make_order(remote).identity != order.identity


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
