"""A process that the supervisor started: its settings, its sockets, and how it ends.

    sys.exit(run_child("engine", serve))       # in `__main__.py`; `serve(child)` works until `child.stopping` is set

What always holds: SIGTERM drains the process (`Child.on_stop`), Ctrl-C in the terminal does nothing here, and the
process ends at once when the supervisor is gone. An InlayError before `ready` is reported to the supervisor, which then
ends the service with this error, because trying again would not help.
"""

from __future__ import annotations

import _thread
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
"""environment variable with an `Inherited` as JSON; without it the process runs alone, as in a test"""
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Inherited:
    """The name and the file descriptors that a process of the service inherits from the supervisor."""

    name: str
    parent: int | None = None
    """process id of the supervisor"""
    life: int | None = None
    """a pipe that closes when the supervisor ends"""
    status: int | None = None
    """a pipe for the reports of the process"""
    listener: int | None = None
    """the listening socket of the web processes"""
    nice: int = 0
    """its niceness (lower priority), once it is ready"""


@dataclass
class Child:
    """This process, as its work sees it."""

    settings: ServeSettings
    inherited: Inherited
    stopping: threading.Event = field(default_factory=threading.Event)
    """set by SIGTERM: finish what is under way, take nothing new, and return"""
    is_ready: bool = False
    """whether it has reported that it is ready"""
    _callbacks: list[Callable[[], None]] = field(default_factory=list)
    _is_stopped: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """The name in logs: `web-1`, `engine`, `trainer`."""
        return self.inherited.name

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once when SIGTERM arrives, in a thread of its own.

        To reach an event loop, pass a callback that uses `loop.call_soon_threadsafe`.
        """
        with self._guard:
            is_late = self._is_stopped
            if not is_late:
                self._callbacks.append(callback)
        if is_late:
            callback()

    def ready(self, facts: Mapping[str, Any] = {}) -> None:
        """Report that it is ready, with facts to show: the backbone, the device, the number of slots."""
        if not self.is_ready:
            lower_priority(self.inherited.nice)
        self.is_ready = True
        self._report("ready", {"facts": dict(facts)})

    def progress(self, message: str) -> None:
        """Report progress before it is ready: `loading the backbone minilm`."""
        self._report("progress", {"message": message})

    def fail(self, error: InlayError) -> None:
        """Report an error that ends this process, and before `ready` the service."""
        self._report("failed", {"error": error.to_json(), "exit_status": error.exit_status})

    def listener(self) -> socket.socket:
        """Return the listening socket that the supervisor bound."""
        if self.inherited.listener is None:
            raise InlayError("no listening socket was inherited", "`inlay serve` starts this process, and binds it")
        return socket.socket(fileno=os.dup(self.inherited.listener))

    def hear_signals(self) -> None:
        """Let SIGTERM drain this process. Some libraries replace the signal's handler: then call it again."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A handler runs between any two steps of the main thread. It may hold the lock of `stopping` just then, as it
        # waits for it, and would wait for itself for ever. So the handler takes no lock and starts a thread.
        signal.signal(signal.SIGTERM, lambda *_: _thread.start_new_thread(self.stop, ()))

    def stop(self) -> None:
        """Begin to drain, as SIGTERM does."""
        with self._guard:
            if self._is_stopped:
                return
            self._is_stopped = True
        self.stopping.set()
        for callback in self._callbacks:
            callback()

    def _report(self, kind: str, fields: dict[str, Any]) -> None:
        if self.inherited.status is not None:
            line = json.dumps({"kind": kind, **fields}, default=str).encode() + b"\n"
            try:
                os.write(self.inherited.status, line)
            except OSError:  # the supervisor is gone, so this process is about to end
                return


def run_child(role: str, work: Callable[[Child], None]) -> int:
    """Run a process of the service from its settings to its end; return its exit status."""
    text = os.environ.get(VARIABLE)
    inherited = Inherited(role) if text is None else Inherited(**json.loads(text))
    child = Child(read_settings(), inherited)
    end_with_parent(inherited)
    set_up_logs(inherited.name, as_json=child.settings.log_json)
    child.hear_signals()
    try:
        work(child)
    except InlayError as error:
        child.fail(error)
        if inherited.status is None or child.is_ready:
            log_event(str(error), {"code": error.code}, level=40)
        return error.exit_status
    except Exception:
        log_failure("ended by an unexpected error")
        return 1
    return 0


def lower_priority(nice: int) -> None:
    """Let other processes go first. A process does so only when it is ready: under load it would never become ready."""
    if not nice:
        return
    if sys.platform != "linux":
        os.nice(nice)
        return
    for thread in os.listdir("/proc/self/task"):  # on Linux each thread has its own
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), os.getpriority(os.PRIO_PROCESS, int(thread)) + nice)


def end_with_parent(inherited: Inherited) -> None:
    """End this process at once when the supervisor is gone, however it ended.

    On Linux the kernel does it, even while a library holds the interpreter; elsewhere a thread waits for the pipe.
    """
    if sys.platform == "linux" and inherited.parent is not None:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != inherited.parent:
            os._exit(1)
    if inherited.life is not None:
        life = inherited.life

        def wait() -> None:
            while os.read(life, 1):
                pass
            os._exit(1)

        threading.Thread(target=wait, name="parent", daemon=True).start()
