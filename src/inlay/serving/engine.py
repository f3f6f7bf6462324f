"""The engine: answers requests for any mix of tasks in shared batches.

A request goes through four steps: `check` finds its version, `encode` tokenises it, `hot_versions` loads the version
into a slot and holds it there, and `answer` computes a batch of requests that are ready. `predict` does one step after
the other; a server does each in a thread of its own. The slots hold the hot versions: a version is loaded into a slot
when it is first needed, and leaves when another version needs the slot. Only the slots of a batch are visited. A bad
request gets an answer that says what is wrong, and does not affect the others; so does a request for which the
version's outputs are NaN or infinite.

Threads may share an engine, and engines a backbone. One thread at a time computes a batch, of versions that it holds.
It locks the backbone for one pass at a time (`Backbone.turn`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from inlay.data import Reading, find_fault
from inlay.errors import BadData, InlayError, NotFinite, OutOfMemory
from inlay.locks import FairLock
from inlay.model import Backbone, Bank, Output, Row, find_head, is_out_of_memory, with_precision
from inlay.serving.answers import Answer, Request, Resolved, VersionLookup, as_error, check_confidence
from inlay.serving.encoded_requests import CheckedRequest, EncodedRequest, encode_requests
from inlay.serving.hot_versions import HotVersion, HotVersions, check_backbone, find_reading, read_slot
from inlay.serving.passes import Passes
from inlay.serving.precision import Drift, measure_drift
from inlay.store import Manifest, Store, Version

_MOST_READINGS = 10_000  # versions whose reading is remembered
_WARM_TOKENS = 16
States = Mapping[str, HotVersion | InlayError]
"""digest -> the version in its slot, or the error that prevented loading it"""
Item = TypeVar("Item")
Found = TypeVar("Found")


class Engine:
    """Keeps up to `num_slots` versions ready on one backbone. `predict` answers for any number of tasks.

    `precision` is `auto` (the backbone's) or `int8` (on a CPU: faster, but answers drift; `drifts` says how far, for
    every version that was loaded). `num_tokens` counts the tokens answered so far. On a GPU the adapters' matrices have
    the backbone's precision, bf16.

    `is_compiled` says whether rows go through captured programs, which make a GPU many times faster for any mix of
    tasks: True captures from the first request on (and is refused where nothing can be captured), False never does, and
    None begins once compiling pays off (`passes.PATIENCE_S`). The first batches of each size then take seconds; set
    `on_compile` to be told of it. Loading and evicting tasks compiles nothing. A new method does, and a slot larger
    than all before it makes every size be captured again.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: Store,
        *,
        num_slots: int = 64,
        precision: str = "auto",
        is_compiled: bool | None = None,
    ) -> None:
        self.backbone = backbone
        self.store = store
        self.num_slots = num_slots
        self.drifts: dict[str, Drift] = {}
        self.num_tokens = 0
        self.on_compile: Callable[[str], None] = lambda what: None
        bank = Bank(with_precision(backbone, precision), num_slots, dtype=backbone.dtype)
        self.hot_versions = HotVersions(bank, store, backbone)
        self._passes = Passes(bank, is_compiled=is_compiled)
        self._backbone = bank.backbone  # in the precision it answers in
        self.precision = precision
        self._lookup = VersionLookup(store)
        self._readings: dict[str, tuple[Reading, float]] = {}  # digest -> how it reads, and its share (CheckedRequest)
        self._computing = FairLock()
        """held while a batch is computed"""

    @property
    def is_compiled(self) -> bool:
        """Return whether rows go through captured programs from now on, where these can take them."""
        return self._passes.is_compiled

    def predict(
        self, requests: Sequence[Request], resolved: Mapping[str, Resolved | InlayError] | None = None
    ) -> list[Answer]:
        """Answer requests for any mix of tasks, in order; a bad request affects no other.

        `resolved` has names whose versions were looked up before.
        """
        answers: list[Answer | None] = [None] * len(requests)
        versions = dict(resolved or {})
        checked: list[tuple[int, CheckedRequest]] = []
        for position, request in enumerate(requests):
            try:
                checked.append((position, self.check(request, versions)))
            except Exception as error:  # whatever a request causes is the answer to it alone
                answers[position] = Answer(request.task, error=as_error(error))
        for group in self._groups(checked):
            found = isolate([item for _, item in group], self._predict_together, CheckedRequest.fail)
            for (position, _), answer in zip(group, found, strict=True):
                answers[position] = answer
        return [answer for answer in answers if answer is not None]

    def ask(
        self, tasks: Sequence[str], text: str, pair: str | None = None, *, min_confidence: float | None = None
    ) -> list[Answer]:
        """Ask several tasks about one text, in order. The layers that are frozen in all of them are computed once."""
        return self.predict([Request(task, text, pair, min_confidence) for task in tasks])

    def load(self, version: Version, manifest: Manifest | None = None) -> HotVersion:
        """Load a version into a slot after checking its digest and its backbone; the least recently used one leaves.

        `manifest` is the version's own, if it was read before.
        """
        hot = self.hot_versions.hold(Resolved(version, manifest or self.store.manifest(version)))
        self.hot_versions.release([version.digest])
        return hot

    def find_version(self, task: str) -> Resolved:
        """Return the version that a name means now; raise what is wrong with the name."""
        return self._lookup.find(task, {})

    def forget(self, name: str) -> int:
        """Forget a task's versions and the states of all texts; return how many versions left their slots.

        Versions in use stay.
        """
        self._lookup.forget(name)
        with self._computing:
            self._passes.shared_texts.forget_texts()
        return self.hot_versions.forget(lambda version: version.name == name)

    def check(self, request: Request, versions: dict[str, Resolved | InlayError], scope: str = "") -> CheckedRequest:
        """Find the version that will answer a request; raise what is wrong with either.

        `versions` has names that were looked up before, and this one is added. Requests share work only with others of
        the same `scope`.
        """
        found = self._lookup.find(request.task, versions)
        if not isinstance(request.text, str) or not request.text.strip():
            raise BadData("the text is empty", "give a text with at least one character that is not white space")
        _check_text(request.text, "text")
        _check_text(request.pair, "second text")
        wants_pair = bool(found.manifest.extra.get("pairs"))
        if wants_pair != (request.pair is not None):
            has, wants = ("one text", "a pair") if wants_pair else ("a pair", "one text")
            hint = "give the second text with `--pair`" if wants_pair else "leave out the second text"
            raise BadData(f"the request has {has}, but task `{request.task}` reads {wants}", hint)
        check_confidence(request.min_confidence, found.manifest.kind)
        known = self._readings.get(found.version.digest)
        if known is None:  # the first request for this version: can this engine answer it?
            check_backbone(found.version, found.manifest, self.backbone)
            share = self._passes.find_share(read_slot(found.manifest, self.backbone))
            known = (find_reading(found.manifest), share)
            if len(self._readings) >= _MOST_READINGS:
                self._readings.clear()
            self._readings[found.version.digest] = known
        reading, share = known
        return CheckedRequest(request, found, reading, scope, share)

    def _groups(self, checked: list[tuple[int, CheckedRequest]]) -> Iterator[list[tuple[int, CheckedRequest]]]:
        """Yield the requests in groups, each with at most as many versions as there are slots."""
        groups: list[tuple[set[str], list[tuple[int, CheckedRequest]]]] = []
        group_of: dict[str, int] = {}
        for position, item in checked:
            digest = item.found.version.digest
            if digest not in group_of:
                if not groups or len(groups[-1][0]) == self.num_slots:
                    groups.append((set(), []))
                groups[-1][0].add(digest)
                group_of[digest] = len(groups) - 1
            groups[group_of[digest]][1].append((position, item))
        return (items for _, items in groups)

    def _predict_together(self, group: Sequence[CheckedRequest]) -> list[Answer]:
        """Tokenise the requests of a group, load their versions, and send all their rows through shared batches."""
        encoded = self.encode(group)
        wanted = {item.found.version.digest: item.found for item in group}
        with self.hot_versions.holding(wanted) as states:
            return self._answer_together(encoded, states)

    def encode(self, group: Sequence[CheckedRequest]) -> list[EncodedRequest]:
        """Tokenise checked requests; a text is tokenised once for all requests that read it in the same way."""
        return encode_requests(self.backbone.tokenizer, group)

    def answer(self, batch: Sequence[EncodedRequest], states: States) -> list[Answer]:
        """Answer requests that are ready, in order. The caller holds their versions; `states` has them by digest.

        A batch that fails unexpectedly, or runs out of memory, is halved until the failure is one request's own.
        """
        return isolate(
            batch, lambda part: self._answer_together(part, states), lambda item, error: item.checked.fail(error)
        )

    def _answer_together(self, batch: Sequence[EncodedRequest], states: States) -> list[Answer]:
        with self._computing:
            # 1. in int8, add the probes of versions whose drift is not known yet
            unmeasured = [
                hot
                for hot in states.values()
                if isinstance(hot, HotVersion)
                and self.precision != "auto"
                and hot.manifest.probes
                and hot.version.reference not in self.drifts
            ]
            probes = [
                CheckedRequest(
                    Request(hot.version.reference, probe.text, probe.pair),
                    Resolved(hot.version, hot.manifest),
                    hot.reading,
                )
                for hot in unmeasured
                for probe in hot.manifest.probes
            ]
            outputs = self._outputs([*batch, *self.encode(probes)], states)
            # 2. measure the drifts
            num_read = len(batch)
            for hot in unmeasured:
                answered = [outputs[num_read + index] for index in range(len(hot.manifest.probes))]
                num_read += len(answered)
                self.drifts[hot.version.reference] = measure_drift(
                    hot.manifest.probes, answered, hot.spec.head, hot.manifest.labels
                )
        return [_phrase(item.checked, states[item.digest], outputs.get(i)) for i, item in enumerate(batch)]

    def run_backbone(self, num_tokens: int) -> float:
        """Send that many tokens through the backbone alone, in short rows, and return the seconds it took."""
        backbone = self._backbone
        rows = [Row([backbone.pad_id] * _WARM_TOKENS, 0)] * max(1, num_tokens // _WARM_TOKENS)
        began = time.perf_counter()
        with torch.inference_mode(), backbone.turn():
            hidden = backbone.hidden(backbone.collate(rows))
            hidden[..., 0].cpu()  # waits for the device
        return time.perf_counter() - began

    def _outputs(self, batch: Sequence[EncodedRequest], states: States) -> dict[int, Output]:
        """Return the outputs of the requests whose version could be loaded, by their index in the batch."""
        # 1. a request is as many rows as it has windows
        rows: list[Row] = []
        keys: list[Hashable] = []
        for item in batch:
            state = states[item.digest]
            if isinstance(state, HotVersion):
                rows += item.rows(state.slot)
                keys += item.keys
        # 2. send all rows through shared batches
        self.num_tokens += sum(row.num_tokens for row in rows)
        self._passes.on_compile = self.on_compile
        logits = iter(self._passes.logits(rows, keys))
        # 3. join each request's windows
        outputs: dict[int, Output] = {}
        for index, item in enumerate(batch):
            if isinstance(states[item.digest], HotVersion):
                tokens = item.tokens
                own = tuple(itertools.islice(logits, len(tokens.windows)))
                outputs[index] = Output(own, tokens.places, tokens.text, tokens.words)
        return outputs


def isolate(
    items: Sequence[Item], work: Callable[[Sequence[Item]], list[Found]], fail: Callable[[Item, InlayError], Found]
) -> list[Found]:
    """Process items together; a group that fails is halved until it is one item, which gets its result from `fail`."""
    try:
        return work(items)
    except Exception as error:  # the border: whatever a request causes is the answer to it alone
        if len(items) == 1:
            if is_out_of_memory(error):
                fault: InlayError = OutOfMemory("the row does not fit in memory, even alone", "send a shorter text")
            else:
                fault = as_error(error)
            return [fail(items[0], fault)]
    middle = len(items) // 2  # outside the `except`, whose traceback keeps the tensors of the failed pass
    return isolate(items[:middle], work, fail) + isolate(items[middle:], work, fail)


def _check_text(text: str | None, name: str) -> None:
    """Refuse a text that must not be given to a tokenizer."""
    if text is None:
        return
    if not isinstance(text, str):
        raise BadData(f"the {name} is a `{type(text).__name__}`, not a text", "give it as a text")
    fault = find_fault(text)
    if fault is not None:
        raise BadData(f"the {name}: {fault.reason}", fault.hint)


def _phrase(item: CheckedRequest, state: HotVersion | InlayError, output: Output | None) -> Answer:
    """Return the answer to a request: what the outputs say, or the error that prevented them."""
    if isinstance(state, InlayError):
        return Answer(item.request.task, error=state)
    assert output is not None
    reference = item.found.version.reference  # the slot may have been filled under another name of the same version
    head = find_head(state.spec.head.kind)
    try:
        outcome = head.answer(output, state.spec.head, state.manifest.labels)
    except NotFinite:
        what = "answer of `{}` is" if output.is_finite else "outputs of `{}` are"
        error = NotFinite(
            f"the {what.format(reference)} not finite for this text",
            f"check it with `inlay verify {reference}`; a lower precision may overflow, "
            "otherwise train the task again with a smaller `--lr`",
        )
        return Answer(item.request.task, error=error)
    outcome = head.abstain(outcome, item.request.min_confidence)
    return Answer(item.request.task, reference, outcome, output.flat)
