"""`inlay doctor`: checks the installed packages, the devices, the backbones, the store and the caches."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from inlay import service
from inlay.caches import find_others_folder, open_compiled
from inlay.cli import screen
from inlay.cli.backbone import describe_built_in
from inlay.cli.flags import JsonOption, StoreOption
from inlay.cli.lazy_packages import data, model
from inlay.cli.screen import Column
from inlay.errors import InlayError, Missing
from inlay.store import Store


@dataclass(frozen=True)
class Diagnosis:
    """A thing that was checked, and its state."""

    what: str
    state: str  # "ok", "missing" (and needed), or "absent" (and optional)
    detail: str


_NEEDED = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "pyarrow", "scikit-learn", "scipy"),
    *("matplotlib", "typer", "rich"),
)
# Optional package -> the extra it belongs to.
_EXTRAS = {
    "datasets": "[hub]: Hugging Face datasets by name",
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "[onnx]: tasks as one ONNX graph"),
    **dict.fromkeys(("fastapi", "uvicorn", "sqlalchemy"), "[serve]: `inlay serve`"),
}


def doctor(store: StoreOption = None, json: JsonOption = False) -> None:
    """Check the environment, the backbones and the store."""
    is_old = sys.version_info < (3, 11)
    python = f"{platform.python_version()} at {sys.executable}"
    findings = [
        Diagnosis("python", "missing" if is_old else "ok", python),
        Diagnosis("inlay", "ok", f"{screen.own_version()} at {Path(__file__).parents[1]}"),
        *(_check_package(name) for name in (*_NEEDED, *_EXTRAS)),
        *_check_machine(),
        *_check_backbones(),
        _check_store(Store(store)),
        _check_service(store),
        _check_cache(),
        _check_compiled(),
    ]
    missing = [finding for finding in findings if finding.state == "missing"]
    if json:
        screen.emit_json({"is_well": not missing, "findings": [vars(finding) for finding in findings]})
    else:
        screen.emit_table(
            ["", "state", Column("detail", is_flexible=True)],
            [[finding.what, finding.state, finding.detail] for finding in findings],
        )
    if missing:
        raise Missing(f"needed, but missing: {', '.join(item.what for item in missing)}", missing[0].detail)


def _check_package(name: str) -> Diagnosis:
    extra = _EXTRAS.get(name)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if extra is not None:
            return Diagnosis(name, "absent", f"{extra}; optional")
        return Diagnosis(name, "missing", f"install it: {sys.executable} -m pip install {name}")
    return Diagnosis(name, "ok", version if extra is None else f"{version}  {extra}")


def _check_machine() -> list[Diagnosis]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = Diagnosis("memory", "ok", screen.size(pages))
    if importlib.util.find_spec("torch") is None:
        return [memory, Diagnosis("devices", "missing", "torch is not installed, so nothing can be computed")]
    with screen.working("asking torch for its devices"):
        try:
            import torch
        except (ImportError, OSError) as error:  # a torch built for another machine fails in many ways
            return [memory, Diagnosis("devices", "missing", f"torch cannot be imported: {error}")]
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    shown = [f"cuda:{i} {gpu.name} ({screen.size(gpu.total_memory)})" for i, gpu in enumerate(gpus)]
    threads = screen.count(torch.get_num_threads(), "thread")
    return [memory, Diagnosis("devices", "ok", ", ".join([f"cpu ({threads}, {os.cpu_count()} cores)", *shown]))]


def _check_backbones() -> list[Diagnosis]:
    try:
        built_in = model.BUILT_IN
    except (ImportError, OSError) as error:
        return [Diagnosis("backbones", "missing", f"`inlay.model` cannot be imported: {error}")]
    findings = []
    for name, entry in built_in.items():
        about = describe_built_in(name, entry)
        if about["state"] == "installed":
            findings.append(Diagnosis(f"backbone {name}", "ok", about["folder"]))
        else:
            problem = about["problem"]
            findings.append(Diagnosis(f"backbone {name}", "missing", f"{problem['message']}; {problem['hint']}"))
    return findings


def _check_store(store: Store) -> Diagnosis:
    try:
        ledger = store.ledger()
    except InlayError as error:
        return Diagnosis("store", "missing", str(error))
    if not store.is_remote and not store.root.exists():
        return Diagnosis("store", "ok", f"{store.root} (will be created with the first task)")
    if not store.is_remote and not os.access(store.root, os.W_OK):
        return Diagnosis("store", "missing", f"{store.root} cannot be written to; choose another with --store")
    num_versions = sum(len(task.versions) for task in ledger)
    about = f"{screen.count(len(ledger), 'task')}, {screen.count(num_versions, 'version')}"
    return Diagnosis("store", "ok", f"{store.place} ({about})")


def _check_service(store: Path | None) -> Diagnosis:
    """Tell whether a service runs on the store, and the states of its processes."""
    status = service.read_status(service.ServeSettings(home=service.find_home(store)))
    if not status.get("is_running"):
        return Diagnosis("service", "absent", "none is running on this store; `inlay serve` starts one")
    processes = [f"{each['name']} {each['state']}" for each in status.get("processes", ())]
    restarts = sum(each["restarts"] for each in status.get("processes", ()))
    again = f"; {screen.count(restarts, 'restart')}" if restarts else ""
    return Diagnosis("service", "ok", f"{status.get('address')} ({', '.join(processes)}{again})")


def _check_cache() -> Diagnosis:
    try:
        cache = data.open_tokens()
    except ImportError as error:
        return Diagnosis("cache", "missing", f"`inlay.data` cannot be imported: {error}")
    except InlayError as error:
        return Diagnosis("cache", "missing", str(error))
    if not cache.limit_bytes:
        return Diagnosis("cache", "absent", "off: $INLAY_CACHE_BYTES is 0")
    used = f"{screen.size(cache.usage().num_bytes)} of at most {screen.size(cache.limit_bytes)}"
    return Diagnosis("cache", "ok", f"{cache.folder} (tokenised texts, {used})")


def _check_compiled() -> Diagnosis:
    what, other = "compiled programs", find_others_folder()
    if other is not None:
        return Diagnosis(what, "ok", f"{other}, set by $TORCHINDUCTOR_CACHE_DIR; `inlay gc` leaves it alone")
    try:
        cache = open_compiled()
    except InlayError as error:
        return Diagnosis(what, "missing", str(error))
    if not cache.limit_bytes:
        off = "not kept by Inlay: $INLAY_CACHE_BYTES is 0, so torch uses a folder of its own"
        return Diagnosis(what, "absent", off)
    used, limit = screen.size(cache.usage().num_bytes), screen.size(cache.limit_bytes)
    return Diagnosis(what, "ok", f"{cache.folder} ({used}; cut to {limit} when a process begins to compile)")
