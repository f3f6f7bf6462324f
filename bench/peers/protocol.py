"""How a measuring process is asked: a line of JSON in, a line of JSON out. Imports nothing but the standard library.

{"do": "prepare", ...}         make the model ready and warm it up; answers with the versions in use
{"do": "measure", "steps": 9}  do that much work; answers with seconds and samples

Before its answer a process may tell what it is doing: {"says": "loading"}.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any

_told: list[IO[str]] = []
"""where answers go, once requests are answered"""


def say(what: str) -> None:
    """Tell whoever asked what is being done now."""
    if _told:
        print(json.dumps({"says": what}), file=_told[0], flush=True)


def answer_requests(handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer until the input ends. What libraries print goes to the error stream, an exception becomes an answer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf8")
    _told.append(answers)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = handlers[request.pop("do")](**request)
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            answer = {"error": f"{type(error).__name__}: {first}"[:400]}
        print(json.dumps(answer), file=answers, flush=True)


def versions_of(*libraries: str) -> dict[str, str]:
    """Python's version and those of the libraries named."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in libraries}
