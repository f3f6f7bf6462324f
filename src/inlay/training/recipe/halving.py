"""Successive halving: which candidates for a task go on, by their dev scores, and when time is up.

Candidates train together in one bank. At a rung, a number of epochs, only the best few of those that reached it go on;
after the last rung one does. A candidate that waited for a slot reaches a rung later than the others, and is compared
with the scores they had there. Which candidates end follows from the dev scores so far, which the resume state has, and
from the seconds of training that are left.

Few dev rows tell little: of candidates within chance of the best, the first, which has the usual settings, is
preferred. What always holds: the candidate that is preferred at a rung goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.data import METRICS
from inlay.errors import BadConfig
from inlay.processes import current_process
from inlay.training.run.run import DIVERGED, FINISHED, STOPPED_EARLY, Result
from inlay.training.run.run_folder import read_result

if TYPE_CHECKING:
    from inlay.training.cohort.cohort import Cohort
    from inlay.training.cohort.member import AnyMember

SPENT = "the budget is spent"
_HALVED = "halved away"


@dataclass(frozen=True)
class Rung:
    """A point in training: after `epoch` epochs, `kept` candidates go on."""

    epoch: int
    kept: int


def make_rungs(num_candidates: int, num_epochs: int) -> tuple[Rung, ...]:
    """Make rungs at a quarter and at half of the epochs, rounded up: half of the candidates go on, then one.

    Two candidates have the second rung only: a quarter tells little, and ends nobody whose end saves much.
    """
    if num_candidates < 2 or num_epochs < 2:
        return ()
    quarter, half = -(-num_epochs // 4), -(-num_epochs // 2)
    if num_candidates == 2 or quarter == half:
        return (Rung(half, 1),)
    return (Rung(quarter, -(-num_candidates // 2)), Rung(half, 1))


def find_chance(metric: str, value: float, num_dev: int) -> float:
    """Return the standard error of a dev score that is a share of so many rows; at most 0.5/√n.

    It is 0 where less is better: such a score has a scale of its own, as for `train.keep`.
    """
    if not METRICS[metric].higher_is_better:
        return 0.0
    share = (min(max(value, 0.0), 1.0) * num_dev + 1) / (num_dev + 2)  # a perfect score on few rows may be chance too
    return math.sqrt(share * (1 - share) / num_dev)


@dataclass(frozen=True)
class Standing:
    """The progress of a candidate. `history` has a line per epoch and per stage before them."""

    history: Sequence[Mapping[str, Any]]
    status: str = ""
    message: str = ""
    dev_metric: float | None = None
    """dev score of the weights that are kept"""

    @classmethod
    def from_result(cls, result: Result) -> Standing:
        """Return the standing of a finished run."""
        return cls(result.history, result.status, result.message, result.dev_metric)

    @property
    def trained(self) -> list[Mapping[str, Any]]:
        """The records of epochs, without those of the stages before training."""
        return [line for line in self.history if not line.get("stage")]

    @property
    def is_halved(self) -> bool:
        """Whether it was ended at a rung."""
        return self.status == STOPPED_EARLY and self.message.startswith(_HALVED)


@dataclass(frozen=True)
class Contest:
    """The rules of a comparison: its runs, the metric, the number of dev rows, and the rungs.

    The first of `runs` is the one with the usual settings.
    """

    runs: tuple[str, ...]
    metric: str
    num_dev: int
    rungs: tuple[Rung, ...] = ()

    def find_losers(self, standings: Mapping[str, Standing], fresh: Collection[str]) -> dict[str, str]:
        """Find the candidates in `fresh`, which just ended an epoch, that must end at a rung, with the reason."""
        lost = {}
        for rung in self.rungs:
            scores = self._score_at(rung, standings)
            order = self._order(scores)
            for run_id in order[rung.kept :]:
                if run_id in fresh and len(standings[run_id].trained) == rung.epoch:
                    epoch = standings[run_id].trained[-1]["epoch"]
                    lost[run_id] = f"{_HALVED} at epoch {epoch}: {self._compare(scores, run_id, order[0])}"
        return lost

    def choose(self, standings: Mapping[str, Standing]) -> list[str]:
        """Rank candidates from the one to publish to the worst; diverged ones are last.

        Among scores within chance of the best, candidates that were not halved away come first, and the first run
        comes before other runs.
        """
        own = {run_id: standings[run_id] for run_id in self.runs if run_id in standings}
        known = {
            run_id: (self._sign * item.dev_metric, 0.0)
            for run_id, item in own.items()
            if item.status != DIVERGED and item.dev_metric is not None and math.isfinite(item.dev_metric)
        }
        order = sorted(known, key=lambda run_id: (-known[run_id][0], self.runs.index(run_id)))
        close = [run_id for run_id in order if self._is_close(known, run_id, order[0])]
        close.sort(key=lambda run_id: (standings[run_id].is_halved, run_id != self.runs[0]))
        first = close[:1]
        others = [run_id for run_id in order if run_id not in first]
        return [*first, *others, *(run_id for run_id in own if run_id not in known)]

    @property
    def _sign(self) -> int:
        return 1 if METRICS[self.metric].higher_is_better else -1

    def _score_at(self, rung: Rung, standings: Mapping[str, Standing]) -> dict[str, tuple[float, float]]:
        """Map each candidate that reached the rung to its best score and its last dev loss there.

        A candidate that finished before the rung counts there with the scores it finished with.
        """
        found = {}
        for run_id in self.runs:
            standing = standings.get(run_id)
            if standing is None or standing.status == DIVERGED:
                continue
            lines = standing.trained[: rung.epoch]
            if len(lines) < rung.epoch:
                lines = (standing.trained or list(standing.history)) if standing.status == FINISHED else []
            values = [self._sign * line["dev"][self.metric] for line in lines]
            values = [value for value in values if math.isfinite(value)]
            if values:
                loss = lines[-1]["dev_loss"]
                found[run_id] = (max(values), loss if math.isfinite(loss) else math.inf)
        return found

    def _order(self, scores: Mapping[str, tuple[float, float]]) -> list[str]:
        """Rank candidates from best to worst, ties by dev loss; the first run leads if it is close to the best."""
        order = sorted(scores, key=lambda run_id: (-scores[run_id][0], scores[run_id][1], self.runs.index(run_id)))
        usual = self.runs[0]
        if usual in scores and self._is_close(scores, usual, order[0]):
            order.remove(usual)
            order.insert(0, usual)
        return order

    def _is_close(self, scores: Mapping[str, tuple[float, float]], run_id: str, best: str) -> bool:
        """Tell whether a score is within chance of the best."""
        top = scores[best][0]
        return top - scores[run_id][0] <= find_chance(self.metric, top, self.num_dev)

    def _compare(self, scores: Mapping[str, tuple[float, float]], run_id: str, first: str) -> str:
        own, other = (self._sign * scores[key][0] for key in (run_id, first))
        if scores[run_id][0] > scores[first][0]:
            return f"dev {self.metric} {own:.4f}, within chance of {other:.4f} with the usual settings"
        return f"dev {self.metric} {own:.4f}, the best {other:.4f}"


class Referee:
    """Ends runs of a cohort before their own end. This one ends none."""

    def begin(self, cohort: Cohort, folder: Path) -> str:
        """Note that a cohort begins or resumes; `folder` has its runs' folders. Return a note for the user."""
        return ""

    def is_late(self, num_active: int) -> bool:
        """Tell whether no time is left for another step of so many runs; then their current weights are scored."""
        return False

    def judge(self, members: Iterable[AnyMember], fresh: Collection[str], *, is_late: bool) -> None:
        """End members that lost; `fresh` has the ids of those just scored."""

    def admit(self, entered: Iterable[AnyMember]) -> None:
        """End runs that enter a slot too late to train."""


class Halving(Referee):
    """Ends candidates at rungs, and all after `seconds` of training; `score_seconds` is the time to score one run.

    Seconds count over all calls of `fit` that the same cohort needs, if it is stopped and goes on.
    """

    def __init__(
        self,
        contest: Contest,
        seconds: float | None = None,
        *,
        score_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.contest, self.seconds = contest, seconds
        self.seconds_before = 0.0
        """seconds of training in earlier calls"""
        self._score_seconds, self._clock = score_seconds, clock
        self._deadline: float | None = None
        self._standings: dict[str, Standing] = {}

    def begin(self, cohort: Cohort, folder: Path) -> str:
        for run_id in self.contest.runs:  # the resume state does not have runs whose slots others took
            result = read_result(folder / run_id)
            if result is not None and run_id not in self._standings:
                self._standings[run_id] = Standing.from_result(result)
        if self.seconds is None or self._deadline is not None:  # begun anew with fewer slots: the time runs on
            return ""
        self.seconds_before = cohort.seconds
        self._deadline = self._clock() + self.seconds - cohort.seconds
        if not cohort.num_steps:
            return ""
        left = max(0.0, self.seconds - cohort.seconds)
        return f"budget: {cohort.seconds:.0f} s were trained before, the other {left:.0f} s are left"

    def is_late(self, num_active: int) -> bool:
        if self._deadline is None:
            return False
        return self._clock() + num_active * self._score_seconds >= self._deadline

    def judge(self, members: Iterable[AnyMember], fresh: Collection[str], *, is_late: bool) -> None:
        seated = {member.run.id: member for member in members}
        for run_id, member in seated.items():
            progress = member.progress
            self._standings[run_id] = Standing(
                progress.history, progress.status, progress.message, progress.best_metric
            )
        active = {run_id: member for run_id, member in seated.items() if member.is_active}
        lost = self.contest.find_losers(self._standings, fresh & active.keys())
        for run_id, member in active.items():
            if run_id in lost:
                member.progress.status, member.progress.message = STOPPED_EARLY, lost[run_id]
            elif is_late:
                member.progress.status, member.progress.message = STOPPED_EARLY, SPENT

    def admit(self, entered: Iterable[AnyMember]) -> None:
        for member in entered:
            if member.is_active and self.is_late(1):
                member.progress.status = STOPPED_EARLY
                member.progress.message = SPENT if member.progress.history else f"{SPENT}: it never began"


def refuse_several() -> None:
    """Refuse a time budget in several processes: their clocks differ."""
    if (size := current_process().size) > 1:
        raise BadConfig(
            f"a time budget is for one process, and this is one of {size}",
            "start it without `torchrun`, or leave out `--budget`",
        )
