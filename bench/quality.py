"""Whether `inlay train FILE` with no options is the best a user can get: real sets, few rows, other systems beside it.

    python bench/quality.py --data-root DIR [--sizes 50,200] [--sets glue/cola,…] [--draws 0] [--systems inlay,probe]
    python bench/quality.py --data-root DIR --gpu --jobs 15 --results results/quality/h200
    python bench/quality.py --report

Every set is drawn at 50, 200, 1,000 and up to 5,000 rows, three times (quality_draws.py). The systems
(quality_systems.py) are `inlay`: `inlay train` with no options; `probe` and `tfidf`: what `inlay baseline` fits;
`setfit` and `full`: SetFit and full fine-tuning on the same weights with their usual settings; `best`: the setting of
a small grid of Inlay's that turned out best on the test rows. What is measured lies in results/quality/SYSTEM.jsonl,
a line for each set, size, draw and system; what has a line is not measured again. The cheapest comes first, and a
second draw counts as twice as dear. `--report` writes tables, checks and a picture from these lines alone.

With `--gpu` peers use the GPU as Inlay does by itself, and several commands share it: scores are what is measured then,
so the results belong into a folder of their own, and no line of it says anything about CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quality_draws import DRAWS, SETS, SIZES, Draw, list_draws
from quality_report import read_records, write_report
from quality_systems import ENVIRONMENT, SYSTEMS, USUAL, Found, Place, end_all, make_environment
from report import ROOT, describe_hardware, find_commit, say

RESULTS = ROOT / "results" / "quality"
FOLDER = ENVIRONMENT.parent / "quality"
LIMIT_S = 900


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    if options.make_env:
        print(make_environment())
        return
    if not options.report:
        if options.data_root is None:
            sys.exit("where are the sets? give `--data-root DIR`, or `--report` for what was measured before")
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            measure_all(options)
        except KeyboardInterrupt:
            say("stopped; the same command goes on from here")
        finally:
            signal.signal(signal.SIGTERM, before)
    print(write_report(read_records(options.results), options.results))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of the GLUE and extra sets")
    parser.add_argument("--sets", type=_words, default=SETS)
    parser.add_argument("--sizes", type=_numbers, default=SIZES)
    parser.add_argument("--draws", type=_numbers, default=tuple(range(DRAWS)), help="numbers of draws, from 0")
    parser.add_argument("--systems", type=_words, default=USUAL, help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--most-words", type=float, help="leave out sets whose rows have more words in the mean")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long")
    parser.add_argument("--limit-s", type=int, default=LIMIT_S, help="CPU seconds of a process at most")
    parser.add_argument("--jobs", type=int, default=1, help="commands at a time")
    parser.add_argument("--gpu", action="store_true", help="let peers use the GPU, as Inlay does by itself")
    parser.add_argument("--again", action="store_true", help="measure Inlay's systems again where its code has changed")
    parser.add_argument("--retry", action="store_true", help="measure again what failed or ran out of time")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report")
    parser.add_argument("--make-env", action="store_true", help="make SetFit's environment, if it is not there")
    parser.add_argument("--setfit-python", type=Path, default=ENVIRONMENT / "bin" / "python")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for draws and what systems write")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--commit", help="what is measured, where the checkout has no .git")
    parser.add_argument("--source", help="what git calls its src/inlay, likewise")
    options = parser.parse_args(words)
    for given, known in ((options.sets, SETS), (options.systems, SYSTEMS)):
        if unknown := set(given) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    return options


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@dataclass(frozen=True)
class Work:
    """A system to be run on a draw."""

    system: str
    draw: Draw

    @property
    def cost(self) -> float:
        """Roughly how dear it is; a later draw counts more, since it tells less."""
        rows = self.draw.num_train * SYSTEMS[self.system].passes(self.draw.num_train) + self.draw.num_test
        return rows * min(self.draw.num_words, 100) * (1 + self.draw.draw)


def measure_all(options: argparse.Namespace) -> None:
    """Measure what is missing, the cheapest first."""
    from inlay.model.backbone.loading import find_folder

    source = options.source or find_source()
    work = list(plan(options, source))
    say(f"{len(work)} to be measured")
    commit = options.commit or find_commit().removesuffix("-dirty")  # `source` says whether the code is the commit's
    head = {"commit": commit, "source": source, "hardware": describe_hardware()}
    scratch = options.folder / "scratch"
    place = Place(options.setfit_python.absolute(), find_folder("minilm"), scratch, options.limit_s,
                  bytecode=options.folder / "bytecode", gpu=options.gpu)  # fmt: skip
    _compile_modules(work, place)
    began = time.monotonic()

    def measure_one(number: int, item: Work) -> dict[str, Found]:
        if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
            return {}
        return run_system(item, replace(place, folder=scratch / str(number)))

    with ThreadPoolExecutor(options.jobs) as pool:
        waiting: dict[Future[dict[str, Found]], Work] = {}
        try:
            for number, item in enumerate(work):
                waiting[pool.submit(measure_one, number, item)] = item
            for number, done in enumerate(as_completed(waiting), start=1):
                item = waiting[done]
                for system, one in done.result().items():
                    append_record(options.results, make_record(system, item.draw, one, head))
                    scored = one.status if one.score is None else f"{one.score:.2f}"
                    say(f"{number}/{len(work)} {system} {item.draw.set} {item.draw.size}-{item.draw.draw}: "
                        f"{scored}, {one.cpu_s:.0f} CPU s {one.message}")  # fmt: skip
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def _compile_modules(work: Sequence[Work], place: Place) -> None:
    """Run each kind of command once, so that its modules are compiled before anything is measured."""
    for runs, item in {SYSTEMS[item.system].run: item for item in reversed(work)}.items():
        warm = place.bytecode / f"{runs.__name__}.warm"
        if not warm.is_file():
            say(f"compiling the modules of {item.system}")
            _clear(place.folder)
            runs(item.draw, place)
            warm.parent.mkdir(parents=True, exist_ok=True)
            warm.touch()


def plan(options: argparse.Namespace, source: str) -> Iterator[Work]:
    """What is missing among what was asked for, in the order of its cost."""
    known = {record.key: record for record in read_records(options.results)}
    draws = [draw for name in options.sets for draw in list_draws(name, options.data_root, options.folder / "draws")]
    wanted = [
        Work(system, draw)
        for draw in draws
        if draw.size in options.sizes and draw.draw in options.draws
        if options.most_words is None or draw.num_words <= options.most_words
        for system in options.systems
        if draw.kind in SYSTEMS[system].kinds
    ]
    done = set()
    for item in sorted(wanted, key=lambda item: item.cost):
        command = (SYSTEMS[item.system].run, item.draw.cell)
        if command in done:  # the command of another system measures it too
            continue
        record = known.get((*item.draw.cell, item.system))
        if (
            record is None
            or record.digest != item.draw.digest
            or (options.retry and record.status != "ok")
            or (options.again and SYSTEMS[item.system].is_ours and record.source != source)
        ):
            done.add(command)
            yield item


def run_system(item: Work, place: Place) -> dict[str, Found]:
    """What a system comes to on a draw."""
    runs = SYSTEMS[item.system].run
    _clear(place.folder)
    try:
        return runs(item.draw, place)
    except (ValueError, KeyError) as error:  # an answer that cannot be read spoils no other
        return {item.system: Found("error", None, 0.0, 0.0, 0.0, message=f"{type(error).__name__}: {error}")}
    finally:
        _clear(place.folder)


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def make_record(system: str, draw: Draw, found: Found, head: dict[str, Any]) -> dict[str, Any]:
    """A line of the results. It holds no text of the set."""
    return {
        "set": draw.set,
        "size": draw.size,
        "draw": draw.draw,
        "system": system,
        "status": found.status,
        "score": found.score,
        "metric": draw.metric,
        "cpu_s": found.cpu_s,
        "wall_s": found.wall_s,
        "peak_mb": found.peak_mb,
        "num_train": draw.num_train,
        "num_test": draw.num_test,
        "digest": draw.digest,
        "settings": found.settings,
        **({"message": found.message} if found.message else {}),
        **head,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": found.versions,
    }


def append_record(folder: Path, record: dict[str, Any]) -> None:
    """Add a line to the file of its system."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{record['system']}.jsonl").open("a", encoding="utf8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def find_source() -> str:
    """The digest that git has of src/inlay, marked where files were changed since.

    A commit to the documents alone changes nothing here.
    """
    digest, changed = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        for words in (["rev-parse", "--short=12", "HEAD:src/inlay"], ["status", "--porcelain", "--", "src/inlay"])
    )
    return (digest or "unknown") + ("-dirty" if changed else "")


if __name__ == "__main__":
    main()
