"""Every method from training to serving: learnt, published, proved, and answered in one mixed batch."""

from __future__ import annotations

import pytest
import torch

from hooks import Hooks
from inlay.errors import BadConfig, Unsupported
from inlay.model.backbone.families import find_family
from inlay.model.backbone.fingerprint import digest_weights
from inlay.model.bank.methods import METHODS
from inlay.serving import Engine, Request, verify
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import FitSettings, fit, make_run, publish
from inlay.training.run.plan import make_plan

TEXTS = ["the movie was good", "free prize call now", "why", "a very bad film , it is awful"]


def make(backbone, task, method=MethodConfig(), **train):
    settings = {"batch_size": 8, "max_length": 32, "epochs": 2, "lr": 3e-3, "pooling": "mean", **train}
    return make_run(task, RunConfig(method=method, train=TrainConfig(**settings)), backbone)


@pytest.fixture(scope="module")
def kept(tiny_bert, toy_task, tmp_path_factory):
    """A store with one task of every method."""
    store = Store(tmp_path_factory.mktemp("store"))
    versions = {}
    for seed, name in enumerate(METHODS):
        run = make(tiny_bert, toy_task(name, num_labels=2 + seed % 3, seed=seed), MethodConfig(name))
        (result,) = fit([run], tiny_bert, store.root / "runs")
        versions[name] = publish(run, result, tiny_bert, store)
    return store, versions


def test_versions_of_every_method_stand_and_answer_alike_alone_and_mixed(tiny_bert, kept):
    store, versions = kept
    for check in verify(list(versions.values()), tiny_bert, store):
        assert check.stands, (check.version, check.problem)
        assert check.is_exact
    requests = [Request(name, text) for text in TEXTS for name in versions]
    together = Engine(tiny_bert, store).predict(requests)
    for request, answer in zip(requests, together, strict=True):
        alone = Engine(tiny_bert, store, num_slots=1).predict([request])[0]
        torch.testing.assert_close(answer.logits, alone.logits, atol=1e-5, rtol=1e-5, msg=request.task)


def test_the_backbone_is_the_same_after_tasks_of_every_method(tiny_bert, kept):
    family = find_family("bert")
    before = digest_weights(tiny_bert.folder, family)
    assert before.exact == tiny_bert.exact_digest
    loaded = dict(tiny_bert.model.named_parameters())
    fresh = type(tiny_bert)(tiny_bert.name, tiny_bert.folder, _reload(tiny_bert), tiny_bert.tokenizer)
    for name, parameter in fresh.model.named_parameters():
        assert torch.equal(parameter, loaded[name]), name


def _reload(backbone):
    from transformers import AutoModel

    return AutoModel.from_pretrained(backbone.folder)


def test_a_version_stores_what_its_method_trains_and_says_how_much(tiny_bert, kept):
    store, versions = kept
    sizes = {name: store.load(version).manifest.num_parameters for name, version in versions.items()}
    whole = sum(p.numel() for n, p in tiny_bert.model.named_parameters() if "pooler" not in n)
    labels = 2 + list(METHODS).index("full") % 3
    assert sizes["full"] == whole + labels * (tiny_bert.hidden_size + 1)
    assert sizes["head"] < sizes["ia3"] < sizes["norms"] + sizes["bitfit"] < sizes["top"] < sizes["full"]
    for name, version in versions.items():
        stored = sum(tensor.numel() for tensor in store.load(version).tensors.values())
        assert stored == sizes[name], name


class Sizes(Hooks):
    def __init__(self):
        self.sizes = []

    def on_start(self, cohort):
        self.sizes.append(len(cohort.members))


def test_fine_tuning_trains_alone_and_unlike_structures_apart(tiny_bert, toy_task, tmp_path):
    watch = Sizes()
    methods = [
        *[MethodConfig("lora", 2), MethodConfig("lora", 4, alpha=16.0)],
        *[MethodConfig(size=4), MethodConfig(size=8, activation="relu"), MethodConfig(size=4, sharing="every-2")],
        *[MethodConfig("full"), MethodConfig("top"), MethodConfig("top", layers="-2:")],
    ]
    runs = [make(tiny_bert, toy_task(), method, epochs=1) for method in methods]
    assert len(fit(runs, tiny_bert, tmp_path, emit=watch)) == 8
    assert watch.sizes == [2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("method", "train"),
    [
        (MethodConfig("full"), {"lr": 1e-3}),
        (MethodConfig("lora"), {"lr": 1e-2}),
        (MethodConfig(sharing="all"), {}),
        (MethodConfig(inner_norm="batch"), {}),
        (MethodConfig("head"), {"features": "mix", "lr": 3e-2}),
        (MethodConfig("norms"), {"hidden": "tanh", "lr": 1e-2}),
    ],
    ids=lambda item: item.name if isinstance(item, MethodConfig) else "-".join(map(str, item.values())),
)
def test_a_task_is_learnt(tiny_bert, toy_task, tmp_path, method, train):
    run = make(tiny_bert, toy_task(num_rows=128), method, **{"epochs": 10, "lr": 5e-3, **train})
    (result,) = fit([run], tiny_bert, tmp_path)
    assert result.dev_metric > 0.75, result.dev_metric


def test_a_plan_counts_the_weights_that_fine_tuning_stores(tiny_bert, toy_task):
    plan = make_plan(make(tiny_bert, toy_task(), MethodConfig("full")), tiny_bert)
    assert plan.inlay.trained_parameters == sum(plan.parameters_by_part.values())
    assert plan.parameters_by_part["weights"] > 0.9 * plan.backbone_parameters


def test_a_trained_pooler_wants_a_backbone_that_has_one(backbone_of, tiny_bert, toy_task):
    with pytest.raises(Unsupported, match="pooler"):
        make(backbone_of("distilbert"), toy_task(), hidden="pooler", pooling="auto")
    with pytest.raises(BadConfig, match="`pooler` with `mean` pooling"):
        make(tiny_bert, toy_task(), hidden="pooler")


KILLED = [
    (MethodConfig(size=4, inner_norm="batch"), {}),
    (MethodConfig(size=4, sharing="every-2", form="parallel"), {"hidden": "tanh"}),
    (MethodConfig("full"), {}),
    (MethodConfig("top"), {"features": "mix"}),
    (MethodConfig("lora"), {"hidden": "pooler", "pooling": "auto"}),
    (MethodConfig("bitfit"), {}),
]


@pytest.mark.parametrize(("method", "train"), KILLED, ids=lambda item: getattr(item, "name", None))
def test_a_stopped_run_of_any_method_ends_with_the_same_weights(tiny_bert, toy_task, tmp_path, method, train):
    class Stop(Hooks):
        def on_step(self, cohort, num_rows):
            if cohort.num_steps == 8:
                raise KeyboardInterrupt

    run = make(tiny_bert, toy_task(), method, **train)
    settings = FitSettings(save_every=5)
    (whole,) = fit([run], tiny_bert, tmp_path / "whole", settings)
    with pytest.raises(KeyboardInterrupt):
        fit([run], tiny_bert, tmp_path / "stopped", settings, Stop())
    (resumed,) = fit([run], tiny_bert, tmp_path / "stopped", settings)
    assert whole.history[-1]["train_loss"] == resumed.history[-1]["train_loss"]
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, resumed.tensors[name]), name


def test_runs_with_unlike_heads_in_a_cohort_equal_each_alone(tiny_bert, toy_task, tmp_path):
    heads = [{}, {"hidden": "tanh"}, {"features": "mix"}, {"hidden": "pooler", "pooling": "auto"}, {"pooling": "cls"}]
    quiet = {"dropout": 0.0, "head_dropout": 0.0, "epochs": 1}
    runs = [make(tiny_bert, toy_task(), MethodConfig(size=4), **quiet, **head) for head in heads]
    together = fit(runs, tiny_bert, tmp_path / "together")
    for run, result in zip(runs, together, strict=True):
        (alone,) = fit([run], tiny_bert, tmp_path / "alone")
        for name, tensor in alone.tensors.items():
            torch.testing.assert_close(result.tensors[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_batch_norm_refuses_a_budget_that_would_tear_a_batch(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task(), MethodConfig(size=4, inner_norm="batch"))
    with pytest.raises(BadConfig, match="batch norm sees a run's batch whole"):
        fit([run], tiny_bert, tmp_path, FitSettings(token_budget=16))


def test_versions_of_every_method_are_built_and_proved_when_another_store_imports_them(tiny_bert, kept, tmp_path):
    from inlay.exchange import import_file

    store, versions = kept
    for name, version in versions.items():
        path = store.export(version.reference, tmp_path)
        assert import_file(path, name, Store(tmp_path / "other"), lambda asked: tiny_bert).digest == version.digest
