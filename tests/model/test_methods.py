"""Parameter counts in docs/methods.md, from shapes alone, and what settings a method takes."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import transformers

from inlay.errors import BadConfig, UnknownName
from inlay.model.backbone.sites import survey
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import METHODS, SlotSpec, layout, resolve_method
from inlay.model.batch.route import Row, collate
from inlay.model.heads.heads import HeadSpec
from inlay.model.parts.part import adapted_layers
from inlay.settings.run_config import MethodConfig
from tiny_backbones import random_tensors

BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def shape_of(**config):
    with torch.device("meta"):
        return transformers.BertModel(transformers.BertConfig(**config))


@pytest.fixture(scope="module")
def bert_base():
    return shape_of()


def count(model, parts=("adapters", "norms", "head"), num_labels=2, **method):
    specs = layout(survey(model), resolve_method(MethodConfig(**method)), HeadSpec("classify", num_labels, "pooler"))
    return sum(spec.num_parameters for spec in specs if spec.part in parts)


def test_bert_base_has_the_published_size(bert_base):
    assert sum(parameter.numel() for parameter in bert_base.parameters()) == 109_482_240


def test_one_adapter_of_size_64_has_99136_parameters(bert_base):
    assert count(bert_base, ["adapters"]) == 24 * 99_136 == 2_379_264


def test_base_with_adapters_and_head_has_the_total_of_the_student_reproduction(bert_base):
    assert 109_482_240 + count(bert_base, ["adapters", "head"]) == 111_863_042


@pytest.mark.parametrize(("size", "total"), [(64, 2_419_202), (2, 132_146), (8, 353_474), (256, 9_501_698)])
def test_houlsby_trains_the_published_number_of_parameters(bert_base, size, total):
    assert count(bert_base, size=size) == total


def test_a_third_label_adds_one_row_of_the_head(bert_base):
    assert count(bert_base, num_labels=3) == 2_419_971


def test_layer_norms_and_head_alone_have_39938_parameters(bert_base):
    assert count(bert_base, ["norms", "head"]) == 39_938


def test_encoder_norms_leave_out_the_embedding_norm(bert_base):
    assert count(bert_base, ["norms"], norms="encoder") == 36_864
    assert count(bert_base, ["norms"], norms="all") == 38_400
    assert count(bert_base, ["norms"], norms="none") == 0


def test_bert_large_trains_the_published_number_of_parameters():
    large = shape_of(**BERT_LARGE)
    assert sum(parameter.numel() for parameter in large.parameters()) == 335_141_888
    assert count(large) == 6_446_082


def test_pfeiffer_has_one_adapter_per_layer_and_no_norms(bert_base):
    assert count(bert_base, ["adapters"], name="pfeiffer") == 12 * 99_136
    assert count(bert_base, ["norms"], name="pfeiffer") == 0


def test_weight_decay_is_for_matrices_only(bert_base):
    specs = layout(survey(bert_base), resolve_method(MethodConfig()), HeadSpec("classify", 2, "cls"))
    assert {spec.name.rsplit(".", 1)[1] for spec in specs if spec.decays} == {"down", "up", "weight"}


def test_auto_is_resolved_to_the_methods_own_choice():
    houlsby, pfeiffer = resolve_method(MethodConfig()), resolve_method(MethodConfig(name="pfeiffer"))
    assert (houlsby.activation, houlsby.norms) == ("gelu", "all")
    assert (pfeiffer.activation, pfeiffer.norms) == ("relu", "none")


def test_an_unknown_method_or_activation_is_refused_by_name():
    with pytest.raises(UnknownName, match="no method named `houlsbi`") as caught:
        resolve_method(MethodConfig(name="houlsbi"))
    assert caught.value.hint == "did you mean `houlsby`?"
    with pytest.raises(UnknownName, match="no activation named `gelo`"):
        resolve_method(MethodConfig(activation="gelo"))


def test_sharing_strategies_have_the_counts_of_the_report(bert_base):
    report = {"norms": "none"}
    assert count(bert_base, ["adapters", "norms"], sharing="within-layer", **report) == 1_189_632
    assert count(bert_base, ["adapters", "norms"], sharing="every-1", **report) == 1_189_632
    assert count(bert_base, ["adapters", "norms"], sharing="every-3", **report) == 396_544
    assert count(bert_base, ["adapters", "norms"], sharing="all", **report) == 99_136


def test_the_unshared_model_of_the_report_has_a_tanh_layer_before_the_head(bert_base):
    head = HeadSpec("classify", 2, "cls", hidden="tanh")
    specs = layout(survey(bert_base), resolve_method(MethodConfig(norms="encoder")), head)
    assert sum(spec.num_parameters for spec in specs if spec.name.startswith("head.hidden")) == 590_592
    without_head = [spec for spec in specs if spec.name not in ("head.weight", "head.bias")]
    assert sum(spec.num_parameters for spec in without_head) == 3_006_720


def test_baselines_have_the_counts_of_their_papers(bert_base):
    parts = ["adapters", "norms", "biases", "weights"]
    assert count(bert_base, parts, name="lora") == 294_912
    assert count(bert_base, name="norms") == 39_938
    assert count(bert_base, name="head") == 1_538
    assert count(bert_base, parts, name="ia3") == 12 * (768 + 768 + 3072)
    biases = 5 * 768 + 3072 + 2 * 768  # of six linear layers and two norms
    assert count(bert_base, parts, name="bitfit") == 12 * biases + 768
    assert count(bert_base, parts, name="parallel") == 12 * 99_136
    assert count(bert_base, parts, name="full") == 109_482_240


def test_top_k_layers_are_those_layers_and_the_pooler(bert_base):
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    pooler = 768 * 768 + 768
    assert count(bert_base, ["weights"], name="top") == layer + pooler
    assert count(bert_base, ["weights"], name="top", layers="-3:") == 3 * layer + pooler
    specs = layout(survey(bert_base), resolve_method(MethodConfig("top")), HeadSpec("classify", 2, "mean"))
    assert sum(spec.num_parameters for spec in specs if spec.part == "weights") == layer  # nothing reads the pooler


@pytest.mark.parametrize("layers", ["2", "0:3", "9,11"])
def test_top_layers_must_reach_the_top(bert_base, layers):
    with pytest.raises(BadConfig, match=f"trains the top layers, but `method.layers` is `{layers}`"):
        layout(survey(bert_base), resolve_method(MethodConfig("top", layers=layers)))


def test_extensions_count_what_they_add(bert_base):
    plain, places = count(bert_base, ["adapters"], size=8), 24
    assert count(bert_base, ["adapters"], size=8, depth=3) == plain + places * 2 * (8 * 8 + 8)
    assert count(bert_base, ["adapters"], size=8, inner_norm="layer") == plain + places * 2 * 8
    # no bias before batch norm; its running statistics are stored, but are no parameters
    assert count(bert_base, ["adapters"], size=8, inner_norm="batch") == plain + places * 8
    assert count(bert_base, ["adapters"], size=8, places=("attention",)) == plain // 2
    assert count(bert_base, ["adapters"], size=8, layers="9:") == plain // 4


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ("all", range(12)),
        ("9:", range(9, 12)),
        ("-2:", (10, 11)),
        (":2", (0, 1)),
        ("2:5", (2, 3, 4)),
        ("0,5,-1", (0, 5, 11)),
    ],
)
def test_layers_are_named_as_slices_are(bert_base, layers, found):
    assert adapted_layers(survey(bert_base), MethodConfig(layers=layers)) == tuple(found)


@pytest.mark.parametrize("layers", ["12", "-13", "x", "", "5:2", "1;2", "2-5", "3 5", "-3-1"])
def test_layers_that_are_not_there_are_refused(bert_base, layers):
    with pytest.raises(BadConfig, match=r"method\.layers"):
        layout(survey(bert_base), resolve_method(MethodConfig(layers=layers)))


def test_norms_below_the_first_adapted_layer_stay_frozen(bert_base):
    specs = layout(survey(bert_base), resolve_method(MethodConfig(layers="10:")))
    assert {spec.name.split(".")[1] for spec in specs if spec.part == "norms"} == {"10", "11"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "bitfit", "size": 8}, "method `bitfit` has no setting `size`"),
        ({"name": "head", "norms": "all"}, "method `head` has no setting `norms`"),
        ({"name": "houlsby", "alpha": 16.0}, "method `houlsby` has no setting `alpha`"),
        ({"combine": "multiply", "form": "parallel"}, "`multiply` for a parallel adapter"),
        ({"name": "full", "norms": "none"}, "method `full` has no setting `norms`"),
        ({"name": "norms", "norms": "none"}, "trains nothing"),
        ({"name": "pfeiffer", "combine": "multiply"}, "method `pfeiffer` has no setting `combine`"),
        ({"sharing": "every-0"}, r"`method.sharing` is `every-0`"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(BadConfig, match=message):
        resolve_method(MethodConfig(**settings))


@pytest.mark.parametrize("name", METHODS)
def test_resolving_twice_changes_nothing(name):
    once = resolve_method(MethodConfig(name))
    assert resolve_method(once.as_config()) == once


def test_lora_scales_by_alpha_over_rank():
    assert resolve_method(MethodConfig("lora", 4, alpha=16.0)).scale == 4.0
    with pytest.raises(BadConfig, match=r"`method\.alpha` is `16` and `method\.scale` `5`"):
        resolve_method(MethodConfig("lora", 4, alpha=16.0, scale=5.0))
    for value in (0.0, float("nan"), float("inf")):
        with pytest.raises(BadConfig, match=r"`method\.alpha`"):
            MethodConfig("lora", alpha=value)


def test_pals_have_the_published_number_of_parameters(bert_base):
    assert count(bert_base, ["adapters"], name="pal") == 1_811_520
    whole = sum(parameter.numel() for parameter in bert_base.parameters())
    assert round(1 + 8 * 1_811_520 / whole, 2) == 1.13


@pytest.mark.parametrize(("width", "heads", "size"), [(768, 12, 204), (384, 12, 108), (1024, 16, 272), (32, 4, 8)])
def test_projected_attention_is_as_wide_as_heads_allow(width, heads, size):
    model = shape_of(hidden_size=width, num_hidden_layers=1, num_attention_heads=heads)
    shapes = {item.name: item.shape for item in layout(survey(model), resolve_method(MethodConfig("pal")))}
    assert shapes["pal.encode"] == (width, size)
    assert size % heads == 0
    assert abs(size - 0.266 * width) <= heads / 2


def test_a_parallel_adapter_counts_four_times_as_published(tiny_bert):
    """He et al. 2022: the feed-forward sublayer gives FFN(x) + 4·up(relu(down(x))), if nobody says another factor."""
    spec = SlotSpec.of(MethodConfig("parallel", 8), HeadSpec("classify", 2, "cls"))
    tensors = random_tensors(tiny_bert, spec)
    bank = Bank(tiny_bert, 1)
    bank.put(0, spec, tensors)
    ids = tiny_bert.tokenizer("the movie was good")["input_ids"]
    batch = collate([Row(ids, 0)], tiny_bert.pad_id)
    with torch.no_grad(), bank.routed(batch.route):
        found = tiny_bert.hidden(batch)
    plain = transformers.AutoModel.from_pretrained(tiny_bert.folder).eval()

    def add_update(layer, dense, inputs, output):
        down, down_bias, up, up_bias = (
            tensors[f"adapter.{layer}.feedforward.{name}"] for name in ("down", "down_bias", "up", "up_bias")
        )
        return output + 4.0 * (torch.relu(read[layer] @ down + down_bias) @ up + up_bias)

    read = {}
    for number, block in enumerate(plain.encoder.layer):
        block.intermediate.register_forward_pre_hook(lambda module, inputs, at=number: read.update({at: inputs[0]}))
        block.output.dense.register_forward_hook(partial(add_update, number))
    with torch.no_grad():
        expected = plain(torch.tensor([ids])).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_resolved_method_has_the_settings_of_a_config_in_its_order():
    """Manifests have them so, and a config made of it says the same."""
    method = resolve_method(MethodConfig("lora", 4))
    assert list(dataclasses.asdict(method)) == [item.name for item in dataclasses.fields(MethodConfig)]
    assert dataclasses.asdict(method) == dataclasses.asdict(method.as_config())
