"""Imports a folder of another library as a version, and exports a version as such a folder.

A folder is recognised by its content, not by its name. An imported version has labels, a backbone's fingerprint and
probes like any other, so it is listed, served and proved like any other; it has no scores, as nothing was judged.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from inlay.data import KINDS, METRICS, Split, resolve_metric
from inlay.errors import BadConfig, BadData, Missing, Unsupported, WrongBackbone
from inlay.exchange import adapterhub, peft, to_adapterhub
from inlay.exchange.folder import Folder, Foreign, TaskToExport, digest_files, dump_json, read_json
from inlay.model import (
    BUILT_IN,
    Anatomy,
    Backbone,
    SlotSpec,
    canonical_backbone,
    canonical_environment,
    find_head,
    infer_canonically,
)
from inlay.serving import check_backbone
from inlay.store import Manifest, Probe, Store, Version, legal_name
from inlay.training import current_commit, describe_backbone, encode_rows

OWN = "inlay.json"
"""the file with the settings of a task that the other library has no word for"""

PROBES = (
    "The meeting was moved to Thursday at ten.",
    "I would not buy this again.",
    "Thank you for your help, it works now.",
    "Where can I find the nearest station?",
    "Prices rose by three percent last year.",
    "He said that nothing had changed.",
)
"""neutral rows that an imported version answers on the canonical path, as it has no dev rows"""


@dataclass(frozen=True)
class Format:
    """The reader and writer of one library's folders."""

    read: Callable[[Path, Backbone], Foreign]
    write: Callable[[TaskToExport, Anatomy], Folder]
    files: tuple[str, ...]
    """the files of a folder"""
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
class Wishes:
    """The user's wishes about a folder; None leaves the choice to the folder."""

    name: str | None = None
    labels: tuple[str, ...] | None = None
    kind: str | None = None
    max_length: int | None = None


@dataclass(frozen=True)
class Imported:
    """A version that came from a folder."""

    version: Version
    library: str
    base: str
    notes: tuple[str, ...]


def find_format(folder: Path) -> str:
    """Find which library wrote a folder: both call their config `adapter_config.json`, but PEFT's has a `peft_type`."""
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
    """The name of the backbone that a folder was trained on; Inlay's own name in an export of Inlay.

    A hub backbone that Inlay carries gets Inlay's name, so no network is needed.
    """
    key = FORMATS[find_format(folder)].base
    base = _read_own(folder / OWN).get("backbone") or read_json(folder / adapterhub.CONFIG).get(key)
    if not base:
        raise BadConfig(f"`{folder}` names no backbone", "name the one it was trained on with `--backbone`")
    return {entry.hub: name for name, entry in BUILT_IN.items()}.get(str(base), str(base))


def import_folder(folder: Path, backbone: Backbone, store: Store, wishes: Wishes) -> Imported:
    """Publish the task in another library's folder as a version on `backbone`."""
    format_name = find_format(folder)
    if backbone.is_seq2seq:
        raise Unsupported(
            f"an import to the backbone `{backbone.name}`, which writes its answers",
            "its tasks have no head to come with: train it here, or name an encoder with `--backbone`",
        )
    foreign = FORMATS[format_name].read(folder, backbone)
    own = _read_own(folder / OWN)
    if own.get("fingerprint") not in (None, backbone.fingerprint):
        raise WrongBackbone(
            f"`{folder}` was exported for the backbone with the fingerprint `{own['fingerprint']}`; "
            f"`{backbone.name}` has `{backbone.fingerprint}`",
            "name the backbone it was trained on with `--backbone`",
        )
    manifest, notes = _describe(foreign, own, backbone, wishes)
    files = digest_files(folder, FORMATS[format_name].files)
    origin = {"format": format_name, "library": foreign.library, "base": foreign.base, "files": files}
    manifest = dataclasses.replace(manifest, extra={**manifest.extra, "origin": origin})
    name = wishes.name or own.get("name") or legal_name(folder.resolve().name)
    version = store.publish(str(name), foreign.tensors, manifest, _sidecar())
    return Imported(version, foreign.library, foreign.base, (*foreign.notes, *notes))


_OWN_TYPES: dict[str, type] = {
    "name": str,
    "kind": str,
    "labels": list,
    "max_length": int,
    "backbone": str,
    "fingerprint": str,
    "temperature": float,
    "thresholds": list,
}


def _read_own(path: Path) -> dict[str, Any]:
    """Read the settings that Inlay's own export noted about the task; none where another library wrote the folder."""
    own = read_json(path) if path.is_file() else {}
    for key, kind in _OWN_TYPES.items():
        if key in own and not isinstance(own[key], kind):
            raise BadData(f"`{key}` is `{own[key]}`", "delete the file: the folder can do without it", path=path)
    if not 0 < own.get("temperature", 1.0) < math.inf:
        raise BadData(f"`temperature` is `{own['temperature']}`", "it must be above 0, or left out", path=path)
    return {**own, "labels": [str(label) for label in own.get("labels", ())]}


def _read_thresholds(own: dict[str, Any], kind: str, num_outputs: int) -> tuple[float, ...] | None:
    """Read the thresholds of Inlay's own export; None where it has none, or where the task is another kind now."""
    cuts, is_same = own.get("thresholds"), kind == own.get("kind")
    if cuts is None or not is_same:
        return None
    expected = 1 if KINDS[kind].is_classifier else num_outputs
    if len(cuts) != expected or not all(isinstance(cut, int | float) and math.isfinite(cut) for cut in cuts):
        raise BadData(f"`thresholds` are `{cuts}`", f"they must be {expected} numbers, or left out")
    return tuple(map(float, cuts))


def _describe(
    foreign: Foreign, own: dict[str, Any], backbone: Backbone, wishes: Wishes
) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest of an imported version, and notes on what had to be guessed."""
    kind = wishes.kind or own.get("kind") or foreign.head.kind
    head = dataclasses.replace(
        foreign.head,
        kind=_check_kind(kind, foreign),
        temperature=own.get("temperature", foreign.head.temperature),
        thresholds=_read_thresholds(own, kind, foreign.head.num_outputs),
    )
    labels, notes = _choose_labels(foreign, own, wishes, kind)
    length = wishes.max_length or own.get("max_length") or find_head(kind).max_length
    spec, length = SlotSpec(foreign.method, head), min(length, backbone.max_length)
    metric = resolve_metric("auto", kind, len(labels))
    manifest = Manifest(
        kind=kind,
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
        probes=_make_probes(foreign.tensors, spec, backbone, length, has_pairs=bool(own.get("pairs"))),
        config={},
        extra={"pairs": bool(own.get("pairs"))},
    )
    return manifest, notes


def _check_kind(kind: str, foreign: Foreign) -> str:
    is_number = foreign.head.num_outputs == 1
    fitting = [name for name, each in KINDS.items() if each.head_type is not None and each.is_number == is_number]
    if kind not in fitting:
        wanted = " or ".join(fitting)
        raise BadConfig(f"kind `{kind}` for a head of {foreign.head.num_outputs} outputs", f"use {wanted}")
    return kind


def _choose_labels(
    foreign: Foreign, own: dict[str, Any], wishes: Wishes, kind: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The user's labels, or the folder's, or transformers' own LABEL_0 …"""
    if KINDS[kind].is_number:
        return (), ()
    labels = wishes.labels or tuple(own.get("labels") or ()) or foreign.labels
    if not labels:
        labels = tuple(f"LABEL_{index}" for index in range(foreign.head.num_outputs))
        return labels, (f"the folder names no labels: they are {labels[0]} … {labels[-1]}; give them with --labels",)
    if len(labels) != foreign.head.num_outputs or len(set(labels)) != len(labels):
        raise BadConfig(
            f"{len(labels)} labels for {foreign.head.num_outputs} outputs", "give each output one label of its own"
        )
    return labels, ()


def _make_probes(
    tensors: Mapping[str, Tensor], spec: SlotSpec, backbone: Backbone, max_length: int, *, has_pairs: bool
) -> tuple[Probe, ...]:
    """The neutral rows, each with the next one where the task reads pairs, and their canonical answers."""
    pairs: list[str] | None = [*PROBES[1:], PROBES[0]] if has_pairs else None
    backbone = canonical_backbone(backbone)
    rows = encode_rows(backbone, Split(list(PROBES), pairs, None, []), max_length)
    answers = infer_canonically(backbone, spec, tensors, rows)
    return tuple(
        Probe(text, pairs[index] if pairs else None, tuple(answers[index].tolist()))
        for index, text in enumerate(PROBES)
    )


def _sidecar() -> dict[str, Any]:
    return {
        "published_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "commit": current_commit(),
        "environment": canonical_environment(),
    }


def export_folder(reference: str, store: Store, backbone: Backbone, format_name: str, target: Path) -> Folder:
    """Write a version as a folder of another library; `target` must not be there yet, or be empty."""
    version = store.resolve(reference)
    loaded = store.load(version)
    manifest, anatomy = loaded.manifest, backbone.anatomy
    check_backbone(version, manifest, backbone)
    spec = SlotSpec.from_stored(manifest.method, manifest.head)
    base = BUILT_IN[backbone.name].hub if backbone.name in BUILT_IN else backbone.name
    task = TaskToExport(version.name, spec.method, spec.head, tuple(manifest.labels), loaded.tensors, base)
    folder = FORMATS[format_name].write(task, anatomy)
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
    _write_folder(target, {**folder.files, OWN: dump_json(own)})
    notes = list(folder.notes)
    if (spec.head.target_mean, spec.head.target_std) != (0.0, 1.0):
        notes.append("the scale of the numbers is in the head's weights")
    return Folder(folder.files, tuple(notes))


def _write_folder(target: Path, files: dict[str, bytes]) -> None:
    """Write all files or none: into a folder beside the target, which then takes its name."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadConfig(f"`{target}` is there already", "give a folder that does not exist, or an empty one")
    if not target.parent.is_dir():
        raise Missing(f"no folder `{target.parent}`", "make it first, or choose another place for the export")
    try:
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
        try:
            for name, content in files.items():
                (draft / name).write_bytes(content)
            umask = os.umask(0)
            os.umask(umask)
            draft.chmod(0o777 & ~umask)  # mkdtemp makes it private
            os.replace(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise Missing(f"cannot write `{target}`: {error.strerror}", "choose another place for the export") from None
