"""Parameter counts of SEMANTICS §1, from shapes alone."""

from __future__ import annotations

import pytest
import torch
import transformers

from inlay.config import MethodConfig
from inlay.errors import UnknownName
from inlay.model.heads import HeadSpec
from inlay.model.methods import layout, resolve_method
from inlay.model.sites import survey

BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def shape_of(**config):
    with torch.device("meta"):
        return transformers.BertModel(transformers.BertConfig(**config))


@pytest.fixture(scope="module")
def bert_base():
    return shape_of()


def count(model, parts=("adapters", "norms", "head"), num_labels=2, **method):
    specs = layout(survey(model), MethodConfig(**method), HeadSpec("classify", num_labels, "pooler"))
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
    specs = layout(survey(bert_base), MethodConfig(), HeadSpec("classify", 2, "cls"))
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
