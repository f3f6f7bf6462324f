"""The same claims over every family and method."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from transformers import AutoModel

from inlay.config import MethodConfig
from inlay.model.bank import Bank, SlotSpec
from inlay.model.heads import HeadSpec
from inlay.model.inference import infer
from inlay.model.methods import METHODS, resolve_method
from inlay.model.route import Row, collate
from inlay.model.sites import FAMILIES

TEXTS = [
    ("the movie was good", None),
    ("why", None),
    ("a very terrible film , it is awful and the plot was bad", None),
    ("free prize", "call now"),
    ("one two three four five six seven", "eight nine ten , who ?"),
    ("cat", "dog"),
]
LABELS = [2, 5, 20]

every_pair = pytest.mark.parametrize(("family", "method"), [(f, m) for f in FAMILIES for m in METHODS])


def make_bank(backbone, method, sizes=(8, 3, 16), trainable=False, std=0.3):
    """A bank of slots with 2, 5 and 20 labels, different sizes and random values far from the identity."""
    bank = Bank(backbone, len(sizes), trainable=trainable)
    for slot, size in enumerate(sizes):
        spec = SlotSpec(MethodConfig(method, size), HeadSpec("classify", LABELS[slot % 3], "mean"))
        generator = torch.Generator().manual_seed(slot)
        tensors = {
            item.name: std * torch.randn(item.shape, generator=generator) + item.name.endswith("scale")
            for item in spec.layout(backbone.anatomy)
        }
        bank.put(slot, spec, tensors)
    return bank


def rows_for(backbone, slots):
    encoded = [backbone.tokenizer(text, pair) for text, pair in TEXTS]
    return [Row(item["input_ids"], slot, item.get("token_type_ids")) for item, slot in zip(encoded, slots, strict=True)]


@every_pair
def test_mixed_batch_equals_one_by_one(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method)
    rows = rows_for(backbone, [2, 0, 1, 0, 2, 1])
    together = infer(bank, rows)
    for row, answer in zip(rows, together, strict=True):
        assert answer.shape == (LABELS[row.slot],)
        torch.testing.assert_close(answer, infer(bank, [row])[0], atol=1e-5, rtol=1e-5)


@every_pair
def test_fresh_adapter_leaves_the_backbone_unchanged(backbone_of, family, method):
    backbone = backbone_of(family)
    batch = collate(rows_for(backbone, [0] * 6), backbone.pad_id)
    head = HeadSpec("classify", 2, "mean")
    with torch.no_grad():
        plain = backbone.hidden(batch)
        for std, share in [(1e-7, 1e-5), (1e-2, 0.02)]:
            bank = Bank(backbone, 1)
            bank.initialise(0, SlotSpec(MethodConfig(method, 8, std), head), seed=0)
            with bank.routed(batch.route):
                changed = backbone.hidden(batch) - plain
            real = batch.mask_BT.bool()
            assert changed[real].norm() <= share * plain[real].norm()


@every_pair
def test_only_the_slots_tensors_get_gradients_and_all_of_them_do(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method, trainable=True)
    batch = collate(rows_for(backbone, [0, 0, 1, 1, 2, 2]), backbone.pad_id)
    with bank.routed(batch.route):
        sum(logits.square().sum() for logits in bank.logits(batch)).backward()
    assert all(parameter.grad is None for parameter in backbone.model.parameters())
    for name, stack in bank.stacks.items():
        assert all(stack.grad[slot].abs().sum() > 0 for slot in range(3)), name


@every_pair
def test_count_equals_the_formula(backbone_of, family, method):
    anatomy = backbone_of(family).anatomy
    config, width, size = resolve_method(MethodConfig(method, 8)), anatomy.hidden_size, 8
    places = {"houlsby": 2, "pfeiffer": 1}[method]
    expected = anatomy.num_layers * places * (2 * size * width + size + width) + 5 * width + 5
    if config.norms == "all":
        expected += sum(norm.width * (1 + norm.has_shift) for norm in anatomy.norms)
    spec = SlotSpec(config, HeadSpec("classify", 5, "mean"))
    assert sum(math.prod(item.shape) for item in spec.layout(anatomy)) == expected


@every_pair
def test_save_load_save_gives_equal_bytes(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method)
    first = bank.read(1)
    other = Bank(backbone, 4)
    other.initialise(3, SlotSpec(MethodConfig(method, 64), HeadSpec("classify", 9, "mean")), seed=5)
    other.put(2, bank.specs[1], first)
    assert save(other.read(2)) == save(first)


@every_pair
def test_training_a_step_leaves_every_weight_of_the_backbone_as_it_was(backbone_of, family, method):
    backbone = backbone_of(family)
    before = {name: parameter.clone() for name, parameter in backbone.model.named_parameters()}
    bank = make_bank(backbone, method, trainable=True)
    batch = collate(rows_for(backbone, [0, 1, 2, 0, 1, 2]), backbone.pad_id)
    with backbone.training(0.1), bank.routed(batch.route):
        sum(logits.sum() for logits in bank.logits(batch, dropout=dict.fromkeys(range(3), 0.1))).backward()
    with torch.no_grad():
        for stack in bank.stacks.values():
            stack.add_(stack.grad)
    assert not backbone.model.training
    for name, parameter in backbone.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def plain_model(backbone, tensors, method):
    """The family's own transformers model with the published formula hooked in, knowing nothing of banks."""
    family, anatomy = FAMILIES[backbone.anatomy.family], backbone.anatomy
    attention = backbone.model.config._attn_implementation
    model = AutoModel.from_pretrained(backbone.folder, attn_implementation=attention).eval()
    for norm in anatomy.norms:
        module = model.get_submodule(norm.path)
        if f"norm.{norm.key}.scale" in tensors:
            module.weight.data = tensors[f"norm.{norm.key}.scale"]
            if norm.has_shift:
                module.bias.data = tensors[f"norm.{norm.key}.shift"]

    def adapter(key, x):
        w1, b1, w2, b2 = (tensors[f"adapter.{key}.{part}"] for part in ("down", "down_bias", "up", "up_bias"))
        z = x @ w1 + b1
        if method == "houlsby":  # tanh form of GELU, spelt out
            z = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        else:
            z = z.clamp(min=0)
        return z @ w2 + b2

    for layer in range(anatomy.num_layers):
        block = f"{family.stack}.{layer}"
        if method == "houlsby":
            for place in ("attention", "feedforward"):
                module = model.get_submodule(f"{block}.{family.places[place]}")
                key = f"{layer}.{place}"
                module.register_forward_hook(lambda m, args, out, key=key: out + adapter(key, out))
        elif anatomy.family == "modernbert":  # no norm at the end of a block: the adapter reads the sum itself
            key = f"{layer}.output"
            module = model.get_submodule(block)
            module.register_forward_hook(lambda m, args, out, key=key: out + adapter(key, out))
        else:
            key = f"{layer}.output"
            norm = model.get_submodule(f"{block}.{family.places['output']}")

            def with_adapter(m, args, key=key):
                (s,) = args
                return (s + adapter(key, F.layer_norm(s, s.shape[-1:], m.weight, m.bias, m.eps)),)

            norm.register_forward_pre_hook(with_adapter)
    return model


@every_pair
def test_forward_and_gradients_equal_the_plain_formula(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method, trainable=True)
    rows = rows_for(backbone, [1] * 6)
    batch = collate(rows, backbone.pad_id)
    with bank.routed(batch.route):
        (logits,) = bank.logits(batch)
        logits.square().sum().backward()

    tensors = {name: tensor.requires_grad_() for name, tensor in bank.read(1).items()}
    model = plain_model(backbone, tensors, method)
    inputs = {"input_ids": batch.input_ids_BT, "attention_mask": batch.mask_BT}
    if batch.token_types_BT is not None:
        inputs["token_type_ids"] = batch.token_types_BT
    for norm in backbone.anatomy.norms:  # a parameter must be a leaf to get a gradient of its own
        module = model.get_submodule(norm.path)
        module.weight.requires_grad_()
    hidden = model(**inputs).last_hidden_state
    mask = batch.mask_BT.unsqueeze(-1)
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    expected = pooled @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    expected.square().sum().backward()
    for name, tensor in tensors.items():
        path = next((n.path for n in backbone.anatomy.norms if f"norm.{n.key}." in name), None)
        if path is None:
            gradient = tensor.grad
        else:
            module = model.get_submodule(path)
            gradient = module.weight.grad if name.endswith("scale") else module.bias.grad
        mine = bank.stacks[name].grad[1][tuple(slice(0, size) for size in tensor.shape)]
        scale = gradient.abs().max()
        torch.testing.assert_close(mine / scale, gradient / scale, atol=2e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_of_both_methods_share_one_bank(backbone_of, family):
    backbone = backbone_of(family)
    mixed = Bank(backbone, 3)
    alone = [make_bank(backbone, method, sizes=(8,)) for method in ("houlsby", "pfeiffer")]
    for slot, bank in enumerate(alone):
        mixed.put(slot, bank.specs[0], bank.read(0))
    rows = rows_for(backbone, [1, 0, 1, 0, 1, 0])
    for row, answer in zip(rows, infer(mixed, rows), strict=True):
        expected = infer(alone[row.slot], [Row(row.ids, 0, row.segments)])[0]
        torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)
