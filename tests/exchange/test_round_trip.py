"""What leaves as another library's folder and comes back is what it was."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from inlay.errors import BadConfig, Missing, WrongBackbone
from inlay.exchange import FORMATS, ImportOptions, export_folder, import_folder, named_backbone
from inlay.model.bank.methods import METHODS, SlotSpec
from inlay.model.heads.heads import HeadSpec
from inlay.serving import Engine, Request
from inlay.serving.verification import verify
from inlay.settings.run_config import MethodConfig
from inlay.store import Store

CLS, HIDDEN = HeadSpec("classify", 3, "cls"), HeadSpec("classify", 3, "cls", hidden="tanh")
POOLER = HeadSpec("classify", 3, "pooler")
METHOD_CASES = {
    "houlsby": MethodConfig("houlsby", 6, norms="none"),
    "pfeiffer": MethodConfig("pfeiffer", 5, activation="gelu", layers="1:"),
    "parallel": MethodConfig("parallel", 7, scale=2.0),
    "lora": MethodConfig("lora", 4, alpha=6.0, linears=("query", "value", "contract")),
    "dora": MethodConfig("dora", 4, alpha=6.0, linears=("query", "value", "contract")),
    "ia3-outputs": MethodConfig("ia3", linears=("key", "value", "expand")),
    "ia3": MethodConfig("ia3"),
    "norms": MethodConfig("norms"),
    "norms-encoder": MethodConfig("norms", norms="encoder"),
}
EXPRESSIBLE = [
    *(
        ("adapterhub", family, method, CLS)
        for family in ("bert", "roberta", "distilbert")
        for method in ("houlsby", "pfeiffer", "parallel", "lora", "ia3-outputs")
    ),
    ("adapterhub", "bert", "houlsby", HIDDEN),
    ("adapterhub", "bert", "lora", POOLER),
    ("adapterhub", "deberta-v2", "pfeiffer", HIDDEN),
    *(
        ("peft", family, method, head)
        for family, head in (("bert", POOLER), ("bert", HIDDEN), ("roberta", HIDDEN), ("mpnet", HIDDEN))
        for method in ("lora", "dora", "ia3-outputs", "ia3", "norms", "norms-encoder")
    ),
]


@pytest.mark.parametrize(("format_name", "family", "case", "head"), EXPRESSIBLE)
def test_export_and_import_give_equal_tensors(format_name, family, case, head, backbone_of, publish_random, tmp_path):
    backbone, store = backbone_of(family), Store(tmp_path / "store")
    version = publish_random(store, "task", backbone, SlotSpec.of(METHOD_CASES[case], head))
    export_folder("task", store, backbone, format_name, tmp_path / "folder")
    back = import_folder(tmp_path / "folder", backbone, store, ImportOptions(name="back"))
    before, after = store.load(version), store.load(back.version)
    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in before.tensors.items():
        assert torch.equal(after.tensors[name], tensor), name
    ours = SlotSpec.from_stored(before.manifest.method, before.manifest.head)
    theirs = SlotSpec.from_stored(after.manifest.method, after.manifest.head)
    assert theirs.head == ours.head
    assert theirs.layout(backbone.anatomy) == ours.layout(backbone.anatomy)
    assert (theirs.method.scale, theirs.method.activation) == (ours.method.scale, ours.method.activation)
    assert (after.manifest.labels, after.manifest.kind) == (before.manifest.labels, before.manifest.kind)


def test_every_method_is_expressible_in_some_format_or_refused():
    written = {METHOD_CASES[case].name for _, _, case, _ in EXPRESSIBLE}
    assert written == {"houlsby", "pfeiffer", "parallel", "lora", "dora", "ia3", "norms"}
    assert written | {"bitfit", "head", "full", "top", "mahabadi", "pal", "pal-full"} == METHODS.keys()


@pytest.fixture
def exported(tiny_bert, publish_random, tmp_path):
    """A folder of each format, and the store of the version it came from."""
    store = Store(tmp_path / "store")
    publish_random(store, "task", tiny_bert, SlotSpec.of(METHOD_CASES["lora"], POOLER))
    for format_name in FORMATS:
        export_folder("task", store, tiny_bert, format_name, tmp_path / format_name)
    return store


@pytest.mark.parametrize("format_name", FORMATS)
def test_imported_version_is_proved_and_served_like_any_other(format_name, exported, tiny_bert, texts, tmp_path):
    imported = import_folder(tmp_path / format_name, tiny_bert, exported, ImportOptions(name="back"))
    (check,) = verify([imported.version], tiny_bert, exported)
    assert (check.problem, check.is_exact) == ("", True)
    answers = Engine(tiny_bert, exported).predict(
        [Request(task, text) for text in texts for task in ("task", "back@1")]
    )
    for ours, theirs in zip(answers[::2], answers[1::2], strict=True):
        assert ours.outcome == theirs.outcome


@pytest.mark.parametrize("format_name", FORMATS)
def test_imported_version_says_where_it_came_from(format_name, exported, tiny_bert, tmp_path):
    folder = tmp_path / format_name
    imported = import_folder(folder, tiny_bert, exported, ImportOptions(name="back"))
    origin = exported.manifest(imported.version).extra["origin"]
    assert origin["format"] == format_name
    assert origin["library"] == {"adapterhub": "adapters 1.3.0", "peft": "peft 0.21.2"}[format_name]
    assert "adapter_config.json" in origin["files"]
    assert import_folder(folder, tiny_bert, exported, ImportOptions(name="back")).version == imported.version


@pytest.mark.parametrize("format_name", FORMATS)
def test_folder_of_another_backbone_is_refused(format_name, exported, backbone_of, tmp_path):
    with pytest.raises(WrongBackbone):
        import_folder(tmp_path / format_name, backbone_of("roberta"), exported, ImportOptions())


def test_exported_folder_remembers_the_fingerprint(exported, tmp_path, tiny_bert):
    text = (tmp_path / "peft" / "inlay.json").read_text().replace(tiny_bert.fingerprint, "0" * 64)
    (tmp_path / "peft" / "inlay.json").write_text(text)
    with pytest.raises(WrongBackbone, match="fingerprint"):
        import_folder(tmp_path / "peft", tiny_bert, exported, ImportOptions())


@pytest.mark.parametrize(("format_name", "key"), [(name, form.base) for name, form in FORMATS.items()])
def test_built_in_backbone_goes_by_its_hub_name_and_is_found_again(
    format_name, key, exported, tiny_bert, monkeypatch, tmp_path
):
    monkeypatch.setattr(tiny_bert, "name", "minilm")
    folder, hub = tmp_path / "folder", "sentence-transformers/all-MiniLM-L6-v2"
    export_folder("task", exported, tiny_bert, format_name, folder)
    assert json.loads((folder / "adapter_config.json").read_text())[key] == hub
    assert f'from_pretrained("{hub}"' in (folder / "README.md").read_text()
    assert str(tiny_bert.folder) not in (folder / "adapter_config.json").read_text()
    assert named_backbone(folder) == "minilm"
    (folder / "inlay.json").unlink()
    assert named_backbone(folder) == "minilm"


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", ["google-bert/bert-base-uncased", "/backbones/mine"])
def test_other_backbones_go_by_the_name_they_were_loaded_by(
    format_name, name, exported, tiny_bert, monkeypatch, tmp_path
):
    monkeypatch.setattr(tiny_bert, "name", name)
    export_folder("task", exported, tiny_bert, format_name, tmp_path / "folder")
    assert f'from_pretrained("{name}"' in (tmp_path / "folder" / "README.md").read_text()
    (tmp_path / "folder" / "inlay.json").unlink()
    assert named_backbone(tmp_path / "folder") == name


@pytest.mark.parametrize("format_name", FORMATS)
def test_readme_says_the_temperature_where_there_is_one(format_name, exported, tiny_bert, publish_random, tmp_path):
    head = dataclasses.replace(POOLER, temperature=1.75)
    publish_random(exported, "warm", tiny_bert, SlotSpec.of(METHOD_CASES["lora"], head))
    export_folder("warm", exported, tiny_bert, format_name, tmp_path / "warm")
    assert "divides the logits by its temperature, 1.75" in (tmp_path / "warm" / "README.md").read_text()
    assert "temperature" not in (tmp_path / format_name / "README.md").read_text()


def test_numbers_keep_their_scale(tiny_bert, publish_random, texts, tmp_path):
    store = Store(tmp_path / "store")
    head = HeadSpec("regress", 1, "cls", target_mean=50.0, target_std=7.0)
    publish_random(store, "task", tiny_bert, SlotSpec.of(METHOD_CASES["houlsby"], head))
    folder = export_folder("task", store, tiny_bert, "adapterhub", tmp_path / "folder")
    assert any("scale of the targets" in note for note in folder.notes)
    import_folder(tmp_path / "folder", tiny_bert, store, ImportOptions(name="back"))
    answers = Engine(tiny_bert, store).predict([Request(task, text) for text in texts for task in ("task", "back")])
    values = [answer.outcome.value for answer in answers]
    assert values[::2] == pytest.approx(values[1::2], rel=1e-5)
    assert max(values) - min(values) > 1


def test_shared_adapters_leave_as_copies_with_a_note(tiny_bert, publish_random, texts, tmp_path):
    store = Store(tmp_path / "store")
    method = MethodConfig("houlsby", 4, norms="none", sharing="every-2")
    publish_random(store, "task", tiny_bert, SlotSpec.of(method, CLS))
    folder = export_folder("task", store, tiny_bert, "adapterhub", tmp_path / "folder")
    assert any("copies" in note for note in folder.notes)
    import_folder(tmp_path / "folder", tiny_bert, store, ImportOptions(name="back"))
    answers = Engine(tiny_bert, store).predict([Request(task, text) for text in texts for task in ("task", "back")])
    for ours, theirs in zip(answers[::2], answers[1::2], strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits)


def test_labels_are_the_users_or_the_folders_or_numbered(exported, tiny_bert, tmp_path):
    (tmp_path / "peft" / "inlay.json").unlink()
    (tmp_path / "adapterhub" / "inlay.json").unlink()
    named = import_folder(tmp_path / "adapterhub", tiny_bert, exported, ImportOptions(name="named"))
    assert exported.manifest(named.version).labels == ("label-0", "label-1", "label-2")
    numbered = import_folder(tmp_path / "peft", tiny_bert, exported, ImportOptions(name="numbered"))
    assert exported.manifest(numbered.version).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert any("--labels" in note for note in numbered.notes)
    told = import_folder(tmp_path / "peft", tiny_bert, exported, ImportOptions(name="told", labels=("x", "y", "z")))
    assert exported.manifest(told.version).labels == ("x", "y", "z")
    with pytest.raises(BadConfig, match="2 labels for 3 outputs"):
        import_folder(tmp_path / "peft", tiny_bert, exported, ImportOptions(labels=("x", "y")))
    with pytest.raises(BadConfig, match="kind `regress`"):
        import_folder(tmp_path / "peft", tiny_bert, exported, ImportOptions(kind="regress"))


def test_export_overwrites_nothing_and_makes_no_folders_above(exported, tiny_bert, tmp_path):
    with pytest.raises(BadConfig, match="already exists"):
        export_folder("task", exported, tiny_bert, "peft", tmp_path / "peft")
    with pytest.raises(Missing, match="no folder"):
        export_folder("task", exported, tiny_bert, "peft", tmp_path / "typo" / "peft")
    (tmp_path / "empty").mkdir()
    export_folder("task", exported, tiny_bert, "peft", tmp_path / "empty")
    assert not list(tmp_path.glob(".draft-*"))
