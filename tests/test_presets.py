"""Presets: every published count, optimizer and schedule in docs/methods.md."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
import transformers

from inlay.data.sampling import task_shares
from inlay.errors import BadConfig, UnknownName, Unsupported
from inlay.model.backbone.sites import survey
from inlay.model.bank.methods import JOINT_METHODS, find_method, layout, resolve_method
from inlay.model.heads.heads import HeadSpec
from inlay.settings.presets import PRESETS, apply_preset
from inlay.settings.run_config import RunConfig, TrainConfig
from inlay.training import make_run
from inlay.training.run.joint import make_joint_run
from inlay.training.step.optimizer import VARIANTS, learning_rate

BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
T5_SMALL = {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
HOULSBY = ("houlsby2019", "houlsby2019-code", "uva2019")
JOINT = [name for name, entry in PRESETS.items() if entry.settings["method.name"] in JOINT_METHODS]
TF_ADAPTER_BERT = ("tf-adapter-bert-within-layer", "tf-adapter-bert-none", "tf-adapter-bert-every-3")


def shape_of(**config):
    with torch.device("meta"):
        return survey(transformers.BertModel(transformers.BertConfig(**config)))


@pytest.fixture(scope="module")
def bert_base():
    return shape_of()


def t5_of(**config):
    with torch.device("meta"):
        return survey(transformers.T5ForConditionalGeneration(transformers.T5Config(**config)))


def preset(name, **method):
    config = apply_preset(name, RunConfig())
    return dataclasses.replace(config, method=dataclasses.replace(config.method, **method))


def count(anatomy, config, *, without=(), num_labels=2):
    """Trained parameters of a classifier with a preset's method and head."""
    train = config.train
    head = HeadSpec("classify", num_labels, train.pooling, hidden=train.hidden, features=train.features)
    specs = layout(anatomy, resolve_method(config.method), head)
    return sum(item.num_parameters for item in specs if item.part not in without and item.name not in without)


@pytest.mark.parametrize("name", HOULSBY)
@pytest.mark.parametrize(("size", "total"), [(2, 132_146), (8, 353_474), (64, 2_419_202), (256, 9_501_698)])
def test_houlsby_presets_train_the_published_number_of_parameters(bert_base, name, size, total):
    assert count(bert_base, preset(name, size=size)) == total


@pytest.mark.parametrize("name", HOULSBY)
def test_houlsby_presets_have_size_64_and_the_counts_of_the_table(bert_base, name):
    config = preset(name)
    assert config.method.size == 64
    assert count(bert_base, config, num_labels=3) == 2_419_971
    assert count(bert_base, config, without=("adapters",)) == 39_938, "25 layer norms and the head"
    assert count(bert_base, config, without=("norms", "head")) == 2_379_264, "what the student reproduction prints"
    assert 109_482_240 + count(bert_base, config, without=("norms",)) == 111_863_042, "and its total"
    assert count(shape_of(**BERT_LARGE), config) == 6_446_082


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("tf-adapter-bert-within-layer", 1_189_632),
        ("tf-adapter-bert-none", 3_006_720),
        ("tf-adapter-bert-every-3", 396_544),
    ],
)
def test_the_three_models_of_tf_adapter_bert_have_the_counts_of_the_report(bert_base, name, total):
    assert count(bert_base, preset(name), without=("head.weight", "head.bias")) == total


def test_the_code_of_within_layer_trains_the_encoder_norms_besides(bert_base):
    config = preset("tf-adapter-bert-within-layer", norms="encoder")
    assert count(bert_base, config, without=("head",)) == 1_189_632 + 24 * 2 * 768


def test_adapterhub_houlsby_has_the_library_s_two_layer_head_and_no_norms(bert_base):
    config = preset("adapterhub-houlsby")
    assert count(bert_base, config, without=("adapters", "norms")) == 592_130
    assert count(bert_base, config, without=("adapters", "head")) == 0
    assert config.method.size == 768 // 16
    assert config.method.activation == "swish"
    one_adapter = 2 * 48 * 768 + 768 + 48
    assert count(bert_base, config, without=("head",)) == 24 * one_adapter
    assert count(bert_base, preset("adapterhub-pfeiffer"), without=("head",)) == 12 * one_adapter


def test_houlsby_s_optimizer_is_bert_adam_with_its_own_schedule():
    train = preset("houlsby2019").train
    variant = VARIANTS[train.optimizer]
    assert (variant.eps, variant.corrects_bias) == (1e-6, False)
    assert (train.weight_decay, train.clip_norm) == (0.01, 1.0)
    rates = [learning_rate(train, step, 100) / train.lr for step in range(100)]
    expected = [step / 10 if step < 10 else 1 - step / 100 for step in range(100)]
    assert rates == pytest.approx(expected), "after warm-up it steps down to 0.9 of the rate"


def test_paper_and_code_differ_in_the_initial_values_only():
    paper, code = preset("houlsby2019"), preset("houlsby2019-code")
    assert (paper.method.init_std, code.method.init_std) == (1e-2, 1e-3)
    assert dataclasses.replace(code.method, init_std=1e-2) == paper.method
    assert code.train == paper.train


def test_student_reproduction_is_the_code_with_its_own_rate_and_epochs():
    uva, code = preset("uva2019"), preset("houlsby2019-code")
    assert (uva.train.lr, uva.train.epochs, uva.train.batch_size, uva.train.max_length) == (2e-5, 15, 32, 128)
    assert uva.method == code.method
    assert dataclasses.replace(uva.train, lr=code.train.lr, epochs=code.train.epochs) == code.train


@pytest.mark.parametrize("name", TF_ADAPTER_BERT)
def test_tf_adapter_bert_trains_with_adam_warm_up_and_linear_decay(name):
    config = preset(name)
    train = config.train
    assert (train.optimizer, train.weight_decay, train.lr, train.epochs) == ("adamw", 0.0, 3e-4, 10)
    assert (train.schedule, train.warmup, config.method.init_std) == ("linear", 0.1, 1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_every_setting_of_a_preset_is_one_that_its_method_takes(name):
    config = preset(name)
    resolve_method(config.method)
    for key, value in PRESETS[name].settings.items():
        section, _, setting = key.partition(".")
        assert getattr(getattr(config, section), setting) == value
    assert PRESETS[name].summary


@pytest.mark.parametrize(
    ("name", "family"), [("mahabadi2021", "t5"), ("mahabadi2021", "bert"), ("stickland2019", "bert")]
)
def test_a_run_of_several_tasks_can_be_made_with_every_preset_for_it(name, family, backbone_of, toy_task):
    config = preset(name)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_length=32))
    run = make_joint_run([toy_task("two"), toy_task("five", num_labels=5)], config, backbone_of(family))
    smoothing = 0.1 if family == "t5" else None
    assert [part.config.train.label_smoothing for part in run.parts] == [smoothing, smoothing]
    assert run.num_steps == config.joint.steps


def test_mahabadi_s_preset_has_the_published_counts_and_schedule():
    config = preset("mahabadi2021")
    task = sum(
        item.num_parameters for item in layout(t5_of(**T5_BASE), resolve_method(config.method)) if not item.is_shared
    )
    shared = sum(
        item.num_parameters for item in layout(t5_of(**T5_BASE), resolve_method(config.method)) if item.is_shared
    )
    assert shared + 8 * task == 5_211_056
    small = layout(t5_of(**T5_SMALL), resolve_method(preset("mahabadi2021", size=16).method))
    assert sum(item.num_parameters * (1 if item.is_shared else 8) for item in small) == 2_415_776
    for changes in (
        ["method.name=hyperformer"],
        ["method.name=mahabadi-multi"],
        ["method.name=full-multi", "method.size=none"],
    ):
        resolve_method(config.override(changes).method)
    train, joint = config.train, config.joint
    assert (train.optimizer, train.weight_decay, train.lr, train.batch_size) == ("adamw", 0.0, 3e-4, 32)
    assert (joint.steps, joint.sampling, joint.temperature, joint.batches) == (
        262_144,
        "temperature",
        10,
        "homogeneous",
    )
    rates = [learning_rate(train, step, joint.steps) for step in range(joint.steps)]
    assert rates.index(max(rates)) == 499, "500 steps of warm-up"
    assert rates[-1] == pytest.approx(3e-4 / (262_144 - 500))


def test_pals_preset_has_the_published_count_and_annealed_sampling(bert_base):
    config = preset("stickland2019")
    own = [item for item in layout(bert_base, resolve_method(config.method)) if not item.is_shared]
    assert sum(item.num_parameters for item in own) == 1_811_520
    assert (config.train.lr, config.train.epochs, config.joint.steps) == (2e-5, 25, 25 * 300 * 8)
    sizes, epochs = (100, 10_000), config.train.epochs
    for epoch in range(epochs):
        exponent = 1 - 0.8 * epoch / (epochs - 1)
        few, many = task_shares(sizes, config.joint, epoch, epochs)
        assert many / few == pytest.approx(100**exponent)


def test_the_help_of_the_rate_says_what_methods_have():
    (item,) = (item for item in dataclasses.fields(TrainConfig) if item.name == "lr")
    usual, on_t5 = item.metadata["help"].rsplit(" (", 1)
    told = re.findall(r"(\S+) for (\w+)", usual)
    assert len(told) == 3
    for rate, method in told:
        assert find_method(method).lr == float(rate)
    (writing,) = re.findall(r"on T5 (\S+) for the last two", on_t5)
    assert {find_method(method).lr_writing for _, method in told[-2:]} == {float(writing)}


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in JOINT])
def test_a_run_can_be_made_with_every_preset(name, tiny_bert, toy_task):
    config = preset(name)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_length=32))
    run = make_run(toy_task(), config, tiny_bert)
    assert run.config.train.optimizer == config.train.optimizer
    assert run.spec.head.hidden == config.train.hidden


def test_backbone_without_a_pooler_is_refused_with_what_to_do(backbone_of, toy_task):
    config = preset("houlsby2019")
    with pytest.raises(Unsupported, match="pooling `pooler` on the backbone") as caught:
        make_run(toy_task(), config, backbone_of("distilbert"))
    assert caught.value.hint == "use `cls` or `mean`"


def test_preset_leaves_alone_what_it_does_not_set():
    config = RunConfig(task="mine", train=TrainConfig(seed=5, patience=2))
    made = apply_preset("houlsby2019", config)
    assert (made.task, made.train.seed, made.train.patience) == ("mine", 5, 2)


def test_unknown_preset_is_refused_by_name():
    with pytest.raises(UnknownName, match="no preset named `tf-adapter-bert`"):
        apply_preset("tf-adapter-bert", RunConfig())


def test_preset_in_the_library_is_overridden_by_settings_by_name(tiny_bert, toy_task):
    import inlay

    run = inlay.make_run(toy_task(), tiny_bert, preset="houlsby2019", size=8, max_length=32)
    assert (run.config.method.size, run.config.train.schedule) == (8, "bert")
    with pytest.raises(BadConfig, match=r"no setting named `epoch`.*did you mean `epochs`"):
        inlay.make_run(toy_task(), tiny_bert, preset="houlsby2019", epoch=3)
