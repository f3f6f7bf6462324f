"""Opening backbones by the names that users give and that stores keep."""

from __future__ import annotations

import shlex
from pathlib import Path

from inlay import model, terminal
from inlay.errors import BadConfig, Missing
from inlay.store import Store


def open_backbone(name: str, device: str = "auto") -> model.Backbone:
    """Load a backbone on the device a user asked for. A folder's path is made absolute, so that it is found later."""
    check_device_name(device)
    with terminal.working(f"loading the backbone {name}"):
        import torch

        if device.startswith("cuda") and not torch.cuda.is_available():
            raise Missing(f"`--device {device}`: torch finds no GPU here", "use `--device cpu`, or see `inlay doctor`")
        return model.load_backbone(full_name(name), device=None if device == "auto" else device)


def full_name(name: str) -> str:
    """Return a backbone's name, with the path of a folder made absolute."""
    is_folder = name not in model.BUILT_IN and Path(name).expanduser().is_dir()
    return str(Path(name).expanduser().resolve()) if is_folder else name


_KEPT = 2  # backbones that `open_once` keeps loaded
_opened: dict[tuple[str, str, int], model.Backbone] = {}


def open_once(name: str, device: str = "auto") -> model.Backbone:
    """Return a backbone that was opened before, or open it. A folder that changed since is opened again."""
    folder = Path(full_name(name))
    stamp = max((path.stat().st_mtime_ns for path in folder.iterdir()), default=0) if folder.is_dir() else 0
    key = (str(folder), device, stamp)
    if key not in _opened:
        found = open_backbone(name, device)
        while len(_opened) >= _KEPT:
            del _opened[next(iter(_opened))]
        _opened[key] = found
    return _opened[key]


def open_stored(asked: str | None, stored: str, store: Store, device: str = "auto") -> model.Backbone:
    """Load the backbone a user asked for, or else the one that stored data name, if the user named it before."""
    return open_backbone(asked or find_stored(stored, store), device)


def find_stored(stored: str, store: Store) -> str:
    """Return the local name of a backbone that stored data name; refuse one that the user never named.

    Imported data must not decide what is downloaded or read.
    """
    found = stored if stored in model.BUILT_IN else store.find_backbone(stored)
    if found is None:
        raise Missing(
            f"the backbone `{stored}` is named by stored data, and you never named it, so it was not loaded",
            f"if you trust it, name it: `--backbone {shlex.quote(stored)}`, or once and for all "
            f"`inlay backbone get {shlex.quote(stored)}`",
        )
    return found


def check_backbone_name(name: str | None) -> None:
    """Refuse a name that is neither built in, nor a folder, nor one of a hub, before any work."""
    if name is not None and "/" not in name:
        model.find_folder(full_name(name))


def check_device_name(device: str) -> None:
    """Refuse a device that Inlay does not support, before any work."""
    plain, _, number = device.partition(":")
    if plain not in ("auto", "cpu", "cuda") or (number and not number.isdigit()):
        raise BadConfig(f"no device named `{device}`", "use auto, cpu or cuda (or cuda:1)")


def device_for_precision(precision: str, device: str) -> str:
    """Return the device that a precision needs; refuse a precision that is not available there."""
    if precision not in ("auto", "int8"):
        raise BadConfig(f"no precision named `{precision}`", "use auto or int8")
    if precision == "auto":
        return device
    model.check_int8("cpu" if device == "auto" else device.partition(":")[0])
    return "cpu"
