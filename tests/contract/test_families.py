"""The same claims over every family and method, and over every setting of the bottleneck."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch.func import functional_call
from transformers import AutoModel

from inlay.config import MethodConfig, RunConfig
from inlay.errors import InlayError, Unsupported
from inlay.model.bank import Bank, SlotSpec
from inlay.model.heads import HeadSpec
from inlay.model.inference import infer
from inlay.model.methods import METHODS, UNSUPPORTED, resolve_method
from inlay.model.route import Row, collate
from inlay.model.sites import FAMILIES
from inlay.training.cohort import Cohort, CohortSettings
from inlay.training.run import make_run

TEXTS = [
    ("the movie was good", None),
    ("why", None),
    ("a very terrible film , it is awful and the plot was bad", None),
    ("free prize", "call now"),
    ("one two three four five six seven", "eight nine ten , who ?"),
    ("cat", "dog"),
]
LABELS = [2, 5, 20]

# What a method is refused on as it stands, and how it works there. Anything else must work on every family.
DEBERTA_LINEARS = {
    "lora": {"linears": ("value", "contract")},
    "ia3": {"linears": ("value", "contract")},
}
VARIANTS = {
    "layer-norm": {"inner_norm": "layer"},
    "batch-norm": {"inner_norm": "batch"},
    "deep": {"depth": 3},
    "tanh": {"activation": "tanh"},
    "swish": {"activation": "swish"},
    "exact": {"activation": "gelu-exact"},
    "relu": {"activation": "relu"},
    "attention-only": {"places": ("attention",)},
    "feedforward-only": {"places": ("feedforward",)},
    "beside": {"form": "parallel", "scale": 0.5},
    "multiply": {"combine": "multiply"},
    "some-layers": {"layers": "0,2"},
    "upper-layers": {"layers": "1:"},
    "within-layer": {"sharing": "within-layer"},
    "every-2": {"sharing": "every-2"},
    "all-one": {"sharing": "all", "depth": 2, "inner_norm": "layer"},
    "no-norms": {"norms": "none"},
    "encoder-norms": {"norms": "encoder"},
}


def method_of(family, method, size=None, **more):
    """The method's config on this family, with its size where it has one."""
    if family == "deberta-v2":
        more |= DEBERTA_LINEARS.get(method, {})
    if method in VARIANTS:
        method, more = "houlsby", more | VARIANTS[method]
    return MethodConfig(method, size if METHODS[method].size else None, **more)


PAIRS = [(f, m) for f in FAMILIES for m in METHODS if (f, m) not in UNSUPPORTED]
PAIRS += [(f, v) for f in ("bert", "distilbert", "modernbert") for v in VARIANTS]
every_pair = pytest.mark.parametrize(("family", "method"), PAIRS)
without_own = [(f, m) for f, m in PAIRS if m not in ("full", "top")]


def make_bank(backbone, method, sizes=(8, 3, 16), trainable=False, std=0.3):
    """A bank of slots with 2, 5 and 20 labels, different sizes and random values far from the identity."""
    is_solo = method in METHODS and METHODS[method].has_own_weights
    bank = Bank(backbone, 1 if trainable and is_solo else len(sizes), trainable=trainable)
    for slot in range(bank.num_slots):
        config = method_of(backbone.anatomy.family, method, sizes[slot])
        bank.put(slot, *random_slot(backbone, config, LABELS[slot % 3], slot, std))
    return bank


def random_slot(backbone, config, num_labels, seed, std=0.3):
    spec = SlotSpec(config, HeadSpec("classify", num_labels, "mean"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for item in spec.layout(backbone.anatomy):
        noise = torch.randn(item.shape, generator=generator)
        if item.start == "backbone":
            tensors[item.name] = backbone.own_tensor(item.name) + 0.5 * std * noise
        elif item.name.endswith("running_var"):
            tensors[item.name] = 0.5 + noise.square()
        else:
            tensors[item.name] = std * noise + float(item.start == "ones")
    return spec, tensors


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
def test_packed_rows_are_answered_as_padded_ones(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method)
    rows = rows_for(backbone, [2, 0, 1, 0, 2, 1])
    for packed, padded in zip(infer(bank, rows), infer(bank, rows, is_padded=True), strict=True):
        torch.testing.assert_close(packed, padded, atol=1e-5, rtol=1e-5)


@every_pair
def test_fresh_adapter_leaves_the_backbone_unchanged(backbone_of, family, method):
    backbone = backbone_of(family)
    batch = collate(rows_for(backbone, [0] * 6), backbone.pad_id)
    config = method_of(family, method, 8)
    takes_std = config.name in ("houlsby", "pfeiffer")
    with torch.no_grad():
        plain = backbone.hidden(batch)
        # A norm inside the bottleneck makes its values large again; the way up still starts near zero.
        usual = 0.02 if config.inner_norm == "none" else 0.1
        for std, share in [(1e-7, 1e-5), (1e-2, usual)] if takes_std else [(1e-2, 1e-6)]:
            bank = Bank(backbone, 1)
            own = dataclasses.replace(config, init_std=std) if takes_std else config
            bank.initialise(0, SlotSpec(own, HeadSpec("classify", 2, "mean")), seed=0)
            weights = bank.weights_of(0) if bank.is_solo(0) else None
            with bank.routed(batch.route):
                changed = backbone.hidden_layers(batch, weights)[-1] - plain
            real = batch.mask_BT.bool()
            assert changed[real].norm() <= share * plain[real].norm()


@every_pair
def test_only_the_slots_tensors_get_gradients_and_all_of_them_do(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method, trainable=True)
    slots = [0, 0, 1, 1, 2, 2] if bank.num_slots == 3 else [0] * 6
    batch = collate(rows_for(backbone, slots), backbone.pad_id)
    with backbone.training(0.0), bank.routed(batch.route):
        sum(logits.square().sum() for logits in bank.logits(batch)).backward()
    assert all(parameter.grad is None for parameter in backbone.model.parameters())
    for name, stack in bank.stacks.items():
        if not name.endswith(("running_mean", "running_var")):
            assert all(stack.grad[slot].abs().sum() > 0 for slot in range(bank.num_slots)), name


@every_pair
def test_save_load_save_gives_equal_bytes(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method)
    first = bank.read(1)
    other = Bank(backbone, 4)
    other.initialise(3, SlotSpec(method_of(family, method, 64), HeadSpec("classify", 9, "mean")), seed=5)
    other.put(2, bank.specs[1], first)
    assert save(other.read(2)) == save(first)


@every_pair
def test_training_a_step_leaves_every_weight_of_the_backbone_as_it_was(backbone_of, family, method):
    backbone = backbone_of(family)
    before = {name: parameter.clone() for name, parameter in backbone.model.named_parameters()}
    bank = make_bank(backbone, method, trainable=True)
    slots = [0, 1, 2, 0, 1, 2] if bank.num_slots == 3 else [0] * 6
    batch = collate(rows_for(backbone, slots), backbone.pad_id)
    with backbone.training(0.1), bank.routed(batch.route):
        sum(logits.sum() for logits in bank.logits(batch, dropout=dict.fromkeys(range(3), 0.1))).backward()
    with torch.no_grad():
        for stack in bank.stacks.values():
            stack.add_(stack.grad if stack.grad is not None else 1.0)
    assert not backbone.model.training
    for name, parameter in backbone.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(("family", "method"), without_own)
def test_a_run_in_a_cohort_equals_the_run_alone(backbone_of, toy_task, family, method):
    backbone = backbone_of(family)
    # Small: a step is several forward passes, and which rows go together depends on the runs beside.
    settings = CohortSettings(token_budget=120, num_threads=1, save_every=100)
    task = toy_task(num_rows=36)

    def train(runs):
        cohort = Cohort(runs, backbone, settings)
        with backbone.training(0.0):
            for _ in range(5):
                cohort.step()
        rows = [Row(ids, member.slot, types) for member in cohort.members for ids, types in member.dev]
        logits = infer(cohort.bank, rows)
        return [torch.stack(logits[slot * 18 : slot * 18 + 18]) for slot in range(len(runs))]

    runs = []
    for seed, size, lr in [(0, 8, 1e-3), (1, 3, 3e-3), (2, 16, 1e-2)]:
        config = RunConfig(method=method_of(family, method, size))
        train_config = dataclasses.replace(
            config.train, seed=seed, lr=lr, batch_size=6, epochs=4, dropout=0.0, head_dropout=0.0
        )
        runs.append(make_run(task, dataclasses.replace(config, train=train_config), backbone))
    together = train(runs)
    for run, logits in zip(runs, together, strict=True):
        torch.testing.assert_close(logits, train([run])[0], atol=1e-5, rtol=1e-4)


def spell_count(model, method, family):
    """How many parameters a method adds at size 8, from the sizes of transformers' own modules."""
    width, wide, layers = model.config.hidden_size, 48, 3
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    if family == "deberta-v2":
        norms.remove(model.encoder.LayerNorm)  # it normalises positions, not tokens
    adapter = 2 * width * 8 + 8 + width
    narrow = 8 * (width + width)
    in_norms = sum(parameter.numel() for norm in norms for parameter in norm.parameters())
    last = f"{FAMILIES[family].stack}.{layers - 1}."
    own = {name: p.numel() for name, p in model.named_parameters() if not name.startswith("pooler.")}
    return {
        "houlsby": layers * 2 * adapter + in_norms,
        "pfeiffer": layers * adapter,
        "parallel": layers * adapter,
        "lora": layers * (narrow + 8 * (wide + width) if family == "deberta-v2" else 2 * narrow),
        "ia3": layers * (width + wide if family == "deberta-v2" else 2 * width + wide),
        "bitfit": layers * (5 * width + wide) + sum(norm.bias.numel() for norm in norms if norm.bias is not None),
        "norms": in_norms,
        "head": 0,
        "full": sum(own.values()),
        "top": sum(size for name, size in own.items() if name.startswith((last, "final_norm."))),
    }[method]


@pytest.mark.parametrize(("family", "method"), [pair for pair in PAIRS if pair[1] in METHODS])
def test_count_equals_the_formula(backbone_of, family, method):
    backbone = backbone_of(family)
    spec = SlotSpec(method_of(family, method, 8), HeadSpec("classify", 5, "mean"))
    expected = spell_count(AutoModel.from_pretrained(backbone.folder), method, family)
    assert spec.count_parameters(backbone.anatomy) == expected + 5 * backbone.hidden_size + 5


# The module of a block whose first argument is what a sublayer reads.
SUBLAYERS = {
    "distilbert": ("attention", "ffn"),
    "modernbert": ("attn", "mlp"),
    "mpnet": ("attention.attn", "intermediate"),
}
USUAL_SUBLAYERS = ("attention.self", "intermediate")


def spell_activation(name, z):
    """The activations as formulas."""
    if name == "gelu":
        return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    if name == "gelu-exact":
        return 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
    return {"relu": z.clamp(min=0), "tanh": torch.tanh(z), "swish": z / (1 + torch.exp(-z))}[name]


def spell_adapter(config, tensors, name, x):
    """scale·up(act(…act(norm(down(x)))…)), one adapter at a time."""
    t = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    z = x @ t["down"] + t.get("down_bias", 0)
    if config.inner_norm == "layer":
        z = (z - z.mean(-1, keepdim=True)) / torch.sqrt(z.var(-1, correction=0, keepdim=True) + 1e-5)
        z = z * t["norm_scale"] + t["norm_shift"]
    elif config.inner_norm == "batch":
        z = (z - t["running_mean"]) / torch.sqrt(t["running_var"] + 1e-5) * t["norm_scale"] + t["norm_shift"]
    z = spell_activation(config.activation, z)
    for index in range(1, config.depth):
        z = spell_activation(config.activation, z @ t[f"hidden{index}"] + t[f"hidden{index}_bias"])
    update = config.scale * (z @ t["up"] + t["up_bias"])
    return x * update if config.combine == "multiply" else update


def group_name(config, layer, place, num_layers):
    """Which adapter a place reads, from the definition of the sharing strategies."""
    if config.sharing == "none":
        return f"adapter.{layer}.{place}"
    step = {"within-layer": 1, "all": num_layers}.get(config.sharing) or int(config.sharing.removeprefix("every-"))
    first = layer - layer % step
    last = min(first + step - 1, num_layers - 1)
    return f"adapter.{first}" if first == last else f"adapter.{first}-{last}"


def merged_weights(backbone, config, tensors):
    """The backbone's parameters with a slot's norms, biases, factors and low-rank updates worked into them."""
    family, anatomy = FAMILIES[backbone.anatomy.family], backbone.anatomy
    model = AutoModel.from_pretrained(backbone.folder)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, tensor in tensors.items():
        if name.startswith("weight."):
            weights[name.removeprefix("weight.")] = tensor
    for norm in anatomy.norms:
        for which, end in (("scale", "weight"), ("shift", "bias")):
            if f"norm.{norm.key}.{which}" in tensors:
                weights[f"{norm.path}.{end}"] = tensors[f"norm.{norm.key}.{which}"]
    for layer in range(anatomy.num_layers):
        for linear, where in family.linears.items():
            path, _, part = where.partition(":")
            full, key = f"{family.stack}.{layer}.{path}", f"{layer}.{linear}"
            index, count = map(int, part.split("/")) if part else (0, 1)
            w, b = weights[f"{full}.weight"], weights.get(f"{full}.bias")
            ws, bs = list(w.chunk(count)), [None] * count if b is None else list(b.chunk(count))
            if f"lora.{key}.down" in tensors:
                ws[index] = ws[index] + config.scale * (tensors[f"lora.{key}.down"] @ tensors[f"lora.{key}.up"]).T
            if f"bias.{key}" in tensors:
                bs[index] = tensors[f"bias.{key}"]
            if f"ia3.{key}" in tensors:
                factor = tensors[f"ia3.{key}"]
                if linear in ("project", "contract"):
                    ws[index] = ws[index] * factor
                else:
                    ws[index] = ws[index] * factor.unsqueeze(-1)
                    bs[index] = None if bs[index] is None else bs[index] * factor
            weights[f"{full}.weight"] = torch.cat(ws)
            if b is not None:
                weights[f"{full}.bias"] = torch.cat(bs)
    return weights


def plain_model(backbone, config, tensors):
    """The family's own transformers model with the adapters hooked in, knowing nothing of banks."""
    family, anatomy = FAMILIES[backbone.anatomy.family], backbone.anatomy
    attention = backbone.model.config._attn_implementation
    model = AutoModel.from_pretrained(backbone.folder, attn_implementation=attention).eval()
    read = {}
    for layer in range(anatomy.num_layers):
        block = f"{family.stack}.{layer}"
        sublayers = SUBLAYERS.get(anatomy.family, USUAL_SUBLAYERS)
        for place, sublayer in zip(("attention", "feedforward"), sublayers, strict=True):
            name = group_name(config, layer, place, anatomy.num_layers)
            if place not in config.places or f"{name}.down" not in tensors:
                continue
            if config.layers == "0,2" and layer == 1:
                continue

            def note(m, args, key=(layer, place)):
                read[key] = args[0]

            model.get_submodule(f"{block}.{sublayer}").register_forward_pre_hook(note)

            def rewrite(m, args, out, name=name, key=(layer, place)):
                source = read[key] if config.form == "parallel" else out
                return out + spell_adapter(config, tensors, name, source)

            model.get_submodule(f"{block}.{family.places[place]}").register_forward_hook(rewrite)
        if "output" not in config.places:
            continue
        name = group_name(config, layer, "output", anatomy.num_layers)
        if anatomy.family == "modernbert":  # no norm at the end of a block: the adapter reads the sum itself

            def after(m, args, out, name=name):
                return out + spell_adapter(config, tensors, name, out)

            model.get_submodule(block).register_forward_hook(after)
            continue

        def before_norm(m, args, name=name):
            (s,) = args
            normal = F.layer_norm(s, s.shape[-1:], m.weight, m.bias, m.eps)
            return (s + spell_adapter(config, tensors, name, normal),)

        model.get_submodule(f"{block}.{family.places['output']}").register_forward_pre_hook(before_norm)
    return model


@every_pair
def test_forward_and_gradients_equal_the_plain_formula(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method, trainable=True)
    slot = min(1, bank.num_slots - 1)
    batch = collate(rows_for(backbone, [slot] * 6), backbone.pad_id)
    with bank.routed(batch.route):
        (logits,) = bank.logits(batch)
        logits.square().sum().backward()

    tensors = {name: tensor.requires_grad_() for name, tensor in bank.read(slot).items()}
    config = resolve_method(bank.specs[slot].method)
    model = plain_model(backbone, config, tensors)
    inputs = {"input_ids": batch.input_ids_BT, "attention_mask": batch.mask_BT}
    if batch.token_types_BT is not None:
        inputs["token_type_ids"] = batch.token_types_BT
    hidden = functional_call(model, merged_weights(backbone, config, tensors), kwargs=inputs).last_hidden_state
    mask = batch.mask_BT.unsqueeze(-1)
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    expected = pooled @ tensors["head.weight"].T + tensors["head.bias"]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    expected.square().sum().backward()
    for name, tensor in tensors.items():
        if name.endswith(("running_mean", "running_var")):
            continue
        mine = bank.stacks[name].grad[slot][tuple(slice(0, size) for size in tensor.shape)]
        if name.endswith((".key", "key.bias", "k.bias", "k_lin.bias", "key_proj.bias")) and "lora" not in name:
            continue  # softmax does not see it: the true gradient of a key's bias is zero, and rounding is all there is
        scale = tensor.grad.abs().max()
        torch.testing.assert_close(mine / scale, tensor.grad / scale, atol=3e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_of_every_method_share_one_bank(backbone_of, family):
    backbone = backbone_of(family)
    names = [name for name in (*METHODS, *VARIANTS) if (family, name) not in UNSUPPORTED]
    mixed = Bank(backbone, len(names) + 1)
    alone = []
    for slot, name in enumerate(names):
        spec, tensors = random_slot(backbone, method_of(family, name, 8), 2 + slot % 3, slot)
        mixed.put(slot, spec, tensors)
        alone.append(Bank(backbone, 1))
        alone[-1].put(0, spec, tensors)
    (row,) = rows_for(backbone, [0] * 6)[4:5]
    rows = [Row(row.ids, slot, row.segments) for slot in range(len(names))]
    for slot, answer in enumerate(infer(mixed, rows)):
        expected = infer(alone[slot], [Row(row.ids, 0, row.segments)])[0]
        torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5, msg=names[slot])
    free = collate([Row(row.ids, len(names), row.segments), rows[0]], backbone.pad_id)
    with torch.no_grad(), mixed.routed(free.route):
        through = backbone.hidden(free)[1]  # sorted by slot: the free one is last
    with torch.no_grad():
        torch.testing.assert_close(through, backbone.hidden(free)[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "method"), UNSUPPORTED)
def test_an_unsupported_pair_is_refused_by_name(backbone_of, family, method):
    spec = SlotSpec(MethodConfig(method), HeadSpec("classify", 2, "mean"))
    with pytest.raises(Unsupported, match=f"`{method}`.*`{family}`"):
        Bank(backbone_of(family), 1).initialise(0, spec, seed=0)


@pytest.mark.parametrize("method", DEBERTA_LINEARS)
def test_layers_that_also_project_positions_are_refused_by_name(backbone_of, method):
    spec = SlotSpec(MethodConfig(method), HeadSpec("classify", 2, "mean"))
    with pytest.raises(InlayError, match=r"`(query|key)` of the backbone family `deberta-v2`: it also projects"):
        Bank(backbone_of("deberta-v2"), 1).initialise(0, spec, seed=0)
