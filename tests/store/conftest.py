"""A store of its own for each test, and manifests that differ where a test says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.store import Manifest, Probe, Store


@pytest.fixture(params=["folder", "object storage"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store in a folder, and one on object storage, which here is a folder too, asked by its `file://` address."""
    if request.param == "folder":
        return Store(tmp_path / "store")
    pytest.importorskip("obstore")
    monkeypatch.setenv("INLAY_LOCAL", str(tmp_path / "local"))
    return Store(f"file://{tmp_path}/bucket")


@pytest.fixture
def make_manifest() -> Callable[..., Manifest]:
    def make(**changes: Any) -> Manifest:
        fields: dict[str, Any] = {
            "kind": "classify",
            "labels": ("ham", "spam"),
            "metric": "accuracy",
            "method": {"name": "houlsby", "size": 8},
            "head": {"kind": "classify", "num_labels": 2, "pooling": "mean"},
            "max_length": 128,
            "metrics": {"dev": {"accuracy": 0.98}, "test": {"accuracy": 0.97}},
            "data_digest": "d" * 64,
            "dev_digest": "e" * 64,
            "backbone": {"name": "minilm", "fingerprint": "f" * 64, "family": "bert", "num_parameters": 22_713_216},
            "run_id": "0123456789abcdef",
            "num_parameters": 100,
            "probes": (Probe("free entry", None, (0.1, -2.5)),),
            "config": {"train": {"lr": 5e-4, "seed": 0}},
        }
        return Manifest(**{**fields, **changes})

    return make


@pytest.fixture
def make_tensors() -> Callable[[int], dict[str, torch.Tensor]]:
    def make(seed: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(3, 4, generator=generator) for name in ("head.weight", "sites.0.down", "sites.0.up")}

    return make
