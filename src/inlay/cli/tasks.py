"""`inlay tasks`: lists the tasks of the store and the parameters each adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inlay.cli import screen
from inlay.cli.flags import JsonOption, StoreOption
from inlay.cli.screen import Column, numbers
from inlay.store import Store, TaskInfo


def tasks(store: StoreOption = None, json: JsonOption = False) -> None:
    """List the tasks and the parameters each adds.

    The last line gives the total as a multiple of the backbone, and what full fine-tuning would need.
    """
    kept = Store(store)
    damaged: list[dict[str, str | None]] = []
    ledger = kept.ledger(lambda version, error: damaged.append({"version": version.reference, **error.to_json()}))
    entries, totals = [_describe_task(task) for task in ledger], _total(ledger)
    if json:
        screen.emit_json({"store": str(kept.place), "tasks": entries, "backbones": totals, "damaged": damaged})
        return
    for item in damaged:
        screen.log(f"{item['version']} cannot be read: {item['message']}; {item['hint']}", "yellow")
    if not ledger:
        screen.log(f"no tasks in {kept.place} yet")
        screen.log(screen.repeat_store("train the first one: `inlay train mail.csv --task mail`", store), "dim")
        return
    columns = [Column("task", is_flexible=True), Column("kind", is_flexible=True), *numbers("labels", "versions")]
    screen.emit_table([*columns, "dev score", "method", *numbers("adds", "share")], [_row(entry) for entry in entries])
    screen.emit()
    for total in totals:
        multiple = "?" if total["multiple"] is None else f"{total['multiple']:.2f}"
        many, full = screen.count(total["num_tasks"], "task"), screen.count(total["num_tasks"])
        more = f"{multiple}× its parameters in all (full fine-tuning: {full}×)"
        screen.emit(f"{many} on {total['name']}: {more}")


def _describe_task(task: TaskInfo) -> dict[str, Any]:
    """Return a task as data: its latest version, and its best."""
    latest = task.latest.summary
    best = task.best
    whole = latest.backbone.get("num_parameters", 0)
    return {
        "task": task.name,
        "kind": latest.kind,
        "num_labels": latest.num_labels,
        "versions": [info.version.number for info in task.versions],
        "latest": task.latest.version.reference,
        "metric": latest.metric,
        "score": latest.score(latest.metric),
        "metrics": latest.metrics,
        "best": None if best is None else best.version.reference,
        "best_score": None if best is None else best.summary.score(latest.metric),
        "method": latest.method.get("name"),
        "size": latest.method.get("size"),
        "num_parameters": latest.num_parameters,
        "backbone": latest.backbone.get("name"),
        "share": latest.num_parameters / whole if whole else None,
        "size_bytes": task.latest.size_bytes,
        "published_at": task.latest.published_at,
    }


def _row(entry: dict[str, Any]) -> list[str]:
    versions = str(len(entry["versions"]))
    if entry["best"] not in (None, entry["latest"]):
        versions += f" (best {entry['best'].partition('@')[2]})"
    return [
        entry["task"],
        entry["kind"],
        str(entry["num_labels"] or "-"),
        versions,
        f"{entry['metric']} {screen.score(entry['score'])}",
        screen.name_method(entry["method"], entry["size"]),
        screen.count(entry["num_parameters"]),
        "-" if entry["share"] is None else f"{100 * entry['share']:.2f}%",
    ]


def _total(ledger: Sequence[TaskInfo]) -> list[dict[str, Any]]:
    """Sum up, for each backbone, what its tasks' latest versions add and what full fine-tuning would need."""
    totals: dict[str, dict[str, Any]] = {}
    for task in ledger:
        backbone = task.latest.summary.backbone
        blank = {"name": backbone["name"], "fingerprint": backbone["fingerprint"], "num_tasks": 0, "added": 0}
        total = totals.setdefault(backbone["fingerprint"], {**blank, "num_parameters": backbone["num_parameters"]})
        total["num_tasks"] += 1
        total["added"] += task.latest.summary.num_parameters
    for total in totals.values():
        total["multiple"] = 1 + total["added"] / total["num_parameters"] if total["num_parameters"] else None
        total["full_multiple"] = float(total["num_tasks"])
    return list(totals.values())
