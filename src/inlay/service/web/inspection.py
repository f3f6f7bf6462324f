"""The inspection of uploads by separate processes, a few at a time, each with bounds on memory and time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from inlay.errors import OutOfMemory, Unanswered
from inlay.service.state import TenantLimits, UploadContent
from inlay.service.web.problems import RequestRefused, Secrets, make_problem_body, speak_http

MOST_AT_ONCE = 2
MOST_WAITING = 32
PATIENCE_S = 300.0
READER = ("-m", "inlay.service.web.inspect_file")
_NAME = "your file"


class Inspector:
    """Inspects files. Each web process has one."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._num_waiting = 0

    async def inspect(
        self, path: Path, format: str, limits: TenantLimits, columns: Mapping[str, str | None]
    ) -> tuple[int, UploadContent]:
        """Return a file's number of rows and what was found in it, read by the columns its owner chose.

        Raises the error that makes a file unreadable.
        """
        question = {
            "path": path.name,
            "format": format,
            "columns": {name: value for name, value in columns.items() if value is not None},
            "most_rows": limits.dataset_rows,
            "most_labels": limits.labels,
            "most_bytes": limits.dataset_bytes,
        }
        if self._num_waiting >= MOST_WAITING:
            raise RequestRefused("too many uploads at once", "try again in a moment", code="busy", status=503)
        self._num_waiting += 1
        try:
            async with self._turns:
                answer = await run_reader(path.parent, json.dumps(question).encode())
        finally:
            self._num_waiting -= 1
        if "error" in answer:
            error = answer["error"]
            message = self._clean(error["message"], path)
            raise RequestRefused(message, error["hint"], code=error["code"], status=error["status"])
        problem = answer["problem"]
        if problem is not None:
            words = (problem["code"], problem["status"], self._clean(problem["message"], path), problem["hint"])
            problem = make_problem_body(*words, self._secrets)
        notes = [{**note, "message": self._clean(note["message"], path)} for note in answer["notes"]]
        found = UploadContent(answer["columns"], answer["reading"], problem, notes, answer["first_rows"])
        return answer["num_rows"], found

    def _clean(self, message: str, path: Path) -> str:
        """Return a message of the reader with `your file` for the name that the file has on this disk."""
        message = message.replace(f"{path.stem}-head.jsonl", _NAME).replace(path.name, _NAME)
        return speak_http(self._secrets.remove(message).removeprefix(f"{_NAME}: "))


async def run_reader(folder: Path, question: bytes) -> dict[str, Any]:
    """Return the answer of the process that reads a file. If it dies or takes too long, the file is refused."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", *READER),  # -P: nothing is imported from the folder
        cwd=folder,
        env=_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,  # a traceback may quote the file
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            output, _ = await process.communicate(question)
    except TimeoutError:
        raise _too_long() from None
    finally:
        if process.returncode is None:  # it was too slow, or the client has gone
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == -signal.SIGXCPU or process.returncode == -signal.SIGKILL:
        raise _too_long()
    if process.returncode in (-signal.SIGSEGV, -signal.SIGABRT) or (process.returncode and not output):
        raise OutOfMemory("the file cannot be read with the memory there is for it", "send it as CSV or JSON lines")
    try:
        answer = json.loads(output)
    except ValueError:
        raise Unanswered("the file could not be inspected", "send it again") from None
    assert isinstance(answer, dict)
    return answer


def _too_long() -> RequestRefused:
    reason = f"the file took longer than {PATIENCE_S:.0f} s to read"
    return RequestRefused(reason, "send fewer rows, or CSV or JSON lines", code="too-slow", status=413)


def _environment() -> dict[str, str]:
    """Return the environment of the process: one thread, no hub, and none of our secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "TMPDIR") if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "ARROW_NUM_THREADS"), "1")
    return kept | threads | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
