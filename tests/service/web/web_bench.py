"""What tests of the web work with: an app on a real database, tenants with keys, and an engine that only pretends."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from inlay.service.engine import (
    Caller,
    EngineRefused,
    EngineStats,
    Predicted,
    TenantLoad,
    VersionLoaded,
    WireAnswer,
    WireError,
    WireRow,
)
from inlay.service.engine.protocol import Probed
from inlay.service.settings import ServeSettings
from inlay.service.state import Database, Keys, TenantLimits, Tenants, Workspace
from inlay.service.web import WebApp, make_app

sys.path.append(str(Path(__file__).parents[1] / "state"))  # versions and jobs made by hand

BASE = "http://127.0.0.1:8642"
LABELS = ("ham", "spam")
CSV = b"text,label\n" + b"".join(
    b"win a prize now %d,spam\nsee you at eight %d,ham\n" % (number, number) for number in range(20)
)


def classify(row: WireRow) -> dict[str, Any]:
    """Answer as a classifier: what mentions a prize is spam."""
    sure = 0.9 if "prize" in row.text else 0.2
    probabilities = dict(zip(LABELS, (1 - sure, sure), strict=True))
    label = max(probabilities, key=lambda name: probabilities[name])
    return {"label": label, "probabilities": probabilities, "probability": probabilities[label]}


def tag(row: WireRow) -> dict[str, Any]:
    """Answer as a tagger: every word with a capital is a name."""
    words, start = [], 0
    for word in row.text.split(" "):
        label = "B-NAME" if word[:1].isupper() else "O"
        words.append({"start": start, "end": start + len(word), "text": word, "tag": label, "probability": 0.8})
        start += len(word) + 1
    found = [{**word, "label": "NAME"} for word in words if word["tag"] != "O"]
    for entity in found:
        del entity["tag"]
    return {"entities": found, "words": words}


def read_passage(row: WireRow) -> dict[str, Any]:
    """Answer as a reader: the first word of the context."""
    word = (row.pair or "").split(" ")[0]
    best = {"text": word, "start": 0, "end": len(word), "score": 2.0, "probability": 0.7}
    none = {"text": "", "start": None, "end": None, "score": 1.0, "probability": 0.3}
    return {"answer": word, "start": 0, "end": len(word), "probability": 0.7, "nbest": [best, none]}


def measure(row: WireRow) -> dict[str, Any]:
    """Answer as a regression: the length of the text."""
    return {"value": float(len(row.text))}


@dataclass
class FakeEngine:
    """An engine that answers at once by rules; tests bend it."""

    rules: dict[str, Any] = field(default_factory=dict)
    """store name -> how it answers; others classify"""
    delay_s: float = 0.0
    refusal: EngineRefused | None = None
    lies: bool = False
    asked: list[tuple[Caller, Sequence[WireRow]]] = field(default_factory=list)
    loaded: list[tuple[str, int]] = field(default_factory=list)
    num_cancelled: int = 0
    _ids: Any = field(default_factory=itertools.count)

    async def predict(
        self, caller: Caller, rows: Sequence[WireRow], *, deadline_ms: float | None = None, request_id: str = ""
    ) -> Predicted:
        self.asked.append((caller, rows))
        self._refuse()
        try:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        answers = [self._answer(row) for row in rows]
        return Predicted(next(self._ids), answers, sum(len(row.text.split()) for row in rows), 0.1, 0.2)

    def _answer(self, row: WireRow) -> WireAnswer | WireError:
        if not row.text.strip():
            return WireError("bad-data", "the text is empty", "send a text", 400)
        rule = self.rules.get(row.store_name, classify)
        shown = row.task.partition("@")[0]
        about = {"task": shown, "version": f"{shown}@{row.number}", **rule(row)}
        return WireAnswer(row.store_name, row.number + self.lies, about)

    async def load(self, store_name: str, number: int) -> VersionLoaded:
        self._refuse()
        self.loaded.append((store_name, number))
        return VersionLoaded(0, 0.01, 1)

    async def forget(self, store_name: str) -> int:
        return 0

    async def stats(self) -> EngineStats:
        self._refuse()
        loads = {"acme": TenantLoad(1, 2, 3, 4, 5)}
        return EngineStats(
            *(0, 1, 2, 0.5, ["acme.mail@1"], 64, 1000.0, 1, 1, 1, loads, "tiny", 1.0, 1000, 0), is_draining=False
        )

    async def probe(self) -> Probed:
        self._refuse()
        return Probed(0, 0.01, "acme.mail@1")

    async def close(self) -> None:
        return None

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal


@dataclass
class WebBench:
    """An app, what is behind it, and clients of tenants."""

    db: Database
    engine: FakeEngine
    app: WebApp
    client: TestClient
    """without a key"""
    secrets: dict[str, str] = field(default_factory=dict)

    def add_tenant(self, name: str, limits: TenantLimits | None = None, **made: Any) -> TestClient:
        """Make a tenant with a key of all scopes but the operator's; return a client that sends it."""
        if name not in {tenant.name for tenant in Tenants(self.db).list()}:
            Tenants(self.db).add(name, limits)
        return self.client_of(name, **made)

    def client_of(self, tenant: str, **made: Any) -> TestClient:
        """Return a client with a new key of a tenant."""
        _, secret = Keys(self.db).make(tenant, **made)
        self.secrets[tenant] = secret
        return self.client_with(secret)

    def client_with(self, secret: str) -> TestClient:
        """Return a client that sends a key."""
        client = TestClient(
            self.app, BASE, raise_server_exceptions=False, headers={"authorization": f"Bearer {secret}"}
        )
        client.portal = self.client.portal
        return client

    def workspace(self, tenant: str) -> Workspace:
        """Return the workspace of a tenant."""
        return Workspace(self.db, tenant, "test")

    def store_task(self, tenant: str, task: str = "mail", seed: int = 0) -> Any:
        """Give a tenant a task with a version that is live."""
        from state_makers import train_and_store

        return train_and_store(self.workspace(tenant), task, seed=seed)


@dataclass
class RawAnswer:
    """What an app sent, message by message."""

    messages: list[dict[str, Any]]

    @property
    def status(self) -> int | None:
        """The status; None where nothing was sent."""
        return self.messages[0]["status"] if self.messages else None

    @property
    def body(self) -> bytes:
        """All pieces together."""
        return b"".join(message.get("body", b"") for message in self.messages)


def send_pieces(
    app: WebApp, path: str, pieces: Sequence[bytes | None], secret: str, headers: dict[str, str] | None = None
) -> RawAnswer:
    """POST a body piece by piece to an app without a server; None in place of a piece is a client that goes."""
    given = {"host": "127.0.0.1", "authorization": f"Bearer {secret}", "content-type": "application/json"}
    head = [(name.encode(), value.encode()) for name, value in {**given, **(headers or {})}.items()]
    path, _, query = path.partition("?")
    scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode(), "headers": head}
    left = list(pieces)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        if not left:
            await asyncio.sleep(60)
        piece = left.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        has_more = bool(left) and (left[0] is not None or not piece.endswith(b"}"))
        return {"type": "http.request", "body": piece, "more_body": has_more}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    return RawAnswer(sent)


def open_bench(home: Path, **settings: Any) -> WebBench:
    """Open a bench on a home whose database is up to date."""
    db = Database.open(home)
    engine = FakeEngine()
    app = make_app(ServeSettings(home, **settings), db, engine)  # type: ignore[arg-type]
    return WebBench(db, engine, app, TestClient(app, BASE, raise_server_exceptions=False))
