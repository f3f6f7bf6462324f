"""What cannot cross exactly is refused by name, with what to do, and nothing is stored or written."""

from __future__ import annotations

import dataclasses
import json
import pickle
import struct
import zipfile
from typing import Any

import pytest
import torch

from inlay.errors import BadData, InlayError, Unsupported, WrongBackbone
from inlay.exchange import FORMATS, ImportOptions, export_folder, import_folder
from inlay.exchange.foreign import TaskToExport
from inlay.model.bank.methods import SlotSpec, resolve_method
from inlay.model.heads.heads import HeadSpec
from inlay.settings.presets import find_preset
from inlay.settings.run_config import MethodConfig
from inlay.store import Store

CLS, POOLER = HeadSpec("classify", 3, "cls"), HeadSpec("classify", 3, "pooler")
HIDDEN = HeadSpec("classify", 3, "cls", hidden="tanh")
MEAN = HeadSpec("classify", 3, "mean")
HOULSBY = MethodConfig("houlsby", 4, norms="none")


@pytest.fixture
def folder(tiny_bert, publish_random, tmp_path):
    """An AdapterHub folder of a Houlsby task on the tiny BERT."""
    store = Store(tmp_path / "other")
    publish_random(store, "task", tiny_bert, SlotSpec.of(HOULSBY, CLS))
    export_folder("task", store, tiny_bert, "adapterhub", tmp_path / "folder")
    return tmp_path / "folder"


def change(path: Any, **settings: Any) -> None:
    """Set settings of the architecture, or of the head, in a config file."""
    tree = json.loads(path.read_text())
    tree["config"].update(settings)
    path.write_text(json.dumps(tree))


def refuse(folder: Any, backbone: Any, error: type[Exception], words: str) -> None:
    store = Store(folder.parent / "store")
    with pytest.raises(error, match=words) as raised:
        import_folder(folder, backbone, store, ImportOptions())
    assert raised.value.hint, "what to do"
    assert store.ledger() == []


SETTINGS: dict[str, Any] = {
    "ln_before": True,
    "ln_after": True,
    "original_ln_after": False,
    "use_gating": True,
    "inv_adapter": "nice",
    "cross_adapter": True,
    "phm_layer": True,
    "non_linearity": "leakyrelu",
    "original_ln_before": True,
    "a_setting_of_tomorrow": 3,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_of_adapterhub_that_inlay_has_not_is_refused_by_name(setting, folder, tiny_bert):
    change(folder / "adapter_config.json", **{setting: SETTINGS[setting]})
    words = {"non_linearity": "non-linearity `leakyrelu`"}.get(setting, f"`{setting}`")
    refuse(folder, tiny_bert, Unsupported, words)


@pytest.mark.parametrize("residual", ["post_add", False])
def test_pfeiffer_with_another_residual_is_refused(residual, folder, tiny_bert):
    change(folder / "adapter_config.json", original_ln_before=True, mh_adapter=False, residual_before_ln=residual)
    refuse(folder, tiny_bert, Unsupported, f"`residual_before_ln` `{residual}`")


WRONG_TYPES: dict[str, Any] = {"scaling": "loud", "leave_out": 3}


@pytest.mark.parametrize("setting", WRONG_TYPES)
def test_value_of_a_wrong_type_is_refused_by_name(setting, folder, tiny_bert):
    change(folder / "adapter_config.json", **{setting: WRONG_TYPES[setting]})
    refuse(folder, tiny_bert, BadData, f"`{setting}` is `{WRONG_TYPES[setting]}`")


@pytest.mark.parametrize("architecture", ["prefix_tuning", "union", "reft", "mtl_lora"])
def test_other_architectures_are_refused_by_name(architecture, folder, tiny_bert):
    change(folder / "adapter_config.json", architecture=architecture)
    refuse(folder, tiny_bert, Unsupported, f"architecture `{architecture}`")


HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"head_type": "question_answering"}, "type `question_answering`"),
    "depth": ({"layers": 3}, "3 layers"),
    "activation": ({"layers": 2, "activation_function": "relu"}, "activation `relu`"),
}


@pytest.mark.parametrize("case", HEADS)
def test_head_that_inlay_has_not_is_refused(case, folder, tiny_bert):
    settings, words = HEADS[case]
    change(folder / "head_config.json", **settings)
    refuse(folder, tiny_bert, Unsupported, words)


def test_adapter_without_a_head_is_refused(folder, tiny_bert):
    (folder / "head_config.json").unlink()
    refuse(folder, tiny_bert, Unsupported, "without a prediction head")


def test_adapter_fusion_is_refused(folder, tiny_bert):
    (folder / "adapter_fusion_config.json").write_text("{}")
    refuse(folder, tiny_bert, Unsupported, "AdapterFusion")


def edit_weights(folder: Any, edit: Any, file: str = "pytorch_adapter.bin") -> None:
    tensors = torch.load(folder / file, weights_only=True)
    edit(tensors)
    torch.save(tensors, folder / file)


def test_tensor_that_nobody_reads_is_refused(folder, tiny_bert):
    edit_weights(folder, lambda tensors: tensors.update({"bert.invertible_adapters.task.F.0.weight": torch.ones(4, 4)}))
    refuse(folder, tiny_bert, Unsupported, "no place for the tensor `bert.invertible_adapters")


def test_adapter_of_a_deeper_backbone_is_refused(folder, tiny_bert):
    def deepen(tensors: dict[str, torch.Tensor]) -> None:
        above = {name.replace("layer.2.", "layer.3."): value for name, value in tensors.items() if "layer.2." in name}
        tensors.update(above)

    edit_weights(folder, deepen)
    refuse(folder, tiny_bert, Unsupported, r"layer\.3\.")


def test_missing_tensor_is_refused(folder, tiny_bert):
    edit_weights(folder, lambda tensors: tensors.pop(min(tensors)))
    refuse(folder, tiny_bert, BadData, "lacks the tensor")


def test_tensor_of_another_width_is_refused(folder, tiny_bert):
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("adapter_up.bias"))
        tensors[name] = torch.zeros(768)

    edit_weights(folder, widen)
    refuse(folder, tiny_bert, WrongBackbone, "is 768; this backbone needs 32")


def test_width_and_family_of_the_config_are_compared(folder, tiny_bert):
    tree = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**tree, "hidden_size": 768}))
    refuse(folder, tiny_bert, WrongBackbone, "hidden_size `768`")
    (folder / "adapter_config.json").write_text(json.dumps({**tree, "model_type": "roberta"}))
    refuse(folder, tiny_bert, WrongBackbone, "model_type `roberta`")


def test_values_that_are_no_numbers_are_refused(folder, tiny_bert):
    edit_weights(folder, lambda tensors: tensors[min(tensors)].fill_(float("nan")))
    refuse(folder, tiny_bert, BadData, "not finite")


class Malicious:
    def __reduce__(self) -> Any:
        return (print, ("this must never run",))


def test_pickle_that_would_run_code_is_refused_unrun(folder, tiny_bert, capsys):
    torch.save({"bert.x": Malicious()}, folder / "pytorch_adapter.bin")
    refuse(folder, tiny_bert, BadData, "more than plain tensors, so it was refused: nothing in it was run")
    assert "never run" not in capsys.readouterr().out


def test_refused_pickle_is_told_without_the_advice_and_the_warnings_of_torch(folder, tiny_bert):
    (folder / "pytorch_adapter.bin").write_bytes(pickle.dumps(Malicious(), protocol=4))
    with pytest.raises(BadData) as raised:  # and no warning, which would be an error here
        import_folder(folder, tiny_bert, Store(folder.parent / "store"), ImportOptions())
    assert "more than plain tensors" in raised.value.message
    assert "weights_only" not in f"{raised.value.message} {raised.value.hint}"


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"PK\x03\x04 half a zip"])
def test_broken_weights_are_refused(content, folder, tiny_bert):
    (folder / "pytorch_adapter.bin").write_bytes(content)
    refuse(folder, tiny_bert, BadData, "pytorch_adapter.bin.*damaged or cut short")


@pytest.mark.parametrize("is_zip", [True, False])
def test_weights_cut_short_are_called_so(is_zip, folder, tiny_bert):
    path = folder / "pytorch_adapter.bin"
    torch.save({"bert.x": torch.ones(1000)}, path, _use_new_zipfile_serialization=is_zip)
    path.write_bytes(path.read_bytes()[:-100])
    refuse(folder, tiny_bert, BadData, "damaged or cut short")


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_broken_config_is_refused(content, folder, tiny_bert):
    (folder / "adapter_config.json").write_text(content)
    refuse(folder, tiny_bert, BadData, "not (JSON|a JSON object)")


def test_folder_of_nobody_is_refused(tmp_path, tiny_bert):
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", tiny_bert, BadData, "without `adapter_config.json`")


LEAVING: dict[str, tuple[str, MethodConfig, HeadSpec, str, str]] = {
    "trained norms": ("adapterhub", MethodConfig("houlsby", 4), CLS, "no trained layer norms", "method.norms=none"),
    "depth": ("adapterhub", MethodConfig("houlsby", 4, norms="none", depth=2), CLS, "one hidden layer", "depth=1"),
    "inner norm": ("adapterhub", MethodConfig("pfeiffer", 4, inner_norm="layer"), CLS, "norm inside", "inner_norm"),
    "multiply": (
        "adapterhub",
        MethodConfig("houlsby", 4, norms="none", combine="multiply"),
        CLS,
        "adapters add",
        "combine=add",
    ),
    "mean pooling": ("adapterhub", HOULSBY, HeadSpec("classify", 3, "mean"), "no pooling `mean`", "--pooling cls"),
    "mix": ("adapterhub", HOULSBY, HeadSpec("classify", 3, "cls", features="mix"), "features `mix`", "features=last"),
    "towers": (
        "adapterhub",
        HOULSBY,
        HeadSpec("classify", 3, "cls", pairs="towers"),
        "texts apart",
        "data.pairs=joined",
    ),
    "towers in PEFT": (
        "peft",
        MethodConfig("lora", 4),
        HeadSpec("classify", 3, "pooler", pairs="towers"),
        "texts apart",
        "data.pairs=joined",
    ),
    "lora project": ("adapterhub", MethodConfig("lora", 4, linears=("query", "project")), CLS, "`project`", "=query"),
    "ia3 inputs": ("adapterhub", MethodConfig("ia3"), CLS, "layer `contract`", "=key,value"),
    "bitfit": ("adapterhub", MethodConfig("bitfit"), CLS, "no method like `bitfit`", "--format inlay"),
    "head only": ("adapterhub", MethodConfig("head"), CLS, "no method like `head`", "--format inlay"),
    "norms": ("adapterhub", MethodConfig("norms"), CLS, "no method like `norms`", "--format inlay"),
    "adapters in PEFT": ("peft", HOULSBY, POOLER, "no method like `houlsby`", "--format adapterhub"),
    "bitfit in PEFT": ("peft", MethodConfig("bitfit"), POOLER, "no method like `bitfit`", "--format inlay"),
    "norms in PEFT's lora": ("peft", MethodConfig("lora", 4, norms="all"), POOLER, "no layer norms", "norms=none"),
    "plain head in PEFT": ("peft", MethodConfig("lora", 4), CLS, "pooling `cls`", "--set train.hidden=pooler"),
    "mean in PEFT": (
        "peft",
        MethodConfig("lora", 4),
        HeadSpec("classify", 3, "mean"),
        "`mean`",
        "--set train.hidden=pooler",
    ),
}


@pytest.mark.parametrize("case", LEAVING)
def test_what_a_format_cannot_express_is_refused_with_what_to_do(case, tiny_bert, publish_random, tmp_path):
    format_name, method, head, words, advice = LEAVING[case]
    store = Store(tmp_path / "store")
    publish_random(store, "task", tiny_bert, SlotSpec.of(method, head))
    with pytest.raises(Unsupported, match=words) as raised:
        export_folder("task", store, tiny_bert, format_name, tmp_path / "folder")
    assert advice in str(raised.value.hint)
    assert not (tmp_path / "folder").exists()


# format, method, head -> every reason, and the whole hint
MANY: dict[str, tuple[str, MethodConfig, HeadSpec, tuple[str, ...], str]] = {
    "houlsby": (
        "adapterhub",
        MethodConfig("houlsby", 4, depth=2),
        MEAN,
        ("no trained layer norms", "; and 2 more: ", "one hidden layer", "no pooling `mean`"),
        "train it with `--set method.norms=none --set method.depth=1 --pooling cls` or `--preset adapterhub-houlsby`",
    ),
    "pfeiffer": (
        "adapterhub",
        MethodConfig("pfeiffer", 4, norms="all"),
        MEAN,
        ("no trained layer norms", "; and 1 more: ", "no pooling `mean`"),
        "train it with `--set method.norms=none --pooling cls` or `--preset adapterhub-pfeiffer`",
    ),
    "bitfit": (
        "adapterhub",
        MethodConfig("bitfit"),
        MEAN,
        ("no method like `bitfit`", "no pooling `mean`"),
        "train it with `--preset adapterhub-houlsby`, or use `--format inlay`",
    ),
    "houlsby in PEFT": (
        "peft",
        MethodConfig("houlsby", 4),
        MEAN,
        ("no method like `houlsby`: it has lora, dora, ia3, norms", "pooling `mean`"),
        "train it with `--method lora --set train.hidden=pooler`, or use `--format adapterhub` or `--format inlay`",
    ),
    "bitfit in PEFT": (
        "peft",
        MethodConfig("bitfit"),
        MEAN,
        ("no method like `bitfit`", "pooling `mean`"),
        "train it with `--method lora --set train.hidden=pooler`, or use `--format inlay`",
    ),
    "lora in PEFT": (
        "peft",
        MethodConfig("lora", 4, norms="all"),
        MEAN,
        ("no layer norms", "pooling `mean`"),
        "train it with `--set method.norms=none --set train.hidden=pooler`",
    ),
    "tag": (
        "adapterhub",
        HOULSBY,
        HeadSpec("tag", 3, "cls"),
        ("no head of the kind `tag`",),
        "use `--format inlay`",
    ),
}


@pytest.mark.parametrize("case", MANY)
def test_all_that_stands_in_the_way_is_told_in_one_refusal(case, tiny_bert):
    format_name, method, head, reasons, hint = MANY[case]
    task = TaskToExport("task", resolve_method(method), head, ("a", "b", "c"), {}, "base")
    with pytest.raises(Unsupported) as raised:
        FORMATS[format_name].write(task, tiny_bert.anatomy)
    assert all(reason in raised.value.message for reason in reasons), raised.value.message
    assert raised.value.hint == hint


def test_presets_that_refusals_name_can_leave():
    for name in ("adapterhub-houlsby", "adapterhub-pfeiffer"):
        settings = find_preset(name).settings
        assert (settings["method.norms"], settings["train.pooling"]) == ("none", "cls")
        assert f"adapterhub-{settings['method.name']}" == name


FAMILIES: dict[str, tuple[str, str, MethodConfig, HeadSpec]] = {
    "no such models in AdapterHub": ("adapterhub", "mpnet", HOULSBY, CLS),
    "no such models there either": ("adapterhub", "modernbert", HOULSBY, CLS),
    "relu in the head": ("peft", "distilbert", MethodConfig("lora", 4), HIDDEN),
    "gelu in the head": ("peft", "electra", MethodConfig("lora", 4), HIDDEN),
    "no tanh layer": ("peft", "roberta", MethodConfig("lora", 4), CLS),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_family_that_a_format_cannot_express_is_refused(case, backbone_of, publish_random, tmp_path):
    format_name, family, method, head = FAMILIES[case]
    store = Store(tmp_path / "store")
    publish_random(store, "task", backbone_of(family), SlotSpec.of(method, head))
    with pytest.raises(InlayError) as raised:
        export_folder("task", store, backbone_of(family), format_name, tmp_path / "folder")
    assert raised.value.hint
    assert isinstance(raised.value, Unsupported)


@pytest.mark.parametrize(
    ("file", "setting", "value"),
    [
        ("head_config.json", ("config",), "soft"),
        ("head_config.json", ("config",), []),
        ("head_config.json", ("config", "label2id"), 3),
        ("head_config.json", ("config", "label2id"), {"a": None, "b": "x", "c": []}),
        ("head_config.json", ("config", "label2id"), {"a": 0, "b": 1, "\ud800": 2}),
        ("adapter_config.json", ("config", "architecture"), [1]),
        ("adapter_config.json", ("config", "scaling"), 10**400),
        ("inlay.json", ("max_length",), True),
        ("inlay.json", ("max_length",), -1),
        ("inlay.json", ("thresholds",), [10**400]),
        ("inlay.json", ("pairs",), "no"),
        ("inlay.json", ("labels",), [1, None, {}]),
        ("inlay.json", ("labels",), ["a", "b", "\udc80"]),
    ],
    ids=range(13),
)
def test_a_setting_of_an_odd_type_is_refused(file, setting, value, folder, tiny_bert):
    path = folder / file
    tree = part = json.loads(path.read_text())
    for key in setting[:-1]:
        part = part[key]
    part[setting[-1]] = value
    path.write_text(json.dumps(tree))
    refuse(folder, tiny_bert, InlayError, ".")


def test_what_no_reader_foresaw_is_an_error_that_names_the_folder(folder, tiny_bert, monkeypatch):
    def fail(*given: Any) -> Any:
        raise AttributeError("'bool' object has no attribute 'get'")

    monkeypatch.setitem(FORMATS, "adapterhub", dataclasses.replace(FORMATS["adapterhub"], read=fail))
    refuse(folder, tiny_bert, BadData, r"folder: its settings cannot be read: AttributeError")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_tensor_declared_larger_than_its_file_is_refused_without_room_being_made(is_zip, folder, tiny_bert):
    path = folder / "pytorch_adapter.bin"
    tensors = torch.load(path, weights_only=True) if path.is_file() else {}
    (folder / "adapter.safetensors").unlink(missing_ok=True)
    name = next(iter(tensors), "bert.x")
    torch.save({**tensors, name: torch.zeros(1).expand(1 << 42)}, path, _use_new_zipfile_serialization=is_zip)
    refuse(folder, tiny_bert, BadData, "declare")


def test_a_storage_of_terabytes_is_refused_before_it_is_made(folder, tiny_bert, monkeypatch):
    path = folder / "pytorch_adapter.bin"
    torch.save({"bert.x": torch.zeros(7919)}, path, _use_new_zipfile_serialization=False)
    (folder / "adapter.safetensors").unlink(missing_ok=True)
    content = path.read_bytes()
    number = b"M" + (7919).to_bytes(2, "little")  # BININT2, of the storage and of the tensor
    assert content.count(number) >= 2
    path.write_bytes(content.replace(number, b"\x8a\x06" + (1 << 44).to_bytes(6, "little")))
    monkeypatch.setattr(torch, "load", lambda *given, **settings: pytest.fail("room was made"))
    refuse(folder, tiny_bert, BadData, "declares more than the file holds")


def test_settings_of_many_megabytes_are_refused_unread(folder, tiny_bert, monkeypatch):
    (folder / "adapter_config.json").write_text('{"a": [' + "[]," * 3_400_000 + "1]}")
    monkeypatch.setattr("json.loads", lambda *given, **settings: pytest.fail("it was parsed"))
    refuse(folder, tiny_bert, BadData, "settings of more than 10,000,000 bytes")


def test_a_zip_of_a_million_entries_is_refused_unread(folder, tiny_bert, monkeypatch):
    path = folder / "pytorch_adapter.bin"
    torch.save({"bert.x": torch.zeros(3)}, path)
    (folder / "adapter.safetensors").unlink(missing_ok=True)
    content = path.read_bytes()
    start, end = content.index(b"PK\x01\x02"), content.index(b"PK\x06\x06")
    entries = content[start:end] * 60_000
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65_535, 65_535, len(entries), start, 0)
    path.write_bytes(content[:start] + entries + last)
    monkeypatch.setattr(torch, "load", lambda *given, **settings: pytest.fail("it was loaded"))
    refuse(folder, tiny_bert, BadData, "damaged or cut short")


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_weights_whose_answers_are_not_finite_are_refused(value, folder, tiny_bert):
    path = next(path for path in folder.iterdir() if path.name.endswith("head.bin") or path.name == "model_head.bin")
    tensors = torch.load(path, weights_only=True)
    torch.save({name: torch.full_like(tensor, value) for name, tensor in tensors.items()}, path)
    refuse(folder, tiny_bert, BadData, "answers to its probes are not finite")


PICKLES = {
    "a text of a terabyte": b"\x80\x02\x8d" + struct.pack("<Q", 1 << 40) + b"abc",
    "bytes of a terabyte": b"\x80\x02\x8e" + struct.pack("<Q", 1 << 40) + b"abc",
    "millions of lists": b"\x80\x02" + b"]" * 5_100_000,
    "millions of marks": b"\x80\x02" + b"(" * 5_100_000 + b".",
}


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_a_pickle_that_would_become_gigabytes_is_refused(content, is_zip, folder, tiny_bert, monkeypatch):
    path = folder / "pytorch_adapter.bin"
    (folder / "adapter.safetensors").unlink(missing_ok=True)
    if is_zip:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")
    else:
        path.write_bytes(content)
    if len(content) > 1_000_000:
        monkeypatch.setattr(torch, "load", lambda *given, **settings: pytest.fail("it was loaded"))
    refuse(folder, tiny_bert, BadData, "refused|damaged|besides the tensors")


def test_a_million_tensors_of_nothing_are_refused_unread(folder, tiny_bert):
    shape = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({str(number): shape for number in range(100_000)}).encode()
    (folder / "pytorch_adapter.bin").unlink()
    (folder / "adapter.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refuse(folder, tiny_bert, BadData, "besides the tensors")
