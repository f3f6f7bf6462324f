"""The report and the model card of a run that was just trained, in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inlay import reports, training
from inlay.store import Version

PAGE, CARD = "report.html", "card.md"


def write_run_report(
    prepared: training.PreparedRun,
    result: training.Result,
    version: Version | None,
    notes: Sequence[str],
    test: dict[str, float] | None = None,
) -> Path:
    """Write the report on a trained run, published or not, and its model card; return where the page lies.

    Where the version must not keep rows (`probes`), the report has none either. `test` has the scores of test rows.
    """
    run, store, size_bytes = prepared.run, prepared.store, None
    if version is None:
        manifest = training.make_manifest(run, result, prepared.backbone, probes="none", test=test)
    else:
        manifest = store.manifest(version)
        infos = store.versions(version.name)
        size_bytes = next((info.size_bytes for info in infos if info.version == version), None)
    trained = reports.TrainedTensors(manifest, result.tensors, prepared.backbone, version, size_bytes)
    facts = reports.TrainingFacts(
        tuple(notes), tuple(result.history), result.best_epoch, result.status, result.seconds, result.peak_memory_bytes
    )
    report = reports.report_on(trained, run.task, facts, shows_rows=prepared.probes == "rows")
    folder = prepared.runs_folder / result.run_id
    reports.write_reports(report, folder / PAGE, folder / CARD)
    return folder / PAGE
