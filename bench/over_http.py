"""Inlay's service over HTTP: beside other servers on the same tasks, and held against its own goals.

    python bench/over_http.py --make-env vllm        makes the environment of a peer (.peers/NAME); without NAME: all
    python bench/over_http.py                        measures what is missing, a part at a time, and draws the report
    python bench/over_http.py --parts goals          only what needs no peer
    python bench/over_http.py --parts vllm-32,litserve-32 --again
    python bench/over_http.py --report               draws results/http/report.md from what is there

A part is one file `results/http/PART.jsonl`, a record a line, written whole when the part has ended; a part that has a
file is not measured again unless `--again` says so. Everything listens on 127.0.0.1 and is ended with its part. What is
compared is compared in turns, so that noise meets all alike, and ratios within one part count.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import http_goals
import http_report
from http_envs import ENVIRONMENTS, is_made, make_environment
from http_pairs import Record, Work, compare_servers
from http_servers import ServerFailed
from http_tasks import make_tasks
from http_turns import Asker, WrongAnswers
from report import ROOT, describe_hardware, find_commit, find_versions, say, write_whole

RESULTS = ROOT / "results" / "http"
FOLDER = Path("~/.cache/inlay-bench/http").expanduser()
PAIRED = ("vllm", "infinity", "litserve", "mosec", "ray", "adapters")
COUNTS = (32, 1, 256)
MOST_TASKS = 256
Part = Callable[[Work], Iterator[Record]]


def main() -> None:
    options = parse()
    if options.make_env is not None:
        for name in options.make_env or ENVIRONMENTS:
            print(make_environment(name))
        return
    if not options.report:
        measure(options)
    print(http_report.write_report(options.results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-env", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; none: all")
    parser.add_argument("--parts", help="names of parts, `goals`, `pairs`, or `PEER` for all of its parts")
    parser.add_argument("--again", action="store_true", help="measure parts that have a file too")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one load in one turn")
    parser.add_argument("--minutes", type=float, help="begin no part after so long")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for tasks, homes and logs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="what is measured, where the checkout has no .git")
    options = parser.parse_args()
    options.chosen = choose_parts(options.parts, parser)
    return options


def list_parts() -> dict[str, Part]:
    """Every part by its name, the most telling ones first."""
    parts: dict[str, Part] = {}
    for count in COUNTS:
        parts |= {f"{peer}-{count}": partial(compare_servers, peer=peer, num_tasks=count) for peer in PAIRED}
        if count == COUNTS[0]:
            parts |= http_goals.PARTS
    return parts


def choose_parts(words: str | None, parser: argparse.ArgumentParser) -> dict[str, Part]:
    known = list_parts()
    if words is None:
        return known
    chosen: dict[str, Part] = {}
    for word in words.split(","):
        groups = {"goals": list(http_goals.PARTS), "pairs": [name for name in known if name not in http_goals.PARTS]}
        of_peer = [name for name in known if name.rsplit("-", 1)[0] == word]
        names = groups.get(word) or of_peer or [word]
        if unknown := [name for name in names if name not in known]:
            parser.error(f"no part `{unknown[0]}`; there are: {', '.join(known)}")
        chosen |= {name: known[name] for name in names}
    return chosen


def measure(options: argparse.Namespace) -> None:
    """Measure the parts that are chosen and have no file."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    began = time.monotonic()
    tasks = make_tasks(options.folder, num_tasks=MOST_TASKS)
    work = Work(tasks, Asker(options.folder / "loads", tasks.texts()), options.turns, options.seconds)
    head = {
        "what": "head",
        "command": "python " + " ".join(["bench/over_http.py", *sys.argv[1:]]),
        "hardware": describe_hardware(),
        "versions": find_versions(),
        "turns": options.turns,
        "seconds": options.seconds,
    }
    for name, part in options.chosen.items():
        path = options.results / f"{name}.jsonl"
        if path.exists() and not options.again:
            continue
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            say(f"no time is left for {name}")
            continue
        peer = name.rsplit("-", 1)[0]
        if peer in ENVIRONMENTS and not is_made(peer):
            say(f"{name} is left out: `python bench/over_http.py --make-env {peer}` makes its environment")
            continue
        _measure_part(name, part, work, path, head | _now(options))


def _measure_part(name: str, part: Part, work: Work, path: Path, head: dict[str, Any]) -> None:
    """Measure one part; its file is written whole, or not at all."""
    say(f"part {name}")
    records = [head | {"part": name}]
    try:
        records += part(work)
    except (ServerFailed, WrongAnswers) as error:
        say(f"{name} failed: {error}")
        records.append({"what": "failed", "why": str(error)})
    except KeyboardInterrupt:
        say(f"stopped in {name}; the same command goes on with it")
        sys.exit(130)
    write_whole(path, "\n".join(json.dumps(_rounded(record)) for record in records))


def _now(options: argparse.Namespace) -> dict[str, Any]:
    load = Path("/proc/loadavg").read_text().split()[0]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": options.commit or find_commit(), "date": date, "load_before": float(load)}


def _rounded(value: Any) -> Any:
    """Numbers as short as they mean something."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
