"""HTML from Python: elements whose texts are always escaped, for pages that must not need a template engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "\N{REPLACEMENT CHARACTER}")
_EMPTY = frozenset({"meta", "line", "circle", "polyline", "rect"})


class Html(str):
    """Text that is HTML already. Any other text is escaped wherever it is put into an element."""

    __slots__ = ()


def tag(name: str, attributes: Mapping[str, str | float] | None = None, *children: str | None) -> Html:
    """Return an element with its children, of which None is nothing."""
    head = "".join(f' {key}="{clean(str(value))}"' for key, value in (attributes or {}).items())
    if name in _EMPTY and not children:
        return Html(f"<{name}{head}>" if name == "meta" else f"<{name}{head}/>")
    return Html(f"<{name}{head}>{join(children)}</{name}>")


def join(parts: Iterable[str | None], between: str = "") -> Html:
    """Return parts one after another, the texts among them escaped."""
    return Html(between.join(part if isinstance(part, Html) else clean(part) for part in parts if part is not None))


def ticked(text: str) -> Html:
    """Return words whose `quoted parts` stand in letters of one width."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a tick without its partner is a letter
        return join([text])
    return join(part if number % 2 == 0 else tag("code", None, part) for number, part in enumerate(parts))


def clean(text: str) -> str:
    """Return a text as HTML: escaped, its control characters and halves of characters made visible."""
    whole = text.encode("utf8", "replace").decode("utf8")
    return escape(whole.translate(_CONTROLS))
