"""The log of what kernels are off by on a GPU: a line of JSON for each case, on disk as soon as it is measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

_begun: set[str] = set()


def note(**line: Any) -> None:
    """Write a line to the file that INLAY_KERNEL_LOG names, if it does; its first says what was measured on."""
    path = os.environ.get("INLAY_KERNEL_LOG")
    if not path:
        return
    lines = [line] if path in _begun else [_machine(), line]
    with Path(path).open("a" if path in _begun else "w", encoding="utf8") as log:
        log.writelines(json.dumps(each) + "\n" for each in lines)
    _begun.add(path)


def _machine() -> dict[str, Any]:
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
