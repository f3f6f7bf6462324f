"""`inlay export --format onnx`: tasks leave the store as one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inlay.cli import screen
from inlay.cli.backbone import open_backbone
from inlay.errors import BadConfig

if TYPE_CHECKING:
    from inlay.store import Store


def export_graph(
    kept: Store, references: Sequence[str], output: Path | None, backbone: str | None
) -> tuple[dict[str, Any], str]:
    """Write tasks as one ONNX graph into a new folder; what was written, as data and in words."""
    if output is None:
        raise BadConfig("`--format onnx` writes a folder", "name it with `--output DIR`")
    versions = [kept.resolve(reference) for reference in references]
    opened = open_backbone(backbone or kept.manifest(versions[0]).backbone["name"], "cpu")
    with screen.working("tracing and checking the graph"):
        from inlay.exchange.onnx import export_onnx

        made = export_onnx(kept, references, opened, output)
    names = [version.reference for version in made.versions]
    report = {**dataclasses.asdict(made), "folder": str(made.folder), "versions": names}
    checked = f"{screen.count(made.num_probes, 'probe')} answered in onnxruntime, within {made.difference:.0e}"
    return report, f"{', '.join(names)} in {made.folder} ({screen.size(made.size_bytes)}); {checked}"
