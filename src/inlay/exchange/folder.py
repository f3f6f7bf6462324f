"""Reads a folder of another library strictly: its JSON, and its weights with a ledger of the tensors used.

Pickled weights are read by torch's safe loader only, which builds tensors and nothing else. A tensor that no one asked
for is an error: weights that Inlay cannot place would otherwise be dropped, and the answers be wrong without a word.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from inlay.errors import BadData, Unsupported, WrongBackbone
from inlay.model import HeadSpec, ResolvedMethod


@dataclass(frozen=True)
class Foreign:
    """A task as another library's folder describes it, in Inlay's terms."""

    method: ResolvedMethod
    head: HeadSpec
    tensors: dict[str, Tensor]
    labels: tuple[str, ...]
    """empty where the folder does not name them"""
    library: str
    """which library wrote it, and its version where it says so"""
    base: str
    """the backbone the folder names"""
    notes: tuple[str, ...] = ()
    """decisions made on the way, to be shown"""


@dataclass(frozen=True)
class TaskToExport:
    """A version on its way into another library's folder."""

    name: str
    method: ResolvedMethod
    """resolved"""
    head: HeadSpec
    labels: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    base: str
    """the name that the other library loads the backbone from"""


@dataclass(frozen=True)
class Folder:
    """The files for another library, and the decisions made on the way."""

    files: dict[str, bytes]
    notes: tuple[str, ...] = ()


class Weights:
    """The tensors of one file. `take` hands each out once; `finish` refuses if any is left."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self._left = dict(tensors)

    @property
    def names(self) -> list[str]:
        """The tensors not taken yet."""
        return list(self._left)

    def rename(self, rule: Callable[[str], str]) -> None:
        """Give every tensor the name that `rule` makes of its own."""
        self._left = {rule(name): tensor for name, tensor in self._left.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        return tuple(self._left[name].shape)

    def take(self, name: str, *shape: int | None) -> Tensor:
        """The tensor as float32; None in `shape` fits any length."""
        if name not in self._left:
            raise BadData(
                f"it lacks the tensor `{name}`, which its config asks for",
                "save the adapter again; if it is whole, it belongs to another backbone: name that with `--backbone`",
                path=self.path,
            )
        tensor = self._left.pop(name)
        if len(tensor.shape) != len(shape) or any(b not in (None, a) for a, b in zip(tensor.shape, shape, strict=True)):
            wanted = " × ".join("any" if size is None else str(size) for size in shape)
            raise WrongBackbone(
                f"`{name}` is {' × '.join(map(str, tensor.shape))}; this backbone needs {wanted}",
                "name the backbone it was trained on with `--backbone`",
            )
        return tensor.to(torch.float32)

    def finish(self, num_layers: int) -> None:
        """Refuse tensors that nobody took."""
        if not self._left:
            return
        name, more = min(self._left), f" and {len(self._left) - 1} more" if len(self._left) > 1 else ""
        raise Unsupported(
            f"{self.path}: Inlay has no place for the tensor `{name}`{more}, and without it answers would be wrong",
            f"if its layer is beyond this backbone's {num_layers}, name the right backbone with `--backbone`; "
            "otherwise train the task again without that part",
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the folder."""
    try:
        tree = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadData(f"not JSON: {error}", "save the adapter again", path=path) from None
    if not isinstance(tree, dict):
        raise BadData("not a JSON object", "save the adapter again", path=path)
    return tree


def read_number(tree: Mapping[str, Any], key: str, default: float) -> float:
    """A number of a config."""
    value = tree.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadData(f"`{key}` is `{value}`, which is no number", "save the adapter again")
    return float(value)


def read_list(tree: Mapping[str, Any], key: str, default: Sequence[Any] = ()) -> list[Any]:
    """A list of a config; None is an empty one."""
    value = tree.get(key, default)
    if value is not None and not isinstance(value, list | tuple):
        raise BadData(f"`{key}` is `{value}`, which is no list", "save the adapter again")
    return list(value or ())


def read_weights(folder: Path, names: Sequence[str]) -> Weights | None:
    """Read the weights in the first of `names` that exists; None where there is none."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        return None
    tensors = _load_safetensors(path) if path.suffix == ".safetensors" else _load_pickled(path)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise BadData(f"the tensor `{name}` holds {tensor.dtype}", "save it as floating point", path=path)
        if not torch.isfinite(tensor).all():
            raise BadData(f"the tensor `{name}` holds values that are no numbers", "train it again", path=path)
    return Weights(path, tensors)


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadData(f"not a safetensors file: {error}", "copy or save it again", path=path) from None


_UNREADABLE = (
    *(UnpicklingError, struct.error, RuntimeError, OSError, EOFError),
    *(ValueError, LookupError, AttributeError, TypeError, AssertionError),
)
"""the errors of torch's loader on bytes that are not a file of named tensors"""


def _load_pickled(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of pickle protocols it did not write
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise BadData(f"it cannot be read: {error.strerror}", "make the file readable", path=path) from None
    except _UNREADABLE as error:
        # Not torch's own words: they advise to load the file with its code.
        if isinstance(error, UnpicklingError) and _is_pickled(path):
            reason = "it holds more than plain tensors, so it was refused: nothing in it was run"
            raise BadData(reason, "save it with safetensors, or plain tensors only", path=path) from None
        raise BadData("the file is damaged or cut short", "copy or save it again", path=path) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise BadData("it holds something else than named tensors", "save plain tensors only", path=path)
    return tensors


def _is_pickled(path: Path) -> bool:
    """Whether a file begins like torch's own: as a zip, or as a pickle of protocol 2 or later."""
    with path.open("rb") as file:
        return file.read(2).startswith((b"PK", b"\x80"))


def digest_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """sha256 of the named files that exist."""
    paths = {name: folder / name for name in names}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if path.is_file()}


def dump_json(tree: Mapping[str, Any]) -> bytes:
    """JSON as these libraries write it."""
    return json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
