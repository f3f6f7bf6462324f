"""The supervisor keeps small stand-in programs running, and ends them in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from inlay.errors import InlayError
from inlay.service.child import Child, Inherited
from inlay.service.settings import VARIABLE, ServeSettings
from inlay.service.supervisor import Backoff, Listeners, ProgramFailed, ServiceProgram, Supervisor

STAND_IN = Path(__file__).with_name("stand_in.py")
PATIENCE_S = 20.0
QUICK = Backoff(first_s=0.05, most_s=0.4, settled_s=60.0)


def wait_for(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, f"waited in vain for {what}"
        time.sleep(0.02)


def make_program(folder: Path, name: str, mode: str = "well", *, ends_last: bool = False) -> ServiceProgram:
    settings = ServeSettings(home=folder)
    environment = {**os.environ, VARIABLE: settings.to_json()}
    command = (sys.executable, str(STAND_IN), mode, str(folder))
    return ServiceProgram(name, command, environment, ends_last=ends_last)


def events(folder: Path, name: str) -> list[tuple[str, float, int]]:
    """What a stand-in wrote: the event, its time and the process."""
    path = folder / name
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(event, float(at), int(pid)) for event, at, pid in rows]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Watch:
    """A supervisor in a thread, and what it told."""

    def __init__(self, programs: list[ServiceProgram], **settings: object) -> None:
        self.facts: dict | None = None
        self.status: dict = {}
        self.progress: list[tuple[str, str]] = []
        self.error: BaseException | None = None
        self.was_drained: bool | None = None
        listeners = Listeners(self._ready, self._change, lambda name, text: self.progress.append((name, text)))
        self.supervisor = Supervisor(programs, listeners, **{"backoff": QUICK, "drain_s": PATIENCE_S, **settings})
        self.thread = threading.Thread(target=self._run)

    def _ready(self, facts: dict) -> None:
        self.facts = dict(facts)

    def _change(self, status: dict) -> None:
        self.status = status

    def _run(self) -> None:
        try:
            self.was_drained = self.supervisor.run()
        except InlayError as error:
            self.error = error

    def state_of(self, name: str) -> dict:
        return next(each for each in self.status["processes"] if each["name"] == name)


@contextmanager
def watched(programs: list[ServiceProgram], **settings: object):
    watch = Watch(programs, **settings)
    watch.thread.start()
    try:
        yield watch
    finally:
        watch.supervisor.stop()
        watch.supervisor.stop()
        watch.thread.join(PATIENCE_S)
        assert not watch.thread.is_alive()


def test_programs_are_ready_together_and_drained_in_order(tmp_path):
    programs = [make_program(tmp_path, "engine", ends_last=True), make_program(tmp_path, "web")]
    with watched(programs) as watch:
        wait_for(lambda: watch.facts, "readiness")
        assert watch.facts == {"engine": {"mode": "well"}, "web": {"mode": "well"}}
        assert sorted(watch.progress) == [("engine", "warming up"), ("web", "warming up")]
        assert watch.status["state"] == "ready"
        watch.supervisor.stop()
        watch.thread.join(PATIENCE_S)
        assert watch.was_drained is True
    ends = {name: {event: at for event, at, _ in events(tmp_path, name)} for name in ("engine", "web")}
    assert ends["web"]["drained"] + 0.15 <= ends["engine"]["drained"], "the engine is asked when the web has ended"
    assert {each["state"] for each in watch.status["processes"]} == {"ended"}
    assert {each["last_exit"] for each in watch.status["processes"]} == {0}


def test_a_killed_program_is_started_again_and_no_other(tmp_path):
    with watched([make_program(tmp_path, "engine"), make_program(tmp_path, "web")]) as watch:
        wait_for(lambda: watch.facts, "readiness")
        os.kill(events(tmp_path, "web")[0][2], signal.SIGKILL)
        wait_for(lambda: len([1 for event, *_ in events(tmp_path, "web") if event == "ready"]) == 2, "a second start")
        wait_for(lambda: watch.state_of("web")["state"] == "ready", "its readiness")
        assert watch.state_of("web")["restarts"] == 1
        assert watch.state_of("web")["last_exit"] == -signal.SIGKILL
        assert watch.state_of("engine")["restarts"] == 0
        assert len(events(tmp_path, "engine")) == 2


def test_pauses_before_restarts_double_up_to_the_longest():
    backoff = Backoff(first_s=0.1, most_s=5.0)
    assert [backoff.pause_s(deaths) for deaths in (1, 2, 3, 4)] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert backoff.pause_s(7) == backoff.pause_s(1000) == 5.0


def test_a_program_that_keeps_dying_is_started_ever_more_rarely(tmp_path):
    with watched([make_program(tmp_path, "web", "short")]) as watch:
        began = lambda: [at for event, at, _ in events(tmp_path, "web") if event == "began"]  # noqa: E731
        wait_for(lambda: len(began()) >= 5, "five starts")
        assert watch.status["processes"][0]["restarts"] >= 4
    gaps = [later - earlier for earlier, later in zip(began(), began()[1:5], strict=False)]
    assert all(gap >= pause for gap, pause in zip(gaps, (0.05, 0.1, 0.2, 0.4), strict=True))


def test_a_program_that_was_up_for_a_while_is_started_again_at_once(tmp_path):
    with watched([make_program(tmp_path, "web", "short")], backoff=Backoff(0.01, 60.0, settled_s=0.0)):
        wait_for(lambda: len([1 for event, *_ in events(tmp_path, "web") if event == "began"]) >= 13, "13 starts")


def test_an_error_before_readiness_ends_the_service_with_its_hint(tmp_path):
    with watched([make_program(tmp_path, "web"), make_program(tmp_path, "engine", "refuses")]) as watch:
        watch.thread.join(PATIENCE_S)
        assert isinstance(watch.error, ProgramFailed)
        assert (watch.error.message, watch.error.hint) == ("no backbone named `nix`", "get one")
        assert (watch.error.code, watch.error.exit_status) == ("missing", 9)
    assert not any(is_there(pid) for name in ("web", "engine") for _, _, pid in events(tmp_path, name))


def test_a_program_that_always_dies_before_readiness_ends_the_service(tmp_path):
    with watched([make_program(tmp_path, "engine", "dies")]) as watch:
        watch.thread.join(PATIENCE_S)
        assert "ended 5 times before it was ready, the last time with exit status 3" in str(watch.error)
    assert len(events(tmp_path, "engine")) == 5


def test_what_does_not_drain_in_time_is_killed(tmp_path):
    programs = [make_program(tmp_path, "engine", ends_last=True), make_program(tmp_path, "web", "stubborn")]
    with watched(programs, drain_s=0.5) as watch:
        wait_for(lambda: watch.facts, "readiness")
        time.sleep(0.2)  # the stubborn one refuses signals only after it said so
        began = time.monotonic()
        watch.supervisor.stop()
        watch.thread.join(PATIENCE_S)
        assert 0.5 <= time.monotonic() - began < 5.0
        assert watch.was_drained is True
        assert watch.state_of("web")["last_exit"] == -signal.SIGKILL
        assert watch.state_of("engine")["last_exit"] == 0, "who answers still ends in order"


def test_asked_twice_everything_ends_at_once(tmp_path):
    with watched([make_program(tmp_path, "web", "stubborn")]) as watch:
        wait_for(lambda: watch.facts, "readiness")
        time.sleep(0.2)
        began = time.monotonic()
        watch.supervisor.stop()
        watch.supervisor.stop()
        watch.thread.join(PATIENCE_S)
        assert time.monotonic() - began < 5.0
        assert watch.was_drained is False


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_supervisor import make_program
from inlay.service.supervisor import Listeners, Supervisor
home = Path(sys.argv[1])
programs = [make_program(home, "web", "stubborn"), make_program(home, "engine")]
supervisor = Supervisor(programs, Listeners(lambda facts: print("ready", flush=True)))
with supervisor.signals():
    sys.exit(0 if supervisor.run() else 130)
"""


def start_parent(folder: Path) -> subprocess.Popen:
    program = [sys.executable, "-c", PARENT.format(folder=str(STAND_IN.parent)), str(folder)]
    parent = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    return parent


def test_programs_end_when_their_supervisor_is_killed(tmp_path):
    with start_parent(tmp_path) as parent:
        pids = [events(tmp_path, name)[0][2] for name in ("web", "engine")]
        assert all(is_there(pid) for pid in pids)
        parent.kill()
        wait_for(lambda: not any(is_there(pid) for pid in pids), "the end of both")


def test_a_stopped_program_too_ends_with_its_supervisor(tmp_path):
    with start_parent(tmp_path) as parent:
        pid = events(tmp_path, "engine")[0][2]
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
        wait_for(lambda: not is_there(pid), "its end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_drain_and_a_second_one_ends_at_once(tmp_path, number):
    with start_parent(tmp_path) as parent:
        parent.send_signal(number)
        wait_for(lambda: "drained" in [event for event, *_ in events(tmp_path, "engine")], "a drain")
        assert parent.poll() is None, "the stubborn one has not ended"
        parent.send_signal(number)
        assert parent.wait(PATIENCE_S) == 130


def test_ctrl_c_of_the_terminal_reaches_the_supervisor_alone(tmp_path):
    with start_parent(tmp_path) as parent:
        groups = {os.getpgid(events(tmp_path, name)[0][2]) for name in ("web", "engine")}
        assert os.getpgid(parent.pid) not in groups
        parent.kill()


def test_callbacks_of_a_drain_are_called_also_when_they_come_too_late(tmp_path):
    child, called = Child(ServeSettings(home=tmp_path), Inherited("web")), []
    child.on_stop(lambda: called.append("early"))
    child.stop()
    child.stop()
    child.on_stop(lambda: called.append("late"))
    assert called == ["early", "late"]


def test_sigterm_drains_whatever_step_the_main_thread_is_at(tmp_path):
    pids = []
    for _ in range(24):
        read, ready = os.pipe()
        pid = os.fork()
        if not pid:
            child = Child(ServeSettings(home=tmp_path), Inherited("engine"))
            child.hear_signals()
            os.write(ready, b".")
            while not child.stopping.wait(0):  # nearly always inside of `wait`, which holds a lock
                pass
            os._exit(7)
        os.read(read, 1)
        os.close(read)
        os.close(ready)
        os.kill(pid, signal.SIGTERM)
        pids.append(pid)
    ended = {}
    try:
        wait_for(lambda: len(ended.update(find_ended(pids)) or ended) == len(pids), "the end of all")
    finally:
        for pid in set(pids) - set(ended):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert set(ended.values()) == {7}


def find_ended(pids: list[int]) -> dict[int, int]:
    """The exit statuses of those children that ended since the last call."""
    found = {}
    for pid in pids:
        with suppress(ChildProcessError):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                found[pid] = os.waitstatus_to_exitcode(status)
    return found


NICED = """
import json, os, threading
from pathlib import Path
from inlay.service.child import Child, Inherited
from inlay.service.settings import ServeSettings

early = threading.Thread(target=threading.Event().wait, daemon=True)
early.start()
found = [os.getpriority(os.PRIO_PROCESS, early.native_id)]
child = Child(ServeSettings(home=Path(".")), Inherited("trainer", nice=3))
for _ in range(2):
    child.ready()
    found.append([os.getpriority(os.PRIO_PROCESS, thread) for thread in (early.native_id, threading.get_native_id())])
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a priority is that of the process")
def test_a_process_stands_back_with_all_its_threads_once_it_is_ready():
    done = subprocess.run([sys.executable, "-c", NICED], capture_output=True, text=True, check=True)
    first, *later = json.loads(done.stdout)
    assert later == [[first + 3] * 2] * 2
