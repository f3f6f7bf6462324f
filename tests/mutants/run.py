"""Change the code a little, one mutant at a time, and see that a named test fails: `make mutants`.

`mutants.toml` is the list. For each mutant `src/` is copied to a temporary folder, the change is made there, and its
tests run with the copy first on the import path; the checkout is never touched. What always holds: a mutant is killed
only by a test that runs and fails, in itself or in its fixtures, and that passes without the change. Code that cannot
be imported proves nothing.
"""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
LIMIT_S = 300
"""seconds that the tests of one mutant may take"""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+?::.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One change of one file, and the tests of which one must fail by it."""

    name: str
    file: str
    """under src/inlay"""
    old: str
    """occurs exactly once in the file"""
    new: str
    tests: tuple[str, ...]
    """files or tests, as pytest takes them"""
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    outcome: str
    """killed, SURVIVED or error"""
    detail: str
    """the test that killed it, or what went wrong"""
    seconds: float


def read_mutants() -> list[Mutant]:
    """The mutants of the list, in order."""
    content = tomllib.loads(LIST.read_text(encoding="utf8"))
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in content["mutant"]]


def apply(mutant: Mutant, source: Path) -> None:
    """Make the change in the package `source`; ValueError where it cannot be made or leaves no Python."""
    path = source / mutant.file
    text = path.read_text(encoding="utf8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"its old text occurs {text.count(mutant.old)} times in src/inlay/{mutant.file}, not once")
    changed = text.replace(mutant.old, mutant.new)
    try:
        compile(changed, mutant.file, "exec")
    except SyntaxError as error:
        raise ValueError(f"the change leaves no Python: {error}") from None
    path.write_text(changed, encoding="utf8")


@contextmanager
def snapshot() -> Iterator[Path]:
    """A copy of src/ as it is now, with bytecode: a checkout may change while the mutants run."""
    with tempfile.TemporaryDirectory(prefix="inlay-mutants-") as folder:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True, ignore=ignored)
        compileall.compile_dir(folder, quiet=2)
        yield Path(folder)


@contextmanager
def copied(source: Path) -> Iterator[Path]:
    """A copy to make a change in. A changed file's time differs from its bytecode's, which is then not read."""
    with tempfile.TemporaryDirectory(prefix="inlay-mutant-") as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        yield Path(folder)


def find_red(tests: Sequence[str], source: Path, jobs: int) -> list[str]:
    """Those of the tests that fail without any change; raises RuntimeError where they cannot be run."""
    files = sorted({test.partition("::")[0] for test in tests})
    parts = [[test for test in tests if test.partition("::")[0] in files[job::jobs]] for job in range(jobs)]
    check_import(source)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            ended = list(pool.map(lambda part: run_pytest(source, part, LIMIT_S * 4), filter(None, parts)))
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the tests took more than {error.timeout:.0f} s as the code stands") from None
    for status, output in ended:
        if status not in (0, 1):
            raise RuntimeError(f"the tests cannot be run as the code stands:\n{output[-3000:]}")
    return [test for _, output in ended for test in _FAILED.findall(output)]


def judge(mutant: Mutant, source: Path, red: Sequence[str]) -> Verdict:
    """Run the tests of a mutant on a copy with its change."""
    began = time.monotonic()

    def verdict(outcome: str, detail: str) -> Verdict:
        return Verdict(mutant, outcome, detail, time.monotonic() - began)

    broken = [test for test in red if any(is_part(test, named) for named in mutant.tests)]
    if broken:
        return verdict("error", f"{broken[0]} fails without the change too")
    with copied(source) as folder:
        try:
            apply(mutant, folder / "inlay")
            check_import(folder)
            status, output = run_pytest(folder, ["-x", *mutant.tests], LIMIT_S)
        except subprocess.TimeoutExpired:
            return verdict("error", f"its tests took longer than {LIMIT_S} s")
        except (ValueError, RuntimeError) as error:
            return verdict("error", str(error))
    if status == 0:
        return verdict("SURVIVED", f"all of {', '.join(mutant.tests)} pass")
    failed = _FAILED.findall(output)
    if status == 1 and failed:
        return verdict("killed", failed[0])
    return verdict("error", f"pytest ended with {status}, and no test failed:\n{output[-1500:]}")


def is_part(test: str, named: str) -> bool:
    """Whether a test is one of those that a mutant names: it itself, one of its parameters, or one of its file."""
    return test == named or test.startswith((f"{named}[", f"{named}::"))


def check_import(folder: Path) -> None:
    """Raise RuntimeError unless Python imports the copy: the environment has an editable install of the checkout."""
    command = [sys.executable, "-c", "import inlay; print(inlay.__file__)"]
    ended = subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True, check=False)
    if not ended.stdout.startswith(f"{folder}{os.sep}"):
        raise RuntimeError(
            f"inlay is imported from `{ended.stdout.strip()}`, not from the copy:\n{ended.stderr[-1500:]}"
        )


def run_pytest(folder: Path, arguments: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Exit status and output of pytest on the copy in `folder`; what it started ends with it."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "--no-header", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output


def environment(folder: Path) -> dict[str, str]:
    """The surroundings of a test run: the copy before all that is installed, one thread, no bytecode."""
    own = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
    return {**os.environ, **own}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this mutant; may be repeated")
    parser.add_argument("--list", action="store_true", help="show the mutants and run none")
    asked = parser.parse_args()
    mutants = read_mutants()
    if unknown := set(asked.only) - {mutant.name for mutant in mutants}:
        parser.error(f"no mutant named {', '.join(sorted(unknown))}: see --list")
    mutants = [mutant for mutant in mutants if not asked.only or mutant.name in asked.only]
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.name:32} {mutant.file:28} {' '.join(mutant.tests)}")
        return 0
    began, counts = time.monotonic(), {"killed": 0, "SURVIVED": 0, "error": 0}
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with snapshot() as source, ThreadPoolExecutor(asked.jobs) as pool:
        red = find_red(tests, source, asked.jobs)
        print(f"{len(tests)} tests run without a change, {len(red)} fail: {time.monotonic() - began:.0f} s", flush=True)
        for verdict in pool.map(lambda mutant: judge(mutant, source, red), mutants):
            counts[verdict.outcome] += 1
            name = f"{verdict.mutant.name:42} {verdict.seconds:4.0f} s"
            print(f"{verdict.outcome:8} {name}  {verdict.detail}", flush=True)
    errors = f", errors {counts['error']}" if counts["error"] else ""
    print(f"killed {counts['killed']}, survived {counts['SURVIVED']}{errors} in {time.monotonic() - began:.0f} s")
    return int(counts["killed"] != len(mutants))


if __name__ == "__main__":
    sys.exit(main())
