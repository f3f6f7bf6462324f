"""`--precision int8`: where it may be used, and what it changed, measured and said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.screen import Column
from inlay.errors import BadConfig, Unsupported

if TYPE_CHECKING:
    from inlay.cli.evaluate import Judged
    from inlay.serving.drift import Drift
    from inlay.store import Manifest

PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision", metavar="auto|int8", help="int8 answers faster on a CPU and drifts; how far is measured and said"
    ),
]


def check_precision(precision: str, device: str) -> str:
    """The device that a precision wants; refuses one that cannot be had, before any work."""
    if precision not in ("auto", "int8"):
        raise BadConfig(f"no precision named `{precision}`", "use auto or int8")
    if precision == "auto":
        return device
    if device.startswith("cuda"):
        raise Unsupported("int8 on a GPU", "int8 is for answering on a CPU: use `--device cpu`, or leave it out")
    from inlay.model.backbone.int8 import check_int8

    check_int8("cpu")
    return "cpu"


def check_int8_task(manifest: Manifest) -> None:
    """Refuse a task that int8 cannot answer, before its rows are read."""
    from inlay.model import SlotSpec
    from inlay.model.backbone.int8 import check_spec

    check_spec(SlotSpec.from_stored(manifest.method, manifest.head))


def say_drift(drifts: Mapping[str, Drift]) -> None:
    """What int8 changed, on the rows that every version keeps of its dev data."""
    from inlay.serving.drift import Drift

    found = Drift.total(drifts.values())
    if not found.num_probes:
        screen.log("int8: no version kept rows to measure its drift on; `inlay evaluate --precision int8` has some")
        return
    of = f"{screen.count(found.num_probes, 'probe')} of {screen.count(len(drifts), 'version')}"
    changed = f"{screen.share(found.num_changed, found.num_probes)} changed their answer"
    screen.log(f"int8: of {of}, {changed}; the largest change of a logit is {found.largest:.2g}")


def compare(plain: Judged, judged: Judged) -> dict[str, Any]:
    """What int8 changed on labelled rows: every metric before and after, the answers that changed, the rates."""
    from inlay.serving.drift import is_changed

    metrics = {}
    for name, before in plain.report.metrics.items():
        after = judged.report.metrics[name].value
        metrics[name] = {"float32": before.value, "int8": after, "difference": after - before.value}
    outputs = zip(plain.found.outputs, judged.found.outputs, strict=True)
    return {
        "metrics": metrics,
        "num_changed": sum(map(is_changed, plain.outcomes, judged.outcomes)),
        "num_rows": len(plain.outcomes),
        "largest_logit_change": max(float((a.flat - b.flat).abs().max()) for a, b in outputs),
        "seconds": {"float32": plain.rate.seconds, "int8": judged.rate.seconds},
    }


def put_change(change: Mapping[str, Any]) -> None:
    """The comparison as a table and a line."""
    screen.emit()
    columns = [Column("precision"), *(Column(title, is_number=True) for title in ("float32", "int8", "difference"))]
    rows = [
        [name, screen.score(found["float32"]), screen.score(found["int8"]), f"{found['difference']:+.4f}"]
        for name, found in change["metrics"].items()
    ]
    screen.emit_table(columns, rows)
    changed = f"{change['num_changed']:,} of {screen.count(change['num_rows'], 'row')} changed their answer"
    screen.emit(f"{changed}; the largest change of a logit is {change['largest_logit_change']:.2g}")
