"""Crafted versions: an import refuses them, and in a store that has them all the same they cost only themselves."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.errors import BadData, InlayError
from inlay.exchange import import_file
from inlay.model import load_backbone
from inlay.store import Store
from inlay.store.format import Export, Summary, encode_object

from .conftest import Inlay, Mail

Tree = dict[str, Any]

NESTED: list[tuple[str, str, Any]] = [
    *(("head", "kind", value) for value in ("regress", "tag", "span", "text", "ordinal", "nothing", ["classify"])),
    *(("head", "num_outputs", value) for value in (0, -1, 3, 10**15, 2.0, True, "2", None)),
    *(("head", "pooling", value) for value in ("tokens", "text", "pooler2", None, ["mean"])),
    *(("head", "temperature", value) for value in (0, -1.0, "1", None, [1], 5e-324, 1e300)),
    *(("head", "target_std", value) for value in (0.0, -2.0, "x")),
    *(("head", "thresholds", value) for value in ([0.1, 0.2], [], "0.5", ["a"], [[1]])),
    *(("head", "texts", value) for value in (["a", "b"], "ab", [1, 2])),
    *(("head", "pairs", value) for value in ("towers", "apart", 3)),
    *(("head", "hidden", value) for value in ("tanh", "relu", [])),
    *(("head", "features", value) for value in ("mix", "first")),
    *(("head", "beams", value) for value in (0, "many")),
    ("head", "prompt", "\ud800"),
    ("head", "surprise", 1),
    *(("method", "name", value) for value in ("lora", "none", "", "hyperformer")),
    *(("method", "size", value) for value in (0, -3, 10**12, 7, "8", 8.5)),
    *(("method", "layers", value) for value in ("0", "99", "a", 3.5, "9" * 5000, "0:" + "9" * 5000, ":," * 900_000)),
    *(("method", "sharing", value) for value in ("every-" + "9" * 5000, "every-0")),
    *(("method", "places", value) for value in (["nowhere"], [1], "attention")),
    *(("method", "activation", value) for value in ("exp", 1)),
    *(("method", "scale", value) for value in (0.0, "1")),
    *(("method", "depth", value) for value in (2, -1, "1")),
    ("method", "surprise", 1),
    *(("backbone", "name", value) for value in (None, 7, ["minilm"])),
    *(("backbone", "fingerprint", value) for value in ("f" * 64, None, 3)),
    *(("backbone", "num_parameters", value) for value in ("many", None, 10**40)),
    *(("extra", "pairs", value) for value in (True, "no", 1)),
    *(("extra", "stride", value) for value in (-1, "9", 1.5)),
    *(("extra", "from", value) for value in ("mail@1", [1], [{}])),
    *(("extra", "joint", value) for value in ("x", {"tasks": "ab"}, {"tasks": [1], "method": "m", "run": "r"})),
    *(("extra", "folds", value) for value in (1, {}, {"num_folds": 1, "num_rows": 1, "standard_error": {}})),
    *(("extra", "origin", value) for value in ("x", {"library": 1})),
]
WHOLE: list[tuple[str, Any]] = [
    *(("run_id", value) for value in ("../../../etc", "a\0b", "/etc")),
    ("config", {"deep": json.loads("[" * 900 + "]" * 900)}),
    *(("kind", value) for value in ("regress", "tag", "span", "text", "ordinal", "multilabels", "")),
    *(("labels", value) for value in ([], ["ham"], ["ham", "ham"], ["a", "b", "c"], ["ham", 1])),
    *(("metric", value) for value in ("rmse", "nothing", "")),
    ("higher_is_better", False),
    *(("max_length", value) for value in (0, -1, 1, 10**6, True, "24")),
    *(("num_parameters", value) for value in (-1, 10**15, 10**40)),
    *(("metrics", {"dev": {"accuracy": value}}) for value in (2.0, -3, "high", [1])),
    ("metrics", {"dev": [1]}),
    *(("probes", [{"text": "a", "pair": None, "logits": value}]) for value in (["nan", "nan"], ["0x1p0"], [0.5], "ab")),
    *(("probes", [{"text": value, "pair": None, "logits": ["0x1p0"] * 2}]) for value in ("", None, 3, "a text")),
    ("probes", [{"text": "a text", "pair": "b", "logits": ["0x1p0"] * 2}]),
    *(("probes", [{"text": value, "pair": None, "logits": ["0x1p0"] * 2}]) for value in ("\ud800", "a \udfff")),
    ("method", []),
    ("head", None),
    ("head", {}),
    ("backbone", {}),
    ("config", []),
    ("format", 0),
    ("format", 99),
]


def craft(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """Every crafted manifest, with words that say what it is."""
    for section, key, value in NESTED:
        yield f"{section}.{key}={value}"[:60], {**tree, section: {**tree[section], key: value}}
    for key, value in WHOLE:
        yield f"{key}={value}"[:60], {**tree, key: value}
    for section, key in (("backbone", "name"), ("backbone", "fingerprint"), ("method", "name"), ("head", "kind")):
        yield f"without {section}.{key}", {**tree, section: {k: v for k, v in tree[section].items() if k != key}}


def pack(tensors: dict[str, torch.Tensor], manifest: str) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, {"manifest": manifest})


def contents(mail: Mail) -> dict[str, bytes]:
    """Objects that no store should take, by what is wrong with them."""
    store = Store(mail.store)
    loaded = store.load(store.resolve("mail"))
    tree = json.loads(loaded.manifest.to_json())
    found = {what: pack(loaded.tensors, json.dumps(changed)) for what, changed in craft(tree)}
    plain = loaded.manifest.to_json()
    name = min(loaded.tensors)
    changes: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "nan": lambda: {name: torch.full_like(loaded.tensors[name], torch.nan)},
        "infinite": lambda: {"head.bias": torch.full((2,), torch.inf)},
        "misshapen": lambda: {name: loaded.tensors[name][..., :1]},
        "transposed": lambda: {"head.weight": loaded.tensors["head.weight"].T},
        "one more": lambda: {"head.more": torch.zeros(3)},
        "other weights": lambda: {"head.weight": torch.randn(loaded.tensors["head.weight"].shape)},
        "whole numbers": lambda: {name: loaded.tensors[name].long()},
        "half": lambda: {name: loaded.tensors[name].half()},
    }
    found |= {what: pack(loaded.tensors | change(), plain) for what, change in changes.items()}
    found["one less"] = pack({key: tensor for key, tensor in loaded.tensors.items() if key != name}, plain)
    found["nan constant"] = pack(loaded.tensors, plain.replace('"max_length":24', '"max_length":NaN'))
    found["5,000 digits"] = pack(loaded.tensors, plain.replace('"max_length":24', f'"max_length":{"9" * 5000}'))
    assert len(found) > 130
    return found


def test_an_import_refuses_every_crafted_version_and_takes_the_true_one(mail: Mail, tmp_path: Path) -> None:
    backbone = load_backbone(str(mail.backbone), device="cpu")
    other, path = Store(tmp_path / "other"), tmp_path / "crafted.inlay"
    taken = []
    for what, content in contents(mail).items():
        path.write_bytes(Export("crafted", hashlib.sha256(content).hexdigest(), content, None).to_bytes())
        try:
            import_file(path, None, other, lambda name: backbone)
            taken.append(what)
        except InlayError:
            continue
    assert taken == []
    assert not (other.root / "objects").exists()
    true = Store(mail.store).export("mail", tmp_path)
    assert import_file(true, None, other, lambda name: backbone).reference == "mail@1"


def test_an_import_refuses_labels_with_half_a_character(mail: Mail, tmp_path: Path) -> None:
    backbone, store, path = load_backbone(str(mail.backbone), device="cpu"), Store(mail.store), tmp_path / "x.inlay"
    loaded = store.load(store.resolve("mail"))
    tree = json.loads(loaded.manifest.to_json())
    content = pack(loaded.tensors, json.dumps(tree | {"labels": ["ham", "a\udc00"]}))
    path.write_bytes(Export("crafted", hashlib.sha256(content).hexdigest(), content, None).to_bytes())
    with pytest.raises(BadData, match="half a character"):
        import_file(path, None, Store(tmp_path / "other"), lambda name: backbone)


@pytest.mark.parametrize("sidecar", [{"seconds": "long"}, {"environment": [1]}, {"environment": {"a": 1}}, {"host": 1}])
def test_an_import_refuses_a_crafted_sidecar(mail: Mail, tmp_path: Path, sidecar: dict[str, Any]) -> None:
    store = Store(mail.store)
    loaded = store.load(store.resolve("mail"))
    content = encode_object(loaded.tensors, loaded.manifest)
    path = tmp_path / "crafted.inlay"
    path.write_bytes(Export("crafted", hashlib.sha256(content).hexdigest(), content, sidecar).to_bytes())
    with pytest.raises(BadData, match=r"sidecar.json: `sidecar\."):
        store.import_(path)


def test_in_a_store_a_crafted_version_costs_only_itself(inlay: Inlay, mail: Mail, tmp_path: Path) -> None:
    store = Store(mail.store)
    names = {}
    for index, (what, content) in enumerate(contents(mail).items()):
        # As an older Inlay took them: any manifest that was JSON, with a summary of its own.
        digest, names[f"bad-{index}"] = hashlib.sha256(content).hexdigest(), what
        path = store.root / "objects" / digest[:2] / f"{digest}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        reference = mail.store / "tasks" / f"bad-{index}" / "1.json"
        reference.parent.mkdir()
        reference.write_text(json.dumps(refer(content, digest)))
    asked = tmp_path / "rows.csv"
    with asked.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "task"])
        writer.writerows(["free win prize", name] for name in ("mail", *names, "mail"))
    listed = inlay("tasks", "--json")
    assert listed.status == 0
    assert "mail" in [task["task"] for task in listed.data["tasks"]]
    answered = inlay("predict", "--input", asked)
    assert answered.status == 0, answered.err
    first, *others, last = answered.lines
    assert first["label"] == last["label"] in ("ham", "spam")
    # What is wrong with some shows in no answer: their probes, their scores.
    harmless = {names[line["task"]] for line in others if not line.get("error")}
    assert {what.split("=")[0] for what in harmless} <= HARMLESS
    checked = inlay("verify", "--json")
    assert checked.status == 7
    stands = {check["version"]: check["stands"] for check in checked.data["checks"]}
    assert stands.pop("mail@1")
    assert len(stands) == len(names)
    assert len([name for name, is_good in stands.items() if is_good]) <= 12
    for name in names:
        for more in ((), ("--json",)):
            assert "Traceback" not in inlay("show", name, *more).err


HARMLESS = {
    "metric",
    "metrics",
    "higher_is_better",
    "num_parameters",
    "probes",
    "other weights",
    "backbone.num_parameters",
}


def refer(content: bytes, digest: str) -> Tree:
    """A reference of format 1, with the summary that a manifest makes, whatever is in it."""
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    text = json.loads(header)["__metadata__"]["manifest"].replace("9" * 5000, "24")
    tree = {"num_labels": 2, **json.loads(text)}
    summary = {key: tree.get(key) for key in Summary.__annotations__}
    about = {"published_at": "2026-01-01T00:00:00+00:00", "size_bytes": len(content)}
    return {"format": 1, "digest": digest, "summary": summary, **about}
