"""The messages between the engine's process and its clients, and the frames they travel in. No torch.

A frame is a length in four bytes, big-endian, and that many bytes of msgpack. A connection carries many questions at
once; a reply has the id of its question. A question gets one reply: of its own type, or `Refused`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from inlay.errors import BadData, InlayError

MOST_FRAME_BYTES = 64 << 20
"""most bytes of a frame; a longer one ends its connection"""
_LENGTH_BYTES = 4

Band = Literal["interactive", "bulk"]


class WireRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A text (or pair of texts) for one version of a task. `task` is its name in the answer, such as `mail`."""

    task: str
    store_name: str
    number: int
    text: str
    pair: str | None = None
    min_confidence: float | None = None


class Caller(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tenant that asks, with its share of the engine and its limit."""

    tenant: str
    weight: float = 1.0
    tokens_per_minute: float | None = None
    band: Band = "interactive"


class WireAnswer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """A task's answer, and the version in the store that gave it.

    `answer` is made by `inlay.serving.describe_answer`: `task`, `version` (as `mail@3`), `label`, `probability` ….
    """

    store_name: str
    number: int
    answer: dict[str, Any]


class WireError(msgspec.Struct, frozen=True, array_like=True, tag="error", gc=False):
    """An error in the place of a row's answer."""

    code: str
    message: str
    hint: str | None
    status: int


class Predict(msgspec.Struct, frozen=True, array_like=True, tag="predict"):
    """A question to answer rows. `deadline_ms` is the time that is left; `request_id` is for logs."""

    id: int
    caller: Caller
    rows: list[WireRow]
    deadline_ms: float | None = None
    request_id: str = ""


class Predicted(msgspec.Struct, frozen=True, array_like=True, tag="predicted"):
    """The answers to a `Predict`, in the order of its rows."""

    id: int
    answers: list[WireAnswer | WireError]
    num_tokens: int
    queue_ms: float
    compute_ms: float


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", gc=False):
    """The refusal of a question. `retry_after_s` says when to try again."""

    id: int
    code: str
    message: str
    hint: str | None
    status: int
    retry_after_s: float | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel", gc=False):
    """A message that nobody waits for a question any more. It has no reply."""

    id: int


class LoadVersion(msgspec.Struct, frozen=True, array_like=True, tag="load", gc=False):
    """A question to load a version into a slot and check its answers to its probes."""

    id: int
    store_name: str
    number: int


class VersionLoaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded", gc=False):
    """The reply that a version is in a slot and answered its probes as published."""

    id: int
    seconds: float
    num_probes: int


class ForgetTask(msgspec.Struct, frozen=True, array_like=True, tag="forget", gc=False):
    """A question to drop all versions of a task from memory; used when the task is erased."""

    id: int
    store_name: str


class TaskForgotten(msgspec.Struct, frozen=True, array_like=True, tag="forgotten", gc=False):
    """The number of versions that were dropped."""

    id: int
    num_versions: int


class AskStats(msgspec.Struct, frozen=True, array_like=True, tag="ask-stats", gc=False):
    """A question for the engine's counters."""

    id: int


class TenantLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tenant's counters since the engine started, and its rows in the queue now."""

    num_rows: int
    num_tokens: int
    num_refused: int
    queued_rows: int
    queued_tokens: int


class EngineStats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """The engine's counters. `queue_s` is the time that it would take to answer all rows in the queue."""

    id: int
    queue_rows: int
    queue_tokens: int
    queue_s: float
    resident: list[str]
    """references of the versions in slots, with the store's names, the least recently used first"""
    num_slots: int
    tokens_per_s: float
    num_batches: int
    num_rows: int
    num_tokens: int
    per_tenant: dict[str, TenantLoad]
    backbone: str
    uptime_s: float
    memory_bytes: int
    num_load_failures: int
    is_draining: bool


class AskProbe(msgspec.Struct, frozen=True, array_like=True, tag="ask-probe", gc=False):
    """A question to answer a real row now, which shows that the engine is ready."""

    id: int


class Probed(msgspec.Struct, frozen=True, array_like=True, tag="probed", gc=False):
    """The reply that a row was answered by the version `reference`; it is empty if no version is in a slot."""

    id: int
    seconds: float
    reference: str = ""


Question = Predict | Cancel | LoadVersion | ForgetTask | AskStats | AskProbe
Reply = Predicted | Refused | VersionLoaded | TaskForgotten | EngineStats | Probed

_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question)
_replies = msgspec.msgpack.Decoder(Reply)


def encode_frame(message: Question | Reply) -> bytes:
    """Return a message as a frame; raise BadData if it is too long or a text cannot be encoded as UTF-8."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:
        raise BadData("a text has half of a surrogate pair", "send texts as UTF-8") from None
    if len(body) > MOST_FRAME_BYTES:
        reason = f"a request of {len(body):,} bytes; the engine takes {MOST_FRAME_BYTES:,} at once"
        raise BadData(reason, "send fewer rows at once")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def read_question(body: bytes) -> Question:
    """Decode a question; raise BadFrame if it is not one."""
    try:
        return _questions.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a frame of {len(body):,} bytes is not a question: {error}") from None


def read_reply(body: bytes) -> Reply:
    """Decode a reply; raise BadFrame if it is not one."""
    try:
        return _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"a frame of {len(body):,} bytes is not a reply: {error}") from None


class BadFrame(InlayError):
    """Bytes on the engine's socket that are not a valid message."""

    code = "bad-frame"


class FrameSplitter:
    """Splits a stream of bytes into the bodies of frames."""

    def __init__(self, most_bytes: int = MOST_FRAME_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that `data` completes; raise BadFrame for a frame longer than allowed."""
        self._held += data
        found = []
        start = 0
        while len(self._held) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            length = int.from_bytes(self._held[start:body], "big")
            if length > self._most_bytes:
                raise BadFrame(f"a frame of {length:,} bytes; the most is {self._most_bytes:,}")
            if len(self._held) < body + length:
                break
            found.append(bytes(self._held[body : body + length]))
            start = body + length
        del self._held[:start]
        return found
