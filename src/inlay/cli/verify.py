"""`inlay verify`: proves, version by version, that published versions still answer as they did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from inlay import serving
from inlay.cli import screen
from inlay.cli.flags import (
    BackboneOption,
    DeviceOption,
    FormatOption,
    HeaderOption,
    JsonOption,
    StoreOption,
)
from inlay.cli.lazy_packages import pipeline
from inlay.cli.screen import Column
from inlay.errors import InlayError, StoreDamaged
from inlay.settings import DataConfig
from inlay.store import Store, Version


def verify(
    references: Annotated[
        list[str] | None, typer.Argument(metavar="TASK", help="NAME (all its versions), NAME@3 or NAME@best")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="FILE", help="the data a task was trained on, if its probes are hashed"),
    ] = None,
    format: FormatOption = "auto",
    header: HeaderOption = None,
    text: Annotated[str | None, typer.Option("--text", metavar="COLUMN", help="column of the text in --rows")] = None,
    pair: Annotated[
        str | None, typer.Option("--pair", metavar="COLUMN", help="column of the second text in --rows")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", metavar="COLUMN", help="column of the label in --rows")
    ] = None,
    backbone: BackboneOption = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Prove that published versions still answer as they did.

    Checks their bytes, their backbone and their probes. A version answers its probes alone and in a batch mixed with
    all the others. The answers alone are compared bit for bit if the machine and the libraries are those it was
    published with. For a version with hashed probes, --rows names a file in which their rows are found.
    """
    pipeline.check_device_name(device)
    pipeline.check_backbone_name(backbone)
    kept = Store(store)
    versions: list[Version] = []
    checks: list[serving.Check] = []  # with those of versions that cannot be read

    def hear(version: Version, error: InlayError) -> None:
        checks.append(serving.Check(version, problem=str(error)))

    for reference in references or ():
        is_one = "@" in reference
        named = [kept.resolve(reference)] if is_one else [info.version for info in kept.versions(reference, hear)]
        versions += [version for version in named if version not in versions]
    if not references:
        versions = [info.version for task in kept.ledger(hear) for info in task.versions]
    columns = DataConfig(format=format, header=header, text=text, pair=pair, label=label)
    given = [] if rows is None else pipeline.read_probe_rows(kept, versions, rows, columns)
    checks += [] if not versions else _check_all(kept, versions, backbone, device, given)
    failed = [check for check in checks if not check.stands]
    if json:
        described = [
            {
                "version": check.version.reference,
                "stands": check.stands,
                "problem": check.problem or None,
                "is_exact": check.is_exact,
                "num_probes": check.num_probes,
                "differences": {"canonical": check.canonical_difference, "engine": check.engine_difference},
            }
            for check in checks
        ]
        screen.emit_json({"stands": not failed, "checks": described})
    elif checks:
        _print_checks(checks)
    else:
        screen.log(f"no versions in {kept.place} yet")
    if failed:
        raise StoreDamaged(
            f"{len(failed)} of {screen.count(len(checks), 'version')} failed, "
            f"such as `{failed[0].version.reference}`: {failed[0].problem}"
        )


def _check_all(
    store: Store, versions: Sequence[Version], backbone: str | None, device: str, rows: Sequence[serving.ProbeRow]
) -> list[serving.Check]:
    """Check all versions and return the results in order; a missing backbone is a problem of its versions only."""
    checks: dict[Version, serving.Check] = {}
    groups: dict[str, list[Version]] = {}
    for version in versions:
        try:
            groups.setdefault(backbone or store.manifest(version).backbone["name"], []).append(version)
        except InlayError as error:
            checks[version] = serving.Check(version, problem=str(error))
    for name, members in groups.items():
        try:
            frozen = pipeline.open_stored(backbone, name, store, device)
            with screen.Meter(f"verifying on {frozen.name}", len(members)) as meter:
                found = serving.verify(
                    members, frozen, store, lambda check: meter.advance(1, check.version.reference), rows=rows
                )
            checks |= {check.version: check for check in found}
        except InlayError as error:
            checks |= {version: serving.Check(version, problem=str(error)) for version in members}
    return [checks[version] for version in versions]


def _print_checks(checks: Sequence[serving.Check]) -> None:
    columns = ["version", "verified", "probes alone", "in a mixed batch"]
    rows = []
    for check in checks:
        if not check.stands:
            rows.append([check.version.reference, "NO", "", "", check.problem])
            continue
        if not check.num_probes:
            rows.append([check.version.reference, "yes", "no rows to answer", "", ""])
            continue
        alone = "bit for bit" if check.is_exact else f"off by {check.canonical_difference:.1g}, within tolerance"
        mixed = f"off by {check.engine_difference:.1g}" if check.engine_difference else "the same"
        rows.append([check.version.reference, "yes", alone, mixed, ""])
    if all(check.stands for check in checks):
        screen.emit_table(columns, [row[:-1] for row in rows])
        num_exact = sum(check.is_exact for check in checks)
        num_bare = sum(not check.num_probes for check in checks)
        others = "others by their bytes and their backbone alone" if num_bare else "others within a tolerance"
        how = "bit for bit" if num_exact == len(checks) else f"{num_exact} of them bit for bit, {others}"
        subject = "the version answers" if len(checks) == 1 else f"all {len(checks)} versions answer"
        screen.emit(f"\n{subject} as published, {how}")
    else:
        screen.emit_table([*columns, Column("problem", is_flexible=True)], rows)
