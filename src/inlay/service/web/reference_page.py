"""`/openapi.json`, and `/docs`: the same as a page for people. The page loads nothing from other addresses."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from inlay.service.web.guard import OPEN, make_router, needs
from inlay.service.web.openapi import list_operations, make_openapi

router = make_router("health")
_TEMPLATE = Path(__file__).with_name("reference.html")
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2124; --line: #8884; --quiet: #565e63; --link: #0b655c; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #121618; --ink: #e8ecec; --quiet: #a3afb3; --link: #63c9ba; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 75rem; padding: 0 1rem 4rem; font: 1rem/1.5 system-ui, sans-serif; }
body, html { background: var(--ground); color: var(--ink); }
a { color: var(--link); }
.skip { position: absolute; left: -100rem; }
.skip:focus { left: 1rem; }
.columns { display: grid; grid-template-columns: 18rem minmax(0, 1fr); gap: 2rem; }
nav { position: sticky; top: 0; max-height: 100vh; overflow: auto; font-size: 0.85rem; padding-bottom: 1rem; }
nav ul { list-style: none; margin: 0; padding: 0; }
nav li { overflow-wrap: anywhere; padding: 0.1rem 0; }
nav h2 { font-size: 0.95rem; margin: 1rem 0 0.25rem; }
article { border-top: 1px solid var(--line); padding: 0.5rem 0 1.5rem; }
code, pre, .method { font-family: ui-monospace, monospace; font-size: 0.9em; }
.method { font-weight: 700; }
pre { overflow: auto; padding: 0.75rem; border: 1px solid var(--line); border-radius: 0.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.75rem 0.3rem 0; }
th, td { border-bottom: 1px solid var(--line); }
thead th { color: var(--quiet); font-weight: 400; }
tbody th { font-weight: 400; }
@media (max-width: 50rem) { .columns { display: block; } nav { position: static; max-height: 16rem; } }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_CODE = re.compile(r"`([^`]+)`")


@router.get(
    "/openapi.json",
    response_class=Response,
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}},
    openapi_extra=needs(OPEN),
)
async def get_openapi_document(request: Request) -> Response:
    """Return the API as OpenAPI 3.1."""
    return Response(_encode(request.app), media_type="application/json")


@router.get(
    "/docs",
    response_class=Response,
    responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}},
    openapi_extra=needs(OPEN),
)
async def get_reference(request: Request) -> Response:
    """Return this reference as a page."""
    headers = {"content-security-policy": _POLICY}
    address = str(request.base_url).rstrip("/")
    return Response(_render(request.app, address), media_type="text/html", headers=headers)


@lru_cache(maxsize=4)
def _encode(app: FastAPI) -> bytes:
    return json.dumps(make_openapi(app), ensure_ascii=False).encode()


@lru_cache(maxsize=4)
def _render(app: FastAPI, address: str) -> str:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf8"))
    return template.render(**describe_api(make_openapi(app), address), style=Markup(_STYLE))


def describe_api(document: dict[str, Any], address: str) -> dict[str, Any]:
    """Return an OpenAPI document as the values of the template: groups of operations, and types."""
    groups: dict[str, dict[str, Any]] = {
        tag["name"]: {"name": tag["name"], "about": tag["description"], "operations": []} for tag in document["tags"]
    }
    for method, path, operation in list_operations(document):
        groups[operation["tags"][0]]["operations"].append(_describe_operation(method, path, operation, address))
    types = [
        {
            "name": name,
            "about": _in_code(schema.get("description", "")),
            "fields": _list_fields(schema),
        }
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    about = [_in_code(words) for words in document["info"]["description"].split("\n\n")]
    return {"groups": list(groups.values()), "types": types, "about": about}


def _describe_operation(method: str, path: str, operation: dict[str, Any], address: str) -> dict[str, Any]:
    parameters = [
        {
            "name": item["name"],
            "place": item["in"],
            "required": item.get("required", False),
            "type": show_type(item.get("schema", {})),
            "about": _in_code(item.get("description", "")),
        }
        for item in operation.get("parameters", ())
    ]
    content = operation.get("requestBody", {}).get("content", {})
    body = [show_type(each["schema"]) for kind, each in content.items() if kind == "application/json"]
    is_upload = "multipart/form-data" in content
    return {
        "id": operation["operationId"],
        "method": method,
        "path": path,
        "summary": operation["summary"],
        "about": [_in_code(words) for words in operation["description"].split("\n\n")],
        "parameters": parameters,
        "body": Markup("a file: ") + ", ".join(sorted(content)) if is_upload else next(iter(body), None),
        "answer": _show_answer(operation["responses"]),
        "example": show_example(method, address + path, operation),
    }


def _show_answer(responses: dict[str, Any]) -> Markup:
    status = next(status for status in responses if status.startswith("2"))
    content = responses[status].get("content", {})
    kinds = [
        show_type(each.get("schema", {})) if kind == "application/json" else kind for kind, each in content.items()
    ]
    shown = Markup(" or ").join(kinds)
    return Markup("{} ").format(status) + shown


def _list_fields(schema: dict[str, Any]) -> list[dict[str, Any]]:
    required = set(schema.get("required", ()))
    return [
        {
            "name": name,
            "required": name in required,
            "type": show_type(each),
            "about": _in_code(each.get("description", "")),
        }
        for name, each in schema.get("properties", {}).items()
    ]


def show_type(schema: dict[str, Any]) -> Markup:
    """Return a JSON schema in a few words, with links to the types it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#type-{0}">{0}</a>').format(name)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return Markup(" or ").join(dict.fromkeys(show_type(each) for each in schema[key]))
    if "enum" in schema:
        return Markup(", ").join(Markup("<code>{}</code>").format(json.dumps(value)) for value in schema["enum"])
    if "const" in schema:
        return Markup("<code>{}</code>").format(json.dumps(schema["const"]))
    kind = schema.get("type", "any")
    if kind == "array":
        return Markup("list of ") + show_type(schema.get("items", {}))
    bounds = [
        f"{words} {schema[name]:,}"
        for name, words in (
            *(("minimum", "from"), ("maximum", "to"), ("minLength", "at least"), ("maxLength", "at most")),
            *(("minItems", "at least"), ("maxItems", "at most")),
        )
        if name in schema
    ]
    return escape(f"{kind} ({', '.join(bounds)})" if bounds else str(kind))


def _in_code(words: str) -> Markup:
    """Return words as HTML, with the parts in backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(words))))


_BODIES = {
    "predict": '{"task": "mail", "rows": ["Where is my parcel?"]}',
    "answer_vllm": '{"model": "mail", "input": "Where is my parcel?"}',
    "answer_hf": '{"inputs": "Where is my parcel?"}',
    "submit_job": '{"task": "mail", "dataset": "ds_…"}',
    "submit_batch_job": '{"task": "mail", "dataset": "ds_…"}',
    "read_dataset_again": '{"text": "message", "label": "topic"}',
    "set_policy": '{"policy": "if-better"}',
    "put_live": '{"version": 2, "reason": "3 is worse on invoices"}',
    "add_feedback": '{"items": [{"text": "Where is my parcel?", "label": "delivery"}]}',
    "make_key": '{"name": "the shop", "scopes": ["predict"]}',
    "rotate_key": '{"overlap_s": 3600}',
}


def show_example(method: str, url: str, operation: dict[str, Any]) -> str:
    """Return a command line that calls an operation."""
    url = url.replace("{task}", "mail").replace("{version}", "2")
    parts = [f"curl '{url}'" if method == "GET" else f"curl -X {method} '{url}'"]
    if operation.get("security"):
        parts.append('-H "Authorization: Bearer $INLAY_KEY"')
    if operation["operationId"] == "upload_dataset":
        parts.append("-F file=@mail.csv")
    elif operation["operationId"] in _BODIES:
        parts += ["-H 'Content-Type: application/json'", f"-d '{_BODIES[operation['operationId']]}'"]
    return " \\\n  ".join(parts)
