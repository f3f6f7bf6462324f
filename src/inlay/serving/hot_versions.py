"""The versions in an engine's slots: loaded from the store when they are first needed, and kept while they are held.

A version is read and checked without any lock; only putting its tensors into a slot takes a turn of the backbone. So
no batch waits for a disk. When no slot is free, the least recently used version that nobody holds leaves.

What always holds: a held version stays in its slot until it is released, and at most `num_slots` versions are held. A
call gets all its versions at once or none, in the order of the calls, so that threads do not deadlock.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from inlay.data import KINDS, Reading, find_layout
from inlay.errors import InlayError, StoreDamaged, WrongBackbone
from inlay.locks import FairLock
from inlay.model import Backbone, Bank, SlotSpec, check_labels, check_slot, read_head
from inlay.serving.answers import Resolved
from inlay.store import Manifest, Store, Version

_SHORTEST_ROW = 4  # tokens; the least that `train.max_length` allows


@dataclass(frozen=True)
class HotVersion:
    """A version in its slot."""

    version: Version
    manifest: Manifest
    spec: SlotSpec
    slot: int

    @cached_property
    def reading(self) -> Reading:
        """The way its rows are read."""
        return find_reading(self.manifest)


class HotVersions:
    """The versions in the slots of a serving bank."""

    def __init__(self, bank: Bank, store: Store, backbone: Backbone) -> None:
        self._bank, self._store, self._backbone = bank, store, backbone
        self._hot: OrderedDict[str, HotVersion] = OrderedDict()  # by digest, the least recently used first
        self._loaded: dict[str, None] = {}  # the same digests, those loaded longest ago first
        self._free = list(range(bank.num_slots))
        self._held: Counter[str] = Counter()  # digest -> how many hold it; it may not be in its slot yet
        self._loading: set[str] = set()
        self._changed = threading.Condition()  # guards all of the above, for a few instructions at a time
        self._turnstile = FairLock()  # calls get room in the order they came
        self._resting: set[str] = set()
        """held versions that no further caller may hold, because a call waits for their slots"""

    @property
    def num_slots(self) -> int:
        """The number of versions that can be hot at a time."""
        return self._bank.num_slots

    def values(self) -> list[HotVersion]:
        """Return the hot versions, the least recently used first."""
        with self._changed:
            return list(self._hot.values())

    def hold_hot(self, digest: str) -> HotVersion | None:
        """Hold a version until it is released, if it is hot; None if it is not, or is about to leave. Never waits."""
        with self._changed:
            hot = self._hot.get(digest)
            has_room = digest in self._held or len(self._held) < self.num_slots
            if hot is None or digest in self._resting or not has_room:
                return None
            self._held[digest] += 1
            self._hot.move_to_end(digest)
            return hot

    def hold(self, found: Resolved) -> HotVersion:
        """Hold a version until it is released, loading it if it is not hot; raise what is wrong with it."""
        with self._reserved([found.version.digest]) as kept:
            hot = self._bring(found.version, found.manifest)
            kept.clear()
        return hot

    def release(self, digests: Iterable[str]) -> None:
        """Give back versions that were held; each stays in its slot until the slot is needed."""
        with self._changed:
            for digest in digests:
                self._held[digest] -= 1
                if self._held[digest] <= 0:
                    del self._held[digest]
            self._changed.notify_all()

    @contextmanager
    def holding(self, wanted: Mapping[str, Resolved]) -> Iterator[dict[str, HotVersion | InlayError]]:
        """Hold versions by their digests inside the block; one that cannot be loaded has its error in its place."""
        states: dict[str, HotVersion | InlayError] = {}
        with self._reserved(wanted):
            for digest, found in wanted.items():
                try:
                    states[digest] = self._bring(found.version, found.manifest)
                except InlayError as error:
                    states[digest] = error.with_traceback(None)
            yield states

    def forget(self, matches: Callable[[Version], bool]) -> int:
        """Empty the slots of versions that nobody holds; return how many versions left."""
        with self._changed:
            leaving = [digest for digest, hot in self._hot.items() if matches(hot.version) and digest not in self._held]
            slots = [self._drop(digest) for digest in leaving]
        for slot in slots:
            with self._bank.backbone.turn():
                self._bank.free(slot)
        with self._changed:
            self._free += slots
            self._changed.notify_all()
        return len(slots)

    @contextmanager
    def _reserved(self, wanted: Iterable[str]) -> Iterator[list[str]]:
        """Hold digests inside the block, after waiting for room; those removed from the list stay held after it."""
        digests = list(wanted)
        assert len(digests) <= self.num_slots, "they would never have room"
        with self._turnstile, self._changed:
            try:
                while (missing := len(self._held.keys() | set(digests)) - self.num_slots) > 0:
                    # Those loaded longest ago: otherwise versions in constant use would never leave.
                    oldest = [digest for digest in self._loaded if digest in self._held and digest not in digests]
                    self._resting = set(oldest[:missing])
                    self._changed.wait()
            finally:
                self._resting = set()
            self._held.update(digests)
        try:
            yield digests
        finally:
            self.release(digests)

    def _bring(self, version: Version, manifest: Manifest) -> HotVersion:
        """Return a held version in its slot, loading it unless another thread does so already."""
        digest = version.digest
        with self._changed:
            while digest in self._loading:
                self._changed.wait()
            if digest in self._hot:
                self._hot.move_to_end(digest)
                return self._hot[digest]
            self._loading.add(digest)
        try:
            return self._load(version, manifest)
        finally:
            with self._changed:
                self._loading.discard(digest)
                self._changed.notify_all()

    def _load(self, version: Version, manifest: Manifest) -> HotVersion:
        # 1. read and check it: this takes a while, so no lock is held
        check_backbone(version, manifest, self._backbone)
        tensors = self._store.load(version, manifest=manifest).tensors
        spec = read_slot(manifest, self._backbone)
        check_slot(spec, self._bank.backbone)
        # 2. take a slot: fewer versions are held than there are slots, so one is free or can be freed
        with self._changed:
            while not self._free:
                coldest = next((digest for digest in self._hot if digest not in self._held), None)
                if coldest is None:  # a slot is being emptied just now
                    self._changed.wait()
                else:
                    self._free.append(self._drop(coldest))
            slot = self._free.pop()
        # 3. put the tensors into it, between two passes
        try:
            with self._bank.backbone.turn():
                self._bank.put(slot, spec, tensors)  # raises before it changes anything
        except BaseException:
            with self._changed:
                self._free.append(slot)
            raise
        with self._changed:
            hot = self._hot[version.digest] = HotVersion(version, manifest, spec, slot)
            self._loaded[version.digest] = None
        return hot

    def _drop(self, digest: str) -> int:
        """Remove a version from the tables and return its slot."""
        del self._loaded[digest]
        return self._hot.pop(digest).slot


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


def read_slot(manifest: Manifest, backbone: Backbone) -> SlotSpec:
    """Return the slot that a manifest describes; refuse one that contradicts itself or cannot be on this backbone.

    A manifest may be damaged, or crafted by a stranger. What passes here can be read and answered, so whatever else it
    says affects nothing but the version's own answers.
    """
    spec = SlotSpec.from_stored(manifest.method, manifest.head)
    head, has_pairs = spec.head, bool(manifest.extra.get("pairs"))
    if head.kind != manifest.kind:
        raise StoreDamaged(f"the version's kind is `{manifest.kind}`, but its head's kind is `{head.kind}`")
    check_labels(head, manifest.labels)
    backbone.resolve_pooling(head.pooling if head.reads_rows else "auto", takes_noise=True)
    can_write = backbone.is_seq2seq and KINDS[head.kind].spell_answers is not None
    if head.is_written and not can_write:
        raise StoreDamaged(
            f"the version generates its answers as text, which a `{head.kind}` task on `{backbone.name}` cannot do"
        )
    if not _SHORTEST_ROW <= manifest.max_length <= backbone.max_length:
        raise StoreDamaged(
            f"the version's rows have {manifest.max_length} tokens; `{backbone.name}` reads {_SHORTEST_ROW} to "
            f"{backbone.max_length}"
        )
    if manifest.extra.get("stride", 0) < 0:
        raise StoreDamaged(f"the version's windows overlap by {manifest.extra['stride']} tokens, which is below 0")
    layout = find_layout(head.kind)
    needs_pairs, takes_pairs = layout.overlaps or head.has_towers, layout.words is None
    if (needs_pairs and not has_pairs) or (has_pairs and not takes_pairs):
        raise StoreDamaged(f"the version reads {'pairs' if has_pairs else 'single texts'}, which its head does not")
    return spec
