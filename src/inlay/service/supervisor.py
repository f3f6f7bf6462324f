"""The supervisor of a service's processes: it starts them, restarts those that die, and drains them.

Each process gets the pipes and sockets of an `Inherited` (child.py) and reports on its status pipe when it is ready.
What always holds: a process that dies is restarted, after pauses that grow with the number of deaths in a row. An error
that it reports before it was ever ready ends the whole service with that error. A drain first ends the processes that
take requests and jobs, then those that answer them. No process is left behind.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from inlay.errors import InlayError
from inlay.service import child
from inlay.service.logs import log_event, write_time

KILLED_EARLY = 5
"""how often a process may end before it was ever ready; then the service gives up"""
_MOST_WAITED_S = 1.0  # between two looks where nothing happens
_LAST_S = 2.0  # the least time for the processes that end last


@dataclass(frozen=True)
class Backoff:
    """The pauses before restarts: short at first, doubled each time, and short again after some time of working."""

    first_s: float = 0.1
    most_s: float = 5.0
    settled_s: float = 10.0
    """a process that was ready for this long starts again with the first pause"""

    def pause_s(self, num_deaths: int) -> float:
        """Return the pause after this number of deaths in a row."""
        return min(self.most_s, self.first_s * 2.0 ** min(num_deaths - 1, 30))


@dataclass(frozen=True)
class ServiceProgram:
    """A program that the supervisor keeps running as a process."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    listener: int | None = None
    """the descriptor of the listening socket, which it inherits"""
    nice: int = 0
    ends_last: bool = False
    """whether other processes need it while they finish"""


class ProgramFailed(InlayError):
    """An error that a process reported before it was ever ready, with its message, hint and exit status."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        error = report["error"]
        super().__init__(error["message"], error["hint"])
        self.code, self.exit_status = error["code"], report.get("exit_status", 1)


@dataclass
class SupervisedProcess:
    """A program with its current process, and the record of earlier ones."""

    program: ServiceProgram
    process: subprocess.Popen[bytes] | None = None
    status: int | None = None
    """the reading end of its status pipe"""
    state: str = "waiting"  # "starting", "ready", "draining", "ended"; "waiting" for its restart
    since: float = 0.0  # time.monotonic() of the last change
    due: float = 0.0
    deaths: int = 0  # in a row
    restarts: int = 0
    was_ready: bool = False
    last_exit: int | None = None
    unread: bytes = b""
    facts: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] | None = None

    def enter(self, state: str) -> None:
        """Note a new state and its time."""
        self.state, self.since = state, time.monotonic()

    @property
    def is_running(self) -> bool:
        """Return whether there is a process that has not been reaped."""
        return self.process is not None

    def send(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


@dataclass(frozen=True)
class Listeners:
    """Callbacks of the supervisor: once when all processes are ready, and at every change, with the state as data."""

    on_ready: Callable[[Mapping[str, dict[str, Any]]], None] = lambda facts: None
    on_change: Callable[[dict[str, Any]], None] = lambda status: None
    on_progress: Callable[[str, str], None] = lambda name, message: None
    on_facts: Callable[[Mapping[str, Any]], None] = lambda facts: None
    """called each time that a process is ready, also after a restart, with the facts that it reports"""


class Supervisor:
    """The supervisor of several processes, from their start until all have ended."""

    def __init__(
        self,
        programs: Sequence[ServiceProgram],
        listeners: Listeners,
        *,
        backoff: Backoff = Backoff(),
        drain_s: float = 20.0,
        inherited: Sequence[int] = (),
    ) -> None:
        self._supervised = [SupervisedProcess(program) for program in programs]
        self._listeners, self._backoff, self._drain_s = listeners, backoff, drain_s
        self._inherited = tuple(inherited)  # descriptors that every process inherits, such as the lock
        self._selector = selectors.DefaultSelector()
        self._life, self._life_end = os.pipe()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._num_asked = 0
        self._deadline: float | None = None  # of the drain
        self._was_ready = self._is_over = False
        self._failure: InlayError | None = None

    def stop(self) -> None:
        """Ask for a drain; the second call ends everything at once. After the end it does nothing."""
        self._num_asked += 1
        if not self._is_over:
            with suppress(BlockingIOError):
                os.write(self._wake, b".")

    def run(self) -> bool:
        """Keep the processes running until asked to stop; return whether they were drained, not ended at once.

        Raises the error of a process that cannot work, after all others have ended.
        """
        try:
            while True:
                for supervised in self._supervised:
                    if not self._is_ending and not supervised.is_running and time.monotonic() >= supervised.due:
                        self._begin(supervised)
                self._wait()
                for supervised in self._supervised:
                    if supervised.process is not None and supervised.process.poll() is not None:
                        self._read(supervised)
                        self._note_end(supervised, supervised.process.returncode)
                if self._is_ending:
                    self._drain()
                    if not any(supervised.is_running for supervised in self._supervised):
                        break
        finally:
            self._end_all()
        if self._failure is not None:
            raise self._failure
        return self._num_asked < 2

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of every process as data."""
        now, wall = time.monotonic(), time.time()
        return [
            {
                "name": supervised.program.name,
                "pid": None if supervised.process is None else supervised.process.pid,
                "state": supervised.state,
                "since": write_time(wall - (now - supervised.since)),
                "restarts": supervised.restarts,
                "last_exit": supervised.last_exit,
            }
            for supervised in self._supervised
        ]

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGTERM, SIGINT and SIGHUP ask for a drain inside the block."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it: a closed terminal does not matter
            numbers.append(signal.SIGHUP)
        before: dict[int, Any] = {number: signal.signal(number, lambda *_: self.stop()) for number in numbers}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        waker = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(waker)
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def _is_ending(self) -> bool:
        return self._num_asked > 0 or self._failure is not None

    def _begin(self, supervised: SupervisedProcess) -> None:
        """Start a process."""
        program = supervised.program
        status, status_end = os.pipe()
        os.set_blocking(status, False)
        inherited = child.Inherited(program.name, os.getpid(), self._life, status_end, program.listener, program.nice)
        kept = [self._life, status_end, *self._inherited]
        kept += [] if program.listener is None else [program.listener]
        supervised.process = subprocess.Popen(
            program.command,
            env={**program.environment, child.VARIABLE: json.dumps(asdict(inherited))},
            pass_fds=kept,
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout is for the supervisor's own data
            process_group=0,  # Ctrl-C of a terminal reaches the supervisor alone
        )
        os.close(status_end)
        supervised.status, supervised.unread, supervised.failure = status, b"", None
        self._selector.register(status, selectors.EVENT_READ, supervised)
        supervised.enter("starting")
        self._report_change()

    def _wait(self) -> None:
        """Wait until something happens or is due, and read the reports of processes."""
        now = time.monotonic()
        waiting = [supervised for supervised in self._supervised if not supervised.is_running]
        due = [supervised.due for supervised in waiting] if self._deadline is None else [self._deadline]
        wait = min([_MOST_WAITED_S, *(max(0.0, at - now) for at in due)])
        for key, _ in self._selector.select(wait):
            if key.data is None:
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            else:
                self._read(key.data)

    def _read(self, supervised: SupervisedProcess) -> None:
        """Read the reports that wait in a status pipe."""
        if supervised.status is None:
            return
        with suppress(BlockingIOError):
            while part := os.read(supervised.status, 65536):
                supervised.unread += part
            self._close_status(supervised)  # at its end: the process has ended, or closed it
        *lines, supervised.unread = supervised.unread.split(b"\n")
        for line in lines:
            self._handle(supervised, json.loads(line))

    def _close_status(self, supervised: SupervisedProcess) -> None:
        if supervised.status is not None:
            self._selector.unregister(supervised.status)
            os.close(supervised.status)
            supervised.status = None

    def _handle(self, supervised: SupervisedProcess, report: dict[str, Any]) -> None:
        """Handle one report of a process."""
        if report["kind"] == "progress":
            self._listeners.on_progress(supervised.program.name, report["message"])
        elif report["kind"] == "failed":
            supervised.failure = report
        elif report["kind"] == "ready" and supervised.state == "starting":
            supervised.facts, supervised.was_ready = report["facts"], True
            supervised.enter("ready")
            is_first = not self._was_ready and all(each.state == "ready" for each in self._supervised)
            if self._was_ready:
                log_event("ready again", {"name": supervised.program.name})
            self._was_ready = self._was_ready or is_first
            self._report_change()
            self._listeners.on_facts(supervised.facts)
            if is_first:
                self._listeners.on_ready({each.program.name: each.facts for each in self._supervised})

    def _note_end(self, supervised: SupervisedProcess, exit_status: int) -> None:
        """Note that a process has ended; plan its restart, or fail if a restart cannot help."""
        self._close_status(supervised)  # still open if a grandchild holds the other end
        settled = supervised.state == "ready" and time.monotonic() - supervised.since >= self._backoff.settled_s
        supervised.process, supervised.last_exit = None, exit_status
        if self._is_ending:
            supervised.enter("ended")
            self._report_change()
            return
        supervised.deaths = 1 if settled else supervised.deaths + 1
        if not supervised.was_ready and supervised.failure is not None:
            self._failure = ProgramFailed(supervised.failure)
        elif not supervised.was_ready and supervised.deaths >= KILLED_EARLY:
            self._failure = InlayError(
                f"the process `{supervised.program.name}` ended {supervised.deaths} times before it was ready, "
                f"the last time with {describe_exit(exit_status)}",
                "the log above says why",
            )
        pause = self._backoff.pause_s(supervised.deaths)
        supervised.restarts, supervised.due = supervised.restarts + 1, time.monotonic() + pause
        supervised.enter("waiting")
        fields = {"name": supervised.program.name, "by": describe_exit(exit_status), "restart_in_s": round(pause, 1)}
        fields |= {} if supervised.failure is None else {"why": supervised.failure["error"]["message"]}
        log_event("a process ended", fields, level=logging.WARNING)
        self._report_change()

    def _drain(self) -> None:
        """Take one step of the drain: first the processes that take work, then those that answer it."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._drain_s
            log_event("draining", {"at_most_s": self._drain_s})
            self._terminate([supervised for supervised in self._supervised if not supervised.program.ends_last])
        first = [
            supervised for supervised in self._supervised if supervised.is_running and not supervised.program.ends_last
        ]
        last = [supervised for supervised in self._supervised if supervised.is_running and supervised.program.ends_last]
        if self._num_asked > 1:
            self._kill([*first, *last])
        elif first and now >= self._deadline:
            self._kill(first)
        elif not first and any(supervised.state != "draining" for supervised in last):
            self._deadline = max(self._deadline, now + _LAST_S)
            self._terminate(last)
        elif not first and now >= self._deadline:
            self._kill(last)

    def _terminate(self, keepers: Sequence[SupervisedProcess]) -> None:
        for supervised in keepers:
            supervised.send(signal.SIGTERM)
            supervised.enter("draining" if supervised.is_running else "ended")
        self._report_change()

    def _kill(self, keepers: Sequence[SupervisedProcess]) -> None:
        for supervised in keepers:
            log_event("ended at once", {"name": supervised.program.name}, level=logging.WARNING)
            supervised.send(signal.SIGKILL)
            if supervised.process is not None:
                supervised.process.wait()

    def _end_all(self) -> None:
        """Kill the processes that still run, and close all descriptors."""
        for supervised in self._supervised:
            if supervised.process is not None and supervised.process.poll() is None:
                supervised.send(signal.SIGKILL)
                supervised.process.wait()
            if supervised.status is not None:
                os.close(supervised.status)
        self._is_over = True
        self._selector.close()
        for descriptor in (self._life, self._life_end, self._woken, self._wake):
            os.close(descriptor)

    def _report_change(self) -> None:
        state = "draining" if self._deadline is not None else "ready" if self._was_ready else "starting"
        self._listeners.on_change({"state": state, "processes": self.describe()})


def describe_exit(exit_status: int) -> str:
    """Return how a process ended, such as `exit status 1` or `SIGKILL`."""
    if exit_status >= 0:
        return f"exit status {exit_status}"
    try:
        return signal.Signals(-exit_status).name
    except ValueError:
        return f"signal {-exit_status}"
