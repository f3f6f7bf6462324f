"""`inlay study report`: tables, figures and claims of what studies have measured; nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inlay.cli import screen
from inlay.errors import Missing


def put_report(paths: Sequence[Path], results: Path, backbone: str | None, *, as_json: bool) -> None:
    """Draw the report of these studies and say where it lies; refused where there is nothing to report."""
    if not any(results.glob("*/*.json")):
        raise Missing(f"no results in `{results}`", "run a study first, or say where they are with `--out DIR`")
    page = draw(paths, results, backbone)
    if as_json:
        screen.emit_json({"report": str(page), "markdown": str(page.with_suffix(".md"))})
    else:
        screen.emit_pairs({"report": page, "markdown": page.with_suffix(".md")})


def draw(paths: Sequence[Path], results: Path, backbone: str | None = None) -> Path:
    """The page of the report of these studies, of one backbone or of all that have results."""
    from inlay.studies.report.report import draw_report

    with screen.working("drawing tables and figures"):
        return draw_report(paths, results, backbone)
