"""What every measurement says of itself, and how times measured in turns are compared."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "triton", "adapters", "peft", "numpy")


def add_options(parser: argparse.ArgumentParser, *, out: Path | None = None) -> None:
    """The options that every script has."""
    parser.add_argument("--out", type=Path, default=out, help="where the report is written too")
    parser.add_argument("--commit", help="what is measured, where the checkout has no .git")


def make_report(options: argparse.Namespace, **findings: Any) -> dict[str, Any]:
    """The findings with what they depend on: command, commit, date, hardware and versions."""
    return {
        "command": "python " + " ".join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "commit": options.commit or find_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": describe_hardware(),
        "versions": find_versions(),
        **findings,
    }


def finish(options: argparse.Namespace, **findings: Any) -> None:
    """Print the report, and write it where `--out` says."""
    text = json.dumps(make_report(options, **findings), indent=1, ensure_ascii=False)
    print(text, flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf8")


def find_commit() -> str:
    """The commit of this checkout, marked where files were changed since."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=ROOT, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return answer.stdout.strip() or "unknown"


def describe_hardware() -> dict[str, Any]:
    """The processor, the cores this process may use, the threads torch takes, and the GPU if there is one."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    return {
        "processor": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def find_versions() -> dict[str, str]:
    """Of this process's Python and libraries; a worker in another environment tells its own."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """The median of measured values, and their range."""
    return {
        "median": round(statistics.median(values), digits),
        "low": round(min(values), digits),
        "high": round(max(values), digits),
    }


def compare(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """The spread of first over second, turn by turn: absolute times on a shared machine mean little."""
    return spread([one / other for one, other in zip(first, second, strict=True)])


def print_table(rows: Mapping[str, Sequence[str]], header: Sequence[str]) -> None:
    """Lines of aligned columns on the error stream, so that the output is the report alone."""
    lines = [list(header), *([name, *cells] for name, cells in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for name, *cells in lines:
        rest = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print(f"{name.ljust(widths[0])}  {rest}", file=sys.stderr, flush=True)
