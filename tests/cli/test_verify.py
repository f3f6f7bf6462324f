"""The proof that versions stand, and what it says when one does not."""

from __future__ import annotations

import shutil
from pathlib import Path

from .conftest import Inlay, Mail


def test_verify_proves_a_version_bit_for_bit(inlay: Inlay, mail: Mail) -> None:
    ended = inlay("verify", "--json")
    assert ended.status == 0
    (check,) = ended.data["checks"]
    assert (ended.data["stands"], check["stands"], check["is_exact"]) == (True, True, True)
    assert check["differences"]["canonical"] == 0
    assert "bit for bit" in inlay("verify", "mail").out


def test_verify_fails_when_bytes_were_changed(inlay: Inlay, mail: Mail) -> None:
    (stored,) = (mail.store / "objects").glob("??/*.safetensors")
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    ended = inlay("verify")
    assert ended.status == 7
    assert "mail@1" in ended.out
    assert "NO" in ended.out
    assert "error: 1 of 1 version" in ended.err
    assert inlay("verify", "--json").data["stands"] is False


def test_verify_says_when_a_backbone_cannot_be_found(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(mail.backbone, tmp_path / "elsewhere"))
    train = ("train", mail.data, "--task", "other", "--backbone", moved, "--epochs", 1, "--size", 4, "--max-length", 24)
    assert inlay(*train).status == 0
    shutil.rmtree(moved)
    ended = inlay("verify", "--json")
    assert ended.status != 0
    found = {check["version"]: check for check in ended.data["checks"]}
    assert found["mail@1"]["stands"]
    assert "no folder" in found["other@1"]["problem"]
    assert inlay("verify", "other", "--backbone", mail.backbone).status == 0, "the same backbone in another place"
