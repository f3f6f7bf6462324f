"""Bodies of JSON read into typed values, with the field that is at fault where they are not what they should be."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from inlay.service.web.problems import FieldFault, RequestRefused, bad_fields
from inlay.service.web.visits import find_header

T = TypeVar("T")
_AT = re.compile(r"^(?P<words>.*?)(?: - at `(?:key in )?\$\.?(?P<field>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_HINT = "send the body as JSON with the header `Content-Type: application/json`"


def check_is_json(scope: Any) -> None:
    """Refuse a body that does not say that it is JSON. A page of another site cannot say so unasked."""
    given = (find_header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if given != b"application/json" and not (given.startswith(b"application/") and given.endswith(b"+json")):
        raise RequestRefused("the body is not JSON", _HINT, code="wrong-content-type", status=415)


def read_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return a body as what the decoder makes of it; refuse what is no JSON, or not of that form."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise bad_fields([_find_fault(str(error))]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_json(body, error) from None
    except RecursionError:
        raise RequestRefused("JSON nested too deeply", "send a flat object", code="bad-json", status=400) from None


def _find_fault(message: str) -> FieldFault:
    found = _AT.match(message)
    assert found is not None
    words, field = found["words"], found["field"] or ""
    missing = _MISSING.fullmatch(words)
    if missing is not None:
        field, words = f"{field}.{missing[1]}".lstrip("."), "it is missing"
    if len(words) > 300:
        words = words[:300]
    return FieldFault(field or "body", words[0].lower() + words[1:])


def _no_json(body: bytes, error: Exception) -> RequestRefused:
    if not body:
        reason = "the body is empty"
    elif isinstance(error, UnicodeDecodeError):
        reason = "the body is not UTF-8"
    elif b"\\ud" in body or b"\\uD" in body:
        reason = f"{str(error).lower()}, or half a character (a lone surrogate)"
    else:
        reason = str(error).replace("JSON is malformed", "malformed JSON").lower().replace("json", "JSON")
    return RequestRefused(reason[:300], _HINT, code="bad-json", status=400)
