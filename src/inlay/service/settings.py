"""The settings of a service: every default, the paths on disk, and the threads of each process.

The supervisor makes them once, from the command line, and passes them to its processes as JSON in `$INLAY_SERVE`.
What always holds: settings that a process reads were checked by `check`, and none of them comes from a customer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.errors import BadConfig
from inlay.threads import find_quota

VARIABLE = "INLAY_SERVE"
"""environment variable in which a process of the service finds its settings"""
ROSTER_VARIABLE = "INLAY_ROSTER"
"""environment variable with the path of the list of engines; without it there is one engine, on this machine"""
_LONGEST_SOCKET = 100  # bytes of a Unix socket's path; the kernel takes 107
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")


@dataclass(frozen=True)
class ClusterSettings:
    """The Ray cluster on which engines and trainers of a service run, and how many."""

    address: str = "auto"
    """the cluster that $RAY_ADDRESS names, or the one on this machine; or `ray://HOST:10001`"""
    engines: tuple[int, int] = (1, 1)
    """the fewest and the most; the queueing time decides between them"""
    trainers: tuple[int, int] = (1, 1)
    """the fewest and the most; the queued work decides between them"""
    num_cpus: float = 1
    """processors of an engine or trainer"""
    num_gpus: float = 0
    """GPUs of an engine or trainer; a fraction shares one"""

    def check(self) -> None:
        """Refuse invalid values."""
        for option, (least, most) in {"--engines": self.engines, "--trainers": self.trainers}.items():
            if not 1 <= least <= most:
                raise BadConfig(f"`{option} {least}-{most}`", f"write the fewest and the most: `{option} 1-4`")
        if self.num_cpus < 0 or self.num_gpus < 0:
            raise BadConfig("`--ray-cpus` and `--ray-gpus` are 0 or more", "leave them out for one processor each")


@dataclass(frozen=True)
class ServeSettings:
    """The settings that all processes of one service share."""

    home: Path
    """the store's folder, or this machine's copy of what it needs from a store on object storage; the service keeps its
    own files in `service/` below it"""
    store: str | None = None
    """address of a store on object storage, which several machines share; None for the home itself"""
    host: str = "127.0.0.1"
    port: int = 8642
    """0 takes a free one"""
    backbone: str = "minilm"
    device: str = "auto"
    precision: str = "auto"
    web_processes: int = 1
    num_slots: int = 64
    engine_threads: int | None = None
    """None divides the cores, see `threads_of`"""
    trainer_threads: int | None = None
    max_body: int = 8 * 2**20
    """bytes of a request's body at most; a dataset's upload is bounded by its tenant's limits instead"""
    hosts: tuple[str, ...] = ()
    """values of the header `Host` that are accepted besides the address itself"""
    train: bool = True
    open_page: bool = False
    log_json: bool = False
    target_batch_ms: float | None = None
    """how long one batch should take; None for 60 on a CPU and 8 on a GPU"""
    drain_s: float = 20.0
    cluster: ClusterSettings | None = None
    """where engines and trainers run; None for this machine"""

    @property
    def store_address(self) -> str:
        """The store, as `Store` and `Database.open` take it: the address on object storage, or the home."""
        return self.store or str(self.home)

    @property
    def folder(self) -> Path:
        """The folder of the service's own files."""
        return self.home / "service"

    @property
    def run_folder(self) -> Path:
        """The folder of sockets and locks, which only the service's own account may enter."""
        return self.folder / "run"

    @property
    def metrics_folder(self) -> Path:
        """The folder in which several web processes keep their counters, so that each of them can show the sums."""
        return self.run_folder / "metrics"

    @property
    def roster_file(self) -> Path:
        """The file in which the web processes of this machine find the engines of a cluster."""
        return self.run_folder / "roster.json"

    @property
    def engine_socket(self) -> Path:
        """The Unix socket of the engine: in the run folder, or elsewhere if that path is too long."""
        usual = self.run_folder / "engine.sock"
        if len(os.fsencode(usual)) <= _LONGEST_SOCKET:
            return usual
        name = hashlib.sha256(os.fsencode(self.home.absolute())).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"inlay-{os.getuid()}-{name}" / "engine.sock"

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the service's port."""
        return _is_loopback(self.host)

    @property
    def is_for_others(self) -> bool:
        """Return whether other machines are meant to use it, by its port or by a name that a proxy serves."""
        names = [host.rpartition(":")[0] if host.count(":") == 1 else host for host in self.hosts]
        return not all(map(_is_loopback, (self.host, *names)))

    @property
    def address(self) -> str:
        """The service's address for a browser."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{self.port}"

    def threads_of(self, role: str) -> int:
        """Return the number of threads that a process of this role computes with.

        The engine leaves one core for the others, since two busy threads on one core wait for each other. The trainer,
        which is niced, takes half of the cores.
        """
        asked = {"engine": self.engine_threads, "trainer": self.trainer_threads}.get(role, 1)
        if asked is not None:
            return asked
        given = os.environ.get("OMP_NUM_THREADS", "")
        if given.isdigit() and int(given):
            return int(given)
        cores = count_cores()
        return max(1, cores - 1 if role == "engine" else cores // 2)

    def check(self) -> None:
        """Refuse invalid values before anything is started."""
        if not 0 <= self.port <= 65535:
            raise BadConfig(f"`--port {self.port}` is not a port", "use one from 1 to 65535, or 0 for any free one")
        for option, number in {"--web": self.web_processes, "--slots": self.num_slots}.items():
            if number < 1:
                raise BadConfig(f"`{option} {number}`", "use at least 1")
        for option, threads in {"engine": self.engine_threads, "trainer": self.trainer_threads}.items():
            if threads is not None and threads < 1:
                raise BadConfig(f"`--{option}-threads {threads}`", "use at least 1, or leave it out")
        if not _DEVICE.fullmatch(self.device):
            raise BadConfig(f"no device named `{self.device}`", "use auto, cpu or cuda (or cuda:1)")
        if self.precision not in ("auto", "int8"):
            raise BadConfig(f"no precision named `{self.precision}`", "use auto or int8")
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise BadConfig(
                    f"`--allow-host {host}` is not a host name", "write it as in the address, without `http://`"
                )
        if self.cluster is not None:
            self.cluster.check()
        if self.drain_s < 0 or self.max_body < 1024:
            raise BadConfig(
                "`--drain` must not be negative, and `--max-body` at least 1 kB", "see `inlay serve --help`"
            )

    def to_json(self) -> str:
        """Return the settings as JSON text, for a process of the service."""
        return json.dumps(dataclasses.asdict(self) | {"home": str(self.home)})


def read_settings(variables: Mapping[str, str] = os.environ) -> ServeSettings:
    """Read the settings that the supervisor put into the environment."""
    text = variables.get(VARIABLE)
    if text is None:
        raise BadConfig(f"`${VARIABLE}` is not set", "`inlay serve` starts this process, and sets it")
    tree: dict[str, Any] = json.loads(text)
    tree |= {"home": Path(tree["home"]), "hosts": tuple(tree.get("hosts", ()))}
    if tree.get("cluster") is not None:
        known = tree["cluster"]
        ranges = {name: tuple(known[name]) for name in ("engines", "trainers")}
        tree["cluster"] = ClusterSettings(**known | ranges)
    return ServeSettings(**tree)


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Return the fewest and the most that a text such as `2` or `1-4` says."""
    least, _, most = text.partition("-")
    if not (least.isdigit() and (most or least).isdigit()):
        raise BadConfig(f"`{option} {text}` is not a number", f"write `{option} 2`, or the fewest and the most: `1-4`")
    return int(least), int(most or least)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def count_cores() -> int:
    """Return how many cores this process may use, by its affinity and its control group."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(mine, find_quota())))
