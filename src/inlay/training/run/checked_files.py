"""Files of a run with a checksum of their content, so that damage is found before the content is used.

Tensors are safetensors, with the checksum in their metadata; a JSON object has it under a key of its own. Files of
earlier versions of Inlay have none, and are read as they are. The checksum is for accidents: against changes on
purpose only the store's digests help.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from inlay.store import write_atomically

_KEY, _TEXT = "crc32", "state"
_DIFFERS = "it is not what was written: its checksum differs"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Checked:
    """Tensors as they were written, with their text and their checksum ("" in files from before there was one)."""

    tensors: dict[str, Tensor]
    text: str
    checksum: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor], text: str = "") -> str:
    """Write tensors and a text beside them as safetensors, whole or not at all, and return their checksum.

    Not with the library's own writer: that needs them in memory twice, or makes a private file of its own.
    """
    # The widest types first, so that each tensor lies at a multiple of its type's size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    parts = {name: _view_bytes(tensors[name]) for name in order}
    metadata = {_KEY: _sum_up(tensors, parts, text)} | ({_TEXT: text} if text else {})
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, part in parts.items():
        start, end = end, end + len(part)
        shape = list(tensors[name].shape)
        header[name] = {"dtype": _NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    write_atomically(path, [len(head).to_bytes(8, "little"), head, *parts.values()])
    return metadata[_KEY]


def read_checked(path: Path) -> Checked:
    """Read tensors and their text; ValueError if they are not what was written, OSError if they cannot be read."""
    # Read and not mapped: a damaged disk is then an error, and not the end of the process.
    with path.open("rb") as file:
        header, start = _read_header(file)
        metadata = header.pop("__metadata__", {})
        tensors = {name: _read_tensor(file, start, about) for name, about in header.items()}
    text, wanted = metadata.get(_TEXT, ""), metadata.get(_KEY, "")
    if wanted and wanted != _sum_up(tensors, {name: _view_bytes(tensor) for name, tensor in tensors.items()}, text):
        raise ValueError(_DIFFERS)
    return Checked(tensors, text, wanted)


def read_text(path: Path) -> str:
    """Read the text beside tensors without reading those, and so without a proof of it."""
    with path.open("rb") as file:
        text: str = _read_header(file)[0].get("__metadata__", {}).get(_TEXT, "")
        return text


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Read the header of safetensors, and where it ends."""
    length = int.from_bytes(file.read(8), "little")
    if length > os.fstat(file.fileno()).st_size - 8:
        raise ValueError(f"not a safetensors file: its header cannot be {length} bytes long")
    try:
        header = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a safetensors file: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise ValueError("not a safetensors file: its header is not a JSON object")
    return header, 8 + length


def _read_tensor(file: BinaryIO, start: int, about: Any) -> Tensor:
    try:
        (begin, end), shape, dtype = about["data_offsets"], about["shape"], _DTYPES[about["dtype"]]
        is_whole = begin >= 0 and all(size >= 0 for size in shape) and end - begin == math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole or start + end > os.fstat(file.fileno()).st_size:
        raise ValueError("not a safetensors file: a tensor is not where its header says")
    content = torch.empty(end - begin, dtype=torch.uint8)
    file.seek(start + begin)
    if file.readinto(content.numpy()) != len(content):  # type: ignore[attr-defined]
        raise ValueError("not a safetensors file: it ends too early")
    return content.view(dtype).reshape(shape)


def seal(content: Mapping[str, Any]) -> bytes:
    """Return a JSON object with its checksum."""
    plain = json.loads(json.dumps(content))  # as it will be read: keys are texts
    return json.dumps({**plain, _KEY: _sum_up_json(plain)}, indent=1).encode()


def unseal(text: bytes) -> dict[str, Any]:
    """Return the content of a sealed JSON object; ValueError if it is something else now, TypeError if no object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise TypeError("not a JSON object")
    wanted = content.pop(_KEY, None)
    if wanted is not None and wanted != _sum_up_json(content):
        raise ValueError(_DIFFERS)
    return content


def _sum_up(tensors: Mapping[str, Tensor], parts: Mapping[str, memoryview], text: str) -> str:
    """Return the checksum of tensors: of their names, types, shapes and values, and of the text beside them."""
    found = zlib.crc32(text.encode())
    for name in sorted(tensors):
        about = f"{name} {_NAMES[tensors[name].dtype]} {list(tensors[name].shape)}"
        found = zlib.crc32(parts[name], zlib.crc32(about.encode(), found))
    return f"{found:08x}"


def _sum_up_json(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _view_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
