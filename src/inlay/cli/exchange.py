"""`inlay export` and `import`: versions leave the store and come into it, as Inlay's own file or in other formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.backbone import open_backbone
from inlay.cli.export_onnx import export_graph
from inlay.cli.flags import BackboneOption, JsonOption, StoreOption, open_store
from inlay.errors import BadConfig, UnknownName
from inlay.settings.trees import split_list

if TYPE_CHECKING:
    from inlay.store import Store, Version

FORMATS = ("inlay", "adapterhub", "peft", "onnx")
"""what `--format` takes; those but `inlay` are the exchange room's, which is not imported to tell"""


def export(
    references: Annotated[
        list[str], typer.Argument(metavar="TASK…", help="NAME, NAME@3 or NAME@best; for onnx as many as you like")
    ],
    format: Annotated[
        str, typer.Option("--format", metavar="|".join(FORMATS), help="Inlay's own file, or a folder for a library")
    ] = "inlay",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PATH", help="file or folder; default: NAME.inlay, NAME-FORMAT"),
    ] = None,
    backbone: BackboneOption = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Write a version as a file for another store, or a folder for another library.

    `adapterhub` is for the adapters library, `peft` for PEFT; `onnx` makes one graph of all the tasks named, with the
    task id as an input. What a format cannot express is refused with the reason.
    """
    if format not in FORMATS:
        raise UnknownName("format", format, FORMATS)
    if len(references) == 2 and output is None and format != "onnx":
        output = Path(references.pop())  # `inlay export mail copy.inlay`
    if len(references) > 1 and format != "onnx":
        raise BadConfig(f"`--format {format}` writes one version", "export one at a time, or use `--format onnx`")
    kept = open_store(store)
    if format == "onnx":
        about, said = export_graph(kept, references, output, backbone)
    elif format == "inlay":
        about, said = _export_file(kept, references[0], output)
    else:
        about, said = _export_folder(kept, kept.resolve(references[0]), format, output, backbone)
    if json:
        screen.emit_json(about)
        return
    for note in about.get("notes", ()):
        screen.log(f"note: {note}", "dim")
    screen.emit(said)


def _export_file(kept: Store, reference: str, output: Path | None) -> tuple[dict[str, Any], str]:
    version = kept.resolve(reference)
    path = kept.export(reference, output or Path(f"{version.name}.inlay"))
    size_bytes = path.stat().st_size
    about = {"version": version.reference, "file": str(path), "size_bytes": size_bytes}
    return about, f"{version.reference} is in {path} ({screen.size(size_bytes)})"


def _export_folder(
    kept: Store, version: Version, format_name: str, output: Path | None, backbone: str | None
) -> tuple[dict[str, Any], str]:
    """Write a version as a folder of another library, and tell about it."""
    target = output or Path(f"{version.name}-{format_name}")
    opened = open_backbone(backbone or str(kept.manifest(version).backbone["name"]), "cpu")
    from inlay.exchange import export_folder

    folder = export_folder(version.reference, kept, opened, format_name, target)
    files = {name: len(content) for name, content in folder.files.items()}
    about = {"version": version.reference, "folder": str(target), "files": files, "notes": list(folder.notes)}
    return about, f"{version.reference} is in {target}; how to load it is in {target / 'README.md'}"


def import_(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="a file that `inlay export` wrote, or a folder of AdapterHub or PEFT")
    ],
    name: Annotated[str | None, typer.Option("--name", help="call the task this; default: its own name")] = None,
    backbone: Annotated[
        str | None,
        typer.Option("--backbone", metavar="NAME", help="what a folder was trained on; default: the one it names"),
    ] = None,
    labels: Annotated[
        str | None, typer.Option("--labels", metavar="A,B", help="a folder's labels in order; default: its own")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="a folder's kind of task: classify, multilabel, regress")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=4, help="tokens a text is cut to; default: 128")
    ] = None,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Add an exported file, or a folder of AdapterHub or PEFT, to the store."""
    kept = open_store(store)
    if not path.is_dir():
        for option, value in (("--backbone", backbone), ("--labels", labels), ("--kind", kind)):
            if value is not None:
                raise BadConfig(f"`{option}` is for folders; a file says it itself", f"leave `{option}` out")
        version, notes = kept.import_(path, name), tuple[str, ...]()
    else:
        from inlay.exchange import Wishes, import_folder, named_backbone

        wishes = Wishes(name, None if labels is None else split_list(labels), kind, max_length)
        opened = open_backbone(backbone or named_backbone(path), "cpu")
        imported = import_folder(path, opened, kept, wishes)
        version, notes = imported.version, (f"made by {imported.library} for {imported.base}", *imported.notes)
    if json:
        screen.emit_json({"version": version.reference, "digest": version.digest, "notes": list(notes)})
        return
    for note in notes:
        screen.log(f"note: {note}", "dim")
    screen.emit(f"{version.reference} is here; prove it with: inlay verify {version.reference}")
