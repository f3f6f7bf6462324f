"""What tests of the page work with: the real app on a real database, a trainer, and an engine in this process."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from inlay.service.engine import Caller, EngineStats, Predicted, VersionLoaded, WireAnswer, WireError, WireRow
from inlay.service.engine.protocol import Probed
from inlay.service.settings import ServeSettings
from inlay.service.state import Database, Keys, Workspace
from inlay.service.trainer.answering import Answerer
from inlay.service.web import make_app
from inlay.store import Store

sys.path.append(str(Path(__file__).parents[1] / "trainer"))

BASE = "http://127.0.0.1:8642"
OWN = {"origin": BASE}
"""what a browser says of a form that the page itself sent"""
QUICK = {"epochs": "2", "lr": "0.005", "size": "4", "max_length": "16"}


class LocalEngine:
    """An engine without a process of its own."""

    def __init__(self, backbone: Any, store: Store) -> None:
        self._answerer = Answerer(backbone, store)
        self.loaded: list[tuple[str, int]] = []

    async def predict(
        self, caller: Caller, rows: Sequence[WireRow], *, deadline_ms: float | None = None, request_id: str = ""
    ) -> Predicted:
        answers = await asyncio.to_thread(self._answer, caller, rows)
        return Predicted(0, answers, sum(len(row.text.split()) for row in rows), 0.1, 0.2)

    def _answer(self, caller: Caller, rows: Sequence[WireRow]) -> list[WireAnswer | WireError]:
        found: list[WireAnswer | WireError] = []
        for row in rows:
            (about,) = self._answerer.answer(caller, (row.store_name, row.number), [(row.text, row.pair)])
            if "error" in about:
                fault = about["error"]
                found.append(WireError(fault["code"], fault["message"], fault["hint"], fault["status"]))
            else:
                named = {"task": row.task, "version": f"{row.task.partition('@')[0]}@{row.number}"}
                found.append(WireAnswer(row.store_name, row.number, about | named))
        return found

    async def load(self, store_name: str, number: int) -> VersionLoaded:
        self.loaded.append((store_name, number))
        return VersionLoaded(0, 0.01, 1)

    async def stats(self) -> EngineStats:
        return EngineStats(
            *(0, 3, 120, 0.025, ["mail@1"], 64, 21034.0, 10, 120932, 1, {}, "tiny", 3600.0, 612_000_000, 0),
            is_draining=False,
        )

    async def probe(self) -> Probed:
        return Probed(0, 0.01, "mail@1")

    async def close(self) -> None:
        return None


@dataclass
class PageBench:
    """The app, a browser without JavaScript, and a trainer that works when told."""

    db: Database
    app: Any
    client: TestClient
    trainer: Any

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.db, "local", "local")

    def get(self, path: str, status: int = 200) -> str:
        """Return a page."""
        response = self.client.get(path)
        assert response.status_code == status, response.text
        return response.text

    def post(self, path: str, data: Any = None, **more: Any) -> Any:
        """Send a form as the page would; return the response without following it."""
        return self.client.post(path, data=data, headers=OWN | more.pop("headers", {}), follow_redirects=False, **more)

    def upload(self, content: bytes, name: str = "mail.csv") -> str:
        """Upload a file; return the address of what was found."""
        response = self.post("/new", files={"file": (name, content)})
        assert response.status_code == 303, response.text
        return response.headers["location"]

    def train(self) -> None:
        """Train what is queued."""
        while self.trainer.train_next(company_s=0.0):
            pass
        while self.trainer.do_next():
            pass

    def train_file(self, content: bytes, task: str = "mail", **settings: str) -> str:
        """Upload a file and train it with quick settings; return the job's address."""
        found = self.upload(content)
        response = self.post(found, {"task": task, "publish": "always", **QUICK, **settings})
        assert response.status_code == 303, response.text
        self.train()
        return response.headers["location"]

    def sign_in(self, tenant: str = "local", **made: Any) -> str:
        """Make a key and sign in with it; return its text."""
        _, secret = Keys(self.db).make(tenant, **made)
        response = self.post("/sign-in", {"key": secret, "next": "/"})
        assert response.status_code == 303, response.text
        return secret


def open_page_bench(home: Path, backbone: Any, **settings: Any) -> PageBench:
    """Open a bench on a folder; without any key, so that nobody needs one."""
    from trainer_bench import open_bench_at

    trained = open_bench_at(home, backbone)
    app = make_app(ServeSettings(home, **settings), trained.db, LocalEngine(backbone, trained.store))
    client = TestClient(app, BASE, raise_server_exceptions=False)
    return PageBench(trained.db, app, client, trained.trainer)


def make_csv(num_rows: int = 60, *, seed: int = 0, wrong: float = 0.0) -> bytes:
    """A file whose labels can be learned from its words; a share of them is wrong."""
    from trainer_bench import make_rows

    rows = make_rows(num_rows, seed=seed, wrong=wrong)
    return b"text,label\n" + b"".join(f"{row['text']},{row['label']}\n".encode() for row in rows)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def read_tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """Every element of a page, with its attributes."""
    reader = _Reader()
    reader.feed(page)
    return reader.tags


@contextmanager
def serving(bench: PageBench):
    """Serve the app on a free port of this machine, with a trainer beside it; gives the address."""
    config = uvicorn.Config(bench.app, host="127.0.0.1", port=0, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    threads = [
        threading.Thread(target=server.run, daemon=True),
        threading.Thread(target=bench.trainer.run, args=(lambda: bench.trainer.train_next(0.1),), daemon=True),
        threading.Thread(target=bench.trainer.run, args=(bench.trainer.do_next,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for _ in range(200):
        if server.started:
            break
        threading.Event().wait(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        bench.trainer.stopping.set()
        for thread in threads:
            thread.join(20)
