"""The same claims over every family and method, and over every setting of the bottleneck."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from fnmatch import fnmatch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch.func import functional_call
from transformers import AutoModel, AutoModelForSeq2SeqLM

from inlay.errors import InlayError, Unsupported
from inlay.model.backbone.families import FAMILIES
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import METHODS, UNSUPPORTED, SlotSpec
from inlay.model.batch.route import Row, collate
from inlay.model.heads.heads import WRITTEN, HeadSpec
from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.run.make_run import make_run
from tiny_backbones import WRITING
from toys import WORDS

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
    "dora": {"linears": ("value", "contract")},
    "ia3": {"linears": ("value", "contract")},
}
VARIANTS = {
    "layer-norm": {"inner_norm": "layer"},
    "batch-norm": {"inner_norm": "batch"},
    "output-norm": {"inner_norm": "output", "form": "parallel"},
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
PAIRS += [(f, v) for f in ("bert", "distilbert", "modernbert", "t5") for v in VARIANTS]
every_pair = pytest.mark.parametrize(("family", "method"), PAIRS)
without_own = [(f, m) for f, m in PAIRS if m not in ("full", "top", "pal-full")]


def make_bank(backbone, method, sizes=(8, 3, 16), trainable=False, std=0.3):
    """A bank of slots with 2, 5 and 20 labels, different sizes and random values far from the identity."""
    is_finetuned = method in METHODS and METHODS[method].is_finetuned
    bank = Bank(backbone, 1 if trainable and is_finetuned else len(sizes), trainable=trainable)
    for slot in range(bank.num_slots):
        config = method_of(backbone.anatomy.family, method, sizes[slot])
        bank.put(slot, *random_slot(backbone, config, LABELS[slot % 3], slot, std))
    return bank


def random_slot(backbone, config, num_labels, seed, std=0.3):
    spec = SlotSpec.of(config, head_of(backbone, num_labels))
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


def head_of(backbone, num_labels):
    """A linear head, or one whose label texts are scored, of one word or several."""
    if not backbone.is_seq2seq:
        return HeadSpec("classify", num_labels, "mean")
    return HeadSpec("classify", num_labels, WRITTEN, texts=tuple(ANSWERS[:num_labels]))


ANSWERS = [" ".join(WORDS[index : index + 1 + index % 3]) for index in range(20)]


def rows_for(backbone, slots, trains=False):
    """Rows of every length; those to train on know their answers, where these are written."""
    encoded = [backbone.tokenizer(text, pair) for text, pair in TEXTS]
    answers = [
        backbone.tokenizer(text)["input_ids"] if trains and backbone.is_seq2seq else None for text in ANSWERS[:6]
    ]
    return [
        Row(item["input_ids"], slot, item.get("token_type_ids"), written=answer)
        for item, slot, answer in zip(encoded, slots, answers, strict=True)
    ]


def states_of(backbone, batch, weights=None):
    """What a pass comes to, before any head: the last states of real tokens, or the logits of the answers."""
    if not backbone.is_seq2seq:
        return backbone.hidden_layers(batch, weights)[-1][batch.mask_BT.bool()]
    read = backbone.read(batch, weights)
    return backbone.write(read, batch.written_BT.clamp(min=0), weights)[0][batch.written_BT >= 0]


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


@pytest.mark.parametrize(("family", "method"), [pair for pair in PAIRS if pair[1] not in ("mahabadi", "output-norm")])
def test_fresh_adapter_leaves_the_backbone_unchanged(backbone_of, family, method):
    backbone = backbone_of(family)
    batch = collate(rows_for(backbone, [0] * 6, trains=True), backbone.pad_id)
    config = method_of(family, method, 8)
    takes_std = config.name in ("houlsby", "pfeiffer")
    with torch.no_grad():
        plain = states_of(backbone, batch)
        # A norm inside the bottleneck makes its values large again; the way up still starts near zero.
        usual = 0.02 if config.inner_norm == "none" else 0.1
        fixed = 0.02 if config.name.startswith("pal") else 1e-6
        for std, share in [(1e-7, 1e-5), (1e-2, usual)] if takes_std else [(1e-2, fixed)]:
            bank = Bank(backbone, 1)
            own = dataclasses.replace(config, init_std=std) if takes_std else config
            bank.initialise(0, SlotSpec.of(own, head_of(backbone, 2)), seed=0)
            weights = bank.weights_of(0)
            with bank.routed(batch.route):
                changed = states_of(backbone, batch, weights) - plain
            assert changed.norm() <= share * plain.norm()


@pytest.mark.parametrize(("family", "scale", "most"), [("bert", 0.08, 0.5), ("t5", 1.0, 5.0)])
def test_an_adapter_with_a_norm_behind_it_is_no_identity_at_the_start(backbone_of, family, scale, most):
    # The norm makes what the adapter adds as large as its scale, however small its weights are, as they outgrow the
    # norm's epsilon. On T5 it is one, as published; an encoder's states would drown in that.
    backbone = backbone_of(family)
    batch = collate(rows_for(backbone, [0] * 6, trains=True), backbone.pad_id)
    with torch.no_grad():
        plain = states_of(backbone, batch)
        for std, least_here, most_here in [(1e-6, 0.0, 1e-2), (0.3, 0.02, most)]:
            bank = Bank(backbone, 1)
            bank.initialise(0, SlotSpec.of(MethodConfig("mahabadi", 8, init_std=std), head_of(backbone, 2)), seed=0)
            scales = torch.cat([tensor for name, tensor in bank.read(0).items() if name.endswith("out_scale")])
            assert scales.square().mean().sqrt() == pytest.approx(scale, rel=0.2)
            with bank.routed(batch.route):
                changed = states_of(backbone, batch) - plain
            assert least_here <= changed.norm() / plain.norm() <= most_here


@every_pair
def test_only_the_slots_tensors_get_gradients_and_all_of_them_do(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method, trainable=True)
    slots = [0, 0, 1, 1, 2, 2] if bank.num_slots == 3 else [0] * 6
    batch = collate(rows_for(backbone, slots, trains=True), backbone.pad_id)
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
    other.initialise(3, SlotSpec.of(method_of(family, method, 64), head_of(backbone, 9)), seed=5)
    other.put(2, bank.specs[1], first)
    assert save(other.read(2)) == save(first)


@every_pair
def test_training_a_step_leaves_every_weight_of_the_backbone_as_it_was(backbone_of, family, method):
    backbone = backbone_of(family)
    before = {name: parameter.clone() for name, parameter in backbone.model.named_parameters()}
    bank = make_bank(backbone, method, trainable=True)
    slots = [0, 1, 2, 0, 1, 2] if bank.num_slots == 3 else [0] * 6
    batch = collate(rows_for(backbone, slots, trains=True), backbone.pad_id)
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
        rows = [row for member in cohort.members for row in member.dev_rows()]
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
    width, wide = model.config.hidden_size, 48
    layers = model.config.num_hidden_layers + (model.config.num_decoder_layers if family in WRITING else 0)
    inner = 4 * 6 if family in WRITING else width  # T5's heads are not as wide together as its states
    norms = [module for module in model.modules() if type(module).__name__.endswith("LayerNorm")]
    if family == "deberta-v2":
        norms.remove(model.encoder.LayerNorm)  # it normalises positions, not tokens
    adapter = 2 * width * 8 + 8 + width
    narrow = 8 * (width + inner)
    pal = 2 * width * 8 + layers * 3 * 8 * 8  # 0.266 of 32, in heads of two
    in_norms = sum(parameter.numel() for norm in norms for parameter in norm.parameters())
    blocks = FAMILIES[family].stacks[-1].stack
    last = f"{blocks}.{len(model.get_submodule(blocks)) - 1}."
    above = (last, "final_norm.", "decoder.final_layer_norm.", "lm_head.")
    own = {name: p.numel() for name, p in model.named_parameters() if not name.startswith("pooler.")}
    return {
        "houlsby": layers * 2 * adapter + in_norms,
        "mahabadi": layers * 2 * (adapter + 2 * width) + in_norms,
        "pfeiffer": layers * adapter,
        "parallel": layers * adapter,
        "lora": layers * (narrow + 8 * (wide + width) if family == "deberta-v2" else 2 * narrow),
        # LoRA's, and a number for each output of the two layers
        "dora": layers
        * (narrow + 8 * (wide + width) + 2 * width if family == "deberta-v2" else 2 * narrow + 2 * inner),
        "ia3": layers * (width + wide if family == "deberta-v2" else 2 * inner + wide),
        "bitfit": layers * (5 * width + wide)
        + sum(norm.bias.numel() for norm in norms if getattr(norm, "bias", None) is not None),
        "norms": in_norms,
        "head": 0,
        "pal": pal,
        "pal-full": sum(own.values()) + pal,
        "full": sum(own.values()),
        "top": sum(size for name, size in own.items() if name.startswith(above)),
    }[method]


@pytest.mark.parametrize(("family", "method"), [pair for pair in PAIRS if pair[1] in METHODS])
def test_count_equals_the_formula(backbone_of, family, method):
    backbone = backbone_of(family)
    spec = SlotSpec.of(method_of(family, method, 8), head_of(backbone, 5))
    expected = spell_count(load_plain(backbone), method, family)
    in_head = 0 if backbone.is_seq2seq else 5 * backbone.hidden_size + 5
    assert spec.count_parameters(backbone.anatomy) == expected + in_head


def load_plain(backbone):
    """transformers' own model, with the embeddings that its files have: read once, then copied."""
    return copy.deepcopy(_read_plain(backbone))


@functools.cache
def _read_plain(backbone):
    if not backbone.is_seq2seq:
        return AutoModel.from_pretrained(
            backbone.folder, attn_implementation=backbone.model.config._attn_implementation
        )
    model = AutoModelForSeq2SeqLM.from_pretrained(backbone.folder, attn_implementation="eager")
    files = load_file(backbone.folder / "model.safetensors")
    model.lm_head.weight = (
        torch.nn.Parameter(files["lm_head.weight"]) if "lm_head.weight" in files else model.shared.weight
    )
    return model


# The module of a block whose first argument is what a sublayer reads.
SUBLAYERS = {
    "distilbert": ("attention", "ffn"),
    "modernbert": ("attn", "mlp"),
    "mpnet": ("attention.attn", "intermediate"),
    **dict.fromkeys(WRITING, ("layer.0.SelfAttention", "layer.{last}.DenseReluDense")),
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
    update = z @ t["up"] + t["up_bias"]
    if config.inner_norm == "output":
        mean, var = update.mean(-1, keepdim=True), update.var(-1, correction=0, keepdim=True)
        update = (update - mean) / torch.sqrt(var + 1e-5) * t["out_scale"] + t["out_shift"]
    update = config.scale * update
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
    anatomy = backbone.anatomy
    weights = {name: parameter.detach() for name, parameter in load_plain(backbone).named_parameters()}
    for name, tensor in tensors.items():
        if name.startswith("weight."):
            weights[name.removeprefix("weight.")] = tensor
    for norm in anatomy.norms:
        for which, end in (("scale", "weight"), ("shift", "bias")):
            if f"norm.{norm.key}.{which}" in tensors:
                weights[f"{norm.path}.{end}"] = tensors[f"norm.{norm.key}.{which}"]
    for linear in anatomy.linears:
        path, key, own = linear.path, linear.key, slice(linear.start, linear.stop)
        whole_w, whole_b = weights[f"{path}.weight"], weights.get(f"{path}.bias")
        w, b = whole_w[own], None if whole_b is None else whole_b[own]
        if f"lora.{key}.down" in tensors:
            w = w + config.scale * (tensors[f"lora.{key}.down"] @ tensors[f"lora.{key}.up"]).T
        if f"dora.{key}.down" in tensors:  # m·(W + s·BA)/‖W + s·BA‖, the norm of every output's weights held fixed
            w = w + config.scale * (tensors[f"dora.{key}.down"] @ tensors[f"dora.{key}.up"]).T
            w = tensors[f"dora.{key}.magnitude"].unsqueeze(-1) * w / w.detach().norm(dim=1, keepdim=True)
        if f"bias.{key}" in tensors:
            b = tensors[f"bias.{key}"]
        if f"ia3.{key}" in tensors and linear.name in ("project", "contract"):
            w = w * tensors[f"ia3.{key}"]
        elif f"ia3.{key}" in tensors:
            w = w * tensors[f"ia3.{key}"].unsqueeze(-1)
            b = None if b is None else b * tensors[f"ia3.{key}"]
        weights[f"{path}.weight"] = torch.cat([whole_w[: linear.start], w, whole_w[linear.stop :]])
        if whole_b is not None:
            weights[f"{path}.bias"] = torch.cat([whole_b[: linear.start], b, whole_b[linear.stop :]])
    return weights


def plain_model(backbone, config, tensors):
    """The family's own transformers model with the adapters hooked in, knowing nothing of banks."""
    anatomy = backbone.anatomy
    model = load_plain(backbone).eval()
    paths = {(site.layer, site.place): site.path for site in anatomy.sites}
    read = {}
    for layer, block in enumerate(anatomy.blocks):
        last = 1 if layer < anatomy.num_readers else 2
        sublayers = [name.format(last=last) for name in SUBLAYERS.get(anatomy.family, USUAL_SUBLAYERS)]
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

            model.get_submodule(paths[layer, place]).register_forward_hook(rewrite)
        if "output" not in config.places:
            continue
        name = group_name(config, layer, "output", anatomy.num_layers)
        if anatomy.family in ("modernbert", *WRITING):  # no norm ends a block: the adapter reads the sum itself

            def after(m, args, out, name=name):
                return out + spell_adapter(config, tensors, name, out)

            model.get_submodule(paths[layer, "output"]).register_forward_hook(after)
            continue

        def before_norm(m, args, name=name):
            (s,) = args
            normal = F.layer_norm(s, s.shape[-1:], m.weight, m.bias, m.eps)
            return (s + spell_adapter(config, tensors, name, normal),)

        model.get_submodule(paths[layer, "output"]).register_forward_pre_hook(before_norm)
    return model


def hook_pals(model, anatomy, tensors, mask):
    """Projected attention of what each block reads, added to what its feed-forward layer gives."""
    paths = {site.layer: site.path for site in anatomy.sites if site.place == "feedforward"}
    read = {}
    for layer, block in enumerate(anatomy.blocks):

        def note(m, args, kwargs, layer=layer):
            read[layer] = args[0] if args else kwargs["hidden_states"]

        def add(m, args, out, layer=layer):
            z = read[layer] @ tensors["pal.encode"]
            q, k, v = (z @ tensors[f"pal.{layer}.{name}"] for name in ("query", "key", "value"))
            heads = []
            for own in torch.arange(z.shape[-1]).chunk(anatomy.num_heads):
                scores = q[..., own] @ k[..., own].transpose(1, 2) / math.sqrt(len(own))
                weights = scores.masked_fill(mask.unsqueeze(1) == 0, -torch.inf).softmax(-1)
                heads.append(weights @ v[..., own])
            return out + torch.cat(heads, -1) @ tensors["pal.decode"]

        model.get_submodule(block).register_forward_pre_hook(note, with_kwargs=True)
        model.get_submodule(paths[layer]).register_forward_hook(add)


def spell_logits(backbone, batch, config, tensors):
    """A mean-pooled linear head on the plain model's states, or the logits of every token of the answers."""
    model, weights = plain_model(backbone, config, tensors), merged_weights(backbone, config, tensors)
    if "pal.encode" in tensors:
        hook_pals(model, backbone.anatomy, tensors, batch.mask_BT)
    inputs = {"input_ids": batch.input_ids_BT, "attention_mask": batch.mask_BT}
    if backbone.is_seq2seq:
        return functional_call(model, weights, kwargs=inputs | {"labels": batch.written_BT}).logits
    if batch.token_types_BT is not None:
        inputs["token_type_ids"] = batch.token_types_BT
    hidden = functional_call(model, weights, kwargs=inputs).last_hidden_state
    mask = batch.mask_BT.unsqueeze(-1)
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    return pooled @ tensors["head.weight"].T + tensors["head.bias"]


@every_pair
def test_forward_and_gradients_equal_the_plain_formula(backbone_of, family, method):
    backbone = backbone_of(family)
    bank = make_bank(backbone, method, trainable=True)
    slot = min(1, bank.num_slots - 1)
    batch = collate(rows_for(backbone, [slot] * 6, trains=True), backbone.pad_id)
    real = (batch.written_BT if backbone.is_seq2seq else batch.mask_BT[:, 0]) >= 0
    with bank.routed(batch.route):
        (logits,) = bank.logits(batch)
        logits[real].square().sum().backward()

    tensors = {name: tensor.requires_grad_() for name, tensor in bank.read(slot).items()}
    expected = spell_logits(backbone, batch, bank.specs[slot].method, tensors)
    torch.testing.assert_close(logits[real], expected[real], atol=1e-5, rtol=1e-4)
    expected[real].square().sum().backward()
    for name, tensor in tensors.items():
        if name.endswith(("running_mean", "running_var")):
            continue
        mine = bank.stacks[name].grad[slot][tuple(slice(0, size) for size in tensor.shape)]
        if name.endswith(("key.bias", "k.bias", "k_lin.bias", "key_proj.bias")) or fnmatch(name, "bias.*.key"):
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
    free = collate([Row(row.ids, len(names), row.segments, written=row.ids)], backbone.pad_id)
    with torch.no_grad(), mixed.routed(free.route):
        through = states_of(backbone, free)
    with torch.no_grad():
        torch.testing.assert_close(through, states_of(backbone, free), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("family", "method"), UNSUPPORTED)
def test_an_unsupported_pair_is_refused_by_name(backbone_of, family, method):
    spec = SlotSpec.of(MethodConfig(method), head_of(backbone_of(family), 2))
    with pytest.raises(Unsupported, match=f"`{method}`.*`{family}`"):
        Bank(backbone_of(family), 1).initialise(0, spec, seed=0)


@pytest.mark.parametrize("method", DEBERTA_LINEARS)
def test_layers_that_also_project_positions_are_refused_by_name(backbone_of, method):
    spec = SlotSpec.of(MethodConfig(method), HeadSpec("classify", 2, "mean"))
    with pytest.raises(InlayError, match=r"`(query|key)` of the backbone family `deberta-v2`: it also projects"):
        Bank(backbone_of("deberta-v2"), 1).initialise(0, spec, seed=0)


@pytest.mark.parametrize("family", WRITING)
@pytest.mark.parametrize("method", ["houlsby", "mahabadi", "pfeiffer", "parallel", "lora", "ia3", "norms"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_texts_written_in_a_mixed_batch_are_those_that_transformers_generates_alone(
    backbone_of, family, method, num_beams
):
    backbone = backbone_of(family)
    bank = Bank(backbone, 3)
    for slot in range(3):
        spec, tensors = random_slot(backbone, method_of(family, method, 8), 2, slot)
        head = HeadSpec("text", 0, WRITTEN, beams=num_beams, max_answer=7)
        bank.put(slot, dataclasses.replace(spec, head=head), tensors)
    rows = rows_for(backbone, [2, 0, 1, 0, 2, 1])
    written = ["".join(map(chr, answer.int().tolist())) for answer in infer(bank, rows)]
    assert len(set(written)) > 1 or method == "norms"
    for row, text in zip(rows, written, strict=True):
        config, tensors = bank.specs[row.slot].method, bank.read(row.slot)
        model = plain_model(backbone, config, tensors)
        with torch.no_grad():
            for name, value in merged_weights(backbone, config, tensors).items():
                model.get_parameter(name).copy_(value)
        ids = model.generate(torch.tensor([row.ids]), num_beams=num_beams, max_new_tokens=7, do_sample=False)
        assert text == backbone.tokenizer.decode(ids[0], skip_special_tokens=True)
