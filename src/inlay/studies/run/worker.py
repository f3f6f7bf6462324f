"""A process that does units of work for another (`jobs.py`), and tells it what comes of them.

It comes to the same plans by itself, each when its first unit does, and never writes a file of results: records go to
the process that asked. Its own words, and those of the libraries, go to a log. Importing this imports no torch: from
the first moment Ctrl-C at the terminal is the other process's, which stops this one when it sees fit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError
from inlay.processes import JOBS
from inlay.studies.spec.study import Study

if TYPE_CHECKING:
    from inlay.model import Backbone
    from inlay.studies.spec.planning import Item, Plan

Key = tuple[str, str, str]
_TELL_SECONDS = 0.5


@dataclass(frozen=True)
class Recipe:
    """All that a process needs to come to the plans of another."""

    studies: Mapping[str, Study]
    backbones: Mapping[str, str]
    """study -> its backbone's name or folder"""
    device: str
    root: str | None
    skip_missing: bool
    runs: Path
    commit: str | None
    num_jobs: int
    memory_share: float = 1.0
    """of a GPU's memory, what all processes may take together"""


@dataclass(frozen=True)
class Order:
    """A unit of work, by the names of its items."""

    kind: str
    items: tuple[Key, ...]
    along: tuple[Key, ...]
    memory_share: float
    """of a GPU's memory, at most; 0 of what needs none"""


def serve(link: Connection, recipe: Recipe, number: int, log: Path) -> None:
    """Do what is asked until nothing more is; the process `number` of several."""
    os.setsid()
    _speak_into(log)
    os.environ[JOBS] = str(recipe.num_jobs)
    # Each process would compile with all cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // recipe.num_jobs)))
    worker = _Worker(_Line(link), recipe, number)
    with contextlib.suppress(EOFError, OSError):
        while (order := link.recv()) is not None:
            if not worker.obey(order):
                return


def _speak_into(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class _Line:
    """The way to the other process. A signal waits until a word is out: half a word would end the talk.

    Handlers, not a mask: libraries start threads, and the signal comes to one that does not mask it.
    """

    def __init__(self, link: Connection) -> None:
        self._link, self._is_asked, self._is_cut = link, False, False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._is_asked = True

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C interrupt the block, be it one that came just before; outside it only is noted."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._is_asked:
                self._is_asked = False
                raise KeyboardInterrupt
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def send(self, what: str, value: Any = None) -> None:
        """Say a word whole; a Ctrl-C meanwhile comes after it. One comes, once, if nobody listens any more."""
        noted: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
        try:
            self._link.send((what, value))
        except OSError:
            noted += [] if self._is_cut else [signal.SIGINT]  # a second one would stop the saving
            self._is_cut = True
        finally:
            signal.signal(signal.SIGINT, before)
        if noted:
            signal.raise_signal(signal.SIGINT)


class _Worker:
    """Finds the items of an order and has them done."""

    def __init__(self, line: _Line, recipe: Recipe, number: int) -> None:
        self._line, self._recipe, self._number = line, recipe, number
        self._bench: Any = None
        self._parent = os.getppid()
        self._tasks: dict[Any, Any] = {}
        self.find_plan = functools.cache(self._find_plan)
        self._load = functools.cache(self._load_backbone)

    def obey(self, order: Order) -> bool:
        """Do a unit and say what came of it; whether this process can do another.

        After what nobody foresaw it cannot: a GPU's error stays with the process, and would fail all that follows.
        """
        try:
            with self._line.interruptible():
                failed = self._do(order)
        except KeyboardInterrupt:
            self._line.send("stopped")
        except InlayError as error:
            self._line.send("refused", (error.message, error.hint))
        except Exception as error:  # the border of this process: the other one shows it and hires another
            traceback.print_exc()
            self._line.send("broken", f"{type(error).__name__}: {error}")
            return False
        else:
            self._line.send("done", [(item.key, error.message) for item, error in failed])
        return True

    def _do(self, order: Order) -> list[tuple[Item, Any]]:
        from inlay.studies.run.agenda import Unit
        from inlay.studies.run.units import Bench
        from inlay.training.cohort.memory import release_memory, take_share

        if self._bench is None:
            _share_threads(self._recipe.num_jobs)
            keep = functools.partial(self._line.send, "records")
            self._bench = Bench(self.find_plan, self._recipe.runs, keep, self._recipe.commit)
        unit = Unit(order.kind, self._find_items(order.items), self._find_items(order.along))
        device = self.find_plan(order.items[0][0]).backbone.device
        release_memory(device)
        if order.memory_share:  # else as it was: a backbone may have to be loaded before the next unit's is known
            take_share(device, order.memory_share)
        try:
            return self._bench.do(unit, _make_relay(self._line, self._parent))
        finally:
            release_memory(device)  # others count on what an idle process does not need

    def _find_items(self, keys: Sequence[Key]) -> tuple[Item, ...]:
        plans = {key[0]: self.find_plan(key[0]) for key in keys}
        known = {item.key: item for plan in plans.values() for item in plan.items}
        return tuple(known[key] for key in keys)

    def _find_plan(self, study: str) -> Plan:
        from inlay.studies.spec.planning import load_tasks, plan_study

        recipe = self._recipe
        tasks, missing = load_tasks(
            recipe.studies[study], recipe.root, skip_missing=recipe.skip_missing, known=self._tasks
        )
        return plan_study(recipe.studies[study], self._load(recipe.backbones[study]), tasks, missing, root=recipe.root)

    def _load_backbone(self, name: str) -> Backbone:
        import torch

        from inlay.model import load_backbone

        device: str | None = None if self._recipe.device == "auto" else self._recipe.device
        if self._recipe.device in ("auto", "cuda") and torch.cuda.is_available():
            device = f"cuda:{self._number % torch.cuda.device_count()}"
        return load_backbone(name, device=device)


def _share_threads(num_jobs: int) -> None:
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_jobs))


def _make_relay(line: _Line, parent: int) -> Any:
    from inlay.training.events import CohortStarted, MemoryRanOut, RowsAnswered, RunEntered, StepTaken

    class Relay:
        """Tells how training goes, not too often, and stops it when nobody is there to hear."""

        def __init__(self) -> None:
            self._num_rows, self._told, self._is_left = 0, time.monotonic(), False

        def __call__(self, event: Any) -> None:
            match event:
                case CohortStarted(cohort):
                    for member in cohort.members:
                        line.send("entered", member.run.id)
                case RunEntered(member):
                    line.send("entered", member.run.id)
                case StepTaken(_, num_rows):
                    self._count(num_rows)
                case RowsAnswered():
                    self._heed_parent()
                case MemoryRanOut(message):
                    line.send("said", message)

        def _count(self, num_rows: int) -> None:
            self._num_rows += num_rows
            if time.monotonic() - self._told >= _TELL_SECONDS:
                line.send("rows", self._num_rows)
                self._num_rows, self._told = 0, time.monotonic()
                self._heed_parent()

        def _heed_parent(self) -> None:
            if not self._is_left and os.getppid() != parent:
                self._is_left = True  # a second one would stop the saving
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)  # as Ctrl-C: the step in hand is finished and saved

    return Relay()
