"""A real `inlay serve` in processes of its own, for tests that need one: started, watched, killed, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ON_RAY = "INLAY_TEST_ON_RAY" in os.environ
"""whether services get their engine and trainer on the Ray cluster that $RAY_ADDRESS names (`make service-on-ray`)"""
START_S = 240.0 if ON_RAY else 60.0
"""how long a service on the tiny backbone may take until it is ready, on a busy machine"""


def find_port() -> int:
    """A port that is free now, on this machine's loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], Any], what: str, patience_s: float = START_S, pause_s: float = 0.05) -> Any:
    """What the condition returns as soon as it is true."""
    until = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {patience_s:g} s in vain for {what}")
        time.sleep(pause_s)
    return found


class RunningService:
    """`inlay serve` over a home; killed and started again it keeps its port."""

    def __init__(self, home: Path, backbone: Path | str, *flags: str) -> None:
        self.home, self.port = home, find_port()
        self.flags = ["--backbone", str(backbone), "--store", str(home), "--port", str(self.port), *flags]
        self.flags += ["--on", "ray", "--engines", "2", "--ray-cpus", "0.5"] if ON_RAY else []
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = home.with_name(f"{home.name}.log")
        self.process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}
        """variables besides this process's own"""
        self.patience_s = START_S
        self.killed: set[int] = set()

    def __enter__(self) -> RunningService:
        self.start()
        try:
            self.wait_ready(self.patience_s)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        """Start the supervisor; nothing is waited for."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "INLAY_CACHE_BYTES": "0", **self.environment}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            command = [sys.executable, "-P", "-m", "inlay", "serve", *self.flags]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait_ready(self, patience_s: float = START_S) -> None:
        """Wait until every process is ready and a row was answered."""
        wait_until(self.is_ready, f"readiness; the log ends with\n{self.tail()}", patience_s)

    def is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.tail()}"
        status = self.status()
        if status.get("pid") != self.process.pid:
            return False
        if any(each["state"] != "ready" or each["pid"] in self.killed for each in status["processes"]):
            return False
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def status(self) -> dict[str, Any]:
        """What the supervisor last wrote of its processes."""
        try:
            return json.loads((self.home / "service" / "run" / "status.json").read_bytes())
        except FileNotFoundError:
            return {}

    def pid_of(self, name: str) -> int | None:
        """The process of this name: `supervisor`, `web`, `engine`, `trainer`."""
        if name == "supervisor":
            return None if self.process is None else self.process.pid
        found = [*self.status().get("processes", ()), *self.members()]
        return next((each["pid"] for each in found if each["name"].startswith(name)), None)

    def members(self) -> list[dict[str, Any]]:
        """What the service last heard of its engines and trainers on a cluster: `engine-1`, `trainer-1`."""
        try:
            return json.loads((self.home / "service" / "run" / "fleet.json").read_bytes())["members"]
        except (FileNotFoundError, KeyError):
            return []

    def kill(self, name: str) -> None:
        """Kill a process by -9, if it is there."""
        pid = self.pid_of(name)
        if pid is not None:
            self.killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return
        if name == "supervisor" and self.process is not None:
            self.process.wait()

    def stop(self, patience_s: float = START_S) -> int:
        """Ask for a drain; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience_s)

    def tail(self, num_characters: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-num_characters:] if self.log.exists() else ""
