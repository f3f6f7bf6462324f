"""Import of another library's folder as a version, and export of a version as such a folder.

A folder is recognised by its content, not by its name. An imported version has labels, a backbone's fingerprint and
probes like any other, so it is listed, served and verified like any other; it has no scores, since nothing was
evaluated.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inlay.data import KINDS, METRICS, Split, find_fault, resolve_metric
from inlay.errors import BadConfig, BadData, Missing, StoreDamaged, Unsupported, WrongBackbone
from inlay.exchange import adapterhub, peft, to_adapterhub
from inlay.exchange.foreign import ExportedFiles, ForeignTask, TaskToExport, check_target, drafted, dump_json, read_json
from inlay.model import (
    BUILT_IN,
    Anatomy,
    Backbone,
    HeadSpec,
    SlotSpec,
    canonical_backbone,
    canonical_environment,
    find_head,
    infer_canonically,
)
from inlay.serving import check_backbone, check_whole, read_slot
from inlay.store import Loaded, Manifest, Probe, Store, Version, legal_name
from inlay.training import current_commit, describe_backbone, encode_rows

OWN = "inlay.json"
"""the file for the settings of a task that the other library does not have"""

PROBES = (
    "The meeting was moved to Thursday at ten.",
    "I would not buy this again.",
    "Thank you for your help, it works now.",
    "Where can I find the nearest station?",
    "Prices rose by three percent last year.",
    "He said that nothing had changed.",
)
"""the probe rows of an imported version, which has no dev rows"""


@dataclass(frozen=True)
class Format:
    """The reader and writer of one library's folders."""

    read: Callable[[Path, Backbone], ForeignTask]
    write: Callable[[TaskToExport, Anatomy], ExportedFiles]
    files: tuple[str, ...]
    """the names of its files"""
    base: str
    """the key of its config that names the backbone"""


FORMATS = {
    "adapterhub": Format(
        adapterhub.read,
        to_adapterhub.write,
        (adapterhub.CONFIG, *adapterhub.WEIGHTS, adapterhub.HEAD_CONFIG, *adapterhub.HEAD_WEIGHTS),
        "model_name",
    ),
    "peft": Format(peft.read, peft.write, (peft.CONFIG, *peft.WEIGHTS), "base_model_name_or_path"),
}


@dataclass(frozen=True)
class ImportOptions:
    """What the user chose for an import; None leaves the choice to the folder."""

    name: str | None = None
    labels: tuple[str, ...] | None = None
    kind: str | None = None
    max_length: int | None = None


@dataclass(frozen=True)
class ImportedVersion:
    """A version that came from a folder."""

    version: Version
    library: str
    base: str
    notes: tuple[str, ...]


def find_format(folder: Path) -> str:
    """Return which library wrote a folder: both name their config `adapter_config.json`, but PEFT's has `peft_type`."""
    path = folder / adapterhub.CONFIG
    if not path.is_file():
        raise BadData(
            f"a folder without `{adapterhub.CONFIG}`",
            "give a file that `inlay export` wrote, or a folder that `save_adapter` (AdapterHub) or "
            "`save_pretrained` (PEFT) wrote",
            path=folder,
        )
    if (folder / "adapter_fusion_config.json").is_file():
        raise Unsupported(
            f"`{folder}` holds an AdapterFusion, which Inlay does not have", "import its adapters one by one"
        )
    return "peft" if "peft_type" in read_json(path) else "adapterhub"


def named_backbone(folder: Path) -> str:
    """Return the name of the backbone that a folder was trained on; an export of Inlay has Inlay's own name.

    A hub backbone that comes with Inlay gets its name there, so no network is needed.
    """
    key = FORMATS[find_format(folder)].base
    base = _read_own(folder / OWN).get("backbone") or read_json(folder / adapterhub.CONFIG).get(key)
    if not base:
        raise BadConfig(f"`{folder}` names no backbone", "name the one it was trained on with `--backbone`")
    return {entry.hub: name for name, entry in BUILT_IN.items()}.get(str(base), str(base))


def import_file(path: Path, name: str | None, store: Store, open_backbone: Callable[[str], Backbone]) -> Version:
    """Add the version in a file that `Store.export` wrote, after checking it on its backbone.

    `open_backbone` loads the backbone that the file names, or refuses to.
    """

    def check(loaded: Loaded, version: Version) -> None:
        named = loaded.manifest.backbone["name"]
        backbone = open_backbone(named)
        check_whole(loaded, version, backbone)
        if backbone.name not in BUILT_IN:
            store.register_backbone(named, backbone.name)

    return store.import_(path, name, check)


def import_folder(folder: Path, backbone: Backbone, store: Store, options: ImportOptions) -> ImportedVersion:
    """Publish the task in another library's folder as a version on `backbone`."""
    format_name = find_format(folder)
    if backbone.is_seq2seq:
        raise Unsupported(
            f"an import for the backbone `{backbone.name}`, which writes its answers",
            "its tasks have no head to import: train the task here, or name an encoder with `--backbone`",
        )
    # 1. read the folder
    foreign = _read_foreign(folder, format_name, backbone)
    own = _read_own(folder / OWN)
    if own.get("fingerprint") not in (None, backbone.fingerprint):
        raise WrongBackbone(
            f"`{folder}` was exported for the backbone with the fingerprint `{own['fingerprint']}`; "
            f"`{backbone.name}` has `{backbone.fingerprint}`",
            "name the backbone it was trained on with `--backbone`",
        )
    # 2. make the manifest and sidecar of the version
    manifest, notes = _describe(foreign, own, backbone, options)
    paths = [folder / file for file in FORMATS[format_name].files]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
    origin = {"format": format_name, "library": foreign.library, "base": foreign.base, "files": digests}
    manifest = dataclasses.replace(manifest, extra={**manifest.extra, "origin": origin})
    name = options.name or own.get("name") or legal_name(folder.resolve().name)
    sidecar = {
        "published_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "commit": current_commit(),
        "environment": canonical_environment(),
    }
    # 3. check the version on the backbone, and publish it
    try:
        check_whole(Loaded(manifest, foreign.tensors), Version(str(name), 1, ""), backbone)
    except StoreDamaged as error:
        raise BadData(error.message, "save the adapter again", path=folder) from None
    if backbone.name not in BUILT_IN:
        store.register_backbone(backbone.name)
    version = store.publish(str(name), foreign.tensors, manifest, sidecar)
    return ImportedVersion(version, foreign.library, foreign.base, (*foreign.notes, *notes))


def _read_foreign(folder: Path, format_name: str, backbone: Backbone) -> ForeignTask:
    """Read another library's folder; settings of unexpected types are an error that names them."""
    try:
        return FORMATS[format_name].read(folder, backbone)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadData(f"its settings cannot be read: {reason}", "save the adapter again", path=folder) from error


_OWN_TYPES: dict[str, type] = {
    "name": str,
    "kind": str,
    "labels": list,
    "max_length": int,
    "backbone": str,
    "fingerprint": str,
    "temperature": float,
    "thresholds": list,
    "pairs": bool,
}


def _read_own(path: Path) -> dict[str, Any]:
    """Read the settings that Inlay's own export added; none if another library wrote the folder."""
    own = read_json(path) if path.is_file() else {}
    for key, kind in _OWN_TYPES.items():
        if key in own and type(own[key]) is not kind:  # not isinstance: True is not a number here
            raise BadData(
                f"`{key}` is `{str(own[key])[:40]}`", "delete the file: the folder is complete without it", path=path
            )
    if not 1e-4 <= own.get("temperature", 1.0) <= 1e4:
        hint = "it must be from 0.0001 to 10,000, or left out"
        raise BadData(f"`temperature` is `{own['temperature']}`", hint, path=path)
    if own.get("max_length", 4) < 4:
        raise BadData(f"`max_length` is `{own['max_length']}`", "it must be 4 or more, or left out", path=path)
    for label in own.get("labels", ()):
        if not isinstance(label, str) or find_fault(label) is not None:
            raise BadData(f"`labels` has `{ascii(label)[:40]}`", "each must be a text", path=path)
    return {**own, "labels": own.get("labels", [])}


def _describe(
    foreign: ForeignTask, own: dict[str, Any], backbone: Backbone, options: ImportOptions
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest of an imported version, and notes on what had to be guessed."""
    head = _choose_head(foreign.head, own, options)
    labels, notes = _choose_labels(foreign, own, options, head.kind)
    length = options.max_length or own.get("max_length") or find_head(head.kind).max_length
    spec, length = SlotSpec(foreign.method, head), min(length, backbone.max_length)
    has_pairs = bool(own.get("pairs"))
    # The probes and their canonical answers; if the task reads pairs, each row has the next one as its second text.
    pairs = [*PROBES[1:], PROBES[0]] if has_pairs else None
    plain = canonical_backbone(backbone)
    rows = encode_rows(plain, Split(list(PROBES), pairs, None, []), length)
    answers = infer_canonically(plain, spec, foreign.tensors, rows)
    probes = [
        Probe(text, pairs[index] if pairs else None, tuple(answers[index].tolist()))
        for index, text in enumerate(PROBES)
    ]
    metric = resolve_metric("auto", head.kind, len(labels))
    manifest = Manifest(
        kind=head.kind,
        labels=labels,
        metric=metric,
        higher_is_better=METRICS[metric].higher_is_better,
        method=dataclasses.asdict(spec.method),
        head=spec.head.to_stored(),
        max_length=length,
        metrics={},
        data_digest="",
        dev_digest="",
        backbone=describe_backbone(backbone),
        run_id="imported",
        num_parameters=sum(tensor.numel() for tensor in foreign.tensors.values()),
        probes=tuple(probes),
        config={},
        extra={"pairs": has_pairs},
    )
    return manifest, notes


def _choose_head(head: HeadSpec, own: dict[str, Any], options: ImportOptions) -> HeadSpec:
    """Return the folder's head, with the kind that the user chose, and the decisions of Inlay's own export."""
    kind = options.kind or own.get("kind") or head.kind
    is_number = head.num_outputs == 1
    fitting = [name for name, each in KINDS.items() if each.head_type is not None and each.is_number == is_number]
    if kind not in fitting:
        raise BadConfig(f"kind `{kind}` for a head of {head.num_outputs} outputs", f"use {' or '.join(fitting)}")
    temperature = own.get("temperature", head.temperature)
    cuts = own.get("thresholds")
    if cuts is None or kind != own.get("kind"):  # thresholds only fit the kind that they were tuned for
        return dataclasses.replace(head, kind=kind, temperature=temperature, thresholds=None)
    expected = 1 if KINDS[kind].is_classifier else head.num_outputs
    if len(cuts) != expected or not all(type(cut) in (int, float) and abs(cut) < 1e300 for cut in cuts):
        raise BadData(f"`thresholds` are `{cuts}`", f"they must be {expected} numbers, or left out")
    return dataclasses.replace(head, kind=kind, temperature=temperature, thresholds=tuple(map(float, cuts)))


def _choose_labels(
    foreign: ForeignTask, own: dict[str, Any], options: ImportOptions, kind: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the user's labels, or the folder's, or LABEL_0 … as in transformers; and a note on guessed ones."""
    if KINDS[kind].is_number:
        return (), ()
    labels = options.labels or tuple(own.get("labels") or ()) or foreign.labels
    if not labels:
        labels = tuple(f"LABEL_{index}" for index in range(foreign.head.num_outputs))
        return labels, (f"the folder names no labels: they are {labels[0]} … {labels[-1]}; give them with --labels",)
    if len(labels) != foreign.head.num_outputs or len(set(labels)) != len(labels):
        raise BadConfig(
            f"{len(labels)} labels for {foreign.head.num_outputs} outputs", "give each output one label of its own"
        )
    return labels, ()


def export_folder(reference: str, store: Store, backbone: Backbone, format_name: str, target: Path) -> ExportedFiles:
    """Write a version as a folder of another library; `target` must not exist yet, or be empty."""
    # 1. load the version, and let the format write its files
    version = store.resolve(reference)
    loaded = store.load(version)
    manifest = loaded.manifest
    check_backbone(version, manifest, backbone)
    spec = read_slot(manifest, backbone)
    base = BUILT_IN[backbone.name].hub if backbone.name in BUILT_IN else backbone.name
    task = TaskToExport(version.name, spec.method, spec.head, tuple(manifest.labels), loaded.tensors, base)
    folder = FORMATS[format_name].write(task, backbone.anatomy)
    own = {
        "name": version.name,
        "kind": manifest.kind,
        "labels": manifest.labels,
        "pairs": bool(manifest.extra.get("pairs")),
        "max_length": manifest.max_length,
        "temperature": spec.head.temperature,
        **({} if spec.head.thresholds is None else {"thresholds": list(spec.head.thresholds)}),
        "backbone": backbone.name,
        "fingerprint": backbone.fingerprint,
        "digest": version.digest,
    }
    # 2. write them, and the settings that only Inlay has
    check_target(target)
    try:
        with drafted(target) as draft:
            for name, content in {**folder.files, OWN: dump_json(own)}.items():
                (draft / name).write_bytes(content)
    except OSError as error:
        raise Missing(f"cannot write `{target}`: {error.strerror}", "choose another place for the export") from None
    notes = list(folder.notes)
    if (spec.head.target_mean, spec.head.target_std) != (0.0, 1.0):
        notes.append("the scale of the targets is folded into the head's weights")
    return ExportedFiles(folder.files, tuple(notes))
