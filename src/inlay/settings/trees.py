"""Settings as trees: nested mappings or TOML text in, checked dataclasses out, and back.

Nothing here knows which settings there are: a dataclass says it by its fields and their types, and one whose type is
a dataclass again is a section. What always holds: a key or a value that does not fit is a `BadConfig` that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from inlay.errors import BadConfig

T = TypeVar("T")


def read_tree(path: Path) -> dict[str, Any]:
    """Read the settings of a TOML file, not checked yet."""
    try:
        return tomllib.loads(path.read_text(encoding="utf8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: not TOML: {error}", "see the config.toml of any run folder for an example") from None


def from_tree(kind: type[T], tree: Mapping[str, Any], where: str = "") -> T:
    """Build a config dataclass from nested mappings, checking keys and types."""
    fields = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = _find_hints(kind)  # type: ignore[arg-type]
    values = {}
    for key, value in tree.items():
        if key not in fields:
            raise BadConfig(f"no setting named `{where}{key}`", _suggest(key, hints, where))
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise BadConfig(f"`{where}{key}` is a section, not a value", f"write `{where}{key}.NAME = …`")
            values[key] = from_tree(hints[key], value, f"{where}{key}.")
        else:
            values[key] = _coerce(hints[key], value, f"{where}{key}")
    return kind(**values)


@functools.cache
def _find_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _suggest(key: str, hints: Mapping[str, Any], where: str) -> str:
    """Return a hint for an unknown key: the nearest setting of this level or of its sections."""
    inner = {
        item.name: f"{where}{section}.{item.name}"
        for section, hint in hints.items()
        if dataclasses.is_dataclass(hint)
        for item in dataclasses.fields(hint)
    }
    places = inner | {name: f"{where}{name}" for name in hints}
    close = difflib.get_close_matches(key, places, n=1)
    return f"did you mean `{places[close[0]]}`?" if close else f"known: {', '.join(hints)}"


def _coerce(hint: Any, value: Any, name: str) -> Any:
    """Return a value as the type that a field's hint asks for; refuse one that does not fit."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, int) and item.bit_length() > 64:  # more than a float, or even Python's `str`, may take
            raise BadConfig(f"`{name}` is a number of {item.bit_length():,} bits", "give one of 64 at most")
    if value is None and type(None) in options:
        return None
    if value is None and str in options:
        value = "none"  # a word like any other: `--set method.norms=none`
    for option in options:
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(str(item) for item in value)
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option is bool and str(value).lower() in ("true", "false"):  # TOML's word, or Python's
            return str(value).lower() == "true"
        if option is str and isinstance(value, str):
            return value
        if option is str and type(value) is int:  # `--set method.layers=5` needs no quotes
            return str(value)
    wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options if option is not type(None))
    if options == (bool,):
        raise BadConfig(f"`{name}` is `{value}`", "use true or false")
    raise BadConfig(f"`{name}` is `{value}`, not {wanted}", "a string may need quotes, a number must have none")


def assign(tree: dict[str, Any], assignments: Iterable[str]) -> None:
    """Lay `section.key=value` assignments over a tree, as `--set` gives them; a value for a list is read as a list."""
    known = [name for name, value in tree.items() if isinstance(value, dict)]
    for assignment in assignments:
        key, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise BadConfig(f"`{assignment}` is not an assignment", "write `--set train.lr=3e-4`")
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            if not isinstance(place.get(section), dict):
                raise BadConfig(f"no section named `{section}` in `{key}`", f"sections: {', '.join(known)}")
            place = place[section]
        is_list = isinstance(place.get(name), tuple) and not value.startswith("[")
        place[name] = split_list(value) if is_list else _parse_value(value)


def _parse_value(text: str) -> Any:
    if text.lower() in ("none", "null"):
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word: `--set train.pooling=mean` needs no quotes


def split_list(text: str) -> tuple[str, ...]:
    """Return the items of a list as the command line has it: `pos,neg`."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def write_toml(config: Any) -> str:
    """Return a config tree as TOML text. `None` is left out, as TOML has no word for it."""
    lines, sections = [], []
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            sections.append(f"\n[{item.name}]\n{write_toml(value)}")
        elif value is not None:
            lines.append(f"{item.name} = {_format_value(value)}\n")
    return "".join(lines + sections)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_format_value(item) for item in value)}]"
    return repr(value)
