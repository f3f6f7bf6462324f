"""The learning curve of a run, as a picture: training loss by step, dev score by epoch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from inlay.store import write_atomically
from inlay.training.cohort.member import PROBE, Progress
from inlay.training.run.run import AnyRun


def draw_curve(path: Path, run: AnyRun, progress: Progress) -> None:
    """Write the picture as PNG. A run that never finished an epoch has a loss curve only."""
    from matplotlib.figure import Figure  # half a second to import, and only at the end of a run

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        range(1, len(progress.losses) + 1), progress.losses, color="#9bb8d3", linewidth=0.8, label="loss per step"
    )
    if progress.history:
        shift = run.config.train.contrast or 0  # number of steps before the first training step
        steps = [_position(line, shift) for line in progress.history]
        known = [line for line in progress.history if line["train_loss"] is not None]
        losses = [line["train_loss"] for line in known]
        axes.plot([_position(line, shift) for line in known], losses, color="#1f4e79", label="loss per epoch")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    lines, names = axes.get_legend_handles_labels()
    if progress.history:
        metric = run.metric
        scores = axes.twinx()
        (line,) = scores.plot(steps, [item["dev"][metric] for item in progress.history], "o-", color="#c0504d")
        best = next((line for line in progress.history if line["epoch"] == progress.best_epoch), progress.history[-1])
        scores.plot(_position(best, shift), best["dev"][metric], "o", color="#c0504d", markersize=10, fillstyle="none")
        scores.set_ylabel(f"dev {metric} (best: {best['dev'][metric]:.4f}, epoch {best['epoch']})", color="#c0504d")
        lines, names = [*lines, line], [*names, f"dev {metric}"]
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False)
    method, train = run.config.method, run.config.train
    axes.set_title(f"{run.name}: {method.name}, size {method.size}, lr {train.lr:g}, seed {train.seed}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_atomically(path, buffer.getvalue())


def _position(line: dict[str, Any], shift: int) -> int:
    """Return an epoch's position on the axis of steps, counting those before training."""
    return int(line["step"]) + (0 if line.get("stage") == PROBE else shift)
