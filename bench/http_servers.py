"""The servers that `bench/over_http.py` measures: how each is started, asked and understood, and what it takes up.

A server and all that it starts carry a mark in their environment. By it their processes are found, whoever their parent
is by now: for memory (PSS, where shared pages count once), for CPU time, and to end them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_envs import find_python
from http_load import make_request
from http_tasks import LABELS, MOST_WHOLE, Tasks, name_task
from report import ROOT, say

PEERS = ROOT / "bench" / "peers"
MARK = "INLAY_BENCH_SERVER"
READY_LIMIT_S, STOP_LIMIT_S = 400.0, 25.0
COMMON = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
TICKS_S = os.sysconf("SC_CLK_TCK")
Probabilities = list[list[float]]


@dataclass(frozen=True)
class Shape:
    """How a server is asked: path, body and headers of a request for rows of one task, and what its answer means."""

    path: Callable[[str], str]
    body: Callable[[str, Sequence[str]], Any]
    read: Callable[[Any], Probabilities]
    headers: Callable[[str], Sequence[tuple[str, str]]] = lambda task: ()

    def request(self, task: str, texts: Sequence[str]) -> str:
        return make_request(self.path(task), self.body(task, texts), self.headers(task))


@dataclass(frozen=True)
class Kind:
    """A server to measure."""

    command: Callable[[Start], list[str]]
    shape: Shape
    environment: str | None = None
    """the peer's environment; None: this python"""
    variables: Mapping[str, str] = field(default_factory=dict)
    most_tasks: int = 100_000
    why_not_more: str = ""
    is_ours: bool = False
    about: str = ""


@dataclass(frozen=True)
class Start:
    """What a command line is made of."""

    python: str
    port: int
    tasks: Tasks
    num_tasks: int
    home: Path
    """of Inlay's service"""
    more: Sequence[str] = ()
    """words for Inlay's command line"""


def _read_rows(answer: Any) -> Probabilities:
    return [row["probs"] for row in answer["data"]]


def _read_inlay(answer: Any) -> Probabilities:
    return [[row["probabilities"][label] for label in LABELS] for row in answer["answers"]]


def _read_infinity(answer: Any) -> Probabilities:
    return [[{item["label"]: item["score"] for item in row}[label] for label in LABELS] for row in answer["data"]]


def _plain_body(task: str, texts: Sequence[str]) -> Any:
    return {"model": task, "input": list(texts)}


CLASSIFY = Shape(lambda task: "/classify", _plain_body, _read_rows)
INLAY = Shape(lambda task: "/v1/predict", lambda task, texts: {"task": task, "rows": list(texts)}, _read_inlay)


def _named(shape: Shape, **changes: Any) -> Shape:
    return Shape(**{"path": shape.path, "body": shape.body, "read": shape.read, "headers": shape.headers} | changes)


def _start_inlay(start: Start) -> list[str]:
    words = [start.python, "-m", "inlay", "serve", "--store", str(start.home), "--port", str(start.port)]
    return [*words, "--slots", str(max(64, start.num_tasks)), *start.more]


def _start_vllm(start: Start) -> list[str]:
    names = [name_task(index) for index in range(start.num_tasks)]
    return [
        *(start.python, "-m", "vllm.entrypoints.cli.main", "serve", str(start.tasks.folder / "base")),
        *("--served-model-name", "base", "--host", "127.0.0.1", "--port", str(start.port)),
        *("--dtype", "float32", "--runner", "pooling", "--max-model-len", "128"),
        *("--enable-lora", "--max-loras", str(start.num_tasks), "--max-cpu-loras", str(start.num_tasks)),
        *("--max-lora-rank", "8", "--disable-uvicorn-access-log"),
        *("--lora-modules", *(f"{name}={start.tasks.folder / 'peft' / name}" for name in names)),
    ]


def _start_infinity(start: Start) -> list[str]:
    words = [str(Path(start.python).with_name("infinity_emb")), "v2", "--host", "127.0.0.1", "--port", str(start.port)]
    for index in range(start.num_tasks):
        name = name_task(index)
        words += ["--model-id", str(start.tasks.folder / "merged" / name), "--served-model-name", name]
    every = ("--engine torch", "--device cpu", "--dtype float32", "--no-bettertransformer", "--no-model-warmup")
    for option in every:
        words += option.split()
    return words


def _start_script(name: str, *more: str) -> Callable[[Start], list[str]]:
    def command(start: Start) -> list[str]:
        script = str(PEERS / f"http_{name}.py")
        return [start.python, script, str(start.port), str(start.tasks.folder / "merged"), str(start.num_tasks), *more]

    return command


def _start_adapters(start: Start) -> list[str]:
    script, folder = str(PEERS / "http_adapters.py"), start.tasks.folder
    return [
        start.python,
        script,
        str(start.port),
        str(folder / "base"),
        str(folder / "adapterhub"),
        str(start.num_tasks),
    ]


def _preloads() -> dict[str, str]:
    """What vLLM advises to load first on a CPU, as far as it is here."""
    known = [
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
        *find_python("vllm").parents[1].glob("lib/libiomp5.so"),
    ]
    return {"LD_PRELOAD": ":".join(map(str, known))} if known else {}


TOO_LARGE = f"a whole model has 90 MB, so that 256 of them take the 23 GB of this machine; {MOST_WHOLE} are measured"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
KINDS: dict[str, Kind] = {
    "inlay": Kind(_start_inlay, INLAY, is_ours=True, about="`inlay serve --no-train`, otherwise as it comes"),
    "inlay-2": Kind(
        lambda start: [*_start_inlay(start), "--engine-threads", "2"],
        INLAY,
        is_ours=True,
        about="the same with `--engine-threads 2`: as many as there are cores",
    ),
    "inlay-classify": Kind(
        _start_inlay, CLASSIFY, is_ours=True, about="the same, asked in vLLM's shape (`POST /classify`)"
    ),
    "vllm": Kind(
        _start_vllm,
        CLASSIFY,
        "vllm",
        {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | _preloads(),
        about="vLLM 0.33.0's Python over the CPU build of 0.32.0, all tasks in LoRA slots, tcmalloc, Intel OpenMP",
    ),
    "infinity": Kind(
        _start_infinity,
        _named(CLASSIFY, read=_read_infinity),
        "infinity",
        {"INFINITY_ANONYMOUS_USAGE_STATS": "0", **ONE_THREAD},
        MOST_WHOLE,
        TOO_LARGE,
        about="Infinity 0.0.78, N whole models, its own batching",
    ),
    "litserve": Kind(
        _start_script("litserve", "2"),
        _named(CLASSIFY, path=lambda task: "/predict"),
        "litserve",
        ONE_THREAD,
        MOST_WHOLE,
        TOO_LARGE,
        about="LitServe 0.2.19, N whole models in each of two workers of one thread, its own batching",
    ),
    "mosec": Kind(
        _start_script("mosec", "2"),
        _named(CLASSIFY, path=lambda task: "/inference"),
        "mosec",
        ONE_THREAD,
        MOST_WHOLE,
        TOO_LARGE,
        about="mosec 0.9.8, N whole models in each of two workers of one thread, its own batching",
    ),
    "ray": Kind(
        _start_script("ray", "32", "2"),
        _named(CLASSIFY, headers=lambda task: (("serve_multiplexed_model_id", task),)),
        "ray",
        {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0", **ONE_THREAD},
        MOST_WHOLE,
        TOO_LARGE,
        about="Ray Serve 2.60, multiplexed whole models, two replicas of one thread that keep 32 each, `@serve.batch`",
    ),
    "adapters": Kind(
        _start_adapters,
        CLASSIFY,
        "adapters",
        about="`adapters` 1.3.0 behind FastAPI: one model, a request at a time switches to its adapter; two threads",
    ),
}


class Server:
    """A running server of one kind."""

    def __init__(
        self,
        name: str,
        tasks: Tasks,
        num_tasks: int,
        *,
        more: Sequence[str] = (),
        home: Path | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.name, self.kind, self.num_tasks = name, KINDS[name], num_tasks
        self.port, self.mark = find_port(), secrets.token_hex(8)
        python = find_python(self.kind.environment) if self.kind.environment else Path(sys.executable)
        self.shape = self.kind.shape
        if headers:
            own = self.kind.shape.headers
            self.shape = _named(self.shape, headers=lambda task: (*own(task), *headers))
        if self.kind.is_ours and home is None:
            home = tasks.copy_home(name)
        command = self.kind.command(Start(str(python), self.port, tasks, num_tasks, home or tasks.home, more))
        self.log = tasks.folder / "logs" / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        threads = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "INLAY_"))}
        # The peers' console scripts (ray, uvicorn …) are looked up on the path.
        path = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
        variables = threads | COMMON | path | dict(self.kind.variables) | {MARK: self.mark}
        self.began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=variables,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.log.parent,
            )
        self.ready_s = 0.0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def wait(self, limit_s: float = READY_LIMIT_S) -> None:
        """Return when its first and its last task answer."""
        ends = time.monotonic() + limit_s
        for index in (0, self.num_tasks - 1):
            while True:
                if self.process.poll() is not None:
                    raise ServerFailed(f"{self.name} ended with status {self.process.returncode}: {self.last_words()}")
                try:
                    self.ask(name_task(index), ["are you there"], limit_s=60)
                    break
                except urllib.error.HTTPError as error:
                    if error.code in (400, 422) or time.monotonic() > ends:  # it runs, and takes no such request
                        raise ServerFailed(f"{self.name} answers {error.code}: {error.read()[:300]!r}") from None
                except (OSError, urllib.error.URLError, KeyError, ValueError) as error:
                    if time.monotonic() > ends:
                        raise ServerFailed(
                            f"{self.name} was not ready in {limit_s:.0f} s: {error}; {self.last_words()}"
                        ) from None
                time.sleep(0.5)
        self.ready_s = time.monotonic() - self.began
        say(f"{self.name}: ready after {self.ready_s:.1f} s with {self.num_tasks} tasks")

    def ask(self, task: str, texts: Sequence[str], *, limit_s: float = 30.0) -> Probabilities:
        """Ask for the probabilities of one task's rows, by itself."""
        shape = self.shape
        return shape.read(
            self.call("POST", shape.path(task), shape.body(task, texts), dict(shape.headers(task)), limit_s)
        )

    def call(
        self, verb: str, path: str, body: Any = None, headers: Mapping[str, str] = {}, limit_s: float = 30.0
    ) -> Any:
        """Any request, and the JSON of its answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=verb)
        for key, value in {"Content-Type": "application/json", **headers}.items():
            request.add_header(key, value)
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return json.load(answer)

    def processes(self) -> list[int]:
        return find_marked(self.mark, self.process.pid)

    def cpu_s(self) -> float:
        """CPU seconds that its processes have used, those that ended included."""
        return sum(map(_cpu_of, self.processes()))

    def pss_mb(self) -> float:
        """Memory of all its processes; a page that several share counts once."""
        return sum(map(_pss_of, self.processes())) / 1024

    def freeze(self) -> None:
        """Let it stand still: an idle Ray takes 40% of a core, which another server's turn should not pay for."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(encoding="utf8", errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-3:])[-500:]

    def stop(self) -> None:
        """Ask it to end, and end what is left of it."""
        self.thaw()
        if self.process.poll() is None:
            self.process.terminate()
        ends = time.monotonic() + STOP_LIMIT_S
        while self.processes() and time.monotonic() < ends:
            self.process.poll()
            time.sleep(0.2)
        self._signal(signal.SIGKILL)
        self.process.wait()


class ServerFailed(Exception):
    """A server that did not start, or ended by itself."""


def find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def find_marked(mark: str, root: int) -> list[int]:
    """The processes that `root` started, at whatever remove.

    They have the mark in their environment, or its session, or one of them as parent: vLLM writes its processes' titles
    over their environment, and Ray's leave the session.
    """
    sought, found, parents = f"{MARK}={mark}".encode(), set(), {}
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        pid = int(place.name)
        try:
            state, parent, _, session = _stat_of(pid)[:4]
            marked = sought in (place / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or a kernel's
            continue
        if state == "Z":
            continue
        parents[pid] = int(parent)
        if marked or int(session) == root:
            found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _stat_of(pid: int) -> list[str]:
    """The fields of a process after its name: its state, its parent …"""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _cpu_of(pid: int) -> float:
    try:
        fields = _stat_of(pid)
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_S


def _pss_of(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
