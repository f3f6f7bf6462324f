"""Writes docs/http.md, the reference of the HTTP API, from the service's OpenAPI: `python docs/draw_http.py`."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from inlay.service.engine import EngineClient
from inlay.service.settings import ServeSettings
from inlay.service.state import Database
from inlay.service.web.app import make_app
from inlay.service.web.openapi import list_operations

INTRODUCTION = """\
# HTTP reference

Every route of the service. [service.md](service.md) is the way in. A running service shows this page at `/docs`, with \
examples, and the whole as OpenAPI 3.1 at `/openapi.json`. This page is written by `python docs/draw_http.py` from the \
code, and a test holds it true.

- Send your key as `Authorization: Bearer inl_…`. Without any key in the service, none is needed on its own machine.
- Errors are problem documents (RFC 9457): `code`, `detail`, a `hint` that says what to do, and a `request_id`.
- Lists take `limit` and `cursor`, and answer with `items` and `next_cursor`.
- A POST that makes something takes an `Idempotency-Key`. Sent again within 24 hours, it makes nothing again and is \
answered as before.
- Times are ISO 8601, in UTC.
"""


def main() -> None:
    Path(__file__).with_name("http.md").write_text(render(), encoding="utf8")


def render() -> str:
    """Return the page as Markdown: a section for each group of routes."""
    document = make_document()
    lines = [INTRODUCTION]
    titles = {tag["name"]: tag["description"] for tag in document["tags"]}
    last = ""
    for method, path, operation in list_operations(document):
        tag = operation["tags"][0]
        if tag != last:
            lines += [f"## {tag.capitalize()}", "", titles[tag], ""]
            last = tag
        lines += describe_operation(method, path, operation)
    lines += describe_types(document["components"]["schemas"])
    return "\n".join(lines).rstrip() + "\n"


def make_document() -> dict[str, Any]:
    """Return the OpenAPI document of a service that does not run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ServeSettings(home=Path(folder))
        with closing(Database.open(settings.home)) as database:
            return make_app(settings, database, EngineClient(settings.engine_socket)).routes.openapi()


def describe_operation(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    """Return one route: what it does, what it takes, what it answers."""
    lines = [f"### {method} {path}", ""]
    summary, text = operation.get("summary", ""), " ".join(operation.get("description", "").split())
    is_given = summary.lower().replace(" ", "_") != operation["operationId"]  # else it is the function's name
    about = f"{summary}. {text}" if is_given and not text.startswith(summary) else text
    lines += [escape(about), ""]
    rows = [
        [f"`{item['name']}`", item["in"], describe_schema(item.get("schema", {})), item.get("description", "")]
        for item in operation.get("parameters", ())
        if item["in"] != "path"
    ]
    if rows:
        lines += [*table(["parameter", "in", "type", ""], rows), ""]
    body = operation.get("requestBody", {}).get("content", {})
    if body:
        kinds, schema = list(body), next(iter(body.values())).get("schema", {})
        is_upload = "multipart/form-data" in body
        taken = f"`file` of a form, or the file itself as {join(kinds[1:])}" if is_upload else describe_schema(schema)
        lines += [f"Takes {taken}.", ""]
    answers = [
        f"{status} {describe_schema(next(iter(answer['content'].values())).get('schema', {}))}"
        if answer.get("content")
        else f"{status}, nothing more"
        for status, answer in operation["responses"].items()
        if status[0] == "2"
    ]
    return [*lines, f"Answers {'; '.join(answers)}.", ""]


def join(kinds: list[str]) -> str:
    """Return media types as a list of words."""
    return ", ".join(f"`{kind}`" for kind in kinds)


def describe_types(schemas: dict[str, Any]) -> list[str]:
    """Return the JSON objects that routes take and answer."""
    lines = ["## Types", ""]
    for name, schema in sorted(schemas.items()):
        lines += [f"### {name}", ""]
        if schema.get("description"):
            lines += [escape(" ".join(schema["description"].split())), ""]
        needed = set(schema.get("required", ()))
        rows = [
            [f"`{field}`", describe_schema(about), "yes" if field in needed else "", describe_field(about)]
            for field, about in schema.get("properties", {}).items()
        ]
        lines += [*table(["field", "type", "required", ""], rows), ""] if rows else [describe_schema(schema), ""]
    return lines


def describe_field(schema: dict[str, Any]) -> str:
    """Return a field's own words, and its default."""
    words = schema.get("description", "")
    default = schema.get("default")
    return f"{words} Default: `{default}`.".strip() if default not in (None, "", {}, []) else words


def describe_schema(schema: dict[str, Any]) -> str:
    """Return a type in a few words, with links to the objects it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for word, joint in (("anyOf", " or "), ("oneOf", " or "), ("allOf", " and ")):
        if word in schema:
            return joint.join(dict.fromkeys(describe_schema(option) for option in schema[word]))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {describe_schema(schema.get('items', {}))}"
    if isinstance(kind, list):
        return " or ".join(kind)
    return f"{kind}{describe_bounds(schema)}"


def describe_bounds(schema: dict[str, Any]) -> str:
    """Return the bounds of a number, a text or a list."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if schema.get("format") == "binary":
        return " (bytes)"
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    if schema.get("maxLength") is not None:
        return f" of at most {schema['maxLength']:,} characters"
    return ""


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return lines + [f"| {' | '.join(escape(cell) for cell in row)} |" for row in rows]


def escape(text: str) -> str:
    """Return a text that is safe inside a table."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
