"""The engine: answers requests for any mix of tasks in shared batches.

Slots are the hot tasks: a version is loaded into a slot when it is first asked for and leaves it when others need the
place. Only the slots of a batch are visited. A bad request gets an answer that says what is wrong and spoils no other;
so does one for which a version's outputs are NaN or infinite.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from inlay.data.encode import Encoded
from inlay.data.tasks import Split
from inlay.data.windows import Reading, encode_split
from inlay.errors import BadConfig, BadData, InlayError, NotFinite, Unsupported, WrongBackbone
from inlay.model.backbone.backbone import Backbone
from inlay.model.backbone.int8 import check_slot, find_precision
from inlay.model.bank.bank import Bank
from inlay.model.bank.slots import SlotSpec
from inlay.model.batch.route import Row, make_rows
from inlay.model.heads.heads import HeadSpec, Outcome, Output, collect_outputs, find_head
from inlay.serving.drift import Drift, measure_drift
from inlay.serving.passes import Passes
from inlay.store import Manifest, Store, Version

_MOST_KNOWN = 10_000  # names whose version is remembered


@dataclass(frozen=True)
class Request:
    """A text (or pair of texts) for a task: `sms`, `sms@3` or `sms@best`."""

    task: str
    text: str
    pair: str | None = None
    min_confidence: float | None = None
    """an answer less sure than this is not given: the task abstains"""


@dataclass(frozen=True)
class Answer:
    """What a task says to a request, or what is wrong with the request."""

    task: str
    version: str | None = None
    """the version that answered, such as `sms@3`"""
    outcome: Outcome | None = None
    logits: Tensor | None = None
    """of all windows and tokens of the row, as one vector"""
    error: InlayError | None = None

    def to_json(self) -> dict[str, Any]:
        """The answer as data, errors included."""
        if self.error is not None:
            return {"task": self.task, "error": self.error.to_json()}
        assert self.outcome is not None
        return {"task": self.task, "version": self.version, **self.outcome.to_json()}


@dataclass(frozen=True)
class Hot:
    """A version in its slot."""

    version: Version
    manifest: Manifest
    spec: SlotSpec
    slot: int

    @cached_property
    def reading(self) -> Reading:
        """How its rows are read: asked for with every row."""
        return find_reading(self.manifest)


@dataclass(frozen=True)
class _Known:
    """What a name stood for while its versions had a stamp."""

    version: Version
    manifest: Manifest
    stamp: int | None


@dataclass(frozen=True)
class _Checked:
    position: int
    """among the requests; -1 for a probe that rides along"""
    request: Request
    version: Version
    manifest: Manifest


@dataclass(frozen=True)
class _Piece:
    """Requests of a group that were tokenised together: which they are, their windows, and the texts of the places."""

    indices: list[int]
    encoded: Encoded
    texts: list[str]


class Engine:
    """Holds up to `num_slots` versions ready on one backbone. `predict` answers for any number of tasks.

    `precision` is `auto` (the backbone's) or `int8` (on a CPU: faster, and it drifts; `drifts` says how far, for every
    version that was loaded). `num_tokens` counts the tokens answered so far. On a GPU the adapters' matrices are held
    as the backbone's are, in bf16.

    `is_compiled` says whether rows go through captured programs, which a GPU answers many times faster, whatever the
    mix: from the first on (True, refused where there can be none), never (False), or by default once there was enough
    to answer for compiling to pay (`passes.PATIENCE_S`). The first batches of a size then take seconds; `on_compile`
    may be set to hear of it. Tasks that come and go compile nothing, but a method that was not there before does, and
    for one that is larger than all every size is captured again.
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
        self.backbone, self.store = backbone, store
        self.drifts: dict[str, Drift] = {}
        self.num_tokens = 0
        self.on_compile: Callable[[str], None] = lambda what: None
        self._bank = Bank(find_precision(backbone, precision), num_slots, dtype=backbone.dtype)
        self._passes = Passes(self._bank, is_compiled=is_compiled)
        self._drifts = precision != "auto"
        self._hot: OrderedDict[str, Hot] = OrderedDict()  # by digest, the coldest first
        self._free = list(range(num_slots))
        self._known: dict[str, _Known] = {}

    @property
    def num_slots(self) -> int:
        return self._bank.num_slots

    @property
    def is_compiled(self) -> bool:
        """Whether rows go through captured programs from now on, as far as these take them."""
        return self._passes.is_compiled

    def predict(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer requests for any mix of tasks, in order; a bad one spoils no other."""
        answers: list[Answer | None] = [None] * len(requests)
        resolved: dict[str, _Known | InlayError] = {}
        checked = []
        for position, request in enumerate(requests):
            try:
                found = self._check(request, resolved)
                checked.append(_Checked(position, request, found.version, found.manifest))
            except InlayError as error:
                # Without its traceback, which would keep all requests alive for as long as the answer is.
                answers[position] = Answer(request.task, error=error.with_traceback(None))
        for group in self._groups(checked):
            for item, answer in zip(group, self._answer(group), strict=True):
                answers[item.position] = answer
        return [answer for answer in answers if answer is not None]

    def load(self, version: Version) -> Hot:
        """Bring a version into a slot, checking its digest and its backbone; the least recently used one leaves."""
        if version.digest in self._hot:
            self._hot.move_to_end(version.digest)
            return self._hot[version.digest]
        loaded = self.store.load(version)
        check_backbone(version, loaded.manifest, self.backbone)
        spec = SlotSpec.from_stored(loaded.manifest.method, loaded.manifest.head)
        check_slot(spec, self._bank.backbone)
        if not self._free:
            coldest = self._hot.popitem(last=False)[1]
            self._free.append(coldest.slot)
        self._bank.put(self._free[-1], spec, loaded.tensors)  # raises before it changes anything
        hot = self._hot[version.digest] = Hot(version, loaded.manifest, spec, self._free.pop())
        return hot

    def _check(self, request: Request, resolved: dict[str, _Known | InlayError]) -> _Known:
        """What will answer; whatever is wrong with the request is raised here, before its batch."""
        if request.task not in resolved:
            try:
                resolved[request.task] = self._resolve(request.task)
            except InlayError as error:
                resolved[request.task] = error
        found = resolved[request.task]
        if isinstance(found, InlayError):
            raise found
        if not isinstance(request.text, str) or not request.text.strip():
            raise BadData("the text is empty", "give a text with at least one character that is not white space")
        wants_pair = bool(found.manifest.extra.get("pairs"))
        if wants_pair != (request.pair is not None):
            has, wants = ("one text", "a pair") if wants_pair else ("a pair", "one text")
            hint = "give the second text with `--pair`" if wants_pair else "leave out the second text"
            raise BadData(f"the request has {has}, but task `{request.task}` reads {wants}", hint)
        if request.min_confidence is not None:
            check_confidence(found.manifest.kind, request.min_confidence)
        return found

    def _resolve(self, task: str) -> _Known:
        """The version that a name means now. The store is read again only if the name's versions may have changed."""
        stamp = self.store.stamp(task)  # taken first: a change after it shows in the next one
        known = self._known.get(task)
        if known is not None and known.stamp is not None and known.stamp == stamp:
            return known
        version = self.store.resolve(task)
        hot = self._hot.get(version.digest)
        manifest = self.store.manifest(version) if hot is None else hot.manifest
        check_backbone(version, manifest, self.backbone)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[task] = found = _Known(version, manifest, stamp)
        return found

    def _groups(self, checked: list[_Checked]) -> Iterator[list[_Checked]]:
        """Requests in groups that need no more versions at once than there are slots."""
        groups: list[tuple[set[str], list[_Checked]]] = []
        places: dict[str, int] = {}
        for item in checked:
            digest = item.version.digest
            if digest not in places:
                if not groups or len(groups[-1][0]) == self.num_slots:
                    groups.append((set(), []))
                groups[-1][0].add(digest)
                places[digest] = len(groups) - 1
            groups[places[digest]][1].append(item)
        return (items for _, items in groups)

    def _answer(self, group: list[_Checked]) -> list[Answer]:
        states: dict[str, Hot | InlayError] = {}
        for item in group:
            if item.version.digest not in states:
                try:
                    states[item.version.digest] = self.load(item.version)
                except InlayError as error:
                    states[item.version.digest] = error
        probes = self._unmeasured(states)
        outputs = self._outputs(group + probes, states)
        self._note_drifts(probes, [outputs[len(group) + i] for i in range(len(probes))])
        return [_phrase(item, states[item.version.digest], outputs.get(i)) for i, item in enumerate(group)]

    def _outputs(self, group: list[_Checked], states: Mapping[str, Hot | InlayError]) -> dict[int, Output]:
        """The outputs of the requests whose version stands, by their place in the group; all in shared batches."""
        pieces = list(self._encode(group, states))
        rows: list[Row] = []
        for piece in pieces:
            owners = [states[group[piece.indices[owner]].version.digest] for owner in piece.encoded.owners]
            slots = [state.slot for state in owners if isinstance(state, Hot)]
            rows += make_rows(piece.encoded, slots)
        self.num_tokens += sum(row.num_tokens for row in rows)
        self._passes.on_compile = self.on_compile
        logits = iter(self._passes.logits(rows))
        outputs: dict[int, Output] = {}
        for piece in pieces:
            found = collect_outputs(piece.encoded, list(itertools.islice(logits, len(piece.encoded))), piece.texts)
            outputs |= dict(zip(piece.indices, found, strict=True))
        return outputs

    def _encode(self, group: list[_Checked], states: Mapping[str, Hot | InlayError]) -> Iterator[_Piece]:
        """Requests whose version stands, tokenised together where they are read alike."""
        alike: dict[tuple[Reading, bool], list[int]] = {}
        for index, item in enumerate(group):
            state = states[item.version.digest]
            if isinstance(state, Hot):
                alike.setdefault((state.reading, item.request.pair is not None), []).append(index)
        for (reading, has_pairs), indices in alike.items():
            texts = [group[index].request.text for index in indices]
            pairs = [group[index].request.pair or "" for index in indices] if has_pairs else None
            encoded = encode_split(self.backbone.tokenizer, Split(texts, pairs, None, []), reading)
            yield _Piece(indices, encoded, pairs or texts)

    def _unmeasured(self, states: Mapping[str, Hot | InlayError]) -> list[_Checked]:
        """The probes of versions that answer in another precision for the first time: they ride along in the batch."""
        fresh = [state for state in states.values() if isinstance(state, Hot)] if self._drifts else []
        return [
            _Checked(-1, Request(hot.version.reference, probe.text, probe.pair), hot.version, hot.manifest)
            for hot in fresh
            if hot.version.reference not in self.drifts
            for probe in hot.manifest.probes
        ]

    def _note_drifts(self, probes: Sequence[_Checked], outputs: Sequence[Output]) -> None:
        found = iter(outputs)
        for version, items in itertools.groupby(probes, key=lambda item: item.version):
            hot, answered = self._hot[version.digest], [next(found) for _ in items]
            self.drifts[version.reference] = measure_drift(
                hot.manifest.probes, answered, hot.spec.head, hot.manifest.labels
            )


def _phrase(item: _Checked, state: Hot | InlayError, output: Output | None) -> Answer:
    if isinstance(state, InlayError):
        return Answer(item.request.task, error=state)
    assert output is not None
    if not output.is_finite:
        return Answer(item.request.task, error=_refuse_lost(item.version))
    head = find_head(state.spec.head.kind)
    outcome = head.answer(output, state.spec.head, state.manifest.labels)
    outcome = head.abstain(outcome, item.request.min_confidence)
    return Answer(item.request.task, item.version.reference, outcome, output.flat)


def _refuse_lost(version: Version) -> NotFinite:
    return NotFinite(
        f"the outputs of `{version.reference}` are not finite for this text",
        f"check it with `inlay verify {version.reference}`; in a lower precision numbers may overflow, "
        "otherwise train the task again with a smaller `--lr`",
    )


def check_confidence(kind: str, min_confidence: float) -> None:
    """Refuse a threshold that is no probability, or one for a kind of task that has none."""
    if not 0 <= min_confidence <= 1:
        raise BadConfig(f"a confidence of `{min_confidence:g}`", "give a probability, from 0 to 1")
    if find_head(kind).confidence is None:
        raise Unsupported(f"a `{kind}` task has no confidence to abstain by", "leave out `--min-confidence`")


def find_reading(manifest: Manifest) -> Reading:
    """How a version's rows become windows of tokens."""
    stride = {"stride": int(manifest.extra["stride"])} if "stride" in manifest.extra else {}
    head = HeadSpec(**manifest.head)
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
