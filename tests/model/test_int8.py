"""Int8 layers: the formula, rows that do not depend on each other, and a float backbone that stays what it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inlay.errors import UnknownName, Unsupported
from inlay.model.backbone.families import FAMILIES, find_family
from inlay.model.backbone.fingerprint import digest_weights
from inlay.model.backbone.int8 import Int8Linear, quantize, with_precision
from inlay.model.bank.bank import Bank
from inlay.model.bank.methods import SlotSpec
from inlay.model.batch.route import Row
from inlay.model.heads.heads import HeadSpec
from inlay.model.heads.inference import canonical_backbone, infer
from inlay.serving import Engine, Request
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import fit, make_run, publish

HOULSBY = SlotSpec.of(MethodConfig("houlsby", 8), HeadSpec("classify", 3, "mean"))


def rows_of(backbone, texts):
    return [Row(backbone.tokenizer(text)["input_ids"], 0) for text in texts]


def tensors_of(backbone, spec, seed=0):
    return {
        item.name: bank_value
        for item, bank_value in ((item, _near_neutral(backbone, item, seed)) for item in spec.layout(backbone.anatomy))
    }


def _near_neutral(backbone, item, seed):
    generator = torch.Generator().manual_seed(seed + len(item.name))
    neutral = backbone.own_tensor(item.name) if item.start == "backbone" else float(item.start == "ones")
    return neutral + 0.1 * torch.randn(item.shape, generator=generator)


def logits_of(backbone, texts, spec=HOULSBY):
    bank = Bank(backbone, 1)
    bank.put(0, spec, tensors_of(backbone, spec))
    return torch.stack(infer(bank, rows_of(backbone, texts)))


def logits_without(backbone, compute):
    """What `compute` gives while no module of `backbone` may run."""

    def fail(module, *_):
        raise AssertionError(f"{type(module).__name__} of the float backbone ran")

    handles = [module.register_forward_pre_hook(fail) for module in backbone.model.modules()]
    try:
        return compute()
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("has_bias", [True, False])
def test_an_int8_layer_is_the_product_of_rounded_weights_and_rounded_tokens(has_bias):
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, bias=has_bias)
    x_ND = torch.randn(700, 24) * torch.logspace(-3, 3, 700).unsqueeze(1) + 5.0  # more than a block, of all sizes
    weight = layer.weight.double()
    step_O1 = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / step_O1).round() * step_O1
    low, high = x_ND.double().amin(1, keepdim=True), x_ND.double().amax(1, keepdim=True)
    step_N1 = (high - low) / (255 if torch.cpu._is_vnni_supported() else 127)  # of 8 bits, or of 7
    expected = x_ND.double() @ rounded.T + (layer.bias.double() if has_bias else 0)
    found = Int8Linear(layer)(x_ND)
    # Rounding moves each value of a token by half a step at most.
    bound = step_N1 / 2 * rounded.abs().sum(1) * 1.02 + 1e-3 * expected.abs().amax(1, keepdim=True)
    assert ((found - expected).abs() <= bound).all()
    assert found.dtype == torch.float32


def test_a_token_of_one_value_and_no_tokens_are_fine():
    layer = nn.Linear(24, 16)
    int8 = Int8Linear(layer)
    torch.testing.assert_close(int8(torch.zeros(2, 24)), layer.bias.detach().expand(2, -1))
    constant = torch.full((1, 3, 24), 7.0)
    torch.testing.assert_close(int8(constant), layer(constant).detach(), atol=0.2, rtol=0.02)
    assert int8(torch.zeros(0, 24)).shape == (0, 16)


def test_a_token_is_rounded_the_same_whatever_is_beside_it():
    torch.manual_seed(0)
    int8 = Int8Linear(nn.Linear(24, 16))
    x_ND = torch.randn(1000, 24)
    huge = torch.cat([x_ND, 1e4 * torch.randn(100, 24)])
    together = int8(huge)
    assert torch.equal(together[:1000], int8(x_ND))
    assert torch.equal(together[517:518], int8(x_ND[517:518]))


def test_int8_layers_have_no_gradient():
    with pytest.raises(AssertionError, match="only answer"):
        Int8Linear(nn.Linear(8, 8))(torch.zeros(1, 8, requires_grad=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_the_blocks_is_int8_and_answers_stay_near(backbone_of, texts, family):
    backbone = backbone_of(family)
    int8 = quantize(backbone)
    stack = find_family(family).stack
    kinds = {type(module) for module in int8.model.get_submodule(stack).modules()}
    assert Int8Linear in kinds
    assert nn.Linear not in kinds
    plain, rounded = logits_of(backbone, texts), logits_without(backbone, lambda: logits_of(int8, texts))
    assert not torch.equal(plain, rounded)
    assert (rounded - plain).abs().max() < 0.1 * plain.abs().max().clamp(min=1)


@pytest.mark.parametrize("method", ["lora", "bitfit", "ia3", "pfeiffer"])
def test_what_a_task_writes_at_linear_layers_is_kept_in_float(tiny_bert, texts, method):
    size = 4 if method in ("lora", "pfeiffer") else None
    spec = SlotSpec.of(MethodConfig(method, size), HeadSpec("classify", 2, "mean"))
    plain, rounded = logits_of(tiny_bert, texts, spec), logits_of(quantize(tiny_bert), texts, spec)
    assert (rounded - plain).abs().max() < 0.1 * plain.abs().max().clamp(min=1)


def test_the_float_backbone_is_untouched_and_answers_bit_for_bit_as_before(tiny_bert, texts):
    before = {name: tensor.clone() for name, tensor in tiny_bert.model.state_dict().items()}
    digest = digest_weights(tiny_bert.folder, find_family("bert"))
    answers = logits_of(tiny_bert, texts)
    engine = torch.backends.quantized.engine
    int8 = quantize(tiny_bert)
    logits_of(int8, texts)
    after = tiny_bert.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(logits_of(tiny_bert, texts), answers)
    assert int8.fingerprint == tiny_bert.fingerprint
    assert digest_weights(tiny_bert.folder, find_family("bert")) == digest
    assert torch.backends.quantized.engine == engine
    assert int8.mount is not tiny_bert.mount
    assert int8.tokenizer is tiny_bert.tokenizer
    embeddings = "embeddings.word_embeddings.weight"
    assert int8.model.get_parameter(embeddings) is tiny_bert.model.get_parameter(embeddings)


def test_the_canonical_path_never_runs_in_int8(tiny_bert):
    found = canonical_backbone(quantize(tiny_bert))
    assert not any(isinstance(module, Int8Linear) for module in found.model.modules())
    assert found.fingerprint == tiny_bert.fingerprint


def test_unknown_precisions_and_other_devices_are_refused_with_a_hint(tiny_bert, monkeypatch):
    with pytest.raises(UnknownName, match="no precision named `int7`"):
        with_precision(tiny_bert, "int7")
    assert with_precision(tiny_bert, "auto") is tiny_bert
    monkeypatch.setattr(type(tiny_bert), "device", torch.device("cuda", 0))
    with pytest.raises(Unsupported, match="int8 on `cuda`") as refusal:
        quantize(tiny_bert)
    assert "--device cpu" in refusal.value.hint


@pytest.fixture(scope="module")
def kept(tiny_bert, toy_task, toy_tags, toy_answers, tmp_path_factory):
    """A store with a trained task of four kinds."""
    store = Store(tmp_path_factory.mktemp("store"))
    tasks = [
        toy_task("classes", num_rows=96),
        toy_task("number", kind="regress", seed=3),
        toy_tags("tags", num_rows=80),
        toy_answers("answers", num_rows=40),
    ]
    train = TrainConfig(batch_size=8, max_length=40, stride=6, epochs=4, lr=1e-2)
    runs = [make_run(task, RunConfig(method=MethodConfig(size=8), train=train), tiny_bert) for task in tasks]
    results = fit(runs, tiny_bert, store.root / "runs")
    for run, result in zip(runs, results, strict=True):
        publish(run, result, tiny_bert, store)
    return store, {run.task.name: run for run in runs}


def test_int8_gives_a_trained_task_the_same_labels_and_logits_that_hardly_moved(tiny_bert, kept):
    store, runs = kept
    dev = runs["classes"].task.dev
    requests = [Request("classes", text) for text in dev.texts]
    plain = Engine(tiny_bert, store).predict(requests)
    rounded = Engine(tiny_bert, store, precision="int8").predict(requests)
    spread = max(float(answer.logits.abs().max()) for answer in plain)
    drift = max(float((a.logits - b.logits).abs().max()) for a, b in zip(plain, rounded, strict=True))
    assert 0 < drift < 0.1 * spread
    assert [answer.outcome.label for answer in rounded] == [answer.outcome.label for answer in plain]


def test_an_engine_measures_the_drift_of_every_version_on_its_own_probes(tiny_bert, kept):
    store, runs = kept
    plain, int8 = Engine(tiny_bert, store), Engine(tiny_bert, store, precision="int8")
    requests = [Request(name, "what prize ?", "the prize is ten" if name == "answers" else None) for name in runs]
    for engine in (plain, int8):
        assert all(answer.error is None for answer in engine.predict(requests))
    assert plain.drifts == {}
    assert int8.drifts.keys() == {f"{name}@1" for name in runs}
    for name in runs:
        manifest = store.manifest(store.resolve(name))
        probes = [Request(name, probe.text, probe.pair) for probe in manifest.probes]
        answers = int8.predict(probes)
        drift = int8.drifts[f"{name}@1"]
        largest = max(
            float((answer.logits - torch.tensor(probe.logits)).abs().max())
            for answer, probe in zip(answers, manifest.probes, strict=True)
        )
        assert drift.num_probes == len(probes) > 0
        spread = max(abs(value) for probe in manifest.probes for value in probe.logits)
        assert drift.largest == pytest.approx(largest, abs=1e-2 * max(1.0, spread)), "as in any other batch"
        assert 0 <= drift.num_changed < len(probes)


def test_int8_answers_hardly_depend_on_the_rows_beside_them(tiny_bert, kept):
    """Batched products of adapters and attention differ in the last bit, which may round a value to the next step."""
    store, _ = kept
    requests = [Request("classes", "the movie was good"), Request("tags", "the oslo is good"), Request("number", "why")]
    engine = Engine(tiny_bert, store, precision="int8")
    for request, answer in zip(requests, engine.predict(requests), strict=True):
        alone = engine.predict([request])[0].logits
        assert (answer.logits - alone).abs().max() < 1e-2 * alone.abs().max().clamp(min=1)


def test_a_task_with_its_own_weights_is_refused_in_int8_and_spoils_no_other(tiny_bert, publish_random, tmp_path):
    store = Store(tmp_path)
    publish_random(store, "full", tiny_bert, SlotSpec.of(MethodConfig("full"), HeadSpec("classify", 2, "mean")))
    publish_random(store, "small", tiny_bert, HOULSBY)
    engine = Engine(tiny_bert, store, precision="int8")
    refused, answered = engine.predict([Request("full", "good"), Request("small", "good")])
    assert isinstance(refused.error, Unsupported)
    assert "`full`" in refused.error.message
    assert "--precision" in refused.error.hint
    assert answered.error is None
