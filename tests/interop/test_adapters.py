"""Inlay against the `adapters` library itself: the same weights give the same logits, whichever way they went.

Run by `make interop`, which makes the library's own environment first.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.data.tasks import Split
from inlay.errors import Unsupported
from inlay.exchange import ImportOptions, export_folder, import_folder
from inlay.model.bank.methods import SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.settings.run_config import MethodConfig
from inlay.store import Store
from predicted import predict_split

pytestmark = pytest.mark.interop

HEAD = {"num_labels": 3, "id2label": {0: "no", 1: "maybe", 2: "yes"}}
ONE_LAYER, POOLED = {**HEAD, "layers": 1}, {**HEAD, "layers": 1, "use_pooler": True}
# name of the case -> what the library is asked to train
TRAINED: dict[str, dict[str, Any]] = {
    "double_seq_bn": {"config": "double_seq_bn", "head": HEAD},
    "seq_bn": {"config": "seq_bn", "head": ONE_LAYER},
    "par_bn": {"config": "par_bn", "head": HEAD},
    "learned-scale": {"config": "scaled_par_bn", "head": ONE_LAYER},
    "channel-scale": {"config": "double_seq_bn", "changes": {"scaling": "channel"}, "head": HEAD},
    "attention-parallel": {"config": "par_bn", "changes": {"mh_adapter": True, "output_adapter": False}, "head": HEAD},
    "gelu": {"config": "double_seq_bn", "changes": {"non_linearity": "gelu", "scaling": 0.5}, "head": HEAD},
    "gelu_new": {"config": "seq_bn", "changes": {"non_linearity": "gelu_new"}, "head": HEAD},
    "leave-out": {"config": "double_seq_bn", "changes": {"leave_out": [0, 2]}, "head": HEAD},
    "sizes": {"config": "seq_bn", "changes": {"reduction_factor": {"1": 2, "default": 8}}, "head": HEAD},
    "lora": {"config": "lora", "changes": {"r": 4, "alpha": 12}, "head": HEAD},
    "lora-wide": {"config": "lora", "changes": {"intermediate_lora": True, "output_lora": True}, "head": ONE_LAYER},
    "ia3": {"config": "ia3", "head": HEAD},
    "safetensors": {"config": "double_seq_bn", "head": HEAD, "safetensors": True},
    "multilabel": {"config": "seq_bn", "head": {**ONE_LAYER, "multilabel": True}},
    "regression": {"config": "seq_bn", "head": {"num_labels": 1}},
}
FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta-v2")
# DeBERTa's query and key also project relative positions, so Inlay refuses what the library's lora and ia3 change.
REFUSED = [("deberta-v2", case) for case, job in TRAINED.items() if job["config"] in ("lora", "ia3")]
OF_ONE_FAMILY = {
    ("bert", "pooler"): {"config": "double_seq_bn", "head": POOLED},
    ("bert", "static"): {"config": "seq_bn", "static": {"num_labels": 3}},
    ("roberta", "static"): {"config": "lora", "static": {"num_labels": 2}},
}
JOBS = {(family, case): job for family in FAMILIES for case, job in TRAINED.items()} | OF_ONE_FAMILY
CASES = [key for key in JOBS if key not in REFUSED]

# name of the case -> a method of Inlay that AdapterHub can express, and the head it gets
LEAVING: dict[str, tuple[MethodConfig, HeadSpec]] = {
    "houlsby": (MethodConfig("houlsby", 6, norms="none"), HeadSpec("classify", 3, "cls")),
    "houlsby-part": (
        MethodConfig("houlsby", 5, norms="none", places=("attention",), layers="1:", activation="gelu-exact"),
        HeadSpec("classify", 2, "cls", hidden="tanh"),
    ),
    "shared": (MethodConfig("houlsby", 4, norms="none", sharing="within-layer"), HeadSpec("multilabel", 2, "cls")),
    "pfeiffer": (MethodConfig("pfeiffer", 7, activation="swish"), HeadSpec("classify", 3, "cls")),
    "parallel": (MethodConfig("parallel", 16, activation="tanh"), HeadSpec("regress", 1, "cls", 3.0, 2.0)),
    "lora": (
        MethodConfig("lora", 4, alpha=10.0, linears=("value", "expand", "contract")),
        HeadSpec("classify", 3, "cls"),
    ),
    "ia3": (MethodConfig("ia3", linears=("value", "expand"), layers="0,2"), HeadSpec("classify", 3, "cls")),
}


@pytest.fixture(scope="session")
def in_adapters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], dict[str, torch.Tensor]]:
    """A function: jobs -> the logits the library gives to each."""
    python = Path(os.environ.get("INLAY_INTEROP", ".interop")).absolute() / "bin" / "python"
    assert python.exists(), "make the environment first: `make interop`"

    def answer(jobs: dict[str, Any]) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("jobs")
        (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf8")
        script = Path(__file__).with_name("in_adapters.py")
        command = [python, script, folder / "jobs.json", folder / "answers.json"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        answers = json.loads((folder / "answers.json").read_text(encoding="utf8"))
        return {key: torch.tensor(logits) for key, logits in answers.items()}

    return answer


def make_inputs(backbone: Any, texts: list[str]) -> dict[str, Any]:
    """The rows as the library takes them, from Inlay's tokenizer: two versions of it may differ."""
    encoded = dict(backbone.tokenizer(texts, padding=True))
    return {name: [list(row) for row in rows] for name, rows in encoded.items()}


@pytest.fixture(scope="session")
def trained(backbone_folder: Any, backbone_of: Any, texts: list[str], in_adapters: Any, tmp_path_factory: Any) -> Any:
    """(family, case) -> the folder the library saved, and the logits it gave."""
    root, jobs = tmp_path_factory.mktemp("trained"), {}
    for (family, case), job in JOBS.items():
        folder = root / family / case
        folder.mkdir(parents=True)
        inputs = make_inputs(backbone_of(family), texts)
        about = {"name": "task", "folder": str(folder), "backbone": str(backbone_folder(family)), "inputs": inputs}
        jobs[f"{family}/{case}"] = {**job, **about}
    answers = in_adapters(jobs)
    return {key: (root / key, logits) for key, logits in answers.items()}


@pytest.mark.parametrize(("family", "case"), CASES)
def test_trained_in_adapters_gives_the_same_logits_in_inlay(family, case, trained, backbone_of, texts, tmp_path):
    folder, expected = trained[f"{family}/{case}"]
    backbone, store = backbone_of(family), Store(tmp_path)
    imported = import_folder(folder, backbone, store, ImportOptions(name="task"))
    loaded = store.load(imported.version)
    spec = SlotSpec.from_stored(loaded.manifest.method, loaded.manifest.head)
    split = Split(texts, None, None, [])
    logits = torch.stack(predict_split(spec, loaded.tensors, backbone, split, loaded.manifest.max_length))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert logits.std(0).min() > 1e-4, "rows that all get the same answer prove nothing"
    if case not in ("regression", "static"):
        assert loaded.manifest.labels == ("no", "maybe", "yes")


@pytest.mark.parametrize(("family", "case"), REFUSED)
def test_what_inlay_cannot_do_is_refused_by_name(family, case, trained, backbone_of, tmp_path):
    folder, _ = trained[f"{family}/{case}"]
    with pytest.raises(Unsupported, match=r"linear layer `(query|key)` of the backbone family `deberta-v2`"):
        import_folder(folder, backbone_of(family), Store(tmp_path), ImportOptions(name="task"))


LEAVING_CASES = [(family, case) for family in FAMILIES for case in LEAVING]


@pytest.fixture(scope="session")
def exported(
    backbone_folder: Any, backbone_of: Any, texts: Any, publish_random: Any, in_adapters: Any, tmp_path_factory: Any
) -> Any:
    """(family, case) -> Inlay's logits, and those of the library for the exported folder."""
    root, jobs, own = tmp_path_factory.mktemp("exported"), {}, {}
    store = Store(root / "store")
    for family, case in LEAVING_CASES:
        backbone, key = backbone_of(family), f"{family}/{case}"
        method, head = LEAVING[case]
        (root / family).mkdir(exist_ok=True)
        version = publish_random(store, f"{family}-{case}".replace("/", "-"), backbone, SlotSpec.of(method, head))
        export_folder(version.reference, store, backbone, "adapterhub", root / key)
        loaded = store.load(version)
        split = Split(texts, None, None, [])
        own[key] = torch.stack(predict_split(SlotSpec.of(method, head), loaded.tensors, backbone, split, 64))
        jobs[key] = {
            "folder": str(root / key),
            "backbone": str(backbone_folder(family)),
            "inputs": make_inputs(backbone, texts),
        }
    answers = in_adapters(jobs)
    return {key: (own[key], answers[key]) for key in jobs}


@pytest.mark.parametrize(("family", "case"), LEAVING_CASES)
def test_exported_from_inlay_gives_the_same_logits_in_adapters(family, case, exported):
    ours, theirs = exported[f"{family}/{case}"]
    head = LEAVING[case][1]
    torch.testing.assert_close(theirs, ours * head.target_std + head.target_mean, rtol=1e-5, atol=1e-5)
    assert ours.std(0).min() > 1e-4, "rows that all get the same answer prove nothing"
