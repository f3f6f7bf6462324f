"""`inlay plan`: the cost of a run, in parameters counted as in the papers, and in measured time and memory."""

from __future__ import annotations

from typing import Annotated

import typer

from inlay.cli import screen
from inlay.cli.flags import DeviceOption, JsonOption, RunFlags, RunOptions, StoreOption, command_options
from inlay.cli.lazy_packages import data, pipeline, training
from inlay.cli.screen import numbers
from inlay.settings import FitSettings
from inlay.store import Store


@command_options(RunFlags(), fit=("checkpointing",))
def plan(
    run: RunOptions,
    effort: FitSettings,
    tasks: Annotated[
        int, typer.Option("--tasks", metavar="N", min=1, help="also show the size of N such tasks on one backbone")
    ] = 1,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="time a few steps, or only count, which is quick")
    ] = True,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Estimate the cost of a run, compared with full fine-tuning.

    First come parameters by part, counted as in the papers, and bytes on disk; then time and memory, from a few
    measured steps.
    """
    kept = Store(store)
    ready = pipeline.prepare(run.resolve(kept), kept, device)
    pipeline.describe_run(ready.run, ready.backbone)
    if ready.is_finished:
        screen.detail(f"run {ready.run.id} is finished already: training it would cost nothing")
    made = training.count_plan(ready.run, ready.backbone)
    if not json:
        _print_counts(made, ready.run, tasks)
    if measure:
        with screen.working("measuring a few steps"):
            made = training.make_plan(ready.run, ready.backbone, checkpointing=effort.checkpointing)
    if json:
        several = {"totals_of_tasks": made.totals.repeat(tasks).to_json()}
        screen.emit_json({**made.to_json(), **several, "notes": list(ready.run.task.notes)})
    else:
        _print_measured(made, ready.run)


def _print_counts(made: training.RunPlan, run: training.Run, num_tasks: int) -> None:
    """Print what follows from the shapes alone."""
    screen.log()
    parts = ", ".join(f"{screen.count(number)} {part}" for part, number in made.parameters_by_part.items())
    costs = (made.inlay, made.full)
    trained = [cost.trained_parameters for cost in costs]
    rows = [
        ["trained parameters", *map(screen.count, trained)],
        ["of the backbone", *(screen.share(number, made.backbone_parameters) for number in trained)],
        ["on disk", *(screen.size(cost.stored_bytes) for cost in costs)],
    ]
    screen.emit_table(["", *numbers(run.config.method.name, "full fine-tuning")], rows)
    screen.emit()
    # A long context makes several windows.
    at_least = "at least " if data.find_layout(run.reading.kind).overlaps else ""
    screen.emit_pairs(
        {
            "parameters": parts,
            **describe_totals(made.totals),
            **describe_times(made.totals.repeat(num_tasks)),
            "rows": f"{screen.count(made.num_train)} to train, {screen.count(made.num_dev)} dev",
            "steps": f"{at_least}{screen.count(made.num_steps)}",
            "together": f"up to {screen.count(made.max_together, 'run')} like it fit at a time",
            "run": made.run_id,
        }
    )
    for path, why in made.frozen_norms.items():
        screen.emit(f"the layer norm {path} stays frozen: {why}")


def describe_totals(totals: training.Totals) -> dict[str, str]:
    """Return the parameters, counted in each way that papers use, as named lines."""
    found = {}
    if totals.adapters:
        found["adapters alone"] = screen.count(totals.adapters)
    found["without last layer"] = f"{screen.count(totals.trained_without_last)} trained"
    again = f"; {screen.count(totals.replaced)} that replace its own are not counted again" if totals.replaced else ""
    found["with the backbone"] = f"{screen.count(totals.with_backbone)} in all{again}"
    return found


def describe_times(totals: training.Totals) -> dict[str, str]:
    """Return the size of all tasks as a multiple of the backbone, and of each task as a share of it."""
    each = f"{100 * totals.share_per_task:.2f}% of it for each task"
    full = f"full fine-tuning of each: {totals.times_full:g}×"
    return {screen.count(totals.num_tasks, "task"): f"{totals.times_backbone:.2f}× the backbone, {each}; {full}"}


def _print_measured(made: training.RunPlan, run: training.Run) -> None:
    screen.emit()
    if made.token_budget is None or made.truncated_share is None:
        screen.emit_pairs({"time": "not measured", "memory": "not measured"})
        return
    costs = (made.inlay, made.full)
    rows = [
        ["time", *(screen.duration(cost.seconds or 0.0) for cost in costs)],
        ["memory", *(screen.size(cost.peak_memory_bytes or 0) for cost in costs)],
    ]
    screen.emit_table(["", *numbers(run.config.method.name, "full fine-tuning")], rows)
    screen.emit()
    screen.emit_pairs(
        {
            "steps": screen.count(made.num_steps),
            "cut": f"{100 * made.truncated_share:.1f}% of the texts",
            "in memory": f"up to {made.token_budget:,} tokens a forward pass",
        }
    )
