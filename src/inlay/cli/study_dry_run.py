"""`inlay study --dry-run`: prints the work that is left, its order, and its cost. Nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inlay.cli import screen
from inlay.cli.screen import Column

if TYPE_CHECKING:
    from inlay.studies import Estimate, StudyDirs, StudyPlan, Unit


def forecast(plans: Sequence[StudyPlan], dirs: StudyDirs, *, measured: bool, as_json: bool) -> None:
    """Print the work left in several studies, counting each run once, and the rows of every arm."""
    from inlay.studies import StudyRecords, count_other_poolings, estimate_units, make_agenda

    known = StudyRecords(plans, dirs)
    units = make_agenda(plans, known, dirs.runs)
    with screen.working("measuring a step of each kind" if measured else "counting"):
        estimates = estimate_units(units, plans, measured=measured)
    left = {plan.study.name: {item.id for item in plan.items if not known.is_known(item)} for plan in plans}
    rows = _join_alone(units, estimates, left)
    if not measured:
        for row in rows:
            row["seconds"] = None
    pairs = list(zip(units, estimates, strict=True))
    num_left = len(set().union(*left.values()))
    totals = {
        "left": num_left,
        "done": len({item.id for plan in plans for item in plan.items}) - num_left,
        "seconds": round(sum(found.seconds for found in estimates), 1) if measured else None,
        "samples": {
            "cohorts": sum(found.num_samples for unit, found in pairs if not unit.is_finetuned),
            "copies": sum(found.num_samples for unit, found in pairs if unit.is_finetuned),
        },
    }
    studies = [
        {
            **_describe_left(plan, units, rows, len(left[plan.study.name])),
            "read_otherwise": count_other_poolings(plan, dirs.results),
        }
        for plan in plans
    ]
    if as_json:
        screen.emit_json({"studies": studies, **totals})
    else:
        _put(plans, studies, rows, totals)


def describe(plan: StudyPlan) -> dict[str, Any]:
    """Return a summary of a plan as data."""
    return {
        "study": plan.study.name,
        "profile": plan.study.profile,
        "backbone": plan.backbone.name,
        "runs": len({item.id for item in plan.items}),
        "left_out": list(plan.left_out),
    }


def describe_others(plan: StudyPlan, dirs: StudyDirs) -> list[str]:
    """Describe the records of the same study and backbone with another pooling."""
    from inlay.studies import count_other_poolings

    return [
        f"{screen.count(number, 'run')} of {plan.study.name} in {dirs.results} with the pooling `{pooling}`, and all "
        "else as here: another experiment, which does not count for this one"
        for pooling, number in count_other_poolings(plan, dirs.results).items()
    ]


def _describe_left(
    plan: StudyPlan, units: Sequence[Unit], rows: Sequence[dict[str, Any]], num_left: int
) -> dict[str, Any]:
    """Return a plan's remaining units as data, each with the plan's own runs; time and memory are the whole unit's.

    The rows of a run that several studies need are counted for the first of them.
    """
    name = plan.study.name
    samples: dict[str, int] = {}
    for item in (item for unit in units for item in unit.items if item.study == name):
        samples[item.arm.name] = samples.get(item.arm.name, 0) + item.num_samples
    own = [{**row, "runs": row["studies"][name]} for row in rows if name in row["studies"]]
    counts = describe(plan)
    return {**counts, "left": num_left, "done": counts["runs"] - num_left, "units": own, "samples": samples}


def _join_alone(
    units: Sequence[Unit], estimates: Sequence[Estimate], left: Mapping[str, set[str]]
) -> list[dict[str, Any]]:
    """Make a row for each unit of work; successive fine-tuned ones of the same arm and seed share a row.

    `left` has the missing runs of each study: a unit belongs to all studies that need one of its runs.
    """
    groups: list[tuple[Unit, list[Estimate]]] = []
    for unit, found in zip(units, estimates, strict=True):
        before = groups[-1][0] if groups else None
        if before is not None and unit.is_finetuned and before.is_finetuned and _key(before) == _key(unit):
            groups[-1] = (before.take((*before.items, *unit.items)), [*groups[-1][1], found])
        else:
            groups.append((unit, [found]))
    rows = []
    for unit, estimated in groups:
        ids = {item.id for item in unit.items}
        row = {
            "studies": {study: len(ids & wanted) for study, wanted in left.items() if ids & wanted},
            "work": unit.describe(),
            "runs": unit.num_runs,
            "together": max(item.num_slots for item in estimated),
            "samples": sum(item.num_samples for item in estimated),
            "seconds": round(sum(item.seconds for item in estimated), 1),
            "memory_bytes": max(item.memory_bytes for item in estimated),
        }
        rows.append(row)
    return rows


def _key(unit: Unit) -> tuple[str, str, int]:
    return (unit.items[0].study, unit.items[0].arm.name, unit.items[0].seed)


def _put(
    plans: Sequence[StudyPlan],
    studies: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
    totals: dict[str, Any],
) -> None:
    numbers = [Column(name, is_number=True) for name in ("runs", "together", "rows", "time", "memory")]
    cells = [
        [
            _name_studies(list(row["studies"])),
            row["work"],
            str(row["runs"]),
            str(row["together"]),
            screen.count(row["samples"]),
            "-" if row["seconds"] is None else screen.duration(row["seconds"]),
            screen.size(row["memory_bytes"]),
        ]
        for row in rows
    ]
    screen.emit_table([Column("study"), Column("work, in this order", is_flexible=True), *numbers], cells)
    screen.emit()
    devices = ", ".join(dict.fromkeys(str(plan.backbone.device) for plan in plans))
    samples = totals["samples"]
    several = {study["study"]: f"{study['left']} to train of {study['runs']}" for study in studies}
    is_shared = sum(study["left"] for study in studies) > totals["left"]
    screen.emit_pairs(
        {
            **(several if len(studies) > 1 else {}),
            "runs": f"{totals['left']} to train, {totals['done']} done"
            + (": runs of several studies are counted once" if is_shared else ""),
            "rows": f"{samples['cohorts']:,} in cohorts, {samples['copies']:,} for copies of the backbone",
            "time": "not measured"
            if totals["seconds"] is None
            else f"about {screen.duration(totals['seconds'])} on {devices}, from a measured step of each kind",
        }
    )


def _name_studies(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"
