"""Snippets: the same request for a shell, for Python and for a service, with the user's text quoted."""

from __future__ import annotations

import json
import shlex

LOCAL_SERVICE = "http://localhost:8642"
"""the address of `inlay serve` by default, which needs no key"""


def write_curl(address: str, task: str, text: str, pair: str | None, *, needs_key: bool) -> str:
    """Return the `curl` command that sends a text to a task of a service."""
    lines = [f"curl {shlex.quote(address + '/v1/predict')}"]
    if needs_key:
        lines.append('-H "Authorization: Bearer $INLAY_KEY"')
    lines.append("-H 'Content-Type: application/json'")
    row = text if pair is None else {"text": text, "pair": pair}
    lines.append(f"-d {shlex.quote(json.dumps({'task': task, 'rows': [row]}, ensure_ascii=False))}")
    return " \\\n  ".join(lines)


def write_client(address: str, task: str, text: str, pair: str | None, *, needs_key: bool) -> str:
    """Return the Python program that sends a text to a task of a service."""
    row = _literal(text) if pair is None else f'{{"text": {_literal(text)}, "pair": {_literal(pair)}}}'
    head = "import os\n\nimport inlay\n\n" if needs_key else "import inlay\n\n"
    key = ', key=os.environ["INLAY_KEY"]' if needs_key else ""
    return f"{head}client = inlay.Client({_literal(address)}{key})\nprint(client.predict({_literal(task)}, [{row}]))"


def write_command(task: str, text: str, pair: str | None) -> str:
    """Return the `inlay predict` command for a text and a task of the store."""
    second = [] if pair is None else ["--pair", pair]
    return shlex.join(["inlay", "predict", task, text, *second])


def write_library(task: str, text: str, pair: str | None) -> str:
    """Return the Python program that answers a text with a task of the store."""
    row = _literal(text) if pair is None else f"({_literal(text)}, {_literal(pair)})"
    return f"import inlay\n\nprint(inlay.predict({_literal(task)}, {row}))"


def _literal(text: str) -> str:
    """Return a text as a Python literal; JSON's form is a valid one."""
    return json.dumps(text, ensure_ascii=False)
