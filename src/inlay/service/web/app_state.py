"""What all routes of one web process share. It is at `app.state.inlay`; the pages use it too."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from inlay.service.engine import Answering
from inlay.service.settings import ServeSettings
from inlay.service.state import Database, Key, Keys, Workspace
from inlay.service.web.counters import Counters
from inlay.service.web.inspection import Inspector
from inlay.service.web.problems import Secrets

_NAMES_KEPT_S = 1.0
_MOST_TENANTS = 1000


@dataclass
class AppState:
    """The settings, database, engine and counters of a web process."""

    settings: ServeSettings
    db: Database
    engine: Answering
    counters: Counters = field(default_factory=Counters)
    find_session: Callable[[str], Key | None] = lambda token: None
    """finds the valid key of a browser's session by its token"""
    is_draining: bool = False
    """set while the process ends: it is not ready any more"""

    def __post_init__(self) -> None:
        self.keys = Keys(self.db)
        self.live_names = LiveNames()
        self.inspector = Inspector(self.secrets)
        self.streams: Counter[str] = Counter()
        """open streams of events, by tenant"""
        self.readiness = KnownReadiness()
        self.started_at = time.time()

    @property
    def secrets(self) -> Secrets:
        """What no answer may show."""
        return Secrets(self.settings.home)


class KnownReadiness:
    """The last result of the readiness checks, so that frequent requests cost little."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.checks: dict[str, str] = {}
        self._at = -math.inf

    def is_fresh(self, seconds: float) -> bool:
        """Return whether the result is at most so many seconds old."""
        return time.monotonic() < self._at + seconds

    def keep(self, checks: dict[str, str]) -> None:
        """Store a new result."""
        self.checks, self._at = checks, time.monotonic()


class LiveNames:
    """The names of a tenant's tasks that can answer, cached for a second: what `"tasks": "*"` means."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, float, tuple[str, ...]]] = OrderedDict()

    def find(self, workspace: Workspace) -> tuple[str, ...]:
        """Return the names in order."""
        revision, at = workspace.db.revision(), time.monotonic()
        known = self._known.get(workspace.name)
        if known is not None and known[0] == revision and at < known[1] + _NAMES_KEPT_S:
            return known[2]
        names: list[str] = []
        cursor: str | None = None
        while True:
            page = workspace.tasks(limit=200, cursor=cursor)
            names += [task.name for task in page.items if task.live is not None]
            cursor = page.next_cursor
            if cursor is None:
                break
        self._known[workspace.name] = (revision, at, tuple(names))
        if len(self._known) > _MOST_TENANTS:
            self._known.popitem(last=False)
        return tuple(names)
