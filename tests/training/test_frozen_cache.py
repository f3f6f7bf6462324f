"""The frozen lower layers computed once per text: the same training, whatever is kept and wherever it is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import weakref

import numpy as np
import pytest
import torch

from hooks import Hooks
from inlay.data.tasks import Split
from inlay.data.windows import Reading, encode_split
from inlay.model.backbone.families import FAMILIES
from inlay.model.batch.route import CacheDepth
from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.frozen_cache import FrozenCache, Limits
from inlay.training.run import plan

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
EXACT = {"atol": 1e-5, "rtol": 1e-5}
ROOM = 1 << 30
REUSING = [name for name, family in FAMILIES.items() if family.reuses]


def make(backbone, task, method="houlsby", *, layers="auto", **train):
    usual = {"batch_size": 8, "max_length": 32, "epochs": 6, "lr": 3e-3}
    size = 8 if method in ("houlsby", "pfeiffer", "lora") else None
    linears = ("value",) if method == "lora" else ()  # DeBERTa's query is refused
    chosen = MethodConfig(method, size, layers=layers, linears=linears)
    config = RunConfig(method=chosen, train=TrainConfig(**{**usual, **train}))
    return make_run(task, config, backbone)


def make_cohort(runs, backbone, cache=None):
    cohort = Cohort(runs, backbone, SETTINGS)
    if cache is not None:
        cohort.reuse(cache)
    return cohort


def take_steps(cohort, num_steps):
    torch.manual_seed(0)
    with cohort.training():
        for _ in range(num_steps):
            cohort.step()
            cohort.backbone.model.eval()
            cohort.finish_epochs()
            cohort.backbone.model.train()


def gradients(cohort):
    torch.manual_seed(0)
    with cohort.training():
        return cohort.stepper.differentiate(
            cohort.active, {member.slot: member.next_batch() for member in cohort.active}
        )


def dev_logits(cohort):
    rows = [dataclasses.replace(row, prefix=None) for member in cohort.members for row in member.dev_rows()]
    return torch.stack(infer(cohort.bank, rows))


@contextlib.contextmanager
def counted(module):
    """The tokens of every forward pass of a module."""
    seen = []
    handle = module.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[:-1].numel()))
    try:
        yield seen
    finally:
        handle.remove()


def block(backbone, layer):
    """A block itself, inside its wrapper: it runs only where it is not left out."""
    return backbone._blocks[layer].inner


@pytest.mark.parametrize("is_padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("layers", ["1:", "2:"])
@pytest.mark.parametrize("family", REUSING)
def test_training_with_reuse_equals_training_without(
    backbone_of, toy_task, tmp_path, monkeypatch, family, layers, is_padded
):
    backbone = backbone_of(family)
    if is_padded:
        monkeypatch.setattr(backbone, "packs", False)
    runs = [make(backbone, toy_task(seed=seed), layers=layers, seed=seed, dropout=0.2) for seed in range(2)]
    plain = make_cohort(runs, backbone)
    reusing = make_cohort(runs, backbone, FrozenCache(backbone, tmp_path))
    for one, other in zip(gradients(plain), gradients(reusing), strict=True):
        torch.testing.assert_close(other, one, **EXACT)
    with counted(block(backbone, int(layers[0]) - 1)) as below, counted(block(backbone, int(layers[0]))) as above:
        take_steps(reusing, 20)
    assert not below
    assert len(above) >= 20
    take_steps(plain, 20)
    torch.testing.assert_close(dev_logits(reusing), dev_logits(plain), **EXACT)
    for slot in range(2):
        for name, tensor in plain.bank.read(slot).items():
            torch.testing.assert_close(reusing.bank.read(slot)[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    assert [member.progress.history for member in reusing.members] != [[], []]


@pytest.mark.parametrize("family", REUSING)
@pytest.mark.parametrize("method", ["head", "top", "pfeiffer", "lora", "norms"])
def test_every_kind_of_method_is_trained_alike_with_reuse(backbone_of, toy_task, tmp_path, family, method):
    backbone = backbone_of(family)
    layers = "auto" if method == "head" else "2:"
    run = make(backbone, toy_task(), method, layers=layers, dropout=0.0, head_dropout=0.0)
    plain = make_cohort([run], backbone)
    reusing = make_cohort([run], backbone, FrozenCache(backbone, tmp_path))
    with counted(block(backbone, 1)) as below:
        take_steps(reusing, 20)
    assert not below
    take_steps(plain, 20)
    torch.testing.assert_close(dev_logits(reusing), dev_logits(plain), **EXACT)


def test_a_backbone_that_writes_keeps_nothing_and_trains_its_upper_layers_alike(backbone_of, toy_task, tmp_path):
    backbone = backbone_of("t5")  # three blocks that read, two that write
    run = make(backbone, toy_task(), layers="3:", dropout=0.0)
    plain = make_cohort([run], backbone)
    reusing = make_cohort([run], backbone, FrozenCache(backbone, tmp_path))
    assert not reusing.members[0].is_reusing
    with counted(block(backbone, 0)) as below:
        take_steps(reusing, 3)
    assert len(below) >= 3
    take_steps(plain, 3)
    torch.testing.assert_close(dev_logits(reusing), dev_logits(plain), **EXACT)


def linear(backbone, layer, name):
    """A linear layer of a block inside its wrapper."""
    path = next(site.path for site in backbone.anatomy.linears if (site.layer, site.name) == (layer, name))
    module = backbone.model.get_submodule(path)
    while hasattr(module, "inner"):
        module = module.inner
    return module


# Method with its settings -> whether attention of the lowest trained layer is frozen up to its projection.
ATTENTION = {
    "houlsby": ({}, True),
    "parallel": ({"places": ("attention", "feedforward")}, True),
    "norms": ({}, True),
    "lora": ({"linears": ("query",)}, False),
    "ia3": ({"linears": ("contract",)}, True),
    "bitfit": ({}, False),
    "top": ({}, False),
}


@pytest.mark.parametrize("name", ["query", "project"])
@pytest.mark.parametrize("method", ATTENTION)
@pytest.mark.parametrize("family", ["bert", "mpnet", "distilbert", "deberta-v2"])
def test_attention_of_the_first_trained_layer_runs_only_if_it_is_trained(
    backbone_of, toy_task, tmp_path, family, method, name
):
    backbone = backbone_of(family)
    more, is_frozen = ATTENTION[method]
    if family == "deberta-v2":  # padded, and bitfit and query are refused there
        more, is_frozen = {"lora": {"linears": ("value",)}}.get(method, more), False
        method = "houlsby" if method == "bitfit" else method
        more = {} if method == "houlsby" else more
        name = "project"
    config = RunConfig(
        method=MethodConfig(method, layers="1:", **more),
        train=TrainConfig(batch_size=8, max_length=32, epochs=6, lr=3e-3, dropout=0.2),
    )
    run = make_run(toy_task(), config, backbone)
    plain, reusing = (
        make_cohort([run], backbone),
        make_cohort([run], backbone, FrozenCache(backbone, tmp_path)),
    )
    with counted(linear(backbone, 1, name)) as at_first, counted(linear(backbone, 2, name)) as above:
        take_steps(reusing, 7)
    assert bool(at_first) != is_frozen
    assert above
    take_steps(plain, 7)
    torch.testing.assert_close(dev_logits(reusing), dev_logits(plain), **EXACT)


def test_attention_with_dropout_is_computed_in_every_step(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task(), layers="1:", dropout=0.1, attention_dropout=0.1)
    plain, reusing = (
        make_cohort([run], tiny_bert),
        make_cohort([run], tiny_bert, FrozenCache(tiny_bert, tmp_path)),
    )
    with counted(linear(tiny_bert, 1, "query")) as at_first, counted(linear(tiny_bert, 0, "query")) as below:
        take_steps(reusing, 7)
    assert at_first
    assert not below
    take_steps(plain, 7)
    torch.testing.assert_close(dev_logits(reusing), dev_logits(plain), **EXACT)


def test_with_nothing_but_a_head_no_layer_runs_at_all(tiny_bert, toy_task, tmp_path):
    cohort = make_cohort([make(tiny_bert, toy_task(), "head")], tiny_bert, FrozenCache(tiny_bert, tmp_path))
    forwards = []
    handle = tiny_bert.model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        take_steps(cohort, 12)  # two epochs, with their scores
    finally:
        handle.remove()
    assert not forwards


def test_a_text_goes_through_the_frozen_layers_once_over_epochs_runs_and_methods(tiny_bert, toy_task, tmp_path):
    runs = [
        make(tiny_bert, toy_task(), method, layers="1:", seed=seed)
        for method in ("houlsby", "pfeiffer")
        for seed in (0, 1)
    ]
    with counted(block(tiny_bert, 0)) as below, counted(block(tiny_bert, 1)) as above:
        fit(runs, tiny_bert, tmp_path, FitSettings(token_budget=16384))  # given: no passes to measure memory by
    assert len(below) == 2  # the training rows, and the dev rows
    assert len(above) == 2 * 6 * (6 + 1)  # two cohorts of six epochs: six steps and a score in each


def relabelled(task):
    """The same texts in another split with other labels."""
    texts = [*task.dev.texts, *task.train.texts]
    labels = np.arange(len(texts)) % 2
    half = len(texts) // 2

    def part(rows):
        return Split(texts[rows], None, labels[rows], list(range(1, len(texts[rows]) + 1)))

    train, dev = part(slice(half)), part(slice(half, None))
    return dataclasses.replace(task, name="other", train=train, dev=dev, digest="other", dev_digest="other/dev")


def test_another_task_on_the_same_texts_computes_nothing(tiny_bert, toy_task, tmp_path):
    cache = FrozenCache(tiny_bert, tmp_path)
    task = toy_task()
    make_cohort([make(tiny_bert, task, layers="1:")], tiny_bert, cache)
    with counted(block(tiny_bert, 0)) as below:
        make_cohort([make(tiny_bert, relabelled(task), layers="1:")], tiny_bert, cache)
    assert not below
    with counted(block(tiny_bert, 0)) as below:
        make_cohort([make(tiny_bert, task, layers="2:")], tiny_bert, cache)
    assert below  # another layer reads other states


@pytest.mark.parametrize("family", ["bert", "mpnet", "deberta-v2", "modernbert"])
def test_states_do_not_depend_on_the_texts_beside_them(backbone_of, toy_task, tmp_path, family):
    backbone = backbone_of(family)
    reach = CacheDepth(2, with_attention=backbone.packs)
    encoded = encode_split(backbone.tokenizer, toy_task().train, Reading("classify", 32))
    kept = FrozenCache(backbone, tmp_path).keep(reach, encoded)
    nothing_kept = FrozenCache(backbone, tmp_path, limits=Limits(0, 0)).keep(reach, encoded)
    for windows in ([5], [0, 7, 30], range(10, 40)):
        for one, other in zip(kept.take(windows), nothing_kept.take(windows), strict=True):
            assert torch.equal(one.states, other.states)


# The 48 + 24 texts of the toy task have about 700 tokens of 2 × 32 numbers: some 180 kB.
LIMITS = {
    "memory": (ROOM, 0),
    "half-memory": (80_000, ROOM),
    "file": (0, ROOM),
    "both-full": (60_000, 60_000),
    "nothing": (0, 0),
}


@pytest.mark.parametrize("limits", LIMITS)
def test_where_states_are_kept_changes_no_bit(tiny_bert, toy_task, tmp_path, limits):
    run = make(tiny_bert, toy_task(), layers="1:", epochs=3)
    memory, file = LIMITS[limits]

    class Full(Hooks):
        def __init__(self):
            self.told = []

        def on_prefix_full(self, num_left, num_texts):
            self.told.append((num_left, num_texts))

    watch = Full()
    (usual,) = fit([run], tiny_bert, tmp_path / "usual")
    (result,) = fit(
        [run], tiny_bert, tmp_path / "limited", FitSettings(prefix_bytes=memory, prefix_file_bytes=file), watch
    )
    assert len(watch.told) == (limits in ("both-full", "nothing"))
    assert all(torch.equal(result.tensors[name], tensor) for name, tensor in usual.tensors.items())
    assert [line["dev"] for line in result.history] == [line["dev"] for line in usual.history]


def test_without_reuse_the_result_is_the_same_but_for_rounding(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task(), layers="2:")
    (reusing,) = fit([run], tiny_bert, tmp_path / "reusing")
    with counted(block(tiny_bert, 0)) as below:
        (plain,) = fit([run], tiny_bert, tmp_path / "plain", FitSettings(reuse_prefix=False))
    assert len(below) > 6 * 6
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(reusing.tensors[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


@pytest.fixture
def maps(monkeypatch):
    """Weak references to all mapped files made."""
    made, real = [], mmap.mmap

    def watched(*args):
        found = real(*args)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(mmap, "mmap", watched)
    return made


class StopAt(Hooks):
    """Looks around at a step, and stops there if it is to."""

    def __init__(self, folder, error=None):
        self.folder, self.error, self.names = folder, error, []

    def on_step(self, cohort, num_rows):
        if cohort.num_steps == 4:
            self.names = [path.name for path in self.folder.iterdir()]
            if self.error is not None:
                raise self.error


@pytest.mark.parametrize("error", [None, RuntimeError("planted"), KeyboardInterrupt()], ids=["end", "error", "ctrl-c"])
def test_the_file_is_gone_however_fit_ends(tiny_bert, toy_task, tmp_path, maps, error):
    run, watch = make(tiny_bert, toy_task(), layers="1:"), StopAt(tmp_path, error)
    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
        fit([run], tiny_bert, tmp_path, FitSettings(prefix_bytes=0), watch)
    assert len(maps) == 2  # the training rows', and the dev rows'
    assert all(found() is None for found in maps)
    assert sorted(watch.names) == sorted([run.id, "cohorts"])  # while it trained, too: the file has no name


def test_a_disk_without_room_is_no_error(tiny_bert, toy_task, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    run = make(tiny_bert, toy_task(), layers="1:", epochs=2)
    (result,) = fit([run], tiny_bert, tmp_path, FitSettings(prefix_bytes=0))
    assert result.status == "finished"


class StopAfter(Hooks):
    def __init__(self, num_steps):
        self.num_left = num_steps

    def on_step(self, cohort, num_rows):
        self.num_left -= 1
        if not self.num_left:
            raise RuntimeError("planted")


def test_a_stopped_run_goes_on_to_the_same_bits(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task(seed=seed), layers="1:", dropout=0.2) for seed in range(2)]
    runs.append(make(tiny_bert, relabelled(toy_task(seed=1)), "pfeiffer", layers="1:", dropout=0.2))
    settings = FitSettings(max_cohort=1, save_every=4)
    whole = fit(runs, tiny_bert, tmp_path / "whole", settings)
    for num_steps in (9, 40, 30):  # in the midst of each: the second enters the first one's slot, the third its own
        with pytest.raises(RuntimeError, match="planted"):
            fit(runs, tiny_bert, tmp_path / "cut", settings, StopAfter(num_steps))
    resumed = fit(runs, tiny_bert, tmp_path / "cut", settings)
    for one, same in zip(whole, resumed, strict=True):
        assert all(torch.equal(one.tensors[name], same.tensors[name]) for name in one.tensors)


def saved_bytes(cohort):
    """What autograd keeps of the forward pass of a step."""
    seen = {}

    def note(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gradients(cohort)
    return sum(seen.values())


def test_nothing_below_the_first_trained_layer_is_kept_for_backward(tiny_bert, toy_task, tmp_path):
    # The mean: of a last block that only computes first tokens less is kept.
    runs = [make(tiny_bert, toy_task(), layers=layers, dropout=0.0, pooling="mean") for layers in ("all", "2:")]
    plain = make_cohort([runs[1]], tiny_bert)
    reusing = make_cohort([runs[1]], tiny_bert, FrozenCache(tiny_bert, tmp_path))
    num_tokens = int(plain.members[0].train.lengths[plain.members[0].next_batch()].sum())
    # What the block reads lies beside what its attention gives, which its adapter's gradient needs.
    assert saved_bytes(reusing) == saved_bytes(plain) + 4 * tiny_bert.hidden_size * num_tokens
    assert saved_bytes(plain) < 0.5 * saved_bytes(make_cohort([runs[0]], tiny_bert))
    read = []
    handle = block(tiny_bert, 2).register_forward_pre_hook(lambda module, args: read.append(args[0]))
    try:
        gradients(plain)
        gradients(reusing)
    finally:
        handle.remove()
    assert not any(states.requires_grad for states in read)
    torch.testing.assert_close(*read, **EXACT)


def test_a_head_that_reads_all_layers_is_trained_beside_one_that_does_not(tiny_bert, toy_task, tmp_path):
    runs = [
        make(tiny_bert, toy_task(), layers="2:", seed=seed, features=features, dropout=0.0, head_dropout=0.0)
        for seed, features in enumerate(("last", "mix"))
    ]
    plain, reusing = (
        make_cohort(runs, tiny_bert),
        make_cohort(runs, tiny_bert, FrozenCache(tiny_bert, tmp_path)),
    )
    for cohort in (plain, reusing):
        take_steps(cohort, 14)
    torch.testing.assert_close(dev_logits(reusing), dev_logits(plain), **EXACT)


def test_texts_that_no_run_needs_any_more_make_room(tiny_bert, toy_task, tmp_path):
    task = toy_task()
    sets = [encode_split(tiny_bert.tokenizer, split, Reading("classify", 32)) for split in (task.train, task.dev)]
    limit = 4 * tiny_bert.hidden_size * int(sets[0].lengths.sum())
    cache = FrozenCache(tiny_bert, tmp_path, limits=Limits(limit, 0))
    first = cache.keep(CacheDepth(1), sets[0])
    assert first.find(0) is not None
    assert cache.keep(CacheDepth(1), sets[1]).find(0) is None  # no room beside the first
    del first
    assert cache.keep(CacheDepth(1), sets[1]).find(0) is not None


def test_filling_is_told_from_the_first_text_to_the_last(tiny_bert, toy_task, tmp_path):
    told = []

    class Listen(Hooks):
        def on_prefix(self, num_done, num_texts):
            told.append((num_done, num_texts))

    task = toy_task(num_rows=150)
    fit([make(tiny_bert, task, layers="1:", epochs=2)], tiny_bert, tmp_path, emit=Listen())
    texts = [len(set(task.train.texts)), len(set(task.dev.texts) - set(task.train.texts))]
    assert [pair for pair in told if pair[0] == pair[1]] == [(n, n) for n in texts]
    assert told == sorted(told, key=lambda pair: (-pair[1], pair[0]))


def test_a_plan_counts_the_frozen_layers_once(tiny_bert, toy_task, monkeypatch):
    run = make(tiny_bert, toy_task(), layers="1:", epochs=10)
    monkeypatch.setattr(plan, "_timed", lambda work, device: 3.0 if work.__name__ == "step" else 1.0)
    monkeypatch.setattr(plan, "_measure_dev", lambda *args: 2.0)
    lengths = [
        int(encode_split(tiny_bert.tokenizer, split, Reading("classify", 32)).lengths.sum())
        for split in (run.task.train, run.task.dev)
    ]
    once, dev_once = 6 * 1.0, 6 * 1.0 * lengths[1] / lengths[0]  # an epoch is six steps
    expected = once + dev_once + 10 * ((6 * 3.0 - once) + max(0.0, 2.0 - dev_once))
    assert plan.make_plan(run, tiny_bert).inlay.seconds == pytest.approx(expected)
