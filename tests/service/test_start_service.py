"""What is refused before the first process begins; the home of a service, and the environment of its processes."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tomllib
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from inlay.cli import main
from inlay.errors import BadConfig, InlayError, Missing
from inlay.service import start_service
from inlay.service.home import AlreadyServed, HomeLock, prepare_home, read_status, write_status
from inlay.service.settings import VARIABLE, ServeSettings, read_settings
from inlay.service.start_service import (
    EXTRA,
    PortTaken,
    bind,
    check_extra,
    make_environment,
    make_programs,
    notify_systemd,
    prepare_database,
)
from inlay.service.state import Database, Keys


@pytest.fixture
def settings(tmp_path):
    made = ServeSettings(home=tmp_path / "home", port=0)
    prepare_home(made)
    return made


def mode_of(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_services_folders_are_private(settings):
    assert mode_of(settings.folder) == mode_of(settings.run_folder) == 0o700
    assert mode_of(settings.engine_socket.parent) == 0o700


def test_a_home_that_is_no_folder_is_refused_with_a_hint(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InlayError, match="cannot be written to") as refused:
        prepare_home(ServeSettings(home=tmp_path / "file"))
    assert "--store" in refused.value.hint


def test_a_home_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("inlay.service.home.make_directory", refuse)  # root, as which tests may run, has every right
    with pytest.raises(InlayError, match="cannot be written to: permission denied"):
        prepare_home(ServeSettings(home=tmp_path / "home"))


def test_the_engines_socket_has_a_short_path_wherever_the_home_is(tmp_path):
    deep = ServeSettings(home=tmp_path / ("long" * 40))
    prepare_home(deep)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(deep.engine_socket))
    deep.engine_socket.unlink()
    assert deep.engine_socket != ServeSettings(home=tmp_path / ("long" * 41)).engine_socket
    deep.engine_socket.parent.rmdir()


def test_a_second_service_on_a_home_is_refused_and_told_where_the_first_is(settings):
    lock = HomeLock(settings)
    with pytest.raises(AlreadyServed, match=f"process {os.getpid()}") as refused:
        HomeLock(settings)
    assert settings.address in str(refused.value)
    lock.release()
    HomeLock(settings).release()


def test_a_home_is_waited_for_while_the_processes_of_a_killed_service_end(settings):
    program = (
        "import os, sys, subprocess; from pathlib import Path\n"
        "from inlay.service.home import HomeLock; from inlay.service.settings import ServeSettings\n"
        "lock = HomeLock(ServeSettings(home=Path(sys.argv[1]), port=0))\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1.5)'], pass_fds=[lock.descriptor])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(settings.home)], check=True, timeout=30)
    with pytest.raises(AlreadyServed):
        HomeLock(settings, patience_s=0.0)
    HomeLock(settings).release()


def test_the_state_of_the_processes_can_be_read_by_others(settings):
    assert read_status(settings) == {}
    write_status(settings, {"pid": os.getpid(), "processes": []})
    assert read_status(settings) == {"pid": os.getpid(), "processes": [], "is_running": True}
    write_status(settings, {"pid": 2**22 + 1})
    assert read_status(settings)["is_running"] is False


def test_a_port_that_is_taken_is_refused_naming_the_next_one(settings):
    with bind(settings) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of `127.0.0.1` is taken") as refused:
            bind(ServeSettings(home=settings.home, port=port))
        assert f"--port {port + 1}" in refused.value.hint


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host", "a" * 300])
def test_a_host_that_is_not_this_machine_is_refused(settings, host):
    with pytest.raises(InlayError, match="is not an address of this machine") as refused:
        bind(ServeSettings(home=settings.home, host=host, port=0))
    assert "127.0.0.1" in refused.value.hint


def test_a_missing_extra_is_named_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start_service, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    with pytest.raises(Missing, match="not installed: uvicorn") as refused:
        check_extra()
    assert "inlay[serve]" in refused.value.hint
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--store", str(tmp_path / "home")])
    assert stop.value.code == Missing.exit_status
    assert "pip install 'inlay[serve]'" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_the_extra_is_what_pyproject_names():
    tree = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf8"))
    named = {entry.partition(">")[0].replace("-", "_") for entry in tree["project"]["optional-dependencies"]["serve"]}
    assert set(EXTRA) == named - {"uvloop"}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"port": 70000}, "--port 70000"),
        ({"web_processes": 0}, "--web 0"),
        ({"num_slots": -1}, "--slots -1"),
        ({"engine_threads": 0}, "--engine-threads 0"),
        ({"device": "tpu"}, "tpu"),
        ({"precision": "int4"}, "int4"),
        ({"hosts": ("http://x",)}, "http://x"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, values, problem):
    with pytest.raises(BadConfig, match=problem.replace("/", ".")):
        ServeSettings(home=tmp_path, **values).check()


def test_settings_reach_a_process_unchanged(tmp_path):
    settings = ServeSettings(home=tmp_path / "ä b", hosts=("a.example", "b.example"), engine_threads=3)
    settings.check()
    assert read_settings({VARIABLE: settings.to_json()}) == settings
    with pytest.raises(BadConfig, match=VARIABLE):
        read_settings({})


@pytest.mark.parametrize(
    ("host", "is_loopback", "address"),
    [
        ("127.0.0.1", True, "http://127.0.0.1:8642"),
        ("localhost", True, "http://localhost:8642"),
        ("::1", True, "http://[::1]:8642"),
        ("0.0.0.0", False, "http://127.0.0.1:8642"),
        ("192.0.2.4", False, "http://192.0.2.4:8642"),
        ("example.org", False, "http://example.org:8642"),
    ],
)
def test_addresses_and_loopback(tmp_path, host, is_loopback, address):
    settings = ServeSettings(home=tmp_path, host=host)
    assert (settings.is_loopback, settings.address) == (is_loopback, address)


@pytest.mark.parametrize(
    ("host", "hosts", "is_for_others"),
    [
        ("127.0.0.1", (), False),
        ("127.0.0.1", ("localhost:9000", "[::1]"), False),
        ("0.0.0.0", (), True),
        ("127.0.0.1", ("inlay.example.org",), True),
    ],
)
def test_a_name_that_a_proxy_serves_opens_the_service_as_much_as_an_address(tmp_path, host, hosts, is_for_others):
    assert ServeSettings(home=tmp_path, host=host, hosts=hosts).is_for_others is is_for_others


def test_without_a_key_a_service_for_others_does_not_start(settings):
    assert prepare_database(settings) is False
    for more in ({"host": "0.0.0.0"}, {"hosts": ("inlay.example.org",)}):
        with pytest.raises(InlayError, match="no key exists") as refused:
            prepare_database(replace(settings, **more))
        assert "inlay key make" in refused.value.hint
    with closing(Database.open(settings.home)) as database:
        Keys(database).make("local", ["predict"], "test")
    assert prepare_database(replace(settings, host="0.0.0.0")) is True


def test_doctor_tells_of_a_service_that_runs(settings, capsys):
    def find_service() -> dict:
        with pytest.raises(SystemExit):
            main(["doctor", "--json", "--store", str(settings.home)])
        return next(each for each in json.loads(capsys.readouterr().out)["findings"] if each["what"] == "service")

    assert find_service()["state"] == "absent"
    processes = [
        {"name": "engine", "state": "ready", "restarts": 2},
        {"name": "web", "state": "starting", "restarts": 0},
    ]
    write_status(settings, {"pid": os.getpid(), "address": "http://127.0.0.1:1", "processes": processes})
    assert find_service() == {
        "what": "service",
        "state": "ok",
        "detail": "http://127.0.0.1:1 (engine ready, web starting; 2 restarts)",
    }


def test_processes_wait_without_spinning_share_the_cores_and_ask_no_hub(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("inlay.service.settings.count_cores", lambda: 8)
    settings = ServeSettings(home=tmp_path)
    own = {"PATH": "/bin", "OMP_WAIT_POLICY": "ACTIVE", "RANK": "1", "WORLD_SIZE": "2", "HF_HUB_OFFLINE": "0"}
    found = {role: make_environment(settings, role, own) for role in ("engine", "trainer", "web")}
    assert {role: each["OMP_NUM_THREADS"] for role, each in found.items()} == {
        "engine": "7",
        "trainer": "4",
        "web": "1",
    }
    for each in found.values():
        assert (each["OMP_WAIT_POLICY"], each["GOMP_SPINCOUNT"], each["HF_HUB_OFFLINE"]) == ("PASSIVE", "0", "1")
        assert "RANK" not in each
        assert each["PATH"] == "/bin"
    asked = ServeSettings(home=tmp_path, engine_threads=2, trainer_threads=1)
    assert make_environment(asked, "engine", own)["OMP_NUM_THREADS"] == "2"


def test_programs_are_those_asked_for_and_the_trainer_stands_back(tmp_path):
    programs = make_programs(ServeSettings(home=tmp_path, web_processes=2), 7)
    assert [each.name for each in programs] == ["engine", "web-1", "web-2", "trainer"]
    assert [each.listener for each in programs] == [None, 7, 7, None]
    assert [each.ends_last for each in programs] == [True, False, False, False]
    assert programs[-1].nice > 0
    assert [each.name for each in make_programs(ServeSettings(home=tmp_path, train=False), 7)] == ["engine", "web"]


def test_systemd_is_told_of_readiness(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        notify_systemd("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert receiver.recv(100) == b"READY=1"
    notify_systemd("READY=1", {})
    notify_systemd("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})


def test_the_supervisor_imports_no_torch():
    program = (
        "import sys, inlay.cli.serve\n"
        "import inlay.service.start_service, inlay.service.supervisor, inlay.service.child\n"
        "print([name for name in ('torch', 'numpy', 'pandas', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
