"""`inlay export`: writes versions as Inlay's own file or in the format of another library."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.flags import BackboneOption, JsonOption, StoreOption
from inlay.cli.lazy_packages import exchange, pipeline
from inlay.errors import BadConfig, UnknownName
from inlay.store import Store, Version

FORMATS = ("inlay", "adapterhub", "peft", "onnx")
"""the values of `--format`; listed here because the package `exchange` is slow to import"""


def export(
    references: Annotated[
        list[str], typer.Argument(metavar="TASK…", help="NAME, NAME@3 or NAME@best; for onnx one or more")
    ],
    format: Annotated[
        str,
        typer.Option("--format", metavar="|".join(FORMATS), help="Inlay's own file, or a folder for another library"),
    ] = "inlay",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="file or folder to write; default: NAME.inlay, NAME-FORMAT"
        ),
    ] = None,
    backbone: BackboneOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Write a version as a file for another store, or a folder for another library.

    `adapterhub` is for the adapters library, `peft` for PEFT; `onnx` writes one graph of all the given tasks, with the
    task id as an input. What a format cannot express is refused, with the reason.
    """
    if format not in FORMATS:
        raise UnknownName("format", format, FORMATS)
    if len(references) == 2 and output is None and format != "onnx":
        output = Path(references.pop())  # `inlay export mail copy.inlay`
    if len(references) > 1 and format != "onnx":
        raise BadConfig(f"`--format {format}` writes one version", "export one at a time, or use `--format onnx`")
    kept = Store(store)
    if format == "onnx":
        about, summary = _export_graph(kept, references, output, backbone)
    elif format == "inlay":
        about, summary = _export_file(kept, references[0], output)
    else:
        about, summary = _export_folder(kept, kept.resolve(references[0]), format, output, backbone)
    if json:
        screen.emit_json(about)
        return
    for note in about.get("notes", ()):
        screen.log(f"note: {note}", "dim")
    screen.emit(summary)


def _export_file(kept: Store, reference: str, output: Path | None) -> tuple[dict[str, Any], str]:
    version = kept.resolve(reference)
    path = kept.export(reference, output or Path(f"{version.name}.inlay"))
    size_bytes, num_probes = path.stat().st_size, len(kept.manifest(version).probes)
    about: dict[str, Any] = {"version": version.reference, "file": str(path), "size_bytes": size_bytes}
    if num_probes:  # others will read them
        rows = screen.count(num_probes, "row")
        about["notes"] = [f"the file has the text of {rows}, as probes; train with `--probes hashed` to keep no texts"]
    return about, f"{version.reference} is in {path} ({screen.size(size_bytes)})"


def _export_folder(
    kept: Store, version: Version, format_name: str, output: Path | None, backbone: str | None
) -> tuple[dict[str, Any], str]:
    """Write a version as a folder of another library; return what was written, as data and in words."""
    target = output or Path(f"{version.name}-{format_name}")
    opened = pipeline.open_stored(backbone, kept.manifest(version).backbone["name"], kept, "cpu")
    folder = exchange.export_folder(version.reference, kept, opened, format_name, target)
    files = {name: len(content) for name, content in folder.files.items()}
    about = {"version": version.reference, "folder": str(target), "files": files, "notes": list(folder.notes)}
    return about, f"{version.reference} is in {target}; how to load it is in {target / 'README.md'}"


def _export_graph(
    kept: Store, references: Sequence[str], output: Path | None, backbone: str | None
) -> tuple[dict[str, Any], str]:
    """Write tasks as one ONNX graph into a new folder; return what was written, as data and in words."""
    if output is None:
        raise BadConfig("`--format onnx` needs a folder to write", "name one with `--output DIR`")
    versions = [kept.resolve(reference) for reference in references]
    opened = pipeline.open_stored(backbone, kept.manifest(versions[0]).backbone["name"], kept, "cpu")
    with screen.working("tracing and checking the graph"):
        made = exchange.export_onnx(kept, references, opened, output)
    names = [version.reference for version in made.versions]
    report = {**dataclasses.asdict(made), "folder": str(made.folder), "versions": names}
    checked = f"{screen.count(made.num_probes, 'probe')} answered in onnxruntime, within {made.difference:.0e}"
    return report, f"{', '.join(names)} in {made.folder} ({screen.size(made.size_bytes)}); {checked}"
