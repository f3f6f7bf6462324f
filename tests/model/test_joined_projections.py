"""Query, key and value as one matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inlay.model.backbone.wrappers import join
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.batch.route import Row
from inlay.model.heads.heads import HeadSpec
from inlay.settings.run_config import MethodConfig


def test_layers_side_by_side_give_what_each_gives_and_share_its_memory():
    layers = {name: nn.Linear(6, 4) for name in ("query", "key", "value")}
    x = torch.randn(5, 6)
    expected = [layer(x) for layer in layers.values()]
    joined = join(layers)
    found = F.linear(x, joined.weight, joined.bias).chunk(3, -1)
    for part, own, layer in zip(found, expected, layers.values(), strict=True):
        torch.testing.assert_close(part, own)
        torch.testing.assert_close(layer(x), own)
    joined.weight.data[4:8] = 0
    assert not layers["key"].weight.any()
    assert layers["query"].weight.all()


@pytest.mark.parametrize("odd", [nn.Linear(6, 8), nn.Linear(6, 4, bias=False), nn.Identity()], ids=str)
def test_layers_that_are_not_alike_stay_apart(odd):
    layers = {"query": nn.Linear(6, 4), "key": nn.Linear(6, 4), "value": odd}
    before = layers["query"].weight.data_ptr()
    assert join(layers) is None
    assert layers["query"].weight.data_ptr() == before


def count_products(backbone, method, monkeypatch) -> int:
    """How many linear layers of the backbone's width a pass of a bank with one slot computes."""
    bank = Bank(backbone, 1)
    bank.initialise(0, SlotSpec.of(method, HeadSpec("classify", 2, "mean")), seed=0)
    batch = backbone.collate([Row([5, 6, 7], 0)])
    inputs, own = [], F.linear

    def linear(x, *args):
        inputs.append(x.shape[-1])
        return own(x, *args)

    with monkeypatch.context() as patched, torch.inference_mode(), bank.routed(batch.route):
        patched.setattr(F, "linear", linear)
        bank.backbone.hidden_layers(batch, bank.weights_of(0))
    return inputs.count(backbone.hidden_size)


@pytest.mark.triton
@pytest.mark.parametrize("family", ["bert", "mpnet", "roberta", "distilbert", "electra"])
def test_a_block_computes_them_at_once_unless_a_task_changes_them(backbone_of, monkeypatch, family):
    backbone = backbone_of(family)
    at_once, changed, own = (
        count_products(backbone, MethodConfig(name=name), monkeypatch) for name in ("houlsby", "lora", "full")
    )
    assert changed - at_once == 2 * backbone.anatomy.num_layers
    assert own == changed
