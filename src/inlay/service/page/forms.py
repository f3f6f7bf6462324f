"""Forms as they arrive: bounded in bytes, fields and time like every other body, and nothing but fields."""

from __future__ import annotations

from urllib.parse import parse_qsl

from starlette.datastructures import FormData
from starlette.requests import Request

from inlay.service.web.problems import RequestRefused
from inlay.service.web.visits import read_body

_MOST_FIELDS = 2000
_TYPE = "application/x-www-form-urlencoded"


async def read_form(request: Request) -> FormData:
    """Return the fields of a form. Its texts are whole characters; what is none is shown as one that is missing."""
    body = await read_body(request.scope, request.receive)
    if body and request.headers.get("content-type", "").partition(";")[0].strip().lower() != _TYPE:
        raise RequestRefused(
            "this is no form of the page", "use the page itself", code="wrong-content-type", status=415
        )
    try:
        text = body.decode("ascii", "replace")
        fields = parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="replace")
    except ValueError:
        raise RequestRefused("the form has too many fields", "send fewer", code="too-large", status=413) from None
    return FormData([(name, value.replace("\0", "").replace("\r\n", "\n")) for name, value in fields])
