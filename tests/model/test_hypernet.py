"""Hypernetworks: the counts in docs/methods.md from shapes alone, and what they write against the formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
import transformers

from inlay.errors import Unsupported
from inlay.model.backbone.sites import survey
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec, layout, make_expander, materialized_method, resolve_method
from inlay.model.heads.heads import HeadSpec
from inlay.model.parts.hypernet import write_adapters
from inlay.settings.run_config import MethodConfig

SMALL = {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}


def t5_shape(**config):
    with torch.device("meta"):
        return survey(transformers.T5ForConditionalGeneration(transformers.T5Config(**config)))


def count(anatomy, num_tasks, name, size, **more):
    """Parameters of a run: what its tasks share once, what each has of its own as often as there are tasks."""
    specs = layout(anatomy, resolve_method(MethodConfig(name, size, **more)))
    return sum(spec.num_parameters * (1 if spec.is_shared else num_tasks) for spec in specs)


@pytest.mark.parametrize(
    ("shape", "size", "name", "total"),
    [
        (BASE, 24, "hyperformer++", 5_211_056),
        (BASE, 24, "hyperformer", 122_404_672),
        (BASE, 24, "mahabadi-multi", 14_581_248),
        (SMALL, 16, "hyperformer++", 2_415_776),
        (SMALL, 16, "hyperformer", 28_074_560),
        (SMALL, 16, "mahabadi-multi", 3_288_064),
    ],
)
def test_eight_tasks_train_the_published_number_of_parameters(shape, size, name, total):
    assert count(t5_shape(**shape), 8, name, size) == total


def test_full_fine_tuning_of_several_tasks_trains_one_copy_of_the_backbone():
    assert count(t5_shape(**SMALL), 8, "full-multi", None) == 60_506_624


def test_an_encoder_has_one_stack_of_the_same_parts(tiny_bert):
    width, layers, size, num_tasks = 32, 3, 4, 5
    heads = 64 * 2 * width * size + 2 * width * size + 65 * size + 3 * 65 * width
    norms = 2 * width * (2 * layers + 1)
    projector = 192 * 128 + 128 + 128 * 64 + 64 + 2 * 64
    shared = heads + projector + 64 * (layers + 2) + norms
    assert count(tiny_bert.anatomy, num_tasks, "hyperformer++", size) == shared + 64 * num_tasks
    projector = 512 * 128 + 128 + 128 * 64 + 64
    assert count(tiny_bert.anatomy, num_tasks, "hyperformer", size) == (
        2 * layers * heads + projector + norms + 512 * num_tasks
    )


def make_net(anatomy, name, **more):
    """Two networks of one shape, and the embeddings of three tasks for each."""
    torch.manual_seed(0)
    config = resolve_method(MethodConfig(name, 4, **more))
    net = make_expander(anatomy, config, 1).net
    shared = {item.name: 0.1 * torch.randn(2, *item.shape) for item in net.tensors()}
    return net, shared, torch.randn(2, 3, net.task_size)


@pytest.mark.parametrize("projector", [128, 0])
def test_hyperformer_writes_what_its_formula_says(tiny_bert, projector):
    net, stacked, tasks = make_net(tiny_bert.anatomy, "hyperformer", projector=projector)
    written = write_adapters(net, stacked, tasks)
    for slot, (number, task) in enumerate(itertools.product(range(2), range(3))):
        shared, read = {name: stack[number] for name, stack in stacked.items()}, tasks[number, task]
        if projector:
            hidden = torch.relu(read @ shared["hyper.in.weight"] + shared["hyper.in.bias"])
            read = hidden @ shared["hyper.out.weight"] + shared["hyper.out.bias"]
        for site, key in enumerate(f"{layer}.{place}" for layer in range(3) for place in ("attention", "feedforward")):
            for part, shape in net.parts.items():
                weight, bias = shared[f"hyper.encoder.{part}.weight"][site], shared[f"hyper.encoder.{part}.bias"][site]
                expected = (read @ weight + bias).view(shape)
                torch.testing.assert_close(written[f"adapter.{key}.{part}"][slot], expected)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_hyperformer_plus_plus_writes_what_its_formula_says(backbone_of, family, number):
    anatomy = backbone_of(family).anatomy
    net, stacked, tasks = make_net(anatomy, "hyperformer++")
    written = write_adapters(net, stacked, tasks)
    shared = {name: stack[number] for name, stack in stacked.items()}
    stacks = {"encoder": range(3)} | ({"decoder": range(3, 5)} if family == "t5" else {})
    for stack, layers in stacks.items():
        own = {name.removeprefix(f"hyper.{stack}."): tensor for name, tensor in shared.items()}
        for index, layer in enumerate(layers):
            for place, name in enumerate(("attention", "feedforward")):
                joined = torch.cat([tasks[number, 1], own["layers"][index], own["places"][place]])
                hidden = torch.relu(joined @ own["in.weight"] + own["in.bias"])
                read = hidden @ own["out.weight"] + own["out.bias"]
                read = F.layer_norm(read, (64,), own["norm.scale"], own["norm.shift"])
                for part, shape in net.parts.items():
                    expected = (read @ own[f"{part}.weight"] + own[f"{part}.bias"]).view(shape)
                    torch.testing.assert_close(written[f"adapter.{layer}.{name}.{part}"][3 * number + 1], expected)


@pytest.mark.parametrize("name", ["hyperformer", "hyperformer++", "mahabadi-multi", "full-multi"])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_trained_task_has_the_tensors_of_an_ordinary_slot(backbone_of, family, name):
    """What is written, together with what stays, is exactly what the ordinary method stores."""
    anatomy = backbone_of(family).anatomy
    size = None if name == "full-multi" else 4
    for more in ({}, {"writes": "blocks"}, {"writes": "norms"}) if name.startswith("hyper") else ({},):
        config = resolve_method(MethodConfig(name, size, **more))
        ordinary = {item.name: item.shape for item in layout(anatomy, materialized_method(config))}
        kept = {item.name: item.shape for item in layout(anatomy, config)}
        if name.startswith("hyper"):
            net = make_expander(anatomy, config, 1).net
            shared = {item.name: torch.zeros(1, *item.shape) for item in net.tensors()}
            written = write_adapters(net, shared, torch.zeros(1, 1, net.task_size))
            kept |= {key: tuple(tensor.shape[1:]) for key, tensor in written.items()}
            kept = {key: shape for key, shape in kept.items() if not key.startswith(("hyper.", "task."))}
        assert kept == ordinary


def test_all_layers_tasks_and_networks_come_from_a_few_products(tiny_bert):
    for name, most in (("hyperformer", 2 + 6), ("hyperformer++", 2 + 6)):
        net, shared, tasks = make_net(tiny_bert.anatomy, name)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            write_adapters(net, shared, tasks)
        kinds = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
        products = sum(event.count for event in seen.key_averages() if event.key in kinds)
        assert products <= most


def test_a_slot_of_a_hypernetwork_answers_nothing_by_itself(tiny_bert):
    spec = SlotSpec.of(MethodConfig("hyperformer++", 4), HeadSpec("classify", 2, "mean"))
    with pytest.raises(Unsupported, match="materialize"):
        Bank(tiny_bert, 1).initialise(0, spec, seed=0)
