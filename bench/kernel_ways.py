"""Our kernels beside what they replace, in one process: a report of cases, each measured in several parts.

Every way of a case is made ready once (captured as a CUDA graph of a few calls, as a step replays it) and measured in
turns with the others of its part; times are medians in microseconds. Ways that need no compiler come first, for all
cases; each that does is a part of its own, later, with our way measured again beside it and a limit of its own for
getting ready: what a compiler unrolls takes minutes, and must not stand in the way of what is known in seconds. Ratios
are of times of one part.

Compiling takes most of the time, and one core. With `--ahead N` that many processes first get a share of the parts
ready, side by side, and measure nothing: what they compiled is found in the caches of Triton and of torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from report import Report, add_options, print_table, say
from torch import Tensor

BAR = 1.1
AT_ONCE = "at once"
UNKNOWN = "not measured"
CALLS = 10
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Work that several ways do."""

    name: str
    facts: dict[str, Any]
    ways: tuple[str, ...]
    """ours first; those that need no compiler and those that do"""
    compiled: tuple[str, ...]
    """the latter, the longest last"""
    open: Callable[[], Mapping[str, Callable[[], Call]]]
    """makes the tensors; what makes each way"""
    rivals: Mapping[str, tuple[str, tuple[str, ...]]]
    """kernel -> our way, and the ways it must beat"""


@dataclass(frozen=True)
class Way:
    """How a result is computed, what it is differentiated by, and from which gradient."""

    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    gradient: Tensor


DIRECTIONS = ("both", "forward")
"""forward and backward, or forward alone without anything kept for backward; the first decides"""


def in_direction(makers: Mapping[str, Callable[[], Way]], direction: str) -> dict[str, Callable[[], Call]]:
    """What makes the calls of one direction of each way."""

    def forward(way: Way) -> Call:
        def run() -> None:
            with torch.no_grad():
                way.run()

        return run

    def both(way: Way) -> Call:
        return lambda: torch.autograd.grad(way.run(), way.leaves, way.gradient)

    prepare = {"both": both, "forward": forward}[direction]
    return {name: lambda make=make: prepare(make()) for name, make in makers.items()}


class TooLong(BaseException):
    """The time for getting ready is over. No `Exception`, which a compiler would take for a reason to try otherwise."""


def add_kernel_options(parser: argparse.ArgumentParser) -> None:
    """The options of the scripts that measure kernels."""
    parser.add_argument("--repeats", type=int, default=20, help="turns of a part")
    parser.add_argument("--launched", action="store_true", help="time as Python launches, not as a graph replays")
    parser.add_argument("--way-limit-s", type=float, default=40, help="for a way to get ready")
    parser.add_argument("--compiled-limit-s", type=float, default=20, help="for one that needs a compiler")
    parser.add_argument("--ahead", type=int, default=0, metavar="N", help="processes that compile side by side first")
    parser.add_argument("--ahead-limit-s", type=float, default=60, help="for all of them together")
    parser.add_argument("--share", metavar="I/N", help="get every Nth part ready, from the Ith on, and measure nothing")
    parser.add_argument("--without-compiled", action="store_true", help="leave out the ways that need a compiler")
    add_options(parser, resumes=True)


def measure_cases(cases: Sequence[Case], options: argparse.Namespace, settings: Sequence[str]) -> None:
    """The whole report: every case at once, then what is compiled, way by way."""
    parts = plan(cases, is_compiled=not options.without_compiled)
    if options.share:
        for case, ways in list(parts.values())[share_of(options.share)]:
            make_ready(case, ways, options)
        return
    report = Report(options, list(parts), lambda found: compose(cases, found), settings=settings)
    with report:
        if options.ahead and report.missing:
            compile_ahead(options.ahead, options.ahead_limit_s)
        for name in report.missing:
            case, ways = parts[name]
            say(f"{name}: getting ready")
            report.add(name, measure_part(case, ways, options))
            show(name, ways[0], report.parts[name]["microseconds"], case.facts.get("least_bytes"))
    for line in describe_verdicts(find_verdicts(cases, report.parts)):
        say(line)
    report.finish()


def share_of(text: str) -> slice:
    """The share that `I/N` is of a list: every Nth, from the Ith on."""
    first, _, step = text.partition("/")
    return slice(int(first), None, int(step))


def compile_ahead(num_processes: int, limit_s: float) -> None:
    """Let processes of this script get the parts ready side by side; those that take longer end as they are."""
    say(f"{num_processes} processes compile what will be measured, {limit_s:g} s at most")
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--share", f"{place}/{num_processes}"],
            env=environment,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what it compiles with must end with it
        )
        for place in range(num_processes)
    ]
    deadline = time.monotonic() + limit_s
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        say("not all were done in time")
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    say("compiled")


def plan(cases: Sequence[Case], *, is_compiled: bool) -> dict[str, tuple[Case, tuple[str, ...]]]:
    """The parts by name, in order: the case of each and its ways, ours first."""
    parts = {}
    for case in cases:
        parts[f"{case.name}: {AT_ONCE}"] = (case, tuple(way for way in case.ways if way not in case.compiled))
    longest = max((len(case.compiled) for case in cases), default=0) if is_compiled else 0
    for place in range(longest):
        for case in cases:
            for way in case.compiled[place : place + 1]:
                ours = next((own for own, others in case.rivals.values() if way in others), case.ways[0])
                parts[f"{case.name}: {way}"] = (case, (ours, way))
    return parts


def measure_part(case: Case, ways: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Median microseconds of each way, measured in turns, and why some have none."""
    calls, failed = make_ready(case, ways, options)
    ready, replayed = {}, []
    for name, call in calls.items():
        graph = None if options.launched else captured(call)
        ready[name] = graph or several(call)
        replayed += [name] if graph else []
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(options.repeats):
        for name, call in ready.items():
            times[name].append(timed(call))
    torch.compiler.reset()  # each part has shapes of its own; nobody's dynamic shapes are measured
    found = {name: statistics.median(values) for name, values in times.items()}
    part = {"microseconds": found, "launched": [name for name in found if name not in replayed], "failed": failed}
    return part | {"error": "; ".join(failed)} if failed else part  # to be tried again by `--resume`


def make_ready(case: Case, ways: Sequence[str], options: argparse.Namespace) -> tuple[dict[str, Call], dict[str, str]]:
    """The ways that can be called, with all they need compiled, and why the others cannot."""
    makers, ready, failed = case.open(), {}, {}
    for name in ways:
        began = time.monotonic()
        limit_s = options.compiled_limit_s if name in case.compiled else options.way_limit_s
        try:
            with limited(limit_s):
                ready[name] = warm(makers[name]())
            say(f"{case.name}: {name} ready after {time.monotonic() - began:.1f} s")
        except TooLong:
            failed[name] = f"not ready after {limit_s:g} s"
        except Exception as error:  # whatever it is, the other ways go on
            failed[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
        if name in failed:
            say(f"{case.name}: {name}: {failed[name]}")
    return ready, failed


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """TooLong inside after so many seconds, and every second from then on: a callback may swallow the first one."""

    def ring(number: int, frame: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # first: from here on nothing is raised
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def warm(call: Call) -> Call:
    """The call after a few, which compile all it needs."""
    side = torch.cuda.Stream() if torch.cuda.is_available() else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    synchronise()
    return call


def several(call: Call) -> Call:
    """As many calls as are timed at once: a graph of one alone is bound by its launch."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def captured(call: Call) -> Call | None:
    """Several calls replayed from a graph; None where they cannot be captured."""
    if not torch.cuda.is_available():
        return None
    graph, run = torch.cuda.CUDAGraph(), several(call)
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def timed(run: Call) -> float:
    """Microseconds of one of several calls."""
    if not torch.cuda.is_available():  # in the interpreter: a trial of the script, no measurement
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) / CALLS * 1e6
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / CALLS * 1e3


def timed_alone(call: Call) -> float:
    """Median microseconds of one program by itself; infinite where it does not fit the processor."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench_cudagraph

    try:
        call()
        return (
            do_bench_cudagraph(call, rep=20, return_mode="median") * 1e3 if torch.cuda.is_available() else timed(call)
        )
    except OutOfResources:
        return float("inf")


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compose(cases: Sequence[Case], parts: Mapping[str, Any]) -> dict[str, Any]:
    """What the cases are, and how ours stands in each by now."""
    facts = {case.name: case.facts for case in cases}
    verdicts = find_verdicts(cases, parts)
    return {"bar": BAR, "kernels": judge_kernels(verdicts), "cases": facts, "verdicts": verdicts}


def find_verdicts(cases: Sequence[Case], parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of every kernel and case: ours beside the best other way that was measured, in the part where it was.

    `passes` is "yes", "no" or, where no other way was measured, "not measured".
    """
    verdicts: list[dict[str, Any]] = []
    for case in cases:
        own = [part["microseconds"] for name, part in parts.items() if name.startswith(f"{case.name}: ")]
        for kernel, (ours, others) in case.rivals.items():
            ratios = {
                way: (times[way] / times[ours], times)
                for times in own
                for way in others
                if way in times and ours in times
            }
            left = [way for way in others if way not in ratios and way in case.ways]
            found = {"kernel": kernel, "case": case.name, "ours": ours, "passes": UNKNOWN, "not_measured": left}
            if ratios:
                best = min(ratios, key=lambda way: ratios[way][0])
                ratio, times = ratios[best]
                found |= {"other": best, "ours_us": round(times[ours], 2), "other_us": round(times[best], 2)}
                found |= {"ratio": round(ratio, 3), "passes": "yes" if ratio >= BAR else "no"}
            verdicts.append(found)
    return verdicts


def judge_kernels(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of every kernel: whether it passes in all cases that were measured, where it does least, what is not known."""
    kernels = {}
    for kernel in dict.fromkeys(one["kernel"] for one in verdicts):
        own = [one for one in verdicts if one["kernel"] == kernel]
        known = [one for one in own if one["passes"] != UNKNOWN]
        failed = [one["case"] for one in known if one["passes"] == "no"]
        left = [f"{one['case']}: {way}" for one in own for way in one["not_measured"]]
        kernels[kernel] = {
            "passes": UNKNOWN if not known else "no" if failed else "yes",
            "cases": len(own),
            "cases_measured": len(known),
            "lowest_ratio": min((one["ratio"] for one in known), default=None),
            "fails_in": failed,
            "not_measured": left,
        }
    return kernels


def describe_verdicts(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each kernel and case, then one for each kernel."""
    lines = []
    for one in verdicts:
        if one["passes"] == UNKNOWN:
            lines.append(f"{one['kernel']}, {one['case']}: {UNKNOWN}")
            continue
        left = f" (not measured: {', '.join(one['not_measured'])})" if one["not_measured"] else ""
        against = f"{one['ours_us']} µs, best other way {one['other']} {one['other_us']} µs"
        lines.append(f"{one['kernel']}, {one['case']}: {against}: {one['ratio']:.2f}×, {_worth(one)}{left}")
    for kernel, judged in judge_kernels(verdicts).items():
        num_worth = judged["cases_measured"] - len(judged["fails_in"])
        lowest = "" if judged["lowest_ratio"] is None else f", {judged['lowest_ratio']:.2f}× at least"
        counted = f"{num_worth} of {judged['cases_measured']} cases measured, of {judged['cases']}"
        lines.append(f"{kernel}: passes: {judged['passes']}{lowest}; at least {BAR}× in {counted}")
    return lines


def _worth(verdict: Mapping[str, Any]) -> str:
    return f"at least {BAR}×" if verdict["passes"] == "yes" else f"LESS than {BAR}×"


def show(name: str, ours: str, times: Mapping[str, float], least_bytes: int | None) -> None:
    """A part as a table: times, how much slower than ours, and how fast what must be moved was."""
    rows = {
        way: [
            f"{us:.1f}",
            f"{us / times[ours]:.2f}" if ours in times else "",
            f"{least_bytes / us / 1e3:.0f}" if least_bytes else "",
        ]
        for way, us in times.items()
    }
    print_table(rows, [name, "µs", "×", "GB/s"])
