"""A process that inspects one uploaded file.

    python -m inlay.service.web.inspect_file < question.json > answer.json

It has bounds on memory and time, so that no file can stop the service.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from inlay.data import FileQuestion, describe_fault, describe_file
from inlay.errors import InlayError, OutOfMemory
from inlay.service.child import Inherited, end_with_parent

MEMORY_BYTES = 3 << 30
"""address space of the process: numpy and pyarrow reserve more of it than they use"""
CPU_S = 240


def bound_process() -> None:
    """Set limits before anything is read: memory, time, a low priority, and the end with the parent process."""
    end_with_parent(Inherited("inspector", os.getppid()))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)


def try_answer(question: FileQuestion) -> dict[str, Any]:
    """Return what a file holds, or, as `error`, what makes it unreadable."""
    try:
        return describe_file(question)
    except InlayError as error:
        return {"error": describe_fault(error)}
    except (MemoryError, RecursionError):
        lacking = OutOfMemory("the file's rows do not fit in memory", "send a smaller file, or a simpler format")
        return {"error": describe_fault(lacking)}


def main() -> None:
    """Answer the question on stdin."""
    bound_process()
    json.dump(try_answer(FileQuestion(**json.load(sys.stdin))), sys.stdout, allow_nan=False)


if __name__ == "__main__":
    main()
