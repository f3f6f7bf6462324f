"""Small damages: of bytes, of JSON, of text, of tensors. Each takes the chance that decides, and is repeated by it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import random
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

LONG_NUMBER = "a number of 5,000 digits"  # stands for one until it is written: Python refuses to print it
ODD_TEXTS = (
    *("", " ", "\x00", "\ud800", "\u202e\u200d\ufeff", "\x1b[31mred\x1b[0m", "=1+1", "-", "@a", "\t", "\r", "a\nb"),
    *("../../etc/passwd", "/etc/passwd", "~", "x" * 100_000, "💥" * 50, "NaN", "1e999", "true", "٣", "İ", "best", "@"),
)
ODD_NUMBERS = (0, 1, -1, 2, 0.5, -0.0, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 1e308, 5e-324, 1e-9, 4096)
ODD_NUMBERS += (float("nan"), float("inf"), float("-inf"))
ODD_VALUES = (None, True, False, [], {}, [[]], [None], {"": None}, LONG_NUMBER, *ODD_TEXTS, *ODD_NUMBERS)


def odd_value(chance: random.Random) -> Any:
    if chance.random() < 0.02:
        deep: Any = []
        for _ in range(400):
            deep = [deep]
        return deep
    return copy.deepcopy(chance.choice(ODD_VALUES))


def mutate_bytes(chance: random.Random, content: bytes) -> bytes:
    """Flip bits, cut, repeat, insert or overwrite, once or a few times."""
    damaged = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        place = chance.randrange(len(damaged) + 1)
        # Heads decide how the rest is read: they are hit as often as all the rest.
        place = min(place, chance.randrange(200)) if chance.random() < 0.5 else place
        width = chance.choice((1, 1, 4, 8, 100))
        kind = chance.randrange(6)
        if kind == 0 and place < len(damaged):
            damaged[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del damaged[place:]
        elif kind == 2:
            del damaged[place : place + width]
        elif kind == 3:
            damaged[place:place] = damaged[place : place + width] * chance.choice((1, 3, 50))
        elif kind == 4:
            damaged[place : place + width] = bytes(chance.randrange(256) for _ in range(width))
        else:
            damaged[place : place + width] = chance.choice((b"\xff", b"\x00")) * width
    return bytes(damaged)


def mutate_text(chance: random.Random, text: str) -> str:
    """Put odd texts between, in place of, or around the words, the delimiters and the lines."""
    words = re.split(r"([,;\t\n\" ])", text)
    for _ in range(chance.choice((1, 1, 2, 5))):
        if not words:
            break
        place = chance.randrange(len(words))
        kind = chance.randrange(5)
        if kind == 0:
            words[place] = str(odd_value(chance))
        elif kind == 1:
            words.insert(place, chance.choice((",", ";", "\t", "\n", '"', "\r", "\x0b", "\u2028", *ODD_TEXTS)))
        elif kind == 2:
            del words[place : place + chance.choice((1, 2, 20))]
        elif kind == 3:
            words[place:place] = words[place : place + 10] * chance.choice((1, 5, 200))
        else:
            words[place] = "9" * chance.choice((20, 400, 5000, 140_000))
    return "".join(words)


def mutate_json(chance: random.Random, tree: Any) -> Any:
    """Change a few places of a tree: another value, another type, a key less, a key more, a key of another name."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            return odd_value(chance)
        owner, key = chance.choice(places)
        kind = chance.randrange(7)
        if kind <= 2:
            owner[key] = odd_value(chance)
        elif kind == 3:
            owner[key] = _near(chance, owner[key])
        elif kind == 4:
            del owner[key]
        elif isinstance(owner, dict):
            name = chance.choice(("a_key_of_tomorrow", "", "format", f"{key}s", "__class__"))
            owner[name] = owner.pop(key) if kind == 5 else odd_value(chance)
        else:
            # What is large already is not made 500 times as large: the bars on time and memory are for small inputs.
            owner[key:key] = [copy.deepcopy(owner[key])] * chance.choice((1, 3, 500 if len(places) < 1000 else 3))
    return tree


def _places(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _places(value)


def _near(chance: random.Random, value: Any) -> Any:
    """A value that is nearly right: what a careless check lets through."""
    if isinstance(value, bool):
        return chance.choice((not value, int(value), str(value)))
    if isinstance(value, int | float):
        return chance.choice((value + 1, -value, value * 10**6, float(value), str(value), value == 1, value / 3))
    if isinstance(value, str):
        return chance.choice((value + "x", value[:-1], value.upper(), [value], value + "\ud800"))
    if isinstance(value, list):
        return chance.choice((value[:-1], value + value[:1], value[::-1], {str(i): v for i, v in enumerate(value)}))
    return [value]


def dump_json(tree: Any) -> str:
    return json.dumps(tree).replace(f'"{LONG_NUMBER}"', "9" * 5000)


def mutate_tensors(chance: random.Random, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor is gone, more, renamed, of another shape or type, or holds numbers that are none."""
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    name = chance.choice(sorted(changed))
    tensor = changed[name]
    edits: list[Callable[[], Any]] = [
        lambda: changed.pop(name),
        lambda: changed.update({name + ".x": changed.pop(name)}),
        lambda: changed.update({chance.choice(("x", "", "head", "../x", "\ud83d")): torch.zeros(3)}),
        lambda: changed.update({name: tensor.flatten()[:-1]}),
        lambda: changed.update({name: tensor.unsqueeze(0)}),
        lambda: changed.update({name: tensor.transpose(0, -1).contiguous()}),
        lambda: changed.update({name: tensor.new_zeros(0)}),
        lambda: changed.update({name: torch.full_like(tensor, chance.choice((float("nan"), float("inf"), 3e38)))}),
        lambda: tensor.view(-1)[:1].fill_(chance.choice((float("nan"), float("-inf")))),
        lambda: changed.update(
            {name: tensor.to(chance.choice((torch.float64, torch.int64, torch.bool, torch.float16)))}
        ),
    ]
    chance.choice(edits)()
    return changed


def craft_export(chance: random.Random, exported: bytes) -> bytes:
    """An `.inlay` file whose digest fits: another manifest, other tensors, other entries."""
    with zipfile.ZipFile(io.BytesIO(exported)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    content = entries["object.safetensors"]
    length = int.from_bytes(content[:8], "little")
    manifest = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["manifest"])
    tensors = load_tensors(content)
    which = chance.randrange(8)
    if which < 5:
        manifest = mutate_json(chance, manifest)
    elif which < 7:
        tensors = mutate_tensors(chance, tensors)
    with contextlib.suppress(UnicodeEncodeError):
        content = save_tensors(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, {"manifest": dump_json(manifest)}
        )
    task = json.loads(entries["task.json"]) | {"digest": hashlib.sha256(content).hexdigest()}
    entries |= {"object.safetensors": content, "task.json": json.dumps(task).encode()}
    if which == 7:
        name = chance.choice(sorted(entries))
        tree = entries[name]
        is_json = name.endswith(".json")
        entries[name] = dump_json(mutate_json(chance, json.loads(tree))).encode() if is_json else tree
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", chance.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))) as archive:
        for name, entry in entries.items():
            archive.writestr(zipfile.ZipInfo(name), entry)
    return buffer.getvalue()


def mutate_part(chance: random.Random, content: bytes) -> bytes:
    """Damage the text of one file inside a zip, and pack it again."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = chance.choice([*sorted(parts), *(name for name in sorted(parts) if "sheet" in name)])
    text = parts[name].decode()
    parts[name] = mutate_text(chance, text).encode("utf8", "surrogatepass")
    words = re.split(r'(?<=[">])([^<>"]+)(?=["<])', text)
    if len(words) > 1 and chance.random() < 0.5:  # inside the values of attributes and cells, so that it stays XML
        words[chance.randrange(1, len(words), 2)] = re.sub('[<>&"\x00-\x08]', "x", str(odd_value(chance)))
        parts[name] = "".join(words).encode("utf8", "replace")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, part in parts.items():
            archive.writestr(zipfile.ZipInfo(each), part)
    return packed.getvalue()


def mutate_file(chance: random.Random, path: Path) -> None:
    """Damage a file in place: as bytes, or as the JSON or TOML text it is, or one part of a workbook."""
    content = path.read_bytes()
    if path.suffix == ".xlsx" and chance.random() < 0.8:
        path.write_bytes(mutate_part(chance, content))
        return
    if path.suffix == ".json" and chance.random() < 0.7:
        path.write_text(dump_json(mutate_json(chance, json.loads(content))))
    elif path.suffix in (".toml", ".jsonl", ".txt") and chance.random() < 0.7:
        path.write_bytes(mutate_text(chance, content.decode()).encode("utf8", "surrogatepass"))
    else:
        path.write_bytes(mutate_bytes(chance, content))
