"""The engine: answers requests for any mix of tasks in shared batches.

Slots are the hot tasks: a version is loaded into a slot when it is first asked for, and leaves it when another version
needs the slot. Only the slots of a batch are visited. A bad request gets an answer that says what is wrong and spoils
no other; so does a request for which a version's outputs are NaN or infinite.

Threads may share an engine, and engines a backbone. One thread at a time has an engine's slots: it loads versions and
answers by them before another may evict them. It has the backbone only for a pass (`Backbone.turn`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from inlay.data import Reading, Split, encode_split, find_fault
from inlay.errors import BadData, InlayError, NotFinite, WrongBackbone
from inlay.locks import FairLock
from inlay.model import (
    Backbone,
    Bank,
    Output,
    Row,
    SlotSpec,
    check_slot,
    collect_outputs,
    find_head,
    find_precision,
    make_rows,
    read_head,
)
from inlay.serving.answers import Answer, Request, Resolved, VersionLookup, as_error, check_confidence
from inlay.serving.passes import Passes
from inlay.serving.precision import Drift, measure_drift
from inlay.serving.slots import read_slot
from inlay.store import Manifest, Store, Version


@dataclass(frozen=True)
class HotVersion:
    """A version in its slot."""

    version: Version
    manifest: Manifest
    spec: SlotSpec
    slot: int

    @cached_property
    def reading(self) -> Reading:
        """The way its rows are read; needed for every row."""
        return find_reading(self.manifest)


@dataclass(frozen=True)
class _Checked:
    """A request with the version that will answer it."""

    position: int
    """its index among the requests; -1 for a probe that is answered along with them"""
    request: Request
    version: Version
    manifest: Manifest


class Engine:
    """Holds up to `num_slots` versions ready on one backbone. `predict` answers for any number of tasks.

    `precision` is `auto` (the backbone's) or `int8` (on a CPU: faster, but answers drift; `drifts` says how far, for
    every version that was loaded). `num_tokens` counts the tokens answered so far. On a GPU the adapters' matrices have
    the backbone's precision, bf16.

    `is_compiled` says whether rows go through captured programs, which make a GPU many times faster for any mix of
    tasks: True captures from the first request on (and is refused where nothing can be captured), False never does, and
    None begins once compiling pays (`passes.PATIENCE_S`). The first batches of a size then take seconds; set
    `on_compile` to hear of it. Tasks that come and go compile nothing. A method that was not there before does, and a
    slot larger than all before it makes every size be captured again.
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
        self._bank = Bank(find_precision(backbone, precision), num_slots, dtype=backbone.dtype)
        self._passes = Passes(self._bank, is_compiled=is_compiled)
        self._measures_drift = precision != "auto"
        self._hot: OrderedDict[str, HotVersion] = OrderedDict()  # by digest, the least recently used first
        self._free = list(range(num_slots))
        self._lookup = VersionLookup(store)
        self._slots = FairLock()
        """held while versions are in slots to be answered by"""

    @property
    def is_compiled(self) -> bool:
        """Return whether rows go through captured programs from now on, as far as these take them."""
        return self._passes.is_compiled

    def predict(
        self, requests: Sequence[Request], resolved: Mapping[str, Resolved | InlayError] | None = None
    ) -> list[Answer]:
        """Answer requests for any mix of tasks, in order; a bad one spoils no other.

        `resolved` has the names that were looked up before.
        """
        answers: list[Answer | None] = [None] * len(requests)
        versions = dict(resolved or {})
        checked = []
        for position, request in enumerate(requests):
            try:
                found = self._check(request, versions)
                checked.append(_Checked(position, request, found.version, found.manifest))
            except InlayError as error:
                # Without its traceback, which would keep all requests alive for as long as the answer is.
                answers[position] = Answer(request.task, error=error.with_traceback(None))
        for group in self._groups(checked):
            with self._slots:
                found_answers = self._answer(group)
            for item, answer in zip(group, found_answers, strict=True):
                answers[item.position] = answer
        return [answer for answer in answers if answer is not None]

    def load(self, version: Version, manifest: Manifest | None = None) -> HotVersion:
        """Bring a version into a slot, checking its digest and its backbone; the least recently used one leaves.

        `manifest` is the version's own, if it was read before.
        """
        with self._slots:
            return self._load(version, manifest)

    def _load(self, version: Version, manifest: Manifest | None) -> HotVersion:
        if version.digest in self._hot:
            self._hot.move_to_end(version.digest)
            return self._hot[version.digest]
        manifest = manifest or self.store.manifest(version)
        check_backbone(version, manifest, self.backbone)
        tensors = self.store.load(version, manifest=manifest).tensors
        spec = read_slot(manifest, self.backbone)
        check_slot(spec, self._bank.backbone)
        if not self._free:
            coldest = self._hot.popitem(last=False)[1]
            self._free.append(coldest.slot)
        with self._bank.backbone.turn():
            self._bank.put(self._free[-1], spec, tensors)  # raises before it changes anything
        hot = self._hot[version.digest] = HotVersion(version, manifest, spec, self._free.pop())
        return hot

    def _check(self, request: Request, versions: dict[str, Resolved | InlayError]) -> Resolved:
        """Return the version that will answer a request; raise what is wrong with the request."""
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
        return found

    def _groups(self, checked: list[_Checked]) -> Iterator[list[_Checked]]:
        """Yield the requests in groups that need no more versions at once than there are slots."""
        groups: list[tuple[set[str], list[_Checked]]] = []
        group_of: dict[str, int] = {}
        for item in checked:
            digest = item.version.digest
            if digest not in group_of:
                if not groups or len(groups[-1][0]) == self.num_slots:
                    groups.append((set(), []))
                groups[-1][0].add(digest)
                group_of[digest] = len(groups) - 1
            groups[group_of[digest]][1].append(item)
        return (items for _, items in groups)

    def _answer(self, group: list[_Checked]) -> list[Answer]:
        """Answer the requests of a group. What fails in a way nobody foresaw is halved until it is one request."""
        try:
            return self._answer_together(group)
        except Exception as error:  # the border: whatever a request does to us is the answer to it alone
            if len(group) == 1:
                return [Answer(group[0].request.task, error=as_error(error))]
        middle = len(group) // 2
        return self._answer(group[:middle]) + self._answer(group[middle:])

    def _answer_together(self, group: list[_Checked]) -> list[Answer]:
        """Answer the requests of a group: load their versions, then send all their rows through shared batches."""
        # 1. load the versions; one that cannot be loaded is an error for its own requests
        states: dict[str, HotVersion | InlayError] = {}
        for item in group:
            if item.version.digest not in states:
                try:
                    states[item.version.digest] = self.load(item.version, item.manifest)
                except InlayError as error:
                    states[item.version.digest] = error.with_traceback(None)
        # 2. answer them, and along with them the probes of versions whose drift is not known yet
        unmeasured = [
            hot
            for hot in states.values()
            if isinstance(hot, HotVersion)
            and self._measures_drift
            and hot.manifest.probes
            and hot.version.reference not in self.drifts
        ]
        probes = [
            _Checked(-1, Request(hot.version.reference, probe.text, probe.pair), hot.version, hot.manifest)
            for hot in unmeasured
            for probe in hot.manifest.probes
        ]
        outputs = self._outputs(group + probes, states)
        # 3. measure the drifts
        num_read = len(group)
        for hot in unmeasured:
            answered = [outputs[num_read + index] for index in range(len(hot.manifest.probes))]
            num_read += len(answered)
            self.drifts[hot.version.reference] = measure_drift(
                hot.manifest.probes, answered, hot.spec.head, hot.manifest.labels
            )
        return [_phrase(item, states[item.version.digest], outputs.get(i)) for i, item in enumerate(group)]

    def _outputs(self, group: list[_Checked], states: Mapping[str, HotVersion | InlayError]) -> dict[int, Output]:
        """Return the outputs of the requests whose version was loaded, by their index in the group."""
        # 1. gather the requests that are read alike
        slots: dict[int, int] = {}
        alike: dict[tuple[Reading, bool], list[int]] = {}
        for index, item in enumerate(group):
            state = states[item.version.digest]
            if isinstance(state, HotVersion):
                slots[index] = state.slot
                alike.setdefault((state.reading, item.request.pair is not None), []).append(index)
        # 2. tokenise those together; a request is as many rows as it has windows
        rows: list[Row] = []
        pieces = []
        for (reading, has_pairs), indices in alike.items():
            texts = [group[index].request.text for index in indices]
            pairs = [group[index].request.pair or "" for index in indices] if has_pairs else None
            encoded = encode_split(self.backbone.tokenizer, Split(texts, pairs, None, []), reading)
            rows += make_rows(encoded, [slots[indices[owner]] for owner in encoded.owners])
            pieces.append((indices, encoded, pairs or texts))
        # 3. send all rows through shared batches
        self.num_tokens += sum(row.num_tokens for row in rows)
        self._passes.on_compile = self.on_compile
        logits = iter(self._passes.logits(rows))
        # 4. join each request's windows
        outputs: dict[int, Output] = {}
        for indices, encoded, texts in pieces:
            found = collect_outputs(encoded, list(itertools.islice(logits, len(encoded))), texts)
            outputs |= dict(zip(indices, found, strict=True))
        return outputs


def _check_text(text: str | None, name: str) -> None:
    """Refuse a text that no tokenizer should be given."""
    if text is None:
        return
    if not isinstance(text, str):
        raise BadData(f"the {name} is a `{type(text).__name__}`, not a text", "give it as a text")
    fault = find_fault(text)
    if fault is not None:
        raise BadData(f"the {name}: {fault.reason}", fault.hint)


def _phrase(item: _Checked, state: HotVersion | InlayError, output: Output | None) -> Answer:
    """Return the answer to a request: what the outputs say, or the error that took their place."""
    if isinstance(state, InlayError):
        return Answer(item.request.task, error=state)
    assert output is not None
    reference = item.version.reference
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


def find_reading(manifest: Manifest) -> Reading:
    """Return the way a version's rows become windows of tokens."""
    stride = {"stride": int(manifest.extra["stride"])} if "stride" in manifest.extra else {}
    head = read_head(manifest.head)
    return Reading(head.layout, manifest.max_length, prompt=head.prompt, pairs=head.pairs, **stride)


def check_backbone(version: Version, manifest: Manifest, backbone: Backbone) -> None:
    """Refuse a version that was trained on another backbone, naming both."""
    trained_on = manifest.backbone
    if trained_on["fingerprint"] != backbone.fingerprint:
        raise WrongBackbone(
            f"`{version.reference}` was trained on the backbone `{trained_on['name']}` "
            f"({trained_on['fingerprint'][:12]}), not on `{backbone.name}` ({backbone.fingerprint[:12]})",
            f"use `--backbone {trained_on['name']}`, or train the task on `{backbone.name}`",
        )
