"""A trained task in memory, which answers rows; pickled, it is a reference to a stored version."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from inlay import model, pipeline, serving, training
from inlay.data import Reading, Split, encode_cached
from inlay.errors import BadConfig, BadData, InlayError, Missing, NotFinite
from inlay.store import Store, Version


class BadInput(BadData, ValueError):
    """Rows or labels that cannot be used; also a `ValueError`, as callers of scikit-learn's estimators expect."""


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Raise errors about rows, labels or settings as `BadInput`, with keyword arguments in place of options."""
    try:
        yield
    except (BadData, BadConfig) as error:
        error.speak_python()
        raise BadInput(error.message, error.hint) from None


@dataclass(frozen=True)
class _Slot:
    """All that answering needs besides the backbone."""

    spec: model.SlotSpec
    tensors: Mapping[str, Tensor]
    reading: Reading
    labels: tuple[str, ...]


class FittedTask:
    """A trained task. It never changes, so a copy of it is the object itself.

    `store` is the folder in which it is published, by default the user's own. `name` is the version's name, by default
    one that follows from the run: the same rows and settings give the same name.
    """

    def __init__(
        self, run: training.Run, result: training.Result, device: str, store: str | None = None, name: str | None = None
    ) -> None:
        # The dev rows are kept, as probes in case it is published; the training rows are not.
        train = run.task.train.take([0])
        self._trained = training.Trained(
            dataclasses.replace(run, task=dataclasses.replace(run.task, train=train)), result
        )
        self._backbone, self._device, self._store = run.config.backbone, device, store
        self._name = name or f"{run.task.name}-{run.id[:8]}"
        self._slot: _Slot | None = _Slot(result.spec(run), result.tensors, run.reading, run.task.labels)
        self._version: Version | None = None

    def __repr__(self) -> str:
        known = self._name if self._version is None else self._version.reference
        return f"FittedTask({known} on {self._backbone})"

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order of the outputs."""
        return self._open_slot().labels

    def answer(self, split: Split) -> list[model.Outcome]:
        """Answer every row."""
        slot, backbone = self._open_slot(), self._open_backbone()
        encoded = encode_cached(backbone.tokenizer, split, slot.reading)
        bank = model.Bank(backbone, 1)
        bank.put(0, slot.spec, slot.tensors)
        logits = model.infer(bank, model.make_rows(encoded))
        texts = split.texts if split.pairs is None else split.pairs
        outputs = model.collect_outputs(encoded, logits, texts)
        found = training.read_outcomes(training.SplitOutputs(slot.spec.head, outputs, None, 0), slot.labels)
        outcomes = [outcome for outcome in found if outcome is not None]
        if len(outcomes) < len(found):
            raise NotFinite("the outputs of some rows are not finite", "fit it again with a smaller `lr`")
        return outcomes

    def publish(self, name: str | None = None, store: str | None = None, *, probes: str = "rows") -> Version:
        """Publish the weights as a version in a store, for use by all of Inlay."""
        opened = Store(store or self._store)
        if self._trained is None:  # it came from a store
            assert self._version is not None
            if store not in (None, self._store) or name not in (None, self._version.name):
                raise BadConfig(f"`{self._version.reference}` is in a store already", "copy it with `inlay.export`")
            return self._version
        run, result = self._trained.run, self._trained.result
        return training.publish(run, result, self._open_backbone(), opened, name or self._name, probes=probes)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Publish the version, and return the reference to it: name, number, digest, store, backbone."""
        if self._version is None:
            self._version = self.publish(probes="hashed")  # neither the pickle nor the version keeps texts
        place = {"store": self._store, "backbone": self._backbone, "device": self._device}
        return {**dataclasses.asdict(self._version), **place}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Find the version in the store; if it is missing, raise an error that names both."""
        self._store, self._backbone, self._device = state["store"], state["backbone"], state["device"]
        self._trained, self._slot, self._name = None, None, state["name"]  # type: ignore[assignment]
        self._version = Version(state["name"], state["number"], state["digest"])
        store = Store(self._store)
        try:
            store.manifest(self._version)
        except (InlayError, OSError):
            raise Missing(
                f"the weights of this estimator are version `{self._version.reference}` "
                f"({self._version.digest[:12]}…), which is not in the store `{store.root}`",
                "set $INLAY_HOME to the store it was saved with, or bring the version here: `inlay.export` there, "
                "`inlay.import_` here",
            ) from None

    def _open_backbone(self) -> model.Backbone:
        return pipeline.open_once(self._backbone, self._device)

    def _open_slot(self) -> _Slot:
        if self._slot is None:
            assert self._version is not None
            store, backbone = Store(self._store), self._open_backbone()
            loaded = store.load(self._version)
            serving.check_backbone(self._version, loaded.manifest, backbone)
            spec, reading = serving.read_slot(loaded.manifest, backbone), serving.find_reading(loaded.manifest)
            self._slot = _Slot(spec, loaded.tensors, reading, tuple(loaded.manifest.labels))
        return self._slot
