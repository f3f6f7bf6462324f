"""The proof that versions stand, and what it says when one does not."""

from __future__ import annotations

import shutil
from pathlib import Path

from inlay import Store, load_backbone, verify

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


def test_a_task_of_private_texts_is_proved_by_hashes_once_its_rows_are_given_again(
    inlay: Inlay, mail: Mail, tmp_path: Path
) -> None:
    train = ("train", mail.data, "--task", "mail", "--backbone", mail.backbone, "--epochs", 1, "--size", 4)
    train += ("--max-length", 24, "--store", tmp_path)
    for probes in ("hashed", "none"):
        ended = inlay(*train, "--probes", probes, "--name", probes)
        assert ended.status == 0, ended.err
    # 1. nothing of the rows is in the file
    texts = [line.split(",")[0] for line in Path(mail.data).read_text(encoding="utf8").splitlines()[1:]]
    for path in (tmp_path / "objects").glob("??/*.safetensors"):
        content = path.read_bytes()
        assert not [text for text in texts if len(text) > 8 and text.encode() in content]
    assert "the text of" not in inlay("export", "hashed", "--store", tmp_path).err
    assert "rows, as hashes" in inlay("show", "hashed", "--store", tmp_path).out
    # 2. without the rows, bytes and backbone stand; with them the answers too
    bare = inlay("verify", "--store", tmp_path, "--json").data["checks"]
    assert [(check["stands"], check["num_probes"]) for check in bare] == [(True, 0), (True, 0)]
    assert "no rows to answer" in inlay("verify", "--store", tmp_path).out
    renamed = tmp_path / "rows.data"
    renamed.write_bytes(Path(mail.data).read_bytes())
    proved = inlay("verify", "--store", tmp_path, "--rows", mail.data, "--json")
    assert proved.status == 0, proved.err
    assert "--format" in inlay("verify", "--store", tmp_path, "--rows", renamed).err
    other = inlay("verify", "--store", tmp_path, "--rows", renamed, "--format", "csv", "--header", "--json")
    assert other.data == proved.data
    library = verify(load_backbone(str(mail.backbone)), Store(tmp_path), renamed, format="csv")
    assert [check.num_probes for check in library] == [check["num_probes"] for check in proved.data["checks"]]
    first, second = proved.data["checks"]
    assert (first["version"], first["stands"], first["is_exact"]) == ("hashed@1", True, True)
    assert first["num_probes"] > 1
    assert second["num_probes"] == 0


def test_an_unknown_way_to_keep_probes_is_refused_before_training(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    ended = inlay("train", mail.data, "--probes", "sometimes", "--store", tmp_path)
    assert ended.status == 3
    assert "hashed, none, rows" in ended.err
