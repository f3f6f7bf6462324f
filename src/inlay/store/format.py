"""A stored version as bytes: the manifest, the object with it and the tensors, the reference, the export.

Nothing here reads or writes the store's folders. Reading is strict: an unknown, missing or mistyped key is damage. The
same content always gives the same bytes, so that their sha256 can be the version's identity. torch is imported only by
the two functions that turn tensors into bytes and back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import re
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from inlay.archives import open_archive
from inlay.errors import BadConfig, BadData, StoreDamaged, Unsupported
from inlay.store.json_values import check_nested, is_nested, parse_json

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

FORMAT = 1
REFERENCE_FORMAT = 2  # format 1 had neither the version's name and number nor a seal
_TWO = 2  # classes, which have one threshold
HASHED = "hashed_probes"
"""the entry of a manifest's `extra` with probes whose rows are not kept: `row`, a hash, and `logits`"""
_MAX_JSON_BYTES = 100_000_000  # safetensors allows no larger header
_MAX_ENTRIES_BYTES = 100_000  # of an export's list of entries, of which there are three
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_SELECTOR = re.compile(r"best|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class Version:
    """One immutable stored result: the number belongs to the name, the digest to the content.

    >>> inlay.Store().resolve("mood").reference
    'mood@1'
    """

    name: str
    number: int
    digest: str

    @property
    def reference(self) -> str:
        """The name that users give this version: `sst2@3`."""
        return f"{self.name}@{self.number}"


@dataclass(frozen=True)
class Probe:
    """A row and the answer that the version gave on the canonical path when it was published.

    Logits of a head that reads tokens are flat: window after window, token after token, label after label.
    """

    text: str
    pair: str | None
    logits: tuple[float, ...]

    def hash_row(self, salt: str) -> str:
        """Return a hash of the row: it identifies a row that one has, but the row cannot be read from it."""
        return hashlib.sha256(_dump([salt, self.text, self.pair]).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """Everything of a version except its tensors. The digest covers it, so it has no times, hosts or paths."""

    kind: str  # of task: a key of `inlay.data.kinds.KINDS`
    labels: tuple[str, ...]
    metric: str  # picked the best epoch, and picks `NAME@best`
    method: dict[str, Any]  # method settings, `name` and `size` among them
    head: dict[str, Any]  # kind, num_labels, pooling; for regress the targets' mean and standard deviation
    max_length: int
    metrics: dict[str, dict[str, float]]  # split -> metric -> value
    data_digest: str
    dev_digest: str  # "" where there were no dev rows
    backbone: dict[str, Any]  # name, fingerprint, family, num_parameters, exact_digest, precision
    run_id: str
    num_parameters: int  # trained ones, head included
    probes: tuple[Probe, ...]
    config: dict[str, Any]  # the resolved settings of the run
    higher_is_better: bool = True  # of `metric`
    extra: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        # Copies, as plain JSON values: so a manifest equals itself read back, and the caller's dicts may change.
        for name in ("method", "head", "backbone", "config", "extra"):
            object.__setattr__(self, name, json.loads(_dump(getattr(self, name))))
        metrics = {split: {name: float(value) for name, value in row.items()} for split, row in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)
        object.__setattr__(self, "labels", tuple(self.labels))
        object.__setattr__(self, "probes", tuple(self.probes))

    def share_of_probes_in(self, rows: Collection[tuple[str, str | None]]) -> float:
        """Return the share of the probes, which are dev rows, that are among rows of text and pair; 0 without any."""
        hashes = self.extra.get(HASHED, ())
        if hashes:
            found = {Probe(text, pair, ()).hash_row(self.run_id) for text, pair in rows}
            known = [probe["row"] in found for probe in hashes]
        else:
            known = [(probe.text, probe.pair) in rows for probe in self.probes]
        return sum(known) / len(known) if known else 0.0

    def to_json(self) -> str:
        """Return canonical JSON. Logits are hexadecimal floats, which keep every bit."""
        tree = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        tree["metrics"] = _write_metrics(self.metrics)
        tree["probes"] = [
            {"text": probe.text, "pair": probe.pair, "logits": [float(value).hex() for value in probe.logits]}
            for probe in self.probes
        ]
        return _dump(tree)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "manifest") -> Manifest:
        """Read a manifest; `where` names its file in errors."""
        tree = parse_json(text, where)
        _check_format(tree, where)
        if isinstance(tree.get("probes"), list):
            tree["probes"] = [_read_probe(probe, where) for probe in tree["probes"]]
        manifest = _read_fields(cls, tree, where)
        cuts, num_labels = manifest.head.get("thresholds"), len(manifest.labels)
        if cuts is not None and len(cuts) != (1 if num_labels == _TWO else num_labels) and len(cuts) != num_labels:
            raise StoreDamaged(f"{where}: {len(cuts)} thresholds for {num_labels} labels")
        if manifest.run_id and not is_name(manifest.run_id):  # it names a folder
            raise StoreDamaged(f"{where}: `{manifest.run_id[:80]!a}` cannot be the id of a run")
        return manifest


@dataclass(frozen=True)
class Summary:
    """The part of a manifest that lists show, kept in the reference so that no object needs to be opened."""

    kind: str
    num_labels: int
    metric: str
    higher_is_better: bool
    metrics: dict[str, dict[str, float]]
    method: dict[str, Any]
    num_parameters: int
    data_digest: str
    dev_digest: str
    backbone: dict[str, Any]
    run_id: str

    @classmethod
    def of(cls, manifest: Manifest) -> Summary:
        """Return the summary of a manifest."""
        shared: dict[str, Any] = {name: vars(manifest)[name] for name in cls.__annotations__ if name != "num_labels"}
        return cls(num_labels=len(manifest.labels), **shared)

    def to_tree(self) -> dict[str, Any]:
        """Return the summary as JSON data."""
        return {**vars(self), "metrics": _write_metrics(self.metrics)}

    def matches(self, manifest: Manifest) -> bool:
        """Return whether this is the summary of a manifest."""
        return _dump(self.to_tree()) == _dump(Summary.of(manifest).to_tree())

    def score(self, metric: str) -> float | None:
        """Return the dev value of a metric; None if there is none, or it is not finite."""
        value = self.metrics.get("dev", {}).get(metric)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class VersionInfo:
    """A version as a list shows it."""

    version: Version
    published_at: str  # UTC, ISO 8601
    size_bytes: int
    summary: Summary

    def to_json(self) -> str:
        """Return the content of a reference file, with a seal: a hash of the rest, which reveals any change."""
        tree = {
            "format": REFERENCE_FORMAT,
            "name": self.version.name,
            "number": self.version.number,
            "digest": self.version.digest,
            "published_at": self.published_at,
            "size_bytes": self.size_bytes,
            "summary": self.summary.to_tree(),
        }
        return _dump({**tree, "seal": _seal(tree)})

    @classmethod
    def from_json(cls, text: bytes, where: str, name: str, number: int) -> VersionInfo:
        """Read the reference file of `name` and `number`; refuse that of another version, or a changed one."""
        tree = parse_json(text, where)
        _check_format(tree, where, REFERENCE_FORMAT)
        if tree["format"] > 1:
            if tree.pop("seal", None) != _seal(tree):
                raise StoreDamaged(f"{where}: this is not what was written: its seal does not match")
            owner = (tree.pop("name", None), tree.pop("number", None))
            if owner != (name, number):
                raise StoreDamaged(f"{where}: this is the reference of `{owner[0]}@{owner[1]}`")
        reference = _read_fields(_Reference, tree, where)
        if not is_digest(reference.digest):
            raise StoreDamaged(f"{where}: `{reference.digest}` is not a digest")
        summary = _read_fields(Summary, reference.summary, where)
        return cls(Version(name, number, reference.digest), reference.published_at, reference.size_bytes, summary)


@dataclass(frozen=True)
class TaskInfo:
    """A task of the store, with its versions, oldest first; there is at least one."""

    name: str
    versions: tuple[VersionInfo, ...]

    @property
    def latest(self) -> VersionInfo:
        """The version that `NAME` alone means."""
        return self.versions[-1]

    @property
    def best(self) -> VersionInfo | None:
        """The version that `NAME@best` means; None if no version has a dev score to compare.

        It is the first with the best dev value of the latest version's metric, among versions with the same dev rows.
        """
        latest = self.latest.summary
        sign = 1 if latest.higher_is_better else -1
        scored = [
            (sign * score, -info.version.number, info)
            for info in self.versions
            if info.summary.dev_digest == latest.dev_digest and (score := info.summary.score(latest.metric)) is not None
        ]
        return max(scored, key=lambda item: item[:2])[2] if scored else None


@dataclass(frozen=True)
class _Reference:
    """The fields of a reference file, without name, number and seal."""

    format: int
    digest: str
    published_at: str
    size_bytes: int
    summary: dict[str, Any]


def is_name(text: str) -> bool:
    """Return whether a text can name a task. Such a name is a safe file name on any file system."""
    return _NAME.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Return whether a text has the form of a sha256."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def legal_name(text: str) -> str:
    """Return the legal task name nearest to a text: `GLUE/CoLA v2` gives `glue-cola-v2`."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).lstrip("._-")[:64].rstrip("._-")
    return name or "task"


def check_name(name: str) -> None:
    """Refuse a text that cannot name a task."""
    if not is_name(name):
        rule = "has lower-case letters, digits, `.`, `_` and `-`, begins with a letter or digit, and has 64 at most"
        raise BadConfig(f"`{name}` cannot name a task", f"a name {rule}; `{legal_name(name)}` would do")


def parse_reference(reference: str) -> tuple[str, str | None]:
    """Split `NAME`, `NAME@3` or `NAME@best` into the name and what follows it."""
    name, at, selector = reference.partition("@")
    if not name or (at and not _SELECTOR.fullmatch(selector)):
        raise BadConfig(
            f"`{reference}` does not name a version of a task",
            "write `NAME` for the latest version, `NAME@3` for one number, `NAME@best` for the best dev score",
        )
    return name, selector if at else None


def encode_object(tensors: Mapping[str, Tensor], manifest: Manifest) -> bytes:
    """Return a version's content. The same tensors, in any order, and manifest give the same bytes."""
    import torch
    from safetensors.torch import save

    plain = {}
    for name in sorted(tensors):
        if tensors[name].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"`{name}` is {tensors[name].dtype}; only what float32 holds exactly can be stored")
        # A copy: slots of one stacked tensor share memory, which safetensors refuses.
        plain[name] = tensors[name].detach().to("cpu", torch.float32, copy=True).contiguous()
    # One metadata key: safetensors does not keep the order of several, and the digest must not depend on it.
    return save(plain, {"manifest": manifest.to_json()})


def decode_tensors(content: bytes, where: str) -> dict[str, Tensor]:
    """Return the tensors of an object."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
    except SafetensorError as error:
        raise StoreDamaged(f"{where}: not a safetensors file: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise StoreDamaged(f"{where}: tensor `{name}` is {tensor.dtype}, not torch.float32")
    return tensors


def read_manifest(file: BinaryIO, size_bytes: int, where: str) -> Manifest:
    """Read the manifest of an object of `size_bytes` from its header alone, without checking the digest."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size_bytes - 8, _MAX_JSON_BYTES):
        raise StoreDamaged(f"{where}: not a safetensors file: its header cannot be {length} bytes long")
    metadata = parse_json(file.read(length), where).get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("manifest"), str):
        raise StoreDamaged(f"{where}: a safetensors file without an Inlay manifest")
    return Manifest.from_json(metadata["manifest"], where)


def check_object(content: bytes, where: str) -> Manifest:
    """Check that bytes from outside are an object, and return its manifest, without torch."""
    from safetensors import SafetensorError, deserialize

    manifest = read_manifest(io.BytesIO(content), len(content), where)
    try:
        tensors = deserialize(content)
    except SafetensorError as error:
        raise StoreDamaged(f"{where}: not a safetensors file: {error}") from None
    for name, tensor in tensors:
        if tensor["dtype"] != "F32":
            raise StoreDamaged(f"{where}: tensor `{name}` is {tensor['dtype']}, not F32")
    return manifest


@dataclass(frozen=True)
class Export:
    """A task as one file: a zip of uncompressed entries, which are never unpacked to paths."""

    name: str
    digest: str
    content: bytes
    sidecar: dict[str, Any] | None

    def to_bytes(self) -> bytes:
        """Return the file's content. The same version gives the same bytes."""
        task = {"format": FORMAT, "name": self.name, "digest": self.digest}
        entries = {"task.json": _dump(task).encode(), "object.safetensors": self.content}
        if self.sidecar is not None:
            entries["sidecar.json"] = _dump(self.sidecar).encode()
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for name, content in entries.items():
                archive.writestr(zipfile.ZipInfo(name), content)  # a ZipInfo of its own has a fixed date
        return buffer.getvalue()


def read_export(path: Path) -> Export:
    """Read an exported file; any other file is refused as `BadData`, with the reason."""
    try:
        with open_archive(path, _MAX_ENTRIES_BYTES) as archive:
            _check_entries(archive, path)
            entries = {name: archive.read(name) for name in archive.namelist()}
    except zipfile.BadZipFile as error:
        raise BadData(f"not an export of Inlay: {error}", "make one with `inlay export TASK`", path=path) from None
    task = parse_json(entries["task.json"], f"{path}: task.json")
    _check_format(task, f"{path}: task.json")
    if task.keys() != {"format", "name", "digest"} or not all(isinstance(task[key], str) for key in ("name", "digest")):
        raise BadData("task.json: must have a name and a digest, nothing else", path=path)
    sidecar = None
    if "sidecar.json" in entries:
        sidecar = parse_json(entries["sidecar.json"], f"{path}: sidecar.json")
        check_nested(sidecar, "sidecar", f"{path}: sidecar.json")
    return Export(task["name"], task["digest"], entries["object.safetensors"], sidecar)


def _check_entries(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse an archive whose entries are not those of an export, or claim impossible sizes."""
    required, optional = {"task.json", "object.safetensors"}, {"sidecar.json"}
    names = archive.namelist()
    if len(names) != len(set(names)) or not required <= set(names) <= required | optional:
        raise BadData(
            f"not an export of Inlay: it holds {len(names)} entries: {', '.join(names[:5])}",
            "an export holds task.json, object.safetensors and perhaps sidecar.json",
            path=path,
        )
    size_bytes = path.stat().st_size
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise BadData(f"{entry.filename} is compressed; an export is not", path=path)
        if entry.file_size > size_bytes or (entry.filename.endswith(".json") and entry.file_size > 1_000_000):
            raise BadData(f"{entry.filename} claims {entry.file_size:,} bytes, which cannot be", path=path)


def _dump(value: Any) -> str:
    """Return canonical JSON: sorted, compact, ASCII (so that any text of a dataset can be written), no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _seal(tree: Mapping[str, Any]) -> str:
    """Return the sha256 of a tree; "" if it cannot be written as JSON."""
    try:
        return hashlib.sha256(_dump(tree).encode()).hexdigest()
    except (ValueError, RecursionError):  # a number too large for a float, or deep nesting: Inlay did not write this
        return ""


def _check_format(tree: Mapping[str, Any], where: str, newest: int = FORMAT) -> None:
    number = tree.get("format")
    if type(number) is not int or number < 1:
        raise StoreDamaged(f"{where}: its format is `{number}`, which does not exist")
    if number > newest:
        raise Unsupported(
            f"{where}: written in format {number}; this Inlay reads up to {newest}", "upgrade: `pip install -U inlay`"
        )


# The annotation of a field -> the types its JSON value may have. Exact types: `true` is not a number here.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "bool": (bool,),
    "dict[str, Any]": (dict,),
    "dict[str, dict[str, float]]": (dict,),
    "tuple[str, ...]": (list,),
    "tuple[float, ...]": (list,),
    "tuple[Probe, ...]": (list,),
}


def _read_fields(kind: type[T], tree: Mapping[str, Any], where: str) -> T:
    """Make a dataclass from JSON data with exactly its fields, of the right types."""
    annotations = kind.__annotations__
    if tree.keys() != annotations.keys():
        names = ", ".join(f"`{name}`" for name in sorted(tree.keys() ^ annotations.keys()))
        raise StoreDamaged(f"{where}: unknown or missing keys: {names}")
    for name, annotation in annotations.items():
        if type(tree[name]) not in _JSON_TYPES[annotation]:
            raise StoreDamaged(f"{where}: `{name}` is {type(tree[name]).__name__}, not {annotation}")
        if annotation == "int" and tree[name] < 0:
            raise StoreDamaged(f"{where}: `{name}` is {tree[name]}, which is below 0")
        if is_nested(name):
            check_nested(tree[name], name, where)
    labels = tree.get("labels", [])
    if not all(isinstance(label, str) for label in labels) or len(set(labels)) < len(labels):
        raise StoreDamaged(f"{where}: its labels are not texts, each there once")
    values = {**tree, "metrics": _read_metrics(tree["metrics"], where)} if "metrics" in annotations else tree
    try:
        return kind(**values)
    except (ValueError, RecursionError) as error:  # a number too large for a float, or deep nesting
        raise StoreDamaged(f"{where}: {error}") from None


def _read_probe(tree: Any, where: str) -> Probe:
    if not isinstance(tree, dict):
        raise StoreDamaged(f"{where}: a probe is not a JSON object")
    probe = _read_fields(Probe, tree, where)
    try:
        return dataclasses.replace(probe, logits=tuple(float.fromhex(value) for value in tree["logits"]))
    except (ValueError, TypeError, OverflowError):
        raise StoreDamaged(f"{where}: a probe's logits are not hexadecimal floats") from None


def _write_metrics(metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    # JSON has no NaN; a metric that is NaN (the correlation of a constant) must not prevent publishing.
    return {
        split: {name: value if math.isfinite(value) else None for name, value in row.items()}
        for split, row in metrics.items()
    }


def _read_metrics(tree: dict[str, Any], where: str) -> dict[str, dict[str, float]]:
    for row in tree.values():
        if type(row) is not dict or not all(value is None or type(value) in (int, float) for value in row.values()):
            raise StoreDamaged(f"{where}: `metrics` must be numbers by split and name")
    return {
        split: {name: math.nan if value is None else float(value) for name, value in row.items()}
        for split, row in tree.items()
    }
