"""The engine's process: one event loop that takes requests and replies, and threads that do the work.

    socket ─► intake (tokenise, in threads) ─► fair queue ─► next batch ─► compute thread ─► replies
                                                   └─ parked ─► loader threads ─┘

The loop owns the queue and all that is known of requests; threads hand their results back to it. What always holds: a
request is answered once, whatever happens to its rows; a batch that fails in a way nobody foresaw costs its own rows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from inlay.service.engine.tickets import RowFailed, Ticket
from inlay.service.engine.version_loader import VersionLoader
from inlay.service.logs import log_failure
from inlay.serving import Answer, Engine, Request, as_error, check_through_engine

TARGET_BATCH_MS = {"cpu": 60.0, "cuda": 8.0}
_WARM_TOKENS = 512
_PROBE_TEXT = "is anybody there ?"


@dataclass(frozen=True)
class EngineLimits:
    """How long a batch should take, and how long the queue may be."""

    target_batch_ms: float
    most_queue_s: float = 20.0


class EngineProcess:
    """Answers questions of clients on a socket. Made and used in the event loop's thread."""

    def __init__(self, engine: Engine, limits: EngineLimits) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._rate = WorkRate(_measure(engine), limits.target_batch_ms / 1000)
        self._queue = FairQueue()
        self._admission = Admission(self._queue, self._rate, limits.most_queue_s)
        hot = engine.hot_versions
        self._loader = VersionLoader(hot, self._arrived, self._cannot_load)
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
        """Take nothing new, and return when all that was taken is answered."""
        self._is_draining = True
        await self._is_idle.wait()

    async def close(self) -> None:
        """End everything; what is not answered yet is refused."""
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

    # What clients ask.

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
                self._aside(lambda: self._forget(question), question.id, connection)
            case AskProbe():
                self._aside(lambda: self._probe(question), question.id, connection)
            case AskStats():
                connection.reply(self._describe(question.id))

    def _gone(self, connection: EngineConnection) -> None:
        """Drop all that a client asked for."""
        for ticket in list(self._tickets.get(connection, {}).values()):
            self._end(ticket, None)
        self._tickets.pop(connection, None)

    def _predict(self, question: Predict, connection: EngineConnection) -> None:
        """Take a request, or refuse it before any work is spent on it."""
        ticket = Ticket(question, connection)
        tickets = self._tickets.setdefault(connection, {})
        if question.id in tickets:
            connection.reply(Refused(question.id, "bad-frame", "an id that is in use", None, 400))
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
        """Put the rows of a request into the queue, if its tenant may have so many tokens."""
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
        """Give up the rows of a request that are not being computed yet, as its deadline has passed."""
        late = RowFailed("the deadline passed before the row was answered", "deadline", 504)
        if ticket.arrival is not None and not ticket.rows:
            ticket.arrival.is_cancelled = True
            for index in range(len(ticket.answers)):
                self._settle(ticket, index, late)
        for row in ticket.rows:
            if self._queue.drop(row) or not ticket.is_computing(row):
                self._settle(ticket, row.ticket[1], late)
        self._former.fill()

    def _settle(self, ticket: Ticket, index: int, found: Answer | InlayError) -> None:
        """Note the answer of a row; when it was the last one, reply."""
        if ticket.settle(index, found):
            self._end(ticket, ticket.reply())

    def _end(self, ticket: Ticket, reply: Reply | None) -> None:
        """End a request with a reply, or without one if nobody waits; its rows are not computed any more."""
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
        self._look_whether_idle()

    def _tickets_open(self) -> int:
        """Return how many requests are under way."""
        return sum(map(len, self._tickets.values()))

    def _look_whether_idle(self) -> None:
        if not self._tickets_open():
            self._is_idle.set()

    # Versions that arrive.

    def _arrived(self, digest: str) -> None:
        self._former.arrived(digest)

    def _cannot_load(self, digest: str, error: InlayError) -> None:
        for row in self._former.failed(digest):
            ticket, index = row.ticket
            self._settle(ticket, index, error)

    # Batches.

    def _compute_batches(self) -> None:
        """Compute one batch after another; this is the compute thread."""
        while (batch := self._former.take()) is not None:
            self._call(self._former.fill)
            batch.rows = [row for row in batch.rows if row.ticket[0].begin(row)]
            took = _Stopwatch(is_on_device=self._engine.backbone.device.type != "cpu")
            answers: list[Answer] = []
            failure: InlayError | None = None
            try:
                if batch.rows:
                    answers = self._engine.answer([row.item for row in batch.rows], batch.states)
            except Exception as error:  # `answer` isolates what fails; this is its own fault
                log_failure("a batch failed")
                failure = as_error(error)
            self._former.release(batch)
            took.stop()
            self._call(lambda b=batch, a=answers, f=failure, t=took: self._take_answers(b, f or a, t))  # type: ignore[misc]

    def _call(self, callback: Callable[[], None]) -> None:
        """Have the event loop call something, if there still is one."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _take_answers(self, batch: PreparedBatch, found: list[Answer] | InlayError, took: _Stopwatch) -> None:
        """Hand the answers of a batch to their requests."""
        if isinstance(found, list) and found:
            self._rate.learn(batch.work, took.seconds, took.busy_s)
            self._num_batches += 1
            self._admission.count(batch.rows)
        for place, row in enumerate(batch.rows):
            ticket, index = row.ticket
            ticket.compute_s += took.seconds / len(batch.rows)
            self._settle(ticket, index, found if isinstance(found, InlayError) else found[place])
        self._former.fill()

    # Other work, in threads of its own.

    def _aside(self, work: Callable[[], Reply], question_id: int, connection: EngineConnection) -> None:
        """Do something that takes a while beside everything else, and reply."""

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

    def _forget(self, question: ForgetTask) -> TaskForgotten:
        name = question.store_name
        return TaskForgotten(question.id, self._engine.forget(name))

    def _probe(self, question: AskProbe) -> Probed:
        """Answer a row of the version that was used last; without one, go through the backbone alone."""
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


class _Stopwatch:
    """The time that a batch takes, by the clock and of computing; beside a device the thread itself only waits."""

    def __init__(self, *, is_on_device: bool) -> None:
        self._is_on_device = is_on_device
        self._began, self._busy_from = time.perf_counter(), time.thread_time()
        self.seconds = self.busy_s = 0.0

    def stop(self) -> None:
        """Note the times, in the thread that began."""
        self.seconds = time.perf_counter() - self._began
        self.busy_s = self.seconds if self._is_on_device else time.thread_time() - self._busy_from


def _measure(engine: Engine) -> float:
    """Return the tokens that the backbone alone reads in a second, after a pass that loads what is needed."""
    engine.run_backbone(_WARM_TOKENS)
    return _WARM_TOKENS / min(engine.run_backbone(_WARM_TOKENS) for _ in range(3))


def _count_memory() -> int:
    """Return the bytes of memory this process has resident; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    import resource

    return pages * resource.getpagesize()
