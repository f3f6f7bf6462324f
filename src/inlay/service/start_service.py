"""The start of a service on one machine: everything is checked and bound before the first process starts.

The listening socket is bound once and inherited, so clients wait in its queue while web processes restart.
What always holds: the service is open to other machines only if a key exists. Every process works without the model
hub, with its own share of the cores, and waits without spinning.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from inlay.errors import InlayError, Missing
from inlay.service.home import HomeLock, prepare_home, write_status
from inlay.service.logs import set_up_logs
from inlay.service.settings import ROSTER_VARIABLE, VARIABLE, ServeSettings

EXTRA = (
    *("fastapi", "starlette", "uvicorn", "httptools", "msgspec", "sqlalchemy", "alembic", "jinja2"),
    *("python_multipart", "prometheus_client", "openpyxl"),
)
"""modules of the extra [serve]"""
TRAINER_NICE = 10
_BACKLOG = 2048  # connections that wait while web processes are busy or restart
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
_OTHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "INLAY_JOBS"),
    *("NOTIFY_SOCKET", "PROMETHEUS_MULTIPROC_DIR"),
)


class PortTaken(InlayError):
    """A port on which another program listens."""

    code = "port-taken"
    exit_status = 18


@dataclass(frozen=True)
class Readiness:
    """A service that is ready: its settings, and facts to show."""

    settings: ServeSettings
    needs_key: bool
    facts: Mapping[str, Mapping[str, Any]]
    """what each process reports about itself"""
    seconds: float


@dataclass(frozen=True)
class StartCallbacks:
    """Callbacks for the start of a service."""

    on_ready: Callable[[Readiness], None]
    on_progress: Callable[[str, str], None]


def serve(settings: ServeSettings, callbacks: StartCallbacks) -> bool:
    """Run a service until it is asked to stop; return whether it was drained, not ended at once."""
    began = time.monotonic()
    settings.check()
    check_extra()
    set_up_logs("serve", as_json=settings.log_json)
    prepare_home(settings)
    lock = HomeLock(settings)
    for path in settings.metrics_folder.glob("*.db"):  # counters of processes that have ended
        path.unlink()
    with bind(settings) as listener:
        settings = dataclasses.replace(settings, port=listener.getsockname()[1])
        lock.tell(settings)
        needs_key = prepare_database(settings)

        from inlay.service.supervisor import Listeners, Supervisor

        def tell_ready(facts: Mapping[str, dict[str, Any]]) -> None:
            callbacks.on_ready(Readiness(settings, needs_key, facts, time.monotonic() - began))
            notify_systemd("READY=1")

        about = {"pid": os.getpid(), "address": settings.address, "backbone": settings.backbone}
        supervisor = Supervisor(
            make_programs(settings, listener.fileno()),
            Listeners(tell_ready, lambda status: write_status(settings, about | status), callbacks.on_progress),
            drain_s=settings.drain_s,
            inherited=(lock.descriptor,),
        )
        with supervisor.signals():
            return supervisor.run()


def check_extra() -> None:
    """Refuse to start if a package of the extra [serve] is not installed."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        hint = "install it: `pip install 'inlay[serve]'`"
        raise Missing(f"`inlay serve` needs packages that are not installed: {', '.join(missing)}", hint)


def bind(settings: ServeSettings) -> socket.socket:
    """Return the listening socket of all web processes."""
    where = f"port {settings.port} of `{settings.host}`"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
    except (socket.gaierror, UnicodeError) as error:
        hint = "use 127.0.0.1 for this machine alone, or 0.0.0.0 for all its addresses"
        raise InlayError(f"`--host {settings.host}` is not an address of this machine", hint) from error
    except OSError as error:
        raise _describe_bind(error, settings, where) from error
    return listener


def _describe_bind(error: OSError, settings: ServeSettings, where: str) -> InlayError:
    if error.errno == errno.EADDRINUSE:
        other = settings.port + 1 if settings.port < 65535 else 0
        hint = f"stop the program there, or use another port: `inlay serve --port {other}` (0 takes any free one)"
        return PortTaken(f"{where} is taken", hint)
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "use 127.0.0.1 for this machine alone, or 0.0.0.0 for all its addresses"
        return InlayError(f"`--host {settings.host}` is not an address of this machine", hint)
    if error.errno == errno.EACCES:
        hint = "use a port of at least 1024, with a proxy in front of it (docs/operating.md)"
        return InlayError(f"{where} needs rights that this account does not have", hint)
    return InlayError(f"{where}: {(error.strerror or str(error)).lower()}", "choose others with `--host` and `--port`")


def prepare_database(settings: ServeSettings) -> bool:
    """Bring the database up to date; return whether requests need a key. An open service without keys is refused."""
    from inlay.service.state import Database, Keys

    with closing(Database.open(settings.store_address)) as database:
        needs_key = Keys(database).exist()
    if not needs_key and settings.is_for_others:
        option = "--host " + settings.host if not settings.is_loopback else "--allow-host " + " ".join(settings.hosts)
        raise InlayError(
            f"`{option}` would open the service to other machines, and no key exists",
            "make one first: `inlay key make local --scope predict,train,admin`",
        )
    return needs_key


def make_programs(settings: ServeSettings, listener: int) -> list[Any]:
    """Return the processes of a service."""
    from inlay.service.supervisor import ServiceProgram

    def make(name: str, role: str, **more: Any) -> ServiceProgram:
        # -P: never import modules from the current folder
        command = (sys.executable, "-P", "-m", f"inlay.service.{role}")
        return ServiceProgram(name, command, make_environment(settings, role), **more)

    names = ["web"] if settings.web_processes == 1 else [f"web-{n + 1}" for n in range(settings.web_processes)]
    webs = [make(name, "web", listener=listener) for name in names]
    if settings.cluster is not None:
        return [make("cluster", "on_ray", ends_last=True), *webs]
    programs = [make("engine", "engine", ends_last=True), *webs]
    programs += [make("trainer", "trainer", nice=TRAINER_NICE)] if settings.train else []
    return programs


def make_environment(settings: ServeSettings, role: str, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process: this one's, with the settings and its threads, and without a model hub."""
    threads = str(settings.threads_of(role))
    kept = {name: value for name, value in own.items() if name not in _OTHERS}
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), threads)
    given = {"INLAY_HOME": settings.store_address, VARIABLE: settings.to_json()}
    if settings.cluster is not None:
        given[ROSTER_VARIABLE] = str(settings.roster_file)
    if role == "web" and settings.web_processes > 1:
        given["PROMETHEUS_MULTIPROC_DIR"] = str(settings.metrics_folder)
    return {**kept, **_QUIET, **_WAITING, **counts, **given}


def notify_systemd(message: str, own: Mapping[str, str] = os.environ) -> None:
    """Tell systemd, if it started this process, that the service is ready (`Type=notify`)."""
    address = own.get("NOTIFY_SOCKET")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)


def find_store_address(folder: Path | None) -> str:
    """Return the store of a service: its address, or its folder with all links followed."""
    from inlay.store import Store

    store = Store(folder)
    return store.place if store.is_remote else str(find_home(folder))


def find_home(folder: Path | str | None) -> Path:
    """Return a service's home on this machine, with all links followed, so that every process means the same folder."""
    from inlay.store import Store

    return Store(folder).root.expanduser().resolve()
