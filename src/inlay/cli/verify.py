"""`inlay verify`: the proof, version by version, that published versions still stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from inlay import serving
from inlay.cli import screen
from inlay.cli.backbone import check_device_name, open_stored
from inlay.cli.flags import BackboneOption, DeviceOption, JsonOption, StoreOption, open_store
from inlay.cli.rooms import model
from inlay.cli.screen import Column
from inlay.errors import InlayError, StoreDamaged
from inlay.store import Store, Version


def verify(
    references: Annotated[
        list[str] | None, typer.Argument(metavar="TASK", help="NAME (all its versions), NAME@3 or NAME@best")
    ] = None,
    backbone: BackboneOption = None,
    device: DeviceOption = "auto",
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Prove that published versions still stand.

    Their bytes, their backbone and their probes are checked. A version answers its probes alone and in a batch mixed
    with all the others. The answers alone are compared bit for bit on the machine and libraries it was published with.
    """
    check_device_name(device)
    kept = open_store(store)
    versions: list[Version] = []
    checks: list[serving.Check] = []  # a reference that cannot be read costs only its own version

    def hear(version: Version, error: InlayError) -> None:
        checks.append(serving.Check(version, problem=str(error)))

    for reference in references or ():
        is_one = "@" in reference
        named = [kept.resolve(reference)] if is_one else [info.version for info in kept.versions(reference, hear)]
        versions += [version for version in named if version not in versions]
    if not references:
        versions = [info.version for task in kept.ledger(hear) for info in task.versions]
    checks += [] if not versions else _check_all(kept, versions, backbone, device)
    fallen = [check for check in checks if not check.stands]
    if json:
        described = [
            {
                "version": check.version.reference,
                "stands": check.stands,
                "problem": check.problem or None,
                "is_exact": check.is_exact,
                "differences": {"canonical": check.canonical_difference, "engine": check.engine_difference},
            }
            for check in checks
        ]
        screen.emit_json({"stands": not fallen, "checks": described})
    elif checks:
        _put_checks(checks)
    else:
        screen.log(f"no versions in {kept.root} yet")
    if fallen:
        raise StoreDamaged(
            f"{len(fallen)} of {screen.count(len(checks), 'version')} do not stand, "
            f"such as `{fallen[0].version.reference}`: {fallen[0].problem}"
        )


def _check_all(store: Store, versions: Sequence[Version], backbone: str | None, device: str) -> list[serving.Check]:
    """Check all versions and return the findings in order; a missing backbone is a problem of its versions only."""
    checks: dict[Version, serving.Check] = {}
    groups: dict[str, list[Version]] = {}
    for version in versions:
        try:
            groups.setdefault(backbone or store.manifest(version).backbone["name"], []).append(version)
        except InlayError as error:
            checks[version] = serving.Check(version, problem=str(error))
    for name, members in groups.items():
        try:
            frozen = open_stored(backbone, name, store, device)
            checks |= {check.version: check for check in _check_on(frozen, store, members)}
        except InlayError as error:
            checks |= {version: serving.Check(version, problem=str(error)) for version in members}
    return [checks[version] for version in versions]


def _check_on(frozen: model.Backbone, store: Store, versions: Sequence[Version]) -> list[serving.Check]:
    with screen.Meter(f"verifying on {frozen.name}", len(versions)) as meter:
        return serving.verify(versions, frozen, store, lambda check: meter.advance(1, check.version.reference))


def _put_checks(checks: Sequence[serving.Check]) -> None:
    columns = ["version", "stands", "probes alone", "in a mixed batch"]
    rows = []
    for check in checks:
        if not check.stands:
            rows.append([check.version.reference, "NO", "", "", check.problem])
            continue
        alone = "bit for bit" if check.is_exact else f"off by {check.canonical_difference:.1g}, tolerated"
        mixed = f"off by {check.engine_difference:.1g}" if check.engine_difference else "the same"
        rows.append([check.version.reference, "yes", alone, mixed, ""])
    if all(check.stands for check in checks):
        screen.emit_table(columns, [row[:-1] for row in rows])
        num_exact = sum(check.is_exact for check in checks)
        how = "bit for bit" if num_exact == len(checks) else f"{num_exact} of them bit for bit, others to a tolerance"
        screen.emit(f"\n{'it stands' if len(checks) == 1 else f'all {len(checks)} versions stand'}, {how}")
    else:
        screen.emit_table([*columns, Column("problem", is_flexible=True)], rows)
