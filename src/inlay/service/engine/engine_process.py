"""The engine's process: one event loop that takes requests and replies, and threads that do the work.

    socket ─► intake (tokenise, in threads) ─► fair queue ─► next batch ─► compute thread ─► replies
                                                   └─ parked ─► loader threads ─┘

The loop owns the queue and the requests; threads hand their results back to it. What always holds: a request gets one
reply, whatever happens to its rows; a batch that fails unexpectedly costs only its own rows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from inlay.errors import InlayError
from inlay.service.engine.admission import Admission
from inlay.service.engine.batches import BatchFormer, PreparedBatch, WorkRate
from inlay.service.engine.engine_connections import EngineConnection, bind_port, bind_socket
from inlay.service.engine.fair_queue import FairQueue, WaitingRow
from inlay.service.engine.intake import Arrival, Intake, Taken
from inlay.service.engine.protocol import (
    AskProbe,
    AskStats,
    Cancel,
    EngineStats,
    ForgetTask,
    LoadVersion,
    Predict,
    Probed,
    Question,
    Refused,
    Reply,
    TaskForgotten,
    VersionLoaded,
)
from inlay.service.engine.tickets import DeadlinePassed, Ticket
from inlay.service.engine.version_loader import VersionLoader
from inlay.service.logs import log_failure
from inlay.serving import Answer, Engine, Request, as_error, check_through_engine

TARGET_BATCH_MS = {"cpu": 60.0, "cuda": 8.0}
_WARM_TOKENS = 512
_PROBE_TEXT = "is anybody there ?"


@dataclass(frozen=True)
class EngineLimits:
    """The time that a batch should take, and the time that the whole queue may take."""

    target_batch_ms: float
    most_queue_s: float = 20.0


class EngineProcess:
    """Answers the questions of clients on a socket. It is made and used in the event loop's thread."""

    def __init__(self, engine: Engine, limits: EngineLimits) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._rate = WorkRate(_measure(engine), limits.target_batch_ms / 1000)
        self._queue = FairQueue()
        self._admission = Admission(self._queue, self._rate, limits.most_queue_s)
        hot = engine.hot_versions
        self._loader = VersionLoader(hot, lambda digest: self._former.arrived(digest), self._cannot_load)
        self._former = BatchFormer(self._queue, hot, lambda: self._rate.budget, self._loader.want)
        self._intake = Intake(engine)
        self._side_work = ThreadPoolExecutor(2, thread_name_prefix="side")  # proofs and probes
        self._compute = threading.Thread(target=self._compute_batches, name="compute", daemon=True)
        self._tickets: dict[EngineConnection, dict[int, Ticket]] = {}
        self._server: asyncio.Server | None = None
        self._num_batches = 0
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def listen(self, path: Path) -> None:
        """Begin to answer on a Unix socket."""
        self._compute.start()
        factory = lambda: EngineConnection(self._ask, self._gone)  # noqa: E731
        self._server = await self._loop.create_unix_server(factory, sock=bind_socket(path))

    async def listen_on_port(self, host: str, token: str) -> int:
        """Begin to answer clients on other machines that know the token; return the port."""
        self._compute.start()
        factory = lambda: EngineConnection(self._ask, self._gone, token=token.encode())  # noqa: E731
        listener = bind_port(host)
        self._server = await self._loop.create_server(factory, sock=listener)
        return int(listener.getsockname()[1])

    async def drain(self) -> None:
        """Accept no more requests, and return when the accepted ones are answered."""
        self._is_draining = True
        await self._is_idle.wait()

    async def close(self) -> None:
        """End all threads and connections; requests without an answer are refused."""
        self._is_draining = True
        if self._server is not None:
            self._server.close()
        self._intake.close()
        self._loader.close()
        self._former.close()
        for connection, tickets in list(self._tickets.items()):
            for ticket in list(tickets.values()):
                self._end(ticket, Refused(ticket.id, "draining", "the service is stopping", None, 503, 1.0))
            connection.close()
        self._side_work.shutdown(wait=False, cancel_futures=True)
        if self._compute.is_alive():
            await asyncio.to_thread(self._compute.join)

    # Questions of clients.

    def _ask(self, question: Question, connection: EngineConnection) -> None:
        match question:
            case Predict():
                self._predict(question, connection)
            case Cancel():
                ticket = self._tickets.get(connection, {}).get(question.id)
                if ticket is not None:
                    self._end(ticket, None)
            case LoadVersion():
                self._aside(lambda: self._load(question), question.id, connection)
            case ForgetTask():
                name = question.store_name
                self._aside(lambda: TaskForgotten(question.id, self._engine.forget(name)), question.id, connection)
            case AskProbe():
                self._aside(lambda: self._probe(question), question.id, connection)
            case AskStats():
                connection.reply(self._describe(question.id))

    def _gone(self, connection: EngineConnection) -> None:
        """Drop all requests of a client that has gone."""
        for ticket in list(self._tickets.get(connection, {}).values()):
            self._end(ticket, None)
        self._tickets.pop(connection, None)

    def _predict(self, question: Predict, connection: EngineConnection) -> None:
        """Accept a request, or refuse it before any work is spent on it."""
        ticket = Ticket(question, connection)
        tickets = self._tickets.setdefault(connection, {})
        if question.id in tickets:
            connection.reply(Refused(question.id, "bad-frame", "the id is in use", None, 400))
            return
        refused = self._admission.refuse_early(question, is_draining=self._is_draining)
        if refused is not None:
            connection.reply(refused)
            return
        tickets[question.id] = ticket
        self._is_idle.clear()
        self._admission.enter(ticket)
        if question.deadline_ms is not None:
            delay_s = max(0.0, question.deadline_ms / 1000)
            ticket.timer = self._loop.call_later(delay_s, self._expire, ticket)
        if not question.rows:
            self._end(ticket, ticket.reply())
            return
        scope = question.caller.tenant
        ticket.arrival = Arrival(question.rows, scope, lambda taken: self._queue_rows(ticket, taken))
        self._intake.submit(ticket.arrival)

    def _queue_rows(self, ticket: Ticket, taken: list[Taken]) -> None:
        """Queue the tokenised rows of a request, or refuse it for the number of its tokens."""
        refused = self._admission.admit(ticket, taken)
        if refused is not None:
            self._end(ticket, refused)
            return
        for index, item in enumerate(taken):
            if isinstance(item, InlayError):
                self._settle(ticket, index, item)
            else:
                ticket.rows.append(WaitingRow(ticket.caller, item.tokens.num_tokens, item, (ticket, index)))
        self._queue.add(ticket.rows)
        self._former.fill()

    def _expire(self, ticket: Ticket) -> None:
        """Drop the rows of a request that are not being computed yet: its deadline has passed."""
        late = DeadlinePassed()
        if ticket.arrival is not None and not ticket.rows:
            ticket.arrival.is_cancelled = True
            for index in range(len(ticket.answers)):
                self._settle(ticket, index, late)
        for row in ticket.rows:
            if self._queue.drop(row) or not ticket.is_computing(row):
                self._settle(ticket, row.ticket[1], late)
        self._former.fill()

    def _settle(self, ticket: Ticket, index: int, found: Answer | InlayError) -> None:
        """Store the answer or error of a row; reply if it was the last one."""
        if ticket.settle(index, found):
            self._end(ticket, ticket.reply())

    def _end(self, ticket: Ticket, reply: Reply | None) -> None:
        """End a request, with a reply unless nobody waits for it. Its rows in the queue are dropped."""
        if self._tickets.get(ticket.connection, {}).pop(ticket.id, None) is None:
            return
        ticket.is_open = False
        if ticket.timer is not None:
            ticket.timer.cancel()
        if ticket.arrival is not None:
            ticket.arrival.is_cancelled = True
        for row in ticket.rows:
            self._queue.drop(row)
        self._admission.leave(ticket, is_refused=isinstance(reply, Refused))
        if reply is not None:
            ticket.connection.reply(reply)
        if not self._tickets_open():
            self._is_idle.set()

    def _tickets_open(self) -> int:
        """Return the number of requests that are being answered."""
        return sum(map(len, self._tickets.values()))

    def _cannot_load(self, digest: str, error: InlayError) -> None:
        """Give the rows that wait for a version its error."""
        for row in self._former.failed(digest):
            ticket, index = row.ticket
            self._settle(ticket, index, error)

    # Batches.

    def _compute_batches(self) -> None:
        """Compute one batch after another. This is the compute thread."""
        is_on_device = self._engine.backbone.device.type != "cpu"
        while (batch := self._former.take()) is not None:
            self._call(self._former.fill)
            batch.rows = [row for row in batch.rows if row.ticket[0].begin(row)]
            began, busy_from = time.perf_counter(), time.thread_time()
            found: list[Answer] | InlayError = []
            try:
                if batch.rows:
                    found = self._engine.answer([row.item for row in batch.rows], batch.states)
            except Exception as error:  # `answer` isolates what fails; this is its own fault
                log_failure("a batch failed")
                found = as_error(error)
            self._former.release(batch)
            seconds = time.perf_counter() - began
            # Beside a device this thread only waits: the device computes all the time.
            busy_s = seconds if is_on_device else time.thread_time() - busy_from
            self._call(partial(self._take_answers, batch, found, seconds, busy_s))

    def _call(self, callback: Callable[[], None]) -> None:
        """Have the event loop call a function, unless the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _take_answers(
        self, batch: PreparedBatch, found: list[Answer] | InlayError, seconds: float, busy_s: float
    ) -> None:
        """Hand the answers of a batch to their requests."""
        if isinstance(found, list) and found:
            self._rate.learn(batch.work, seconds, busy_s)
            self._num_batches += 1
            self._admission.count(batch.rows)
        for place, row in enumerate(batch.rows):
            ticket, index = row.ticket
            ticket.compute_s += seconds / len(batch.rows)
            self._settle(ticket, index, found if isinstance(found, InlayError) else found[place])
        self._former.fill()

    # Other work, in threads.

    def _aside(self, work: Callable[[], Reply], question_id: int, connection: EngineConnection) -> None:
        """Do slow work in a thread of its own, and reply."""

        def reply(done: asyncio.Future[Reply]) -> None:
            if done.cancelled():
                return
            error = done.exception()
            if error is None:
                connection.reply(done.result())
                return
            if not isinstance(error, InlayError):
                log_failure("side work failed")
            known = as_error(error) if isinstance(error, Exception) else InlayError("no answer")
            connection.reply(Refused(question_id, known.code, known.message, known.hint, known.http_status))

        if self._is_draining:
            connection.reply(Refused(question_id, "draining", "the service is stopping", None, 503, 1.0))
            return
        self._loop.run_in_executor(self._side_work, work).add_done_callback(reply)

    def _load(self, question: LoadVersion) -> VersionLoaded:
        began = time.monotonic()
        found = self._engine.find_version(f"{question.store_name}@{question.number}")
        num_probes = check_through_engine(found.version, self._engine)
        return VersionLoaded(question.id, time.monotonic() - began, num_probes)

    def _probe(self, question: AskProbe) -> Probed:
        """Answer a probe row of the version that was used last; without any version, run the backbone alone."""
        began = time.monotonic()
        for hot in reversed(self._engine.hot_versions.values()):
            if not hot.manifest.probes:
                continue
            probe = hot.manifest.probes[0]
            (answer,) = self._engine.predict([Request(hot.version.reference, probe.text, probe.pair)])
            if answer.error is None:
                return Probed(question.id, time.monotonic() - began, hot.version.reference)
            if answer.error.code not in ("unknown-name", "store-damaged", "not-finite"):  # the version's own fault
                raise answer.error
        self._engine.run_backbone(len(_PROBE_TEXT))
        return Probed(question.id, time.monotonic() - began)

    def _describe(self, question_id: int) -> EngineStats:
        hot = self._engine.hot_versions
        return EngineStats(
            question_id,
            queue_rows=self._queue.num_rows,
            queue_tokens=self._queue.num_tokens,
            queue_s=self._admission.queue_s,
            resident=[each.version.reference for each in hot.values()],
            num_slots=hot.num_slots,
            tokens_per_s=self._rate.per_s,
            num_batches=self._num_batches,
            num_rows=self._admission.num_rows,
            num_tokens=self._admission.num_tokens,
            per_tenant=self._admission.describe(),
            backbone=self._engine.backbone.name,
            uptime_s=time.monotonic() - self._began,
            memory_bytes=_count_memory(),
            num_load_failures=self._loader.num_failed,
            is_draining=self._is_draining,
        )


def _measure(engine: Engine) -> float:
    """Return the tokens that the backbone alone reads in a second, after one pass to warm up."""
    engine.run_backbone(_WARM_TOKENS)
    return _WARM_TOKENS / min(engine.run_backbone(_WARM_TOKENS) for _ in range(3))


def _count_memory() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    import resource

    return pages * resource.getpagesize()
