"""The work of several plans as one list: every run once, whoever asks for it; what trains together; in which order.

The most valuable work comes first: of every study the first seed of everything with its best-known learning rates, then
the next tier, so that studies that are cut short have whole tables of fewer seeds. Of two units of a tier that of the
study named first comes first. Runs that go on from others come after the cohort that trains those. A cohort that was
stopped goes on before anything is begun.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inlay.studies.run.ledger import Ledger
from inlay.studies.spec.planning import Item, Plan
from inlay.training.cohort.fit import has_known_heads, structure_of, trains_apart
from inlay.training.cohort.memory import MAX_COHORT
from inlay.training.cohort.resume import list_stopped
from inlay.training.run.run import is_finished

# Stacks are as wide as the widest slot: above this size a cohort of its own is cheaper than padding the others to it.
_PADDED_TO = 64
# Copies of the backbone are trained one after another by the same programs; so few that others may begin the rest.
_COPIES_IN_A_ROW = 8


@dataclass(frozen=True, eq=False)
class Unit:
    """Work that is done at once: runs that train together or in a row, or one piece of another kind; each run once."""

    kind: str
    items: tuple[Item, ...]
    """what has no record yet"""
    along: tuple[Item, ...] = ()
    """what ended before the rest of its cohort was stopped: it goes on whole"""
    is_begun: bool = False
    """whether it was stopped, and has a state to go on from"""

    @property
    def is_finetuned(self) -> bool:
        """Whether its runs train copies of the backbone's weights, one after another."""
        return any(item.is_finetuned for item in self.items)

    @property
    def is_row(self) -> bool:
        """Whether several copies are to be trained, one after another."""
        return self.is_finetuned and len(self.items) > 1

    @property
    def num_together(self) -> int:
        """Runs that train at the same time, where memory allows."""
        return 1 if self.is_finetuned else len(self.items) + len(self.along)

    @property
    def cost(self) -> float:
        return sum(item.cost for item in self.items)

    @property
    def num_runs(self) -> int:
        return len(self.items)

    @property
    def likeness(self) -> tuple[Any, ...]:
        """Units that have it in common are trained by the same programs."""
        return _likeness(self.items[0])

    def take(self, items: Iterable[Item]) -> Unit:
        """The same work with some of its items only."""
        return dataclasses.replace(self, items=tuple(items))

    def singly(self, items: Iterable[Item]) -> list[Unit]:
        """Some of its items, each as a unit that begins anew."""
        return [Unit(self.kind, (item,)) for item in items]

    def describe(self) -> str:
        """Its arms, tasks and settings in a few words."""
        arms = list(dict.fromkeys(item.arm.name for item in self.items))
        tasks = list(dict.fromkeys(task for item in self.items for task in item.all_tasks))
        first = ", ".join(arms[:3]) + (f" … {arms[-1]}" if len(arms) > 3 else "")
        where = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
        where += ", one after another" if len(tasks) > 1 and self.items[0].sequence else ""
        seeds = sorted({item.seed for item in self.items})
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
        return f"{first} on {where}, {which}{self._settings}"

    @property
    def _settings(self) -> str:
        """What tells it apart from units of the same arms: sizes, where the arms do not name them, and one rate."""
        trained = [item for item in self.items if item.run is not None or item.sequence]
        sizes = {item.config.method.size for item in trained if str(item.config.method.size) not in item.arm.name}
        found = sorted(size for size in sizes if size is not None)
        said = "" if not found else f", size {found[0]}" + (f" to {found[-1]}" if len(found) > 1 else "")
        rates = {item.config.train.lr for item in trained}
        return said + (f", lr {rates.pop():g}" if len(rates) == 1 and None not in rates else "")


def make_agenda(
    plans: Sequence[Plan], ledger: Ledger, runs: Path, *, in_pieces: bool = False, num_jobs: int = 1
) -> list[Unit]:
    """What has no record yet, as units of work, the most valuable first. `runs` has the folders of runs.

    `in_pieces` keeps cohorts to as many runs as train at a time: so that several processes can take them, and a
    deadline finds most of what was begun finished. Of the copies of the backbone each of `num_jobs` gets its part.
    """
    wanted = {item.id: item for item in map(_choose, _by_run(plans, ledger))}
    begun = _find_begun(plans, wanted, runs)
    groups: dict[tuple[Any, ...], list[Item]] = {}
    by_study = {plan.study.name: plan for plan in plans}
    num_copies = Counter(item.tier for item in wanted.values() if item.is_finetuned)
    lengths = {tier: min(_COPIES_IN_A_ROW, -(-number // num_jobs)) for tier, number in num_copies.items()}
    for item in sorted(wanted.values(), key=lambda item: item.tier):
        groups.setdefault(_key(item, by_study[item.study]), []).append(item)
    units = [unit for key, group in groups.items() for unit in _slice(key[0], group, lengths, in_pieces=in_pieces)]
    order = {name: number for number, name in enumerate(by_study)}
    return begun + _after_sources(sorted(units, key=lambda unit: (unit.items[0].tier, order[unit.items[0].study])))


def _after_sources(units: Sequence[Unit]) -> list[Unit]:
    """The same order, but what goes on from runs comes after the unit that trains them: alone they would take as long
    as their cohort does."""
    trained = {item.id: unit for unit in units for item in unit.items}
    placed: dict[int, Unit] = {}
    for unit in units:
        sources = [trained.get(item.source.id) for item in unit.items if item.source is not None]
        for each in (*sources, unit):
            if each is not None:
                placed.setdefault(id(each), each)
    return list(placed.values())


def _by_run(plans: Sequence[Plan], ledger: Ledger) -> list[list[Item]]:
    """Those who ask for a run and have no record of it, run by run."""
    asking: dict[str, list[Item]] = {}
    for plan in plans:
        for item in plan.items:
            if not ledger.is_known(item):
                asking.setdefault(item.id, []).append(item)
    return list(asking.values())


def _choose(asking: Sequence[Item]) -> Item:
    """The one whose record serves all (spans are more work, on the same run); else the one that wants it soonest."""
    return min(asking, key=lambda item: (item.arm.kind != "spans", item.tier))


def _find_begun(plans: Sequence[Plan], wanted: dict[str, Item], runs: Path) -> list[Unit]:
    """Cohorts that were stopped, each as it was, if its runs are of these plans; they are taken out of `wanted`."""
    known = {item.id: item for plan in plans for item in plan.items}
    begun = []
    # Of a row that broke some may have begun anew by themselves: it has them all, and nobody else is at them.
    for ids in sorted(list_stopped(runs / "cohorts"), key=len, reverse=True):
        is_left = any(run_id in wanted and not is_finished(runs / run_id) for run_id in ids)
        if is_left and all(run_id in known for run_id in ids):
            along = tuple(known[run_id] for run_id in ids if run_id not in wanted)
            items = tuple(wanted.pop(run_id) for run_id in ids if run_id in wanted)
            begun.append(Unit("runs", items, along, is_begun=True))
    return begun


def _likeness(item: Item) -> tuple[Any, ...]:
    if item.run is None:
        return (item.arm.kind,)
    method, rates, _, num_parts = structure_of(item.run)  # not whether it is alone
    return (method, rates, num_parts, has_known_heads(item.run))


def _key(item: Item, plan: Plan) -> tuple[Any, ...]:
    """What items of one unit have in common."""
    if item.run is None:
        return (item.arm.kind, item.id)
    width = max(_PADDED_TO, item.config.method.size or 0)
    structure = (*structure_of(item.run), trains_apart(item.run, plan.backbone))
    return ("runs", plan.backbone.fingerprint, tuple(plan.study.fit.items()), structure, width, item.source is None)


def _slice(kind: str, group: list[Item], lengths: Mapping[int, int], *, in_pieces: bool) -> list[Unit]:
    """A group as units: whole, or as many runs as train at once, the most wanted first, like lengths together.

    Copies of the backbone come in rows, each of one tier and as long as `lengths` says: they do not train at once.
    """
    ordered = sorted(group, key=lambda item: (item.tier, -item.num_samples))
    if group[0].is_finetuned:
        tiers = itertools.groupby(ordered, key=lambda item: item.tier)
        return [Unit(kind, tuple(row)) for tier, own in tiers for row in _cut(list(own), lengths[tier])]
    if not in_pieces or len(group) <= MAX_COHORT:
        return [Unit(kind, tuple(group))]
    return [Unit(kind, tuple(row)) for row in _cut(ordered, MAX_COHORT)]


def _cut(items: list[Item], most: int) -> Iterator[list[Item]]:
    return (items[start : start + most] for start in range(0, len(items), most))
