"""Measure how much of our code four flows run through: files, functions, calls and how deep they are nested.

    python bench/flows.py [--source SRC] [--json] [--deepest]

The flows are `inlay train x.csv`, `inlay predict TASK TEXT`, one step of a cohort of four and `inlay study glue
--profile tiny`, on a tiny backbone, each in a process of its own with the code under SRC. Only code under SRC/inlay
counts: functions and methods, not comprehensions, lambdas, class bodies and modules; a file counts if a function of its
was called. A generator that goes on is called again. Functions are told by their qualified names, wherever they lie, so
that two versions of the code can be compared. Frames below the step are those of our functions on the stack at its
deepest point; those of torch and transformers between them do not count.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEP = ("Cohort.step",)
MEASURED_STEP = 2  # the first one does what is done once
COUNTED: dict[str, tuple[str, ...]] = {
    "names resolved": ("Store.resolve",),
    "manifests parsed": ("Manifest.from_json", "Manifest.parse", "parse_manifest"),
    "methods resolved": ("resolve_method", "Method.resolve", "MethodConfig.resolve"),
}
"""what is counted -> the names it may have; the first that was called counts"""
FLOWS = ("train", "predict", "step", "study")
COLUMNS = ("files", "functions", "calls", "depth", "frames below step", *COUNTED)
_UNNAMED = {"<listcomp>", "<lambda>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>"}


class Tracer:
    """Counts what is called of our code; with `within`, only inside the nth call of a function of such a name."""

    def __init__(self, package: Path, within: tuple[str, ...] = (), nth: int = 1) -> None:
        self._package, self._within, self._left = f"{package}{os.sep}", within, nth
        self._known: dict[CodeType, bool] = {}
        self._stacks = threading.local()
        self._counts: Counter[CodeType] = Counter()
        self._is_counting = not within
        self._first: FrameType | None = None
        self.deepest: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Hear of a call or a return, as `sys.setprofile` tells."""
        if event not in ("call", "return"):
            return
        code = frame.f_code
        is_ours = self._known.get(code)
        if is_ours is None:
            is_ours = self._known[code] = self._judge(code)
        if is_ours and event == "call":
            self._enter(frame, code)
        elif is_ours:
            self._leave(frame)

    def _judge(self, code: CodeType) -> bool:
        """Tell whether a code is a function of ours."""
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in _UNNAMED
        return is_function and os.path.realpath(code.co_filename).startswith(self._package)

    def _enter(self, frame: FrameType, code: CodeType) -> None:
        if self._within and self._first is None and code.co_qualname in self._within:
            self._left -= 1
            if self._left == 0:
                self._first, self._is_counting = frame, True
        if not self._is_counting:
            return
        stack = self._stacks.__dict__.setdefault("names", [])
        stack.append(code.co_qualname)
        self._counts[code] += 1
        if len(stack) > len(self.deepest):
            self.deepest = list(stack)

    def _leave(self, frame: FrameType) -> None:
        if not self._is_counting:
            return
        stack = self._stacks.__dict__.setdefault("names", [])
        if stack:  # what was called before counting began returns too
            stack.pop()
        if frame is self._first:
            self._is_counting = False

    def sum_up(self) -> dict[str, Any]:
        """Sum up what was counted."""
        by_name: Counter[str] = Counter()
        for code, count in self._counts.items():
            by_name[code.co_qualname] += count
        return {
            "files": len({code.co_filename for code in self._counts}),
            "functions": len(self._counts),
            "calls": sum(self._counts.values()),
            "depth": len(self.deepest),
            "frames below step": len(self.deepest) - 1 if self._within else None,
            **{what: next((by_name[name] for name in names if by_name[name]), 0) for what, names in COUNTED.items()},
            "deepest": self.deepest,
        }


def main() -> None:
    """Measure every flow and show what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="folder that holds `inlay`; default: ours")
    parser.add_argument("--json", action="store_true", help="print data as JSON")
    parser.add_argument("--deepest", action="store_true", help="show the deepest stack of the step, too")
    parser.add_argument("--flow", choices=FLOWS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--argv", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    source = options.source.resolve()
    if options.flow:
        print(json.dumps(trace(options.flow, source, options.argv)), file=sys.__stdout__)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(source, Path(folder))
    print(json.dumps(found, indent=1) if options.json else draw(found, source))
    if options.deepest and not options.json:
        print("\ndeepest stack of a step:\n  " + "\n  ".join(found["step"]["deepest"]))


def measure(source: Path, folder: Path) -> dict[str, Any]:
    """Run each flow in a process of its own, on a backbone and rows made for it."""
    store, rows, made = folder / "store", folder / "x.csv", folder / "made"
    write_rows(rows)
    tiny = str(made / "studies" / "tiny")
    launch(source, folder, "-m", "inlay", "study", "glue", "--profile", "tiny", "--dry-run", "--store", str(made))
    common = ["--store", str(store)]
    train = ["train", str(rows), "--backbone", tiny, *common]
    grid = ["--lr", "1e-3,3e-3", "--size", "4,8", "--epochs", "3", "--batch-size", "16"]
    flows = {
        "train": train,
        "predict": ["predict", "x", "win a free prize now", *common],  # the task that the flow before has made
        "step": ["sweep", str(rows), "--backbone", tiny, *grid, *common],
        "study": ["study", "glue", "--profile", "tiny", *common],
    }
    found = {}
    for name, argv in flows.items():
        said = launch(
            source, folder, str(Path(__file__)), "--source", str(source), "--flow", name, "--argv", json.dumps(argv)
        )
        found[name] = json.loads(said.strip().splitlines()[-1])
    return found


def write_rows(path: Path) -> None:
    """Write eighty messages as a CSV file, a fifth of them spam."""
    words = "call me when you are home tonight see you at five the film was good we go now".split()
    lines = ["text,label"]
    for number in range(80):
        start = 3 * number % len(words)
        text = " ".join((words[start:] + words)[: 4 + number % 9])
        is_spam = number % 5 == 0
        lines.append(f"{'win a free prize ' if is_spam else ''}{text} {number},{'spam' if is_spam else 'ham'}")
    path.write_text("\n".join(lines) + "\n")


def launch(source: Path, folder: Path, *arguments: str) -> str:
    """Run Python with a source, a home and a cache of its own, and one thread; what it printed."""
    own = {"PYTHONPATH": str(source), "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=source.parent, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}:\n{done.stderr[-2000:]}{done.stdout[-2000:]}")
    return done.stdout


def trace(flow: str, source: Path, argv: list[str]) -> dict[str, Any]:
    """Run a command under the tracer and sum up."""
    from inlay import cli

    tracer = Tracer(source / "inlay", STEP if flow == "step" else (), MEASURED_STEP)
    sys.stdout = sys.stderr
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        cli.main(argv)
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return tracer.sum_up()


def draw(found: dict[str, Any], source: Path) -> str:
    """Draw the table: a line per flow."""
    rows = [["flow", *COLUMNS]]
    for flow, counts in found.items():
        rows.append([flow, *("–" if counts[name] is None else f"{counts[name]:,}" for name in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"source: {source}", *lines])


if __name__ == "__main__":
    main()
