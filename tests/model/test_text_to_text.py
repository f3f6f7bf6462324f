"""T5 as a family: its anatomy, the counts of SEMANTICS §3, and embeddings tied or not as the files have them."""

from __future__ import annotations

import pytest
import torch
import transformers

from inlay.config import MethodConfig
from inlay.model.methods import layout
from inlay.model.sites import survey

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
    specs = layout(survey(model), MethodConfig("mahabadi", size))
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
