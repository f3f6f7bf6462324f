"""The common code for other libraries' folders: files, heads, adapters of unequal sizes, refusals.

Pickled weights are read by torch's safe loader only, which builds tensors and nothing else. A tensor that was not asked
for is an error: if weights that Inlay has no place for were dropped, answers would be silently wrong.

In other libraries every layer may have its own size, and any set of layers may be adapted; a slot has one size and the
same places in all its layers. The conversion is exact: zero columns change no answer, nor does an adapter that adds
nothing.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from pickletools import genops
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor

from inlay.archives import open_archive
from inlay.data import CLASSIFICATION, KINDS, find_fault, find_kind_of_head
from inlay.errors import BadConfig, BadData, Missing, Unsupported, WrongBackbone
from inlay.model import (
    BOTTLENECK,
    CLASSIFIERS,
    LORA,
    Backbone,
    HeadSpec,
    LoraPart,
    ResolvedMethod,
    find_family,
    layout,
)
from inlay.model import head as head_part
from inlay.store import DRAFT_PREFIX, sync_directory

Linear = tuple[Tensor, Tensor]
"""weight [out, in] and bias [out]"""
Neutral = Mapping[str, tuple[tuple[Any, ...], str]]
"""setting -> the values at which it has no effect, and what other values mean"""
HEAD_TYPES = {name: kind.head_type for name, kind in KINDS.items() if kind.head_type is not None}
"""kind -> AdapterHub's type of its head; a classification of one label is its regression"""


@dataclass(frozen=True)
class ForeignTask:
    """A task as another library's folder describes it, in Inlay's terms."""

    method: ResolvedMethod
    head: HeadSpec
    tensors: dict[str, Tensor]
    labels: tuple[str, ...]
    """empty if the folder does not name them"""
    library: str
    """the library that wrote it, with its version if known"""
    base: str
    """the backbone that the folder names"""
    notes: tuple[str, ...] = ()
    """decisions to show the user"""


@dataclass(frozen=True)
class TaskToExport:
    """A version to be written as another library's folder."""

    name: str
    method: ResolvedMethod
    head: HeadSpec
    labels: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    base: str
    """the name under which the other library loads the backbone"""


@dataclass(frozen=True)
class ExportedFiles:
    """The files for another library, and notes for the user."""

    files: dict[str, bytes]
    notes: tuple[str, ...] = ()


class Weights:
    """The tensors of one file, by name. `take` gives each out once; `finish` refuses tensors that are left."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self.left = dict(tensors)

    def take(self, name: str, *shape: int | None) -> Tensor:
        """Return a tensor as float32, after checking its shape; None in `shape` fits any length."""
        if name not in self.left:
            raise BadData(
                f"it lacks the tensor `{name}`, which its config asks for",
                "save the adapter again; if it is whole, it belongs to another backbone: name that with `--backbone`",
                path=self.path,
            )
        tensor = self.left.pop(name)
        if len(tensor.shape) != len(shape) or any(b not in (None, a) for a, b in zip(tensor.shape, shape, strict=True)):
            wanted = " × ".join("any" if size is None else str(size) for size in shape)
            raise WrongBackbone(
                f"`{name}` is {' × '.join(map(str, tensor.shape))}; this backbone needs {wanted}",
                "name the backbone it was trained on with `--backbone`",
            )
        return tensor.to(torch.float32)

    def finish(self, num_layers: int) -> None:
        """Refuse tensors that were not taken."""
        if not self.left:
            return
        name = min(self.left)
        more = f" and {len(self.left) - 1} more" if len(self.left) > 1 else ""
        raise Unsupported(
            f"{self.path}: Inlay has no place for the tensor `{name}`{more}, and without it answers would be wrong",
            f"if its layer is beyond this backbone's {num_layers}, name the right backbone with `--backbone`; "
            "otherwise train the task again without that part",
        )


_MOST_JSON_BYTES = 10_000_000
"""most bytes of a folder's settings; with 100,000 labels they take 3 MB"""
_MOST_ENTRIES_BYTES = 20_000_000
"""most bytes of the list of entries of a zip of tensors; for 100,000 tensors it takes 10 MB"""
_MOST_NAMING_BYTES = 5_000_000
"""most bytes of the tensors' names and places, 200 for each tensor; every byte may become 100 in memory"""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a folder; anything else, or a file too large for settings, is `BadData`."""
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise BadData(f"settings of more than {_MOST_JSON_BYTES:,} bytes", "save the adapter again", path=path)
        tree = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadData(f"not JSON: {error}", "save the adapter again", path=path) from None
    if not isinstance(tree, dict):
        raise BadData("not a JSON object", "save the adapter again", path=path)
    return tree


def read_number(tree: Mapping[str, Any], key: str, default: float) -> float:
    """Return a number among settings; anything else is `BadData`."""
    value = tree.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < 1e300:  # also NaN, and what a float cannot hold
        raise BadData(f"`{key}` is `{str(value)[:40]}`, which is not a number", "save the adapter again")
    return float(value)


def check_settings(config: Mapping[str, Any], neutral: Neutral, path: Path, advice: str) -> None:
    """Refuse settings that Inlay does not have; `path` is their file, and `advice` begins the hint."""
    for key, (values, meaning) in neutral.items():
        if key in config and config[key] not in values:
            raise Unsupported(
                f"{path}: `{key}` is `{config[key]}`: {meaning}, which Inlay does not have",
                f"{advice} with {key}={values[0]}",
            )


def read_weights(folder: Path, names: Sequence[str]) -> Weights:
    """Read the weights in the first of `names` that exists."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise BadData(f"no weights: neither `{names[0]}` nor `{names[1]}`", "save the adapter again", path=folder)
    tensors = _load_safetensors(path) if path.suffix == ".safetensors" else _load_pickled(path)
    size_bytes = path.stat().st_size
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise BadData(f"the tensor `{name}` is not a plain one", "save plain tensors only", path=path)
        # A pickle may declare any size, and repeat one number a trillion times.
        if tensor.numel() * tensor.element_size() > size_bytes:
            raise BadData(f"the tensor `{name}` is declared larger than the file", "copy or save it again", path=path)
        if not tensor.is_floating_point():
            raise BadData(f"the tensor `{name}` holds {tensor.dtype}", "save it as floating point", path=path)
        if not torch.isfinite(tensor).all():
            raise BadData(f"the tensor `{name}` holds values that are not finite", "train it again", path=path)
    return Weights(path, tensors)


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes < path.stat().st_size:  # else the loader refuses the file
            _check_naming_bytes(header_bytes, path)
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadData(f"not a safetensors file: {error}", "copy or save it again", path=path) from None


_UNREADABLE = (
    *(UnpicklingError, zipfile.BadZipFile, struct.error, RuntimeError, OSError, EOFError, MemoryError),
    *(ValueError, LookupError, AttributeError, TypeError, AssertionError),
)
"""the errors of torch's loader for a file that is not one of named tensors"""


def _load_pickled(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            start = file.read(2)
        _check_declared(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about pickle protocols that it does not write
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise BadData(f"it cannot be read: {error.strerror}", "make the file readable", path=path) from None
    except _UNREADABLE as error:
        # Not torch's own message, which advises to load the file with its code. torch's own files begin as a zip, or
        # as a pickle of protocol 2 or later.
        if isinstance(error, UnpicklingError) and start.startswith((b"PK", b"\x80")):
            reason = "it holds more than plain tensors, so it was refused: nothing in it was run"
            raise BadData(reason, "save it with safetensors, or plain tensors only", path=path) from None
        raise BadData("the file is damaged or cut short", "copy or save it again", path=path) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise BadData("it holds something other than named tensors", "save plain tensors only", path=path)
    return tensors


_PICKLED_MAGIC = 0x1950A86A20F9469CFC6C
"""the number with which torch's files from before 2020 begin; it is not a size"""


def _check_declared(path: Path) -> None:
    """Refuse a file that declares more data than it holds, before torch allocates memory for it."""
    size_bytes = path.stat().st_size
    if zipfile.is_zipfile(path):
        with open_archive(path, _MOST_ENTRIES_BYTES) as archive:
            entries = archive.infolist()
        pickled = sum(item.file_size for item in entries if item.filename.endswith(".pkl"))
        is_larger = sum(item.file_size for item in entries) > size_bytes  # torch does not compress
    else:
        with path.open("rb") as file:
            start = io.BytesIO(file.read(_MOST_NAMING_BYTES))
        is_larger = any(
            isinstance(value, int) and abs(value) > max(size_bytes, 1 << 20) and value != _PICKLED_MAGIC
            for value in _first_values(start)
        )
        pickled = size_bytes if start.tell() >= _MOST_NAMING_BYTES else 0
    if is_larger:
        raise BadData("it declares more than the file holds", "copy or save it again", path=path)
    _check_naming_bytes(pickled, path)


def _check_naming_bytes(num_bytes: int, path: Path) -> None:
    if num_bytes > _MOST_NAMING_BYTES:
        reason = f"more than {_MOST_NAMING_BYTES:,} bytes besides the tensors"
        raise BadData(reason, "save it again, with the adapter's tensors alone", path=path)


def _first_values(file: BinaryIO) -> Iterator[Any]:
    """Yield the arguments of the pickles with which torch's old files begin: magic, version, machine, tensors, keys."""
    with suppress(ValueError):  # the loader reports what is wrong
        for _ in range(5):
            for _, value, _ in genops(file):
                yield value


@dataclass(frozen=True)
class LowRank:
    """LoRA's update of one linear layer: `scale · x·down·up`."""

    down_DR: Tensor
    up_RE: Tensor
    scale: float


def join_bottlenecks(parts: Mapping[str, Mapping[str, Tensor]]) -> tuple[int, dict[str, Tensor]]:
    """Pad adapters to a common size; return that, and a slot's tensors. `parts` has each site's tensors, by its key."""
    size = max(len(part["down_bias"]) for part in parts.values())
    tensors = {}
    for key, part in parts.items():
        missing = size - len(part["down_bias"])
        padding = {"down": (0, missing), "down_bias": (0, missing), "up": (0, 0, 0, missing), "up_bias": (0, 0)}
        for item, tensor in part.items():
            tensors[BOTTLENECK.name(key, item)] = F.pad(tensor, padding[item])
    return size, tensors


def join_low_ranks(parts: Mapping[str, LowRank], ours: LoraPart = LORA) -> tuple[int, float, dict[str, Tensor]]:
    """Pad updates to a common rank and scale; return these, and a slot's tensors. `parts` has one for each layer's key.

    If scales differ, the first one that is not 0 is used for all, and the ratio goes into the other layers' `up`.
    """
    size = max(part.down_DR.shape[1] for part in parts.values())
    scale = next((part.scale for part in parts.values() if part.scale), 1.0)
    tensors = {}
    for key, part in parts.items():
        missing = size - part.down_DR.shape[1]
        up = part.up_RE if part.scale == scale else part.up_RE * (part.scale / scale)
        tensors[ours.name(key, "down")] = F.pad(part.down_DR, (0, missing))
        tensors[ours.name(key, "up")] = F.pad(up, (0, 0, 0, missing))
    return size, scale, tensors


def complete(
    backbone: Backbone, method: ResolvedMethod, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """Add neutral tensors for the method's places that the folder lacks; return all tensors and how many are new."""
    whole = dict(tensors)
    for spec in layout(backbone.anatomy, method):
        if spec.name not in whole and spec.start == "backbone":
            whole[spec.name] = backbone.own_tensor(spec.name)
        elif spec.name not in whole:
            whole[spec.name] = torch.full(spec.shape, float(spec.start == "ones"))
    return {name: tensor.contiguous() for name, tensor in whole.items()}, len(whole) - len(tensors)


def name_layers(layers: Iterable[int], num_layers: int) -> str:
    """Write layers in the form of `method.layers`."""
    found = sorted(set(layers))
    return "all" if found == list(range(num_layers)) else ",".join(map(str, found))


def check_classifier(model_class: str, backbone: Backbone) -> None:
    """Refuse the head of a model class if none of Inlay's heads equals it."""
    family = backbone.anatomy.family
    if not model_class.endswith("ForSequenceClassification"):
        raise Unsupported(f"the head of a `{model_class}`", "Inlay reads heads that classify whole texts")
    if isinstance(reason := CLASSIFIERS[family], str):
        raise Unsupported(
            f"transformers' own classifier of the family `{family}` has {reason}, which Inlay's heads do not have",
            "train it in `adapters` with a flexible head (`AutoAdapterModel`), or train it in Inlay",
        )


def take_classifier(weights: Weights, backbone: Backbone, prefix: str = "") -> tuple[HeadSpec, dict[str, Tensor]]:
    """Read the head of transformers' own sequence classifier. One output is a number, several are classes."""
    form, width = CLASSIFIERS[backbone.anatomy.family], backbone.hidden_size
    assert not isinstance(form, str), "checked before"
    out = _take_linear(weights, f"{prefix}{form.out}", None, width)
    hidden, pooling = None, "cls"
    family = find_family(backbone.anatomy.family)
    trained_pooler = f"{prefix}{family.prefix}.{family.pooler}.dense"
    if form.hidden:
        hidden = _take_linear(weights, f"{prefix}{form.hidden}", width, width)
    elif f"{trained_pooler}.weight" in weights.left:
        hidden = _take_linear(weights, trained_pooler, width, width)
    else:
        pooling = "pooler"
        if not backbone.has_pooler:
            raise Unsupported(
                f"the head reads the pooler, which the backbone `{backbone.name}` lacks",
                "train it with the pooler among `modules_to_save`, or on a backbone that has one",
            )
    return _join_head(CLASSIFICATION, pooling, out, hidden)


def take_flexible_head(
    config: Mapping[str, Any], weights: Weights, backbone: Backbone
) -> tuple[HeadSpec, dict[str, Tensor]]:
    """Read the head of AdapterHub's model classes: one linear layer, or two with an activation between."""
    inner, width = config["config"], backbone.hidden_size
    if not isinstance(inner, Mapping):
        raise BadData(f"the head's `config` is `{str(inner)[:40]}`, not settings", "save the adapter again")
    head_type: Any = inner.get("head_type")
    if head_type not in HEAD_TYPES.values():
        known = ", ".join(dict.fromkeys(HEAD_TYPES.values()))
        raise Unsupported(f"a prediction head of the type `{head_type}`", f"known: {known}")
    num_layers, act = inner.get("layers"), inner.get("activation_function")
    if num_layers not in (1, 2) or (num_layers == 2 and act != "tanh"):
        raise Unsupported(
            f"a prediction head of {num_layers} layers with the activation `{act}`",
            "Inlay's heads have one layer, or two with tanh between: train it with layers=1",
        )
    if inner.get("use_pooler") and not backbone.has_pooler:
        raise Unsupported(f"the head reads the pooler, which the backbone `{backbone.name}` lacks", "use_pooler=False")
    prefix, last = f"heads.{config.get('name')}", 1 if num_layers == 1 else 4
    out = weights.take(f"{prefix}.{last}.weight", None, width)
    bias = weights.take(f"{prefix}.{last}.bias", out.shape[0]) if inner.get("bias", True) else out.new_zeros(len(out))
    hidden = _take_linear(weights, f"{prefix}.1", width, width) if num_layers == 2 else None
    return _join_head(head_type, "pooler" if inner.get("use_pooler") else "cls", (out, bias), hidden)


def _take_linear(weights: Weights, name: str, num_out: int | None, num_in: int) -> Linear:
    """Take weight and bias of a linear layer."""
    weight = weights.take(f"{name}.weight", num_out, num_in)
    return weight, weights.take(f"{name}.bias", len(weight))


def _join_head(head_type: str, pooling: str, out: Linear, hidden: Linear | None) -> tuple[HeadSpec, dict[str, Tensor]]:
    """Return a head in Inlay's form, and its tensors."""
    kind = find_kind_of_head(head_type, len(out[0]))
    assert kind is not None
    tensors = {head_part.WEIGHT: out[0], head_part.BIAS: out[1]}
    if hidden is not None:
        tensors |= {head_part.HIDDEN_WEIGHT: hidden[0], head_part.HIDDEN_BIAS: hidden[1]}
    return HeadSpec(kind, len(out[0]), pooling, hidden="none" if hidden is None else "tanh"), tensors


def read_labels(ids: Any, num_outputs: int) -> tuple[str, ...]:
    """Read the labels of a `label2id`, in the order of their outputs; none if it has none."""
    if not ids or num_outputs == 1:
        return ()
    if not isinstance(ids, Mapping) or not all(type(number) is int for number in ids.values()):
        raise BadData(f"`label2id` is `{str(ids)[:40]}`, not labels with numbers", "name them with `--labels`")
    if any(find_fault(label) is not None for label in ids):
        raise BadData("`label2id` names labels with half a character", "name them with `--labels`")
    if sorted(ids.values()) != list(range(num_outputs)):
        raise BadData(f"`label2id` names {len(ids)} labels for {num_outputs} outputs", "name them with `--labels`")
    return tuple(sorted(ids, key=lambda label: ids[label]))


def fold_targets(task: TaskToExport) -> Linear:
    """Fold the targets' scale into the output layer: other libraries expect the number, not its standard score."""
    std, mean = task.head.target_std, task.head.target_mean
    return task.tensors[head_part.WEIGHT] * std, task.tensors[head_part.BIAS] * std + mean


def describe_decisions(head: HeadSpec) -> str:
    """Describe for a README how logits become answers; "" if that is done in the usual way."""
    said = ""
    if head.temperature != 1:
        divided = f"For probabilities Inlay divides the logits by its temperature, {head.temperature:.6g}"
        said += f"\n{divided}; this format has no place for it.\n"
    if head.thresholds is not None:
        cuts = ", ".join(f"{cut:.6g}" for cut in head.thresholds)
        applies = "A label applies from these logits on, label by label"
        if KINDS[head.kind].is_classifier:
            applies = "The second label is the answer if its logit exceeds the first one's by more than"
        said += f"\n{applies}: {cuts} (tuned on dev rows; this format has no place for it).\n"
    return said


def dump_json(tree: Mapping[str, Any]) -> bytes:
    """Write JSON in the same layout as these libraries."""
    return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def check_target(folder: Path) -> None:
    """Refuse to export into a folder that is not empty, or whose parent does not exist."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadConfig(f"`{folder}` already exists", "give a folder that does not exist, or an empty one")
    if not folder.absolute().parent.is_dir():
        raise Missing(f"no folder `{folder.parent}`", "make it first, or choose another place for the export")


@contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """Yield a draft folder, which is renamed to `folder` at the end of the block: it appears whole or not at all."""
    draft = folder.absolute().parent / f"{DRAFT_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    try:
        draft.mkdir()
        yield draft
        for path in draft.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(draft)
        os.replace(draft, folder)  # this also replaces an empty folder
        sync_directory(draft.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@dataclass(frozen=True)
class Obstacle:
    """A part of a version that a format cannot express."""

    reason: str
    options: str | None = None
    """options of `inlay train` that avoid it; None if there are none"""


def refuse(obstacles: Sequence[Obstacle], *, presets: Sequence[str] = (), formats: Sequence[str] = ()) -> None:
    """Refuse with all reasons at once, if there are any; the hint names options, presets and formats without them."""
    if not obstacles:
        return
    first, *more = [obstacle.reason for obstacle in obstacles]
    message = f"{first}; and {len(more)} more: {'; '.join(more)}" if more else first
    options = [obstacle.options for obstacle in obstacles]
    recipes = [f"--preset {preset}" for preset in presets]
    if None not in options:
        recipes.insert(0, " ".join(dict.fromkeys(filter(None, options))))
    ways = {"train it with": recipes, "use": [f"--format {name}" for name in formats]}
    hints = [f"{verb} `{'` or `'.join(choices)}`" for verb, choices in ways.items() if choices]
    raise Unsupported(message, ", or ".join(hints))
