"""The start of a run from stored versions: the tensors of one, or the mean of several, instead of fresh values.

A start is named as a version is (`cola`, `cola@2`); a resolved run has `cola@2:3f9c0d1e2b4a`, the digest's first digits
behind the reference, so that its id covers what it started from. The method must be the source's. The head is taken
over only where it means the same: same kind, same labels, same reading of the backbone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inlay.data import KINDS, Task
from inlay.errors import BadConfig, Missing, WrongBackbone
from inlay.model import Backbone, HeadSpec, ResolvedMethod, SlotSpec, find_head
from inlay.model import head as head_part
from inlay.settings import DataConfig, MethodConfig, RunConfig, TrainConfig
from inlay.store import Manifest, Store, Version

_DIGITS = 12
# Settings of a head that its own data decided.
_SCALE = ("target_mean", "target_std", "temperature", "null_threshold", "thresholds")
_FREE = ("init_std",)  # settings in which methods may differ: with other ones, equal numbers mean something else
_OUTPUTS = {*head_part.OUTPUTS}  # tensors of a head with a row for each output
_INHERITED = ("pooling", "hidden", "features")  # settings of a head that are settings of training


@dataclass(frozen=True)
class StartSource:
    """A stored version that a run starts from."""

    version: Version
    manifest: Manifest
    spec: SlotSpec
    tensors: Mapping[str, Tensor]

    @property
    def label(self) -> str:
        """The name of the source in a resolved run: its reference, and the first digits of its digest."""
        return f"{self.version.reference}:{self.version.digest[:_DIGITS]}"


@dataclass(frozen=True)
class Start:
    """The tensors a run's slot begins with; those that are not there begin fresh."""

    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    lineage: tuple[dict[str, str], ...] = ()
    """reference and digest of every source"""
    notes: tuple[str, ...] = ()
    backbone: str = ""
    """the backbone of the multi-task run that these tensors come from; "" if there is none"""
    fingerprint: str = ""
    """fingerprint of that backbone; "" if the run's folder does not have it"""

    def of(self, task: str) -> dict[str, Tensor]:
        """Return the tensors a task's slot begins with: those shared by all tasks of its run, and its own."""
        common = {name: tensor for name, tensor in self.tensors.items() if "/" not in name}
        own = f"{task}/"
        return common | {n.removeprefix(own): tensor for n, tensor in self.tensors.items() if n.startswith(own)}


def inherit(start: Sequence[str], store: Store) -> RunConfig:
    """Return the defaults, with the method and the pooling of the first version that a run starts from."""
    manifest = store.manifest(_resolve(start[0], store))
    spec = SlotSpec.from_stored(manifest.method, manifest.head)
    choices = {item.name: item.metadata["choices"] for item in dataclasses.fields(TrainConfig)}
    # A head on tokens pools nothing: then the new task uses the backbone's default pooling.
    reading = {name: value for name in _INHERITED if (value := getattr(spec.head, name)) in choices[name]}
    return RunConfig(method=spec.method.as_config(), train=TrainConfig(**reading))


def load_sources(
    start: Sequence[str], store: Store | None, backbone: Backbone, method: MethodConfig
) -> list[StartSource]:
    """Read the versions named in `start`, and check that they fit this backbone, `method` and each other."""
    if start and store is None:
        raise BadConfig(f"`train.start` is `{', '.join(start)}`, but there is no store", "give one: `store=Store()`")
    sources: list[StartSource] = []
    for name in start:
        assert store is not None
        version = _resolve(name, store)
        if any(version.digest == source.version.digest for source in sources):
            raise BadConfig(f"`train.start` has `{version.reference}` twice", "name every task once")
        loaded = store.load(version)
        trained_on = loaded.manifest.backbone
        if trained_on["fingerprint"] != backbone.fingerprint:
            raise WrongBackbone(
                f"cannot start from `{version.reference}`: it was trained on the backbone `{trained_on['name']}` "
                f"({trained_on['fingerprint'][:12]}), not on `{backbone.name}` ({backbone.fingerprint[:12]})",
                f"use `--backbone {trained_on['name']}`, or start from a task trained on `{backbone.name}`",
            )
        spec = SlotSpec.from_stored(loaded.manifest.method, loaded.manifest.head)
        source = StartSource(version, loaded.manifest, spec, loaded.tensors)
        # No mean of tensors that mean different things.
        if sources and (unlike := _find_difference(sources[0].spec.method, source.spec.method)):
            setting, mine, its = unlike
            raise BadConfig(
                f"no mean of `{sources[0].version.reference}` (`method.{setting}` `{mine}`) and "
                f"`{version.reference}` (`{its}`)",
                "start from tasks that were trained with the same method and size",
            )
        sources.append(source)
    if sources:
        check_method(method, sources[0].spec.method, sources[0].version.reference)
    return sources


def check_method(method: MethodConfig, its: MethodConfig | ResolvedMethod, reference: str) -> None:
    """Refuse to start from a version of another method, before their other settings are compared."""
    if method.name != its.name:
        raise _method_error("name", method.name, its.name, reference)


def make_start(sources: Sequence[StartSource], spec: SlotSpec, task: Task, backbone: Backbone) -> Start:
    """Return the start of a slot of `spec`: the sources' mean, with or without heads. Refuses another layout."""
    if not sources:
        return Start()
    shapes = {item.name: item.shape for item in spec.layout(backbone.anatomy)}
    body = [name for name in shapes if not head_part.is_of_head(name)]
    for source in sources:
        if unlike := _find_difference(spec.method, source.spec.method):
            raise _method_error(*unlike, source.version.reference)
        own = {name: tuple(tensor.shape) for name, tensor in source.tensors.items() if not head_part.is_of_head(name)}
        if own != {name: shapes[name] for name in body}:
            raise BadConfig(
                f"the run would not train the tensors that `{source.version.reference}` has",
                "leave out settings of the head, such as `--pooling`, or train without `--from`",
            )
    reason = next((why for source in sources if (why := _why_fresh_head(source, spec.head, task))), None)
    names = body if reason else list(shapes)
    parts = [_rescaled(source, spec.head) for source in sources]
    tensors = {name: torch.stack([part[name].double() for part in parts]).mean(0).float() for name in names}
    lineage = tuple({"reference": item.version.reference, "digest": item.version.digest} for item in sources)
    references = " and ".join(f"`{source.version.reference}`" for source in sources)
    note = f"starts from {'the mean of ' if len(sources) > 1 else ''}{references}"
    note += f"; its head starts fresh: {reason}" if reason else ", head included"
    return Start(tensors, lineage, (note,))


def reads_alike(mine: TrainConfig, its: TrainConfig) -> bool:
    """Tell whether the heads of two runs read the backbone in the same way, as far as their settings show."""
    return all(getattr(mine, name) == getattr(its, name) for name in _INHERITED)


def take_head(own: Mapping[str, Tensor], its: DataConfig, task: Task) -> dict[str, Tensor]:
    """Build a new task's head from that of a trained task: each label begins as the label of the same meaning.

    `own` are the trained task's tensors and `its` its resolved data settings. Labels mean the same if their written
    form is the same: their name, or what `data.answers` says. Empty if a label of the new task has no such row.
    """
    known = [
        answer.removeprefix(f"{label}=") for label, answer in zip(its.labels, its.answers or its.labels, strict=True)
    ]
    is_known = task.kind == its.kind and KINDS[task.kind].is_classifier and set(task.written) <= set(known)
    if not is_known or head_part.WEIGHT not in own:
        return {}
    rows = [known.index(text) for text in task.written]
    by_label = {*_OUTPUTS, head_part.BIAS}
    return {
        name: tensor[rows].clone() if name in by_label else tensor
        for name, tensor in own.items()
        if head_part.is_of_head(name)
    }


def _resolve(name: str, store: Store) -> Version:
    reference, _, digits = name.partition(":")
    version = store.resolve(reference)
    if not version.digest.startswith(digits):
        raise Missing(
            f"`{version.reference}` is not the version the run started from (`{digits}`, not "
            f"`{version.digest[:_DIGITS]}`)",
            "import that version again, or name another start with `--from`",
        )
    return version


def _method_error(name: str, mine: object, its: object, reference: str) -> BadConfig:
    return BadConfig(
        f"`method.{name}` is `{mine}`, but `{reference}` has `{its}`",
        "leave it out, and the run has the method it starts from; or train without `--from`",
    )


def _find_difference(first: ResolvedMethod, second: ResolvedMethod) -> tuple[str, object, object] | None:
    """Return the first setting in which two methods differ, and both values; None if they are alike."""
    for item in dataclasses.fields(first):
        mine, its = getattr(first, item.name), getattr(second, item.name)
        if mine != its and item.name not in _FREE:
            return item.name, mine, its
    return None


def _why_fresh_head(source: StartSource, head: HeadSpec, task: Task) -> str | None:
    """Return why the source's head would mean something else here, or None."""
    manifest, reference = source.manifest, source.version.reference
    if manifest.kind != task.kind:
        return f"`{reference}` is of the kind {manifest.kind}, this task {task.kind}"
    if manifest.labels != task.labels:
        return f"`{reference}` has other labels"
    plain = {name: getattr(HeadSpec, name) for name in _SCALE}
    if dataclasses.replace(source.spec.head, **plain) != dataclasses.replace(head, **plain):
        return f"the head of `{reference}` reads the backbone in another way"
    return None


def _rescaled(source: StartSource, head: HeadSpec) -> dict[str, Tensor]:
    """Return the source's tensors with its head rescaled to this task's numbers: the same answers as before."""
    own, tensors = source.spec.head, dict(source.tensors)
    if own.kind == head.kind and find_head(head.kind).is_scaled and not head.is_written:
        for name in _OUTPUTS & tensors.keys():
            tensors[name] = tensors[name] * (own.target_std / head.target_std)
        shift = own.target_mean - head.target_mean
        tensors[head_part.BIAS] = (tensors[head_part.BIAS] * own.target_std + shift) / head.target_std
    return tensors
