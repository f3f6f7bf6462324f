"""The OpenAPI 3.1 document of the whole API, made of the types that routes read and answer with."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from inspect import cleandoc
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from inlay.service.web.compatible_routes import ClassifyAnswer, ClassifyRequest, HfRequest, answer_hf, answer_vllm
from inlay.service.web.guard import OPEN, SCOPE
from inlay.service.web.predict_route import PredictAnswer, PredictRequest, predict
from inlay.service.web.problems import MEDIA_TYPE

_REF = "#/components/schemas/"
_ABOUT = """Customers bring text tasks, each is trained on one frozen transformer, and all are answered by it.

Send your key as `Authorization: Bearer inl_…`. Errors are problem documents (RFC 9457) with a `hint` that says what to
do. Lists have `limit` and an opaque `cursor`. A POST that makes something takes an `Idempotency-Key`: sent again within
24 hours, it makes nothing again and is answered as before. Times are ISO 8601, in UTC."""
_TAGS = {
    "predict": "Ask tasks for answers.",
    "datasets": "Upload rows to train on, or to have answered.",
    "jobs": "Train versions, and have datasets answered in the background.",
    "tasks": "Tasks, their versions, reports, and what is live.",
    "account": "Keys, limits and usage.",
    "health": "For whoever runs the service.",
}
_HF_ANSWER: dict[str, Any] = {
    "description": "Scores of labels, entities, or a passage: as the task answers, in Hugging Face's shape.",
    "anyOf": [{"type": "array"}, {"type": "object"}],
}
_IDEMPOTENCY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A name of your own for this request: sent again, it is answered as the first time.",
    "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,255}$"},
}
MAKERS = {
    *("upload_dataset", "submit_job", "submit_batch_job", "erase_task", "add_feedback", "make_key", "rotate_key"),
}
"""operations that take an idempotency key"""
_HOT: tuple[tuple[str, str, Callable[..., Any], type, type | None], ...] = (
    ("/v1/predict", "Answer rows", predict, PredictRequest, PredictAnswer),
    ("/classify", "Classify texts, in vLLM's shape", answer_vllm, ClassifyRequest, ClassifyAnswer),
    ("/hf/{task}", "Answer in Hugging Face's shape", answer_hf, HfRequest, None),
)


def make_openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of the app. It is made once."""
    if app.openapi_schema is None:
        app.openapi_schema = _make(app)
    return app.openapi_schema


def _make(app: FastAPI) -> dict[str, Any]:
    tags = [{"name": name, "description": words} for name, words in _TAGS.items()]
    about: dict[str, Any] = {"title": "Inlay", "version": version("inlay"), "description": _ABOUT}
    document = get_openapi(**about, routes=app.routes, tags=tags, openapi_version="3.1.0")
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    types = [kind for _, _, _, asked, given in _HOT for kind in (asked, given) if kind is not None]
    found, named = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    schemas.update(named)
    shapes = iter(found)
    hot = {}
    for path, summary, function, _, given in _HOT:
        bodies = (next(shapes), _HF_ANSWER if given is None else next(shapes))
        hot[path] = {"post": _describe_hot(path, summary, function, bodies)}
    document["paths"] = {**hot, **document["paths"]}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "bearerFormat": "inl_…"}}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return _rename(document)


def _describe_hot(
    path: str, summary: str, function: Callable[..., Any], bodies: tuple[dict[str, Any], dict[str, Any]]
) -> dict[str, Any]:
    asked, given = bodies
    operation: dict[str, Any] = {
        "tags": ["predict"],
        "summary": summary,
        "operationId": function.__name__,
        "description": cleandoc(function.__doc__ or ""),
        "requestBody": {"required": True, "content": {"application/json": {"schema": asked}}},
        "responses": {"200": {"description": "The answers.", "content": {"application/json": {"schema": given}}}},
        SCOPE: "predict",
    }
    if "{task}" in path:
        about = {"name": "task", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [about]
    return operation


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add what all operations have: who may call them, and the problems they answer with."""
    scope = operation.get(SCOPE)
    if scope != OPEN:
        operation["security"] = [{"key": []}]
        words = "any" if scope is None else f"`{scope}`"
        operation["description"] = f"{operation.get('description', '').strip()}\n\nScope: {words}.".strip()
    if operation["operationId"] in MAKERS:
        operation.setdefault("parameters", []).append(_IDEMPOTENCY)
    responses = operation["responses"]
    responses.pop("422", None)
    problem = {MEDIA_TYPE: {"schema": {"$ref": f"{_REF}ProblemShape"}}}
    for status, words in (("4XX", "The request cannot be carried out."), ("5XX", "The service cannot carry it out.")):
        responses[status] = {"description": words, "content": problem}


def _rename(item: Any) -> Any:
    """Return a part of the document with shorter names of types, without `Shape`."""
    if isinstance(item, dict):
        renamed = {}
        for key, value in item.items():
            renamed[_short(key) if isinstance(value, dict) and key[:1].isupper() else key] = _rename(value)
        return renamed
    if isinstance(item, list):
        return [_rename(value) for value in item]
    return _short(item) if isinstance(item, str) and item.startswith(_REF) else item


@lru_cache(maxsize=1000)
def _short(name: str) -> str:
    return re.sub(r"ListShape_(\w+?)Shape_", r"\1List", name).replace("Shape", "")


def list_operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the operations of a document as (method, path, operation), by tag."""
    order = list(_TAGS)
    found = [
        (method.upper(), path, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return sorted(found, key=lambda item: order.index(item[2]["tags"][0]))
