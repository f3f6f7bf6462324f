"""A process that the supervisor started: its settings, its sockets, and how it ends.

    sys.exit(run_child("engine", serve))       # in `__main__.py`; `serve(child)` works until `child.stopping` is set

What always holds: SIGTERM drains (`Child.on_stop`), Ctrl-C of the terminal does nothing here, and the process ends at
once when the supervisor is gone, so that nothing outlives it or answers in its place. An InlayError before `ready` is
told to the supervisor, which then ends the service with it: trying again would not help.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from inlay.errors import InlayError
from inlay.service.logs import log_event, log_failure, set_up_logs
from inlay.service.settings import ServeSettings, read_settings

VARIABLE = "INLAY_CHILD"
"""environment variable with a `Place` as JSON; without it the process is alone, as in a test"""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Place:
    """The inheritance of a process of the service: its name, and file descriptors."""

    name: str
    parent: int | None = None
    """process id of the supervisor"""
    life: int | None = None
    """a pipe that ends with the supervisor"""
    status: int | None = None
    """a pipe that takes what the process reports"""
    listener: int | None = None
    """the listening socket of the web processes"""
    nice: int = 0
    """how far it stands back behind other processes, once it is ready"""


@dataclass
class Child:
    """The process itself, as the work it does sees it."""

    settings: ServeSettings
    place: Place
    stopping: threading.Event = field(default_factory=threading.Event)
    """set by SIGTERM: finish what is under way, take nothing new, and return"""
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _is_ready: bool = False

    @property
    def name(self) -> str:
        """The name in logs: `web-1`, `engine`, `trainer`."""
        return self.place.name

    @property
    def is_ready(self) -> bool:
        """Return whether it has reported that it is ready."""
        return self._is_ready

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call this when SIGTERM arrives, in the main thread, perhaps between any two lines of its code.

        An event loop is told by `loop.call_soon_threadsafe`.
        """
        self._callbacks.append(callback)
        if self.stopping.is_set():
            callback()

    def ready(self, facts: Mapping[str, Any] = {}) -> None:
        """Report that it works, with what may be shown: the backbone, the device, the number of slots."""
        if not self._is_ready:
            stand_back(self.place.nice)
        self._is_ready = True
        self._report("ready", {"facts": dict(facts)})

    def progress(self, message: str) -> None:
        """Report what it does before it is ready: `loading the backbone minilm`."""
        self._report("progress", {"message": message})

    def fail(self, error: InlayError) -> None:
        """Report an error that ends this process, and before `ready` the service."""
        self._report("failed", {"error": error.to_json(), "exit_status": error.exit_status})

    def listener(self) -> socket.socket:
        """Return the listening socket that the supervisor bound."""
        if self.place.listener is None:
            raise InlayError("no listening socket was inherited", "`inlay serve` starts this process, and binds it")
        return socket.socket(fileno=os.dup(self.place.listener))

    def hear_signals(self) -> None:
        """Let SIGTERM drain this process. Some libraries take the signal for themselves: then call it again."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())

    def stop(self) -> None:
        """Begin to drain, as SIGTERM does."""
        if not self.stopping.is_set():
            self.stopping.set()
            for callback in self._callbacks:
                callback()

    def _report(self, kind: str, fields: dict[str, Any]) -> None:
        if self.place.status is not None:
            line = json.dumps({"kind": kind, **fields}, default=str).encode() + b"\n"
            try:
                os.write(self.place.status, line)
            except OSError:  # the supervisor is gone, and so will be this process
                return


def run_child(role: str, work: Callable[[Child], None]) -> int:
    """Run a process of the service from its settings to its end; return its exit status."""
    place = read_place(role)
    child = Child(read_settings(), place)
    end_with_parent(place)
    set_up_logs(place.name, as_json=child.settings.log_json)
    child.hear_signals()
    try:
        work(child)
    except InlayError as error:
        child.fail(error)
        if place.status is None or child.is_ready:
            log_event(str(error), {"code": error.code}, level=40)
        return error.exit_status
    except Exception:
        log_failure("ended by an error that nobody foresaw")
        return 1
    return 0


def stand_back(nice: int) -> None:
    """Let other processes go first. Until it is ready a process does not: under load it would never become so."""
    if not nice:
        return
    if sys.platform != "linux":
        os.nice(nice)
        return
    for thread in os.listdir("/proc/self/task"):  # on Linux each thread has its own
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, int(thread)) + nice)


def read_place(role: str, variables: Mapping[str, str] = os.environ) -> Place:
    """Read what the supervisor says a process inherits; a process that is alone inherits nothing."""
    text = variables.get(VARIABLE)
    return Place(role) if text is None else Place(**json.loads(text))


def end_with_parent(place: Place) -> None:
    """End this process at once when the supervisor is gone, however it went.

    The kernel does it on Linux, even while a library holds the interpreter; elsewhere a thread waits for the pipe.
    """
    if sys.platform == "linux" and place.parent is not None:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != place.parent:
            os._exit(1)
    if place.life is not None:
        threading.Thread(target=_wait_for_end, args=(place.life,), name="parent", daemon=True).start()


def _wait_for_end(life: int) -> None:
    while os.read(life, 1):
        pass
    os._exit(1)
