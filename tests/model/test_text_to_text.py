"""T5 as a family: its anatomy, the counts in docs/methods.md, and embeddings tied or not as the files have them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inlay.errors import StoreDamaged
from inlay.model import load_backbone
from inlay.model.backbone.sites import survey
from inlay.model.bank.methods import layout, resolve_method
from inlay.model.heads.generation import EncoderStates
from inlay.settings.run_config import MethodConfig

SMALL = {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}


def shape_of(**config):
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**config))


@pytest.mark.parametrize(
    ("shape", "backbone", "size", "total", "norms"),
    [(BASE, 222_903_552, 24, 1_928_832, 47_616), (SMALL, 60_506_624, 16, 446_848, 32 * 512)],
)
def test_single_task_adapters_have_the_published_number_of_parameters(shape, backbone, size, total, norms):
    model = shape_of(**shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == backbone
    specs = layout(survey(model), resolve_method(MethodConfig("mahabadi", size)))
    assert sum(spec.num_parameters for spec in specs) == total
    assert sum(spec.num_parameters for spec in specs if spec.part == "norms") == norms


def test_adapters_stand_before_dropout_in_both_stacks_and_not_on_cross_attention():
    anatomy = survey(shape_of(**SMALL))
    assert (anatomy.num_layers, anatomy.num_readers) == (12, 6)
    places = {site.path for site in anatomy.sites if site.place != "output"}
    assert places == {
        *(f"{stack}.block.{i}.layer.0.SelfAttention.o" for stack in ("encoder", "decoder") for i in range(6)),
        *(f"encoder.block.{i}.layer.1.DenseReluDense" for i in range(6)),
        *(f"decoder.block.{i}.layer.2.DenseReluDense" for i in range(6)),
    }


@pytest.mark.parametrize("projection", ["relu", "gated-gelu"])
def test_plain_and_gated_feed_forward_layers_are_both_found(projection):
    anatomy = survey(shape_of(**SMALL, feed_forward_proj=projection))
    first = {linear.name: linear.path.rpartition(".")[2] for linear in anatomy.linears if linear.layer == 0}
    gated = {"expand": "wi_0", "gate": "wi_1"} if projection != "relu" else {"expand": "wi"}
    assert first == {"query": "q", "key": "k", "value": "v", "project": "o", "contract": "wo", **gated}


def test_embeddings_are_tied_or_not_as_the_files_have_them(backbone_of):
    tied, untied = backbone_of("t5"), backbone_of("mt5")
    for backbone in (tied, untied):
        files = load_file(backbone.folder / "model.safetensors")
        model = backbone.model
        for module in (model.shared, model.encoder.embed_tokens, model.decoder.embed_tokens):
            assert module.weight is model.shared.weight
        assert torch.equal(model.shared.weight, files["shared.weight"])
        output = files.get("lm_head.weight", files["shared.weight"])
        assert torch.equal(model.lm_head.weight, output)
    assert tied.model.lm_head.weight is tied.model.shared.weight
    assert not torch.equal(untied.model.lm_head.weight, untied.model.shared.weight)


@pytest.mark.parametrize(("family", "scale"), [("t5", 32**-0.5), ("mt5", 1.0)])
def test_outputs_are_scaled_where_the_embedding_writes_them(backbone_of, family, scale):
    backbone = backbone_of(family)
    ids = torch.tensor([[5, 9, 11, 1]])
    with torch.no_grad():
        read = EncoderStates(backbone.model.encoder(input_ids=ids).last_hidden_state, torch.ones_like(ids))
        states = backbone.model.decoder(input_ids=ids, encoder_hidden_states=read.states_BTD).last_hidden_state
        logits, _ = backbone.write(read, ids)
    torch.testing.assert_close(logits, scale * states @ backbone.model.lm_head.weight.T)


def test_a_state_dict_loaded_into_a_tied_model_would_have_overwritten_the_embedding(backbone_of):
    # The trap: transformers calls every T5 tied, and a plain `load_state_dict` then writes the output layer over it.
    backbone = backbone_of("mt5")
    files = load_file(backbone.folder / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(backbone.folder)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    model.load_state_dict(files, strict=False)
    is_tied = torch.equal(model.shared.weight, model.lm_head.weight)
    assert is_tied == (not torch.equal(model.shared.weight, files["shared.weight"]))
    assert torch.equal(backbone.model.shared.weight, files["shared.weight"])


def test_copies_of_the_embedding_in_a_file_are_no_part_of_the_fingerprint(backbone_of, tmp_path):
    backbone = backbone_of("t5")
    shutil.copytree(backbone.folder, tmp_path / "copy")
    tensors = load_file(backbone.folder / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors["shared.weight"].clone()
    save_file(tensors, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    copied = load_backbone(str(tmp_path / "copy"), device="cpu")
    assert (copied.fingerprint, copied.num_parameters) == (backbone.fingerprint, backbone.num_parameters)
    assert copied.num_parameters == sum(parameter.numel() for parameter in backbone.model.parameters())


def test_different_embeddings_for_reading_and_writing_are_refused(backbone_of, tmp_path):
    shutil.copytree(backbone_of("t5").folder, tmp_path / "odd")
    tensors = load_file(tmp_path / "odd" / "model.safetensors")
    tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    save_file(tensors, tmp_path / "odd" / "model.safetensors", {"format": "pt"})
    with pytest.raises(StoreDamaged, match="different embeddings"):
        load_backbone(str(tmp_path / "odd"), device="cpu")


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_an_output_layer_of_its_own_that_is_not_in_the_files_is_missed(backbone_of, tmp_path, family):
    """Tied instead, it would write with the wrong matrix. Only a folder that says it is tied may leave it out."""
    folder = tmp_path / "half"
    shutil.copytree(backbone_of(family).folder, folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(StoreDamaged, match=r"weights have no `lm_head\.weight`"):
        load_backbone(str(folder), device="cpu")
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load_backbone(str(folder), device="cpu").model
    assert model.lm_head.weight is model.shared.weight
