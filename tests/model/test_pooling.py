"""What a backbone's outputs are read by: its files' word, a trained pooler, else the mean; never an untrained one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from inlay.errors import StoreDamaged, Unsupported
from inlay.model import load_backbone
from inlay.model.backbone.families import FAMILIES
from inlay.model.backbone.pooling import describe_noise
from tiny_backbones import untrain_pooler

HAVING = [name for name, family in FAMILIES.items() if family.pooler is not None]


@pytest.fixture
def made(backbone_folder, tmp_path):
    """A function: family -> a copy of its tiny backbone, whose pooler is as transformers draws one unless `trained`."""

    def make(family, *, trained=False, modes=None, dtype=torch.float32, prefix=""):
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(backbone_folder(family), folder)
        if not trained:
            untrain_pooler(folder)
        tensors = load_file(folder / "model.safetensors")
        named = {f"{prefix}{name}": tensor.to(dtype) for name, tensor in tensors.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        if modes is not None:
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        return load_backbone(str(folder), device="cpu")

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HAVING)
def test_an_untrained_pooler_is_neither_the_default_nor_taken(made, family, dtype):
    backbone = made(family, dtype=dtype)
    assert backbone.has_pooler
    assert backbone.default_pooling == backbone.resolve_pooling("auto") == "mean"
    with pytest.raises(Unsupported, match=r"never trained \(its bias is 0 everywhere .* std 0\.02\d\d") as caught:
        backbone.resolve_pooling("pooler")
    assert "--pooling mean" in caught.value.hint
    assert backbone.resolve_pooling("pooler", takes_noise=True) == "pooler"


def test_an_untrained_pooler_is_found_in_a_pretraining_checkpoint_too(made):
    assert made("bert", prefix="bert.").pooler_noise
    backbone = made("bert", prefix="bert.", trained=True)
    assert (backbone.default_pooling, backbone.pooler_noise) == ("pooler", "")


@pytest.mark.parametrize("family", HAVING)
def test_a_trained_pooler_is_taken_and_is_the_default_of_bert_alone(made, family):
    backbone = made(family, trained=True)
    assert backbone.resolve_pooling("pooler") == "pooler"
    assert backbone.default_pooling == ("pooler" if family == "bert" else "mean")
    assert ("trained" in backbone.pooling_reason) is (family == "bert")


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.decoder is None])
def test_the_word_of_the_files_comes_first_in_every_family(made, family):
    for trained in (True, False):
        backbone = made(family, trained=trained, modes={"pooling_mode_cls_token": True})
        assert (backbone.default_pooling, "`cls_token`" in backbone.pooling_reason) == ("cls", True)
        backbone = made(family, trained=trained, modes={"pooling_mode_mean_tokens": True})
        assert (backbone.default_pooling, "`mean_tokens`" in backbone.pooling_reason) == ("mean", True)


def test_a_mode_that_inlay_has_not_is_told(made):
    for modes, said in [
        ({"pooling_mode_max_tokens": True}, "`max_tokens`"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "`mean_tokens` and `max_tokens`"),
        ({"pooling_mode": "weightedmean"}, "`weightedmean`"),
    ]:
        backbone = made("bert", trained=True, modes=modes)
        assert backbone.default_pooling == "mean"
        assert backbone.pooling_reason == f"its `1_Pooling/config.json` says {said}, which Inlay does not have"
    assert made("bert", modes={"pooling_mode": "cls"}).default_pooling == "cls"
    assert "no `1_Pooling" in made("bert", modes={"pooling_mode_mean_tokens": False}).pooling_reason


def test_a_file_of_modes_that_is_none_is_an_error(made):
    with pytest.raises(StoreDamaged, match="1_Pooling"):
        made("bert", modes=["mean"])


def test_the_same_weights_say_why_they_are_read_in_two_ways(made):
    told, silent = made("bert", modes={"pooling_mode_mean_tokens": True}), made("bert")
    assert told.fingerprint == silent.fingerprint
    assert told.pooling_reason != silent.pooling_reason
    trained = made("bert", trained=True), made("bert", trained=True, modes={"pooling_mode_mean_tokens": True})
    assert trained[0].fingerprint == trained[1].fingerprint
    assert [item.default_pooling for item in trained] == ["pooler", "mean"]


def test_noise_of_any_size_is_noise_and_anything_learnt_is_not():
    torch.manual_seed(0)
    zeros = torch.zeros(96)
    for draw in (torch.randn, torch.rand):
        for size in (0.009, 0.02, 1.0):
            weight = (draw(96, 96) - (0.5 if draw is torch.rand else 0.0)) * size
            assert describe_noise({"weight": weight, "bias": zeros}, 0.02)
            assert describe_noise({"weight": weight}, 0.02), "transformers fills a bias that is missing with zeros"
            assert not describe_noise({"weight": weight, "bias": zeros + 1e-6}, 0.02)
    noise = 0.02 * torch.randn(96, 96)
    direction = torch.nn.functional.normalize(torch.randn(96), dim=0)
    assert not describe_noise({"weight": noise + torch.outer(direction, direction), "bias": zeros}, 0.02)
    assert not describe_noise({"weight": torch.eye(96), "bias": zeros}, 0.02)
    assert not describe_noise({"weight": noise.abs(), "bias": zeros}, 0.02)
    assert describe_noise({"weight": torch.zeros(96, 96), "bias": zeros}, 0.02)


def test_minilm_says_how_it_is_read_and_that_its_pooler_is_noise():
    backbone = load_backbone("minilm", device="cpu")
    assert backbone.pooling_reason == "its `1_Pooling/config.json` says `mean_tokens`"
    assert "std 0.0091" in backbone.pooler_noise


@pytest.mark.parametrize("width", [128, 384, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_as_pytorch_begins_it_was_never_trained_though_its_bias_is_not_zero(width, dtype):
    torch.manual_seed(width)
    layer = torch.nn.Linear(width, width)
    fresh = {name: tensor.detach().to(dtype) for name, tensor in layer.named_parameters()}
    assert "as PyTorch draws them" in describe_noise(fresh, 0.02)
    moved = fresh["weight"].float() + 2 * width**-0.5 * torch.outer(torch.randn(width), torch.randn(width)) / width**0.5
    assert describe_noise({**fresh, "weight": moved}, 0.02) == ""
