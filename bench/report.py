"""What every measurement says of itself, how it keeps what it has, and how times measured in turns are compared.

A machine is lent for minutes and may be gone in the middle of anything. So a long measurement is made of parts with
names, and its file lies whole on disk after every part and says which are missing (`Report`); lines on the error stream
say what is done, with the seconds since the start (`say`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "triton", "adapters", "peft", "numpy")
BEGAN = time.monotonic()
GRACE_S = 1.5
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPED = 130  # exit status, as a shell has it after Ctrl-C
IDENTITY = ("commit", "hardware", "versions", "settings")


def add_options(parser: argparse.ArgumentParser, *, out: Path | None = None, resumes: bool = False) -> None:
    """The options that every script has, and those of a script whose report grows."""
    parser.add_argument("--out", type=Path, default=out, help="where the report is written too")
    parser.add_argument("--commit", help="what is measured, where the checkout has no .git")
    if resumes:
        parser.add_argument("--resume", action="store_true", help="go on with what is missing in the file of --out")


def say(what: str) -> None:
    """A line on the error stream, with the seconds since the start."""
    print(f"{time.monotonic() - BEGAN:7.1f} s  {what}", file=sys.stderr, flush=True)


class Stopped(KeyboardInterrupt):
    """Somebody asked this process to end: SIGINT or SIGTERM."""


class Report:
    """A measurement made of named parts. Its file is written whole after each part and names those that are missing.

    `compose` makes the findings of the parts there are. Inside `with report:` a signal ends the block, not the script:
    what comes after it has what was measured so far. With `--resume` the parts of the file that is there are taken
    over, if they are of the same commit, hardware, versions and settings; those that failed are tried again.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        planned: Sequence[str],
        compose: Callable[[dict[str, Any]], dict[str, Any]],
        *,
        settings: Sequence[str] = (),
        grace_s: float = GRACE_S,
    ) -> None:
        self.options, self._planned, self._compose, self._grace_s = options, list(planned), compose, grace_s
        self.head = make_report(options, settings={name: _plain(getattr(options, name)) for name in settings})
        self.parts: dict[str, Any] = {}
        self.is_told = False
        """whether a signal came, to whomever it went"""
        self.is_stopped = False
        """whether the block ended by one"""
        if getattr(options, "resume", False):
            self._take_over()

    @property
    def missing(self) -> list[str]:
        """The parts that are still to be measured, in order."""
        return [name for name in self._planned if name not in self.parts]

    def add(self, name: str, part: Any) -> None:
        """Keep a part, on disk too."""
        self.parts[name] = part
        self.write()

    def write(self) -> None:
        """The file as it is now, if there is one: whole, or as it was before."""
        if self.options.out is not None:
            write_whole(self.options.out, self._text())

    def __enter__(self) -> Report:
        self._before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        self._is_over = threading.Event()
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._insist, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        self.is_stopped = self.is_stopped or isinstance(error, KeyboardInterrupt)
        if self.is_stopped:
            say(f"stopped; missing: {', '.join(self.missing) or 'nothing'}")
            self.write()
            return isinstance(error, KeyboardInterrupt)
        self._let_go()
        return False

    def _let_go(self) -> None:
        """Signals go where they went before."""
        self._is_over.set()
        signal.set_wakeup_fd(-1)
        self._mouth.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def finish(self) -> None:
        """Print the report, and write it where `--out` says. A script that was stopped ends here, at once."""
        self.write()
        print(self._text(), flush=True)
        if self.is_stopped:
            self._let_go()
            os._exit(STOPPED)  # not by way of a GPU's clean-up, which takes seconds

    def _text(self) -> str:
        missing = self.missing
        marked = {"stopped": {"missing": missing}} if missing else {}
        whole = self.head | marked | self._compose(self.parts) | {"parts": self.parts}
        return json.dumps(whole, indent=1, ensure_ascii=False)

    def _take_over(self) -> None:
        path = self.options.out
        if path is None:
            sys.exit("`--resume` goes on with a file: say which with `--out`")
        if not path.exists():
            return
        known = json.loads(path.read_text(encoding="utf8"))
        self.check_same(known, path, "`--out`, or leave out `--resume`")
        self.parts = {name: part for name, part in known["parts"].items() if not _has_failed(part)}
        say(f"{path} of {known['date']} goes on; missing: {', '.join(self.missing) or 'nothing'}")

    def check_same(self, known: Mapping[str, Any], path: Path, way_out: str) -> None:
        """Refuse what a file has of another commit, hardware, libraries or settings."""
        for what in IDENTITY:
            if known.get(what) != self.head[what]:
                unlike = f"`{path}` is of other {what} (`{known.get(what)}`, not `{self.head[what]}`)"
                sys.exit(f"{unlike}: give another {way_out}")

    def _stop(self, number: int, frame: Any) -> None:
        if not self.is_stopped:  # a second one has nothing to add
            self.is_stopped = True
            raise Stopped(signal.Signals(number).name)

    def _insist(self) -> None:
        """End the process soon after a signal, even if it is deep in a compiler: all it had is on disk."""
        with self._ear:
            while told := self._ear.recv(1):
                if told[0] in SIGNALS:
                    self.is_told = True
                    if not self._is_over.wait(self._grace_s):
                        say("ended in the middle of it")
                        os._exit(STOPPED)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _has_failed(part: Any) -> bool:
    return isinstance(part, dict) and "error" in part


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, at any moment, finds it whole: the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text + "\n", encoding="utf8")
    os.replace(draft, path)


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
        write_whole(options.out, text)


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
