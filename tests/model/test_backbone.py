"""Backbones: found, loaded, frozen, fingerprinted."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inlay.errors import Missing, StoreDamaged, Unsupported
from inlay.model import load_backbone
from inlay.model.backbone.families import FAMILIES
from inlay.model.backbone.loading import BUILT_IN, find_folder
from inlay.model.batch.route import Row, collate

# Computed with transformers 5.17.0 and 5.22.2; a version that changes it would orphan every published task.
MINILM = "1b270ee776ef549a2507f6df6dcc4adad804dd6a36dc5f2f2110833ae6840ba8"


@pytest.fixture
def copy_of(backbone_folder, tmp_path):
    def make(family, name="copy"):
        shutil.copytree(backbone_folder(family), tmp_path / name)
        return tmp_path / name

    return make


def change_weights(folder, change):
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_default_backbone_is_the_real_minilm():
    backbone = load_backbone("minilm", device="cpu")
    assert backbone.fingerprint == MINILM
    assert backbone.num_parameters == 22_713_216
    assert (backbone.anatomy.num_layers, backbone.hidden_size) == (6, 384)
    assert backbone.default_pooling == "mean"  # it is sentence-tuned that way
    assert backbone.has_pooler
    assert backbone.precision == "float32"
    assert backbone.exact_digest == BUILT_IN["minilm"].sha256


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_is_equal_for_a_bf16_copy(backbone_of, copy_of, family):
    folder = copy_of(family)
    change_weights(folder, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    original, copy = backbone_of(family), load_backbone(str(folder), device="cpu")
    assert copy.fingerprint == original.fingerprint
    assert (copy.precision, original.precision) == ("bfloat16", "float32")
    assert copy.exact_digest != original.exact_digest


def test_fingerprint_is_equal_for_a_checkpoint_with_a_pretraining_head(backbone_of, copy_of):
    folder = copy_of("bert")

    def with_head(tensors):
        named = {f"bert.{name}": tensor for name, tensor in tensors.items()}
        return {**named, "cls.predictions.bias": torch.randn(10)}

    change_weights(folder, with_head)
    copy = load_backbone(str(folder), device="cpu")
    assert copy.fingerprint == backbone_of("bert").fingerprint
    assert copy.num_parameters == backbone_of("bert").num_parameters
    batch = collate([Row([2, 11, 45, 3], 0)], copy.pad_id)
    assert torch.equal(copy.hidden(batch), backbone_of("bert").hidden(batch))


def test_fingerprint_sees_one_changed_weight_a_changed_setting_and_a_changed_word(backbone_of, copy_of):
    known = {backbone_of("bert").fingerprint}

    def nudge(tensors):
        tensors["encoder.layer.1.output.dense.weight"][3, 4] += 0.5
        return tensors

    folder = copy_of("bert", "weights")
    change_weights(folder, nudge)
    known.add(load_backbone(str(folder), device="cpu").fingerprint)
    folder = copy_of("bert", "config")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-3}))
    known.add(load_backbone(str(folder), device="cpu").fingerprint)
    folder = copy_of("bert", "words")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"awful"', '"lawful"'))
    known.add(load_backbone(str(folder), device="cpu").fingerprint)
    assert len(known) == 4


def test_fingerprint_sees_another_rotary_base(backbone_of, copy_of):
    folder = copy_of("modernbert")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["full_attention"]["rope_theta"] = 10.0
    (folder / "config.json").write_text(json.dumps(config))
    assert load_backbone(str(folder), device="cpu").fingerprint != backbone_of("modernbert").fingerprint


def test_fingerprint_does_not_depend_on_where_the_folder_lies(backbone_of, copy_of):
    assert load_backbone(str(copy_of("mpnet")), device="cpu").fingerprint == backbone_of("mpnet").fingerprint


@pytest.mark.network
def test_fingerprints_are_equal_under_transformers_5_17_and_the_newest(backbone_of, backbone_folder, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    # with the hub client of its time: 5.17 does not know the newest
    subprocess.run(
        [*pip, "transformers==5.17.0", "huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9", "certifi"],
        check=True,
        capture_output=True,
    )
    program = (
        "import sys, transformers; from inlay.model import load_backbone; print(transformers.__version__);"
        "[print(load_backbone(name, device='cpu').fingerprint) for name in sys.argv[1:]]"
    )
    folders = [str(backbone_folder(family)) for family in FAMILIES]
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2] / "src")])
    done = subprocess.run(
        [sys.executable, "-c", program, *folders, "minilm"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    version, *found = done.stdout.split()
    assert version == "5.17.0"
    assert found == [*(backbone_of(family).fingerprint for family in FAMILIES), MINILM]


def test_pooler_that_was_not_pretrained_is_refused(backbone_of, copy_of):
    folder = copy_of("bert")
    change_weights(folder, lambda tensors: {n: t for n, t in tensors.items() if "pooler" not in n})
    without = load_backbone(str(folder), device="cpu")
    assert not without.has_pooler
    assert without.default_pooling == "mean"
    assert without.fingerprint != backbone_of("bert").fingerprint
    with pytest.raises(Unsupported, match="its file has none"):
        without.resolve_pooling("pooler")
    with pytest.raises(Unsupported, match="its family has none"):
        backbone_of("electra").resolve_pooling("pooler")
    assert backbone_of("bert").resolve_pooling("pooler") == "pooler"


def test_newly_initialised_tensors_are_not_part_of_the_fingerprint(copy_of):
    folder = copy_of("bert")
    change_weights(folder, lambda tensors: {n: t for n, t in tensors.items() if "pooler" not in n})
    torch.manual_seed(1)
    first = load_backbone(str(folder), device="cpu").fingerprint
    torch.manual_seed(2)
    assert load_backbone(str(folder), device="cpu").fingerprint == first


@pytest.mark.parametrize("family", FAMILIES)
def test_pooling_reads_real_tokens_only(backbone_of, family):
    backbone = backbone_of(family)
    short, long = [2, 11, 45, 3], [2, *range(8, 20), 3]
    batch = collate([Row(short, 0), Row(long, 0)], backbone.pad_id)
    alone = collate([Row(short, 0)], backbone.pad_id)
    with torch.no_grad():
        padded, plain = backbone.hidden(batch)[:1], backbone.hidden(alone)
    torch.testing.assert_close(padded[:, :4], plain, atol=1e-5, rtol=1e-5)
    mean = backbone.pool(padded, batch.mask_BT[:1], "mean")
    torch.testing.assert_close(mean, plain.mean(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(backbone.pool(padded, batch.mask_BT[:1], "cls"), plain[:, 0], atol=1e-5, rtol=1e-5)


def test_pooler_is_dense_and_tanh_on_the_first_token(backbone_of):
    backbone = backbone_of("bert")
    batch = collate([Row([2, 11, 45, 3], 0)], backbone.pad_id)
    hidden = backbone.hidden(batch)
    dense = backbone.model.pooler.dense
    expected = torch.tanh(hidden[:, 0] @ dense.weight.T + dense.bias)
    torch.testing.assert_close(backbone.pool(hidden, batch.mask_BT, "pooler"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backbone_without_a_route_is_exactly_itself(backbone_of, backbone_folder, family):
    from transformers import AutoModel

    backbone = backbone_of(family)
    attention = backbone.model.config._attn_implementation
    plain = AutoModel.from_pretrained(backbone_folder(family), attn_implementation=attention).eval()
    batch = collate([Row([2, 11, 45, 12, 3], 0), Row([2, 9, 3], 0)], backbone.pad_id)
    reader = plain.encoder if backbone.is_seq2seq else plain
    with torch.no_grad():
        expected = reader(input_ids=batch.input_ids_BT, attention_mask=batch.mask_BT).last_hidden_state
        assert torch.equal(backbone.hidden(batch), expected)


def test_norms_that_are_not_over_tokens_stay_frozen_and_are_named(backbone_of):
    anatomy = backbone_of("deberta-v2").anatomy
    assert anatomy.frozen_norms == {"encoder.LayerNorm": "it normalises relative-position embeddings, not tokens"}
    assert "convolution" in {norm.key for norm in anatomy.norms}


def test_an_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(Unsupported, match="`gpt2`") as caught:
        load_backbone(str(tmp_path), device="cpu")
    assert "modernbert" in caught.value.hint
    assert "CONTRIBUTING.md" in caught.value.hint


def test_what_cannot_be_found_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(Missing, match="no backbone named `minilmm`"):
        find_folder("minilmm")
    with pytest.raises(Missing, match="no folder"):
        find_folder("./nowhere")
    with pytest.raises(Missing, match="could not be fetched from the hub") as caught:
        find_folder("nobody/nothing")  # the tests run offline
    assert "minilm" in caught.value.hint
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Unsupported, match="holds no backbone"):
        load_backbone(str(tmp_path), device="cpu")


def test_a_built_in_backbone_with_other_weights_is_refused(monkeypatch):
    import dataclasses

    from inlay.model.backbone import loading

    wrong = dataclasses.replace(BUILT_IN["minilm"], sha256="0" * 64)
    monkeypatch.setitem(loading.BUILT_IN, "minilm", wrong)
    with pytest.raises(StoreDamaged, match="sha256 differs"):
        find_folder("minilm")
    absent = dataclasses.replace(wrong, package="no-such-package-here")
    monkeypatch.setitem(loading.BUILT_IN, "minilm", absent)
    with pytest.raises(Missing, match="is not installed") as caught:
        find_folder("minilm")
    assert "inlay backbone get minilm" in caught.value.hint


EVIL = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import BertConfig, BertModel, BertTokenizerFast
class EvilConfig(BertConfig):
    model_type = "evil"
class EvilModel(BertModel):
    config_class = EvilConfig
class EvilTokenizer(BertTokenizerFast):
    pass
"""


@pytest.mark.parametrize("model_type", ["evil", "bert"])
@pytest.mark.parametrize("tokenizer", ["EvilTokenizer", "BertTokenizerFast"])
def test_code_that_comes_with_a_folder_is_never_run_nor_asked_about(
    copy_of, tmp_path, monkeypatch, model_type, tokenizer
):
    folder, marker = copy_of("bert"), tmp_path / "marker"
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "evil.EvilConfig", "AutoModel": "evil.EvilModel", "AutoTokenizer": ["evil.EvilTokenizer"] * 2}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": auto}))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    auto = {"AutoTokenizer": auto["AutoTokenizer"]}
    about |= {"tokenizer_class": tokenizer, "auto_map": auto}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    rows = io.StringIO("y\n" * 9)
    monkeypatch.setattr("sys.stdin", rows)
    if model_type == "evil" or tokenizer == "EvilTokenizer":
        with pytest.raises(Unsupported, match=f"{folder}.*code that comes with its files"):
            load_backbone(str(folder), device="cpu")
    else:
        load_backbone(str(folder), device="cpu")  # transformers' own classes read it
    assert not marker.exists()
    assert rows.tell() == 0


def test_an_adapter_in_a_backbones_folder_does_not_bring_in_another_backbone(copy_of, backbone_folder):
    folder, other = copy_of("bert"), backbone_folder("roberta")
    about = {"peft_type": "LORA", "base_model_name_or_path": str(other)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(Unsupported, match="holds an adapter, not a backbone"):
        load_backbone(str(folder), device="cpu")


def test_a_folder_without_a_tokenizer_is_refused(copy_of):
    folder = copy_of("bert")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(Missing, match="no tokenizer in"):
        load_backbone(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("name", "content"), [("model.safetensors", b"\x10\x00"), ("tokenizer.json", b"{"), ("config.json", b"\xff")]
)
def test_a_broken_file_of_a_backbone_is_an_error_that_names_the_folder(copy_of, name, content):
    folder = copy_of("bert")
    (folder / name).write_bytes(content)
    with pytest.raises((StoreDamaged, Unsupported), match=str(folder)):
        load_backbone(str(folder), device="cpu")


def test_a_folder_without_weights_is_refused(copy_of):
    folder = copy_of("bert")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Missing, match="no weights in"):
        load_backbone(str(folder), device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_reaches_every_place_and_is_restored(copy_of, family):
    folder = copy_of(family)
    config = json.loads((folder / "config.json").read_text())
    names = [name for name in config if "dropout" in name and isinstance(config[name], float)]
    (folder / "config.json").write_text(json.dumps({**config, **dict.fromkeys(names, 0.3)}))
    backbone = load_backbone(str(folder), device="cpu")
    batch = collate([Row([2, *range(8, 30), 3], 0)], backbone.pad_id)
    with torch.no_grad():
        plain = backbone.hidden(batch)
        with backbone.training(0.0):
            assert torch.allclose(backbone.hidden(batch), plain, atol=1e-5)
        with backbone.training(None):
            assert not torch.allclose(backbone.hidden(batch), plain, atol=1e-3)
        assert torch.equal(backbone.hidden(batch), plain)


def test_a_hub_name_is_downloaded_once_asked_for(backbone_folder, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        return str(backbone_folder("bert"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_backbone("google-bert/bert-base-uncased", device="cpu").anatomy.family == "bert"
    assert asked == ["google-bert/bert-base-uncased"]
