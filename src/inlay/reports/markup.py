"""HTML from Python: elements whose texts are always escaped, for pages without a template engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "\N{REPLACEMENT CHARACTER}")
_EMPTY = frozenset({"meta", "line", "circle", "polyline", "rect"})


class Html(str):
    """Text that is HTML already; any other text is escaped when it is put into an element."""

    __slots__ = ()


def tag(name: str, attributes: Mapping[str, str | float] | None = None, *children: str | None) -> Html:
    """Return an element with its children; None is no child."""
    head = "".join(f' {key}="{clean(str(value))}"' for key, value in (attributes or {}).items())
    if name in _EMPTY and not children:
        return Html(f"<{name}{head}>" if name == "meta" else f"<{name}{head}/>")
    return Html(f"<{name}{head}>{join(children)}</{name}>")


def join(parts: Iterable[str | None], between: str = "") -> Html:
    """Return the joined parts, with plain texts escaped."""
    return Html(between.join(part if isinstance(part, Html) else clean(part) for part in parts if part is not None))


def ticked(text: str) -> Html:
    """Return a text with its `parts in backticks` as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick is an ordinary character
        return join([text])
    return join(part if number % 2 == 0 else tag("code", None, part) for number, part in enumerate(parts))


def clean(text: str) -> str:
    """Return a text as HTML: escaped, with control characters and lone surrogates replaced by visible characters."""
    whole = text.encode("utf8", "replace").decode("utf8")
    return escape(whole.translate(_CONTROLS))
