"""Data files as people have them (packed, documents, without a header, labels as columns)."""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import gzip
import io
import json
import lzma
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
from mutators import dump_json, mutate_bytes, mutate_json, mutate_text
from world import Silent, World

from inlay.data import load_task, stream_rows
from inlay.errors import InlayError
from inlay.settings.run_config import DataConfig

ROWS = [(f"the movie {word} was {n}", label) for n in range(8) for word, label in (("good", "yes"), ("bad", "no"))]
OBJECTS = [{"text": text, "label": label} for text, label in ROWS]
PLAIN: dict[str, str] = {
    "head.csv": "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in ROWS),
    "bare.csv": "".join(f"{text},{label}\n" for text, label in ROWS),
    "tabs.txt": "".join(f"{label}\t{text}\n" for text, label in ROWS),
    "lines.txt": "".join(f"{text}\n" for text, _ in ROWS),
    "lines.jsonl": "\n".join(map(json.dumps, OBJECTS)),
    "list.json": json.dumps(OBJECTS, indent=1),
    "columns.json": json.dumps({name: [row[name] for row in OBJECTS] for name in ("text", "label")}),
    "frame.json": json.dumps(
        {name: {str(n): row[name] for n, row in enumerate(OBJECTS)} for name in ("text", "label")}
    ),
    "marks.csv": "id,text,a,b\n" + "".join(f"{n},{text},{n % 2},{n % 3 // 2}\n" for n, (text, _) in enumerate(ROWS)),
    "parts.csv": "title,body,label\n" + "".join(f"t {n},{text},{label}\n" for n, (text, label) in enumerate(ROWS)),
}


def _zip(name: str, content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return file.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}
_SUFFIXES = ("", ".csv", ".tsv", ".txt", ".json", ".jsonl", ".xlsx", ".parquet", ".gz", ".zip", ".zst", ".conll", ".xz")
_COLUMNS = (None, None, None, "text", "1", "2", "title,body", "a,b", "1,2", ",", "99", "0", "²", "a,", "3,4", "label")


def damage_text(chance: random.Random, name: str) -> bytes:
    """A file's content with damage of its own form."""
    content = PLAIN[name]
    if name.endswith(".json") and chance.random() < 0.6:
        return dump_json(mutate_json(chance, json.loads(content))).encode("utf8", "surrogatepass")
    if chance.random() < 0.2:
        return content.encode()
    return mutate_text(chance, content).encode("utf8", "surrogatepass")


def settings_of(chance: random.Random) -> DataConfig:
    """Settings as users might give them, right or wrong."""
    return DataConfig(
        text=chance.choice(_COLUMNS),
        label=chance.choice(_COLUMNS),
        pair=chance.choice((None, None, None, None, "1", "a,b")),
        header=chance.choice((None, None, True, False)),
        format=chance.choice(("auto", "auto", "auto", "csv", "json", "txt", "xlsx", "parquet")),
        kind=chance.choice(("auto", "auto", "multilabel", "classify", "tag", "text")),
        on_bad_row=chance.choice(("refuse", "skip")),
    )


def use_file(place: str, config: DataConfig) -> None:
    """Read a file to train and to predict, as a user would; what is wrong must be an `InlayError`."""
    with contextlib.suppress(InlayError):
        task = load_task(dataclasses.replace(config, source=place), "task")
        for split in (task.train, task.dev):
            if len(split.texts) != len(split.targets) or not all(isinstance(text, str) for text in split.texts):
                raise Silent("texts and targets do not fit")
        json.dumps(list(task.labels))
    with contextlib.suppress(InlayError):
        for chunk in stream_rows(place, config, isolate=True):
            for row in chunk:
                if row.error is None and not isinstance(row.text, str):
                    raise Silent(f"a text is {type(row.text).__name__}")


class FileDoors:
    """Files in every shape, packed or not, damaged inside, outside or in their name."""

    def __init__(self, world: World) -> None:
        pass

    def attempt(self, chance: random.Random, folder: Path) -> None:
        name = chance.choice(sorted(PLAIN))
        content = damage_text(chance, name)
        packing = chance.choice(("", ".zip", *PACKERS))
        if packing == ".zip":
            inside = name if chance.random() < 0.7 else chance.choice(("a", "../a.csv", "a.gz", "a/", "\u202e.csv"))
            content, name = _zip(inside, content), f"{name}.zip"
        elif packing:
            content, name = PACKERS[packing](content), f"{name}{packing}"
        if packing and chance.random() < 0.5:
            content = mutate_bytes(chance, content)
        if chance.random() < 0.2:
            name = f"{name.partition('.')[0]}{chance.choice(_SUFFIXES)}{chance.choice(_SUFFIXES)}"
        path = folder / name
        path.write_bytes(content)
        use_file(str(path), settings_of(chance))
