"""Brief reports of the runs that a command trained and did not choose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inlay import model, reports, terminal, training
from inlay.errors import InlayError


def write_briefly(
    runs: Sequence[training.AnyRun],
    results: Sequence[training.Result],
    backbone: model.Backbone,
    folder: Path,
    left_out: str = reports.UNCHOSEN,
) -> None:
    """Write brief reports into the folders of these runs; what cannot be written is said, and nothing is lost by it."""
    if not terminal.is_main_process():
        return
    try:
        reports.write_brief_reports(runs, results, backbone, folder, left_out)
    except InlayError as error:
        terminal.detail(f"no report was written: {error.message}")
