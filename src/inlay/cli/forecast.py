"""`inlay study --dry-run`: what is left of studies, in which order, and what it would take. Nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from inlay.cli import screen
from inlay.cli.screen import Column

if TYPE_CHECKING:
    from inlay.research.agenda import Unit
    from inlay.research.estimate import Estimate
    from inlay.research.ledger import Places
    from inlay.research.planning import Plan


def forecast(plans: Sequence[Plan], places: Places, *, measured: bool, as_json: bool) -> None:
    """Put the work that is left of several studies, each run once, and the rows of every arm."""
    from inlay.research.conduct import list_todo
    from inlay.research.estimate import estimate_units

    units = list_todo(plans, places)
    with screen.working("measuring a step of each kind" if measured else "counting"):
        estimates = estimate_units(units, plans, measured=measured)
    rows = _join_alone(units, estimates)
    if not measured:
        for row in rows:
            row["seconds"] = None
    totals = {
        "seconds": round(sum(found.seconds for found in estimates), 1) if measured else None,
        "samples": {
            "cohorts": sum(found.num_samples for unit, found in zip(units, estimates, strict=True) if not unit.is_solo),
            "copies": sum(found.num_samples for unit, found in zip(units, estimates, strict=True) if unit.is_solo),
        },
    }
    if as_json:
        screen.put_json({"studies": [_describe_left(plan, units, rows) for plan in plans], **totals})
    else:
        _put(plans, rows, totals)


def describe(plan: Plan) -> dict[str, Any]:
    """A plan in short, as data."""
    return {
        "study": plan.study.name,
        "profile": plan.study.profile,
        "backbone": plan.backbone.name,
        "runs": len({item.id for item in plan.items}),
        "left_out": list(plan.left_out),
    }


def _describe_left(plan: Plan, units: Sequence[Unit], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A plan with its units; of a run that several studies ask for, the rows are the first one's."""
    samples: dict[str, int] = {}
    for item in (item for unit in units for item in unit.items if item.study == plan.study.name):
        samples[item.arm.name] = samples.get(item.arm.name, 0) + item.num_samples
    return {**describe(plan), "units": [row for row in rows if row["study"] == plan.study.name], "samples": samples}


def _join_alone(units: Sequence[Unit], estimates: Sequence[Estimate]) -> list[dict[str, Any]]:
    """A row for each unit of work; neighbours that train alone, of one arm and seed, have one together."""
    groups: list[tuple[Unit, list[Estimate]]] = []
    for unit, found in zip(units, estimates, strict=True):
        before = groups[-1][0] if groups else None
        if before is not None and unit.is_solo and before.is_solo and _key(before) == _key(unit):
            groups[-1] = (before.take((*before.items, *unit.items)), [*groups[-1][1], found])
        else:
            groups.append((unit, [found]))
    return [
        {
            "study": unit.items[0].study,
            "work": unit.describe(),
            "runs": unit.num_runs,
            "together": max(item.num_slots for item in found),
            "samples": sum(item.num_samples for item in found),
            "seconds": round(sum(item.seconds for item in found), 1),
            "memory_bytes": max(item.memory_bytes for item in found),
        }
        for unit, found in groups
    ]


def _key(unit: Unit) -> tuple[str, str, int]:
    return (unit.items[0].study, unit.items[0].arm.name, unit.items[0].seed)


def _put(plans: Sequence[Plan], rows: Sequence[dict[str, Any]], totals: dict[str, Any]) -> None:
    numbers = [Column(name, is_number=True) for name in ("runs", "together", "rows", "time", "memory")]
    cells = [
        [
            row["study"],
            row["work"],
            str(row["runs"]),
            str(row["together"]),
            screen.count(row["samples"]),
            "-" if row["seconds"] is None else screen.duration(row["seconds"]),
            screen.size(row["memory_bytes"]),
        ]
        for row in rows
    ]
    screen.put_table([Column("study"), Column("work, in this order", is_flexible=True), *numbers], cells)
    screen.put()
    num_left = sum(row["runs"] for row in rows)
    num_done = len({item.id for plan in plans for item in plan.items}) - num_left
    devices = ", ".join(dict.fromkeys(str(plan.backbone.device) for plan in plans))
    samples = totals["samples"]
    screen.put_pairs(
        {
            "runs": f"{num_left} to train, {max(0, num_done)} done",
            "rows": f"{samples['cohorts']:,} in cohorts, {samples['copies']:,} for copies of the backbone",
            "time": "not measured"
            if totals["seconds"] is None
            else f"about {screen.duration(totals['seconds'])} on {devices}, from a measured step of each kind",
        }
    )
