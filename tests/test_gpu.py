"""The same claims on a GPU. Deselected by `make test`; run with `pytest -m gpu tests/test_gpu.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hooks import Hooks
from inlay.model import Bank, infer, load_backbone
from inlay.model.bank.methods import METHODS, UNSUPPORTED, SlotSpec
from inlay.model.batch.route import Row
from inlay.model.heads.captured_inference import GraphedForward
from inlay.model.heads.generation import EncoderStates
from inlay.model.heads.heads import WRITTEN, HeadSpec
from inlay.model.kernels.launch import GraphRecorder
from inlay.serving import Engine, Request, verify
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.store import Store
from inlay.training import FitSettings, fit, make_run, publish
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.step.compiled import CompiledStepper
from inlay.training.step.eager import Stepper

pytestmark = pytest.mark.gpu
ROWS = [[2, 11, 45, 3], [2, 12, 3], [2, 9, 30, 31, 32, 3], [2, 3], [2, *range(8, 40), 3]]
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 32, "epochs": 2, "lr": 3e-3}
FAMILIES = ["bert", "mpnet", "modernbert", "deberta-v2", "t5", "mt5"]


def head_of(backbone, num_labels):
    """A linear head, or one whose label texts are scored."""
    if not backbone.is_seq2seq:
        return HeadSpec("classify", num_labels, "mean")
    return HeadSpec("classify", num_labels, WRITTEN, texts=("no", "very good", "bad", "so so so")[:num_labels])


def fill(backbone, sizes=(8, 16, 3)):
    bank = Bank(backbone, len(sizes))
    for slot, size in enumerate(sizes):
        method = MethodConfig("pfeiffer" if slot == 1 else "houlsby", size, init_std=0.3)
        bank.initialise(slot, SlotSpec.of(method, head_of(backbone, 2 + slot)), seed=slot)
    return bank


def mixed_rows():
    return [Row(ids, slot) for slot in (2, 0, 1) for ids in ROWS]


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_answers_equal_the_cpus(backbone_folder, backbone_of, family):
    gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    expected = infer(fill(backbone_of(family)), mixed_rows())
    for a, b in zip(infer(fill(gpu), mixed_rows()), expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_equals_one_by_one_in_bf16(backbone_folder, family):
    gpu = load_backbone(str(backbone_folder(family)), device="cuda")
    assert next(gpu.model.parameters()).dtype == torch.bfloat16
    bank = fill(gpu)
    assert all(stack.dtype == torch.float32 for stack in bank.stacks.values())
    for row, answer in zip(mixed_rows(), infer(bank, mixed_rows()), strict=True):
        alone = infer(bank, [row])[0]
        torch.testing.assert_close(answer, alone, atol=5e-2, rtol=5e-2)


def fill_all(backbone):
    """A bank with a slot of every method, far from the identity."""
    names = [name for name in METHODS if (backbone.anatomy.family, name) not in UNSUPPORTED]
    bank = Bank(backbone, len(names))
    for slot, name in enumerate(names):
        is_shared = backbone.anatomy.family == "deberta-v2" and name in ("lora", "dora", "ia3")
        method = MethodConfig(name, linears=("value", "contract") if is_shared else ())
        spec = SlotSpec.of(method, head_of(backbone, 2))
        bank.initialise(slot, spec, seed=slot)
        noise = torch.Generator().manual_seed(slot)
        tensors = {key: t + 0.05 * torch.randn(t.shape, generator=noise) for key, t in bank.read(slot).items()}
        bank.put(slot, spec, tensors)
    return bank


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_answers_of_every_method_equal_the_cpus(backbone_folder, backbone_of, family):
    gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    here, there = fill_all(backbone_of(family)), fill_all(gpu)
    rows = [Row(ids, slot) for slot in range(here.num_slots) for ids in ROWS]
    for row, a, b in zip(rows, infer(there, rows), infer(here, rows), strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3, msg=here.specs[row.slot].method.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batch_of_every_method_equals_one_by_one_in_bf16(backbone_folder, family):
    bank = fill_all(load_backbone(str(backbone_folder(family)), device="cuda"))
    rows = [Row(ids, slot) for slot in range(bank.num_slots) for ids in ROWS]
    for row, answer in zip(rows, infer(bank, rows), strict=True):
        alone = infer(bank, [row])[0]
        torch.testing.assert_close(answer, alone, atol=5e-2, rtol=5e-2, msg=bank.specs[row.slot].method.name)


KINDS = [
    *[{}, {"inner_norm": "layer"}, {"inner_norm": "batch"}, {"depth": 2}, {"combine": "multiply"}],
    *[
        {"form": "parallel"},
        {"sharing": "every-2"},
        {"name": "lora"},
        {"name": "dora"},
        {"name": "ia3"},
        {"name": "bitfit"},
    ],
    *[{"name": "pfeiffer"}, {"name": "parallel"}, {"name": "full"}, {"name": "top"}],
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_cohort_steps_on_the_gpu_as_on_the_cpu(backbone_folder, tiny_bert, toy_task, kind):
    gpu = load_backbone(str(backbone_folder("bert")), device="cuda", dtype=torch.float32)
    settings = CohortSettings(65536, torch.get_num_threads(), 100)
    cohorts = []
    for backbone in (tiny_bert, gpu):
        sizes = (4, 16) if METHODS[kind.get("name", "houlsby")].size else (None, None)
        methods = [MethodConfig(size=size, **kind) for size in sizes]
        runs = [make_run(toy_task(), RunConfig(method=m, train=TrainConfig(**QUIET)), backbone) for m in methods]
        cohort = Cohort(runs[:1] if runs[0].spec.is_finetuned else runs, backbone, settings)
        with backbone.training(0.0):
            for _ in range(5):
                cohort.step()
        cohorts.append(cohort)
    # Logits, not weights: some gradients are zero but for rounding (a key's bias, a shift that a norm takes away), and
    # Adam makes a step of the rounding.
    answers = [
        infer(cohort.bank, [Row(ids, slot) for slot in range(cohort.bank.num_slots) for ids in ROWS])
        for cohort in cohorts
    ]
    for here, there in zip(*answers, strict=True):
        torch.testing.assert_close(there, here, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_method_learns_in_bf16(backbone_folder, toy_task, tmp_path, kind):
    gpu = load_backbone(str(backbone_folder("bert")), device="cuda")
    train = TrainConfig(batch_size=8, max_length=32, epochs=6, lr=3e-3, hidden="tanh", features="mix", pooling="mean")
    run = make_run(toy_task(num_rows=96), RunConfig(method=MethodConfig(**kind), train=train), gpu)
    (result,) = fit([run], gpu, tmp_path / "runs")
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]


@pytest.mark.parametrize("kind", [{}, {"name": "mahabadi"}, {"name": "lora"}, {"name": "full"}], ids=str)
def test_a_cohort_that_writes_steps_on_the_gpu_as_on_the_cpu(backbone_folder, backbone_of, toy_task, toy_texts, kind):
    gpu = load_backbone(str(backbone_folder("mt5")), device="cuda", dtype=torch.float32)
    quiet = {name: value for name, value in QUIET.items() if name != "head_dropout"}
    losses = []
    for backbone in (backbone_of("mt5"), gpu):
        config = RunConfig(method=MethodConfig(**kind), train=TrainConfig(**quiet))
        runs = [make_run(task, config, backbone) for task in (toy_task(), toy_texts())]
        runs = runs[:1] if runs[0].spec.is_finetuned else runs
        cohort = Cohort(runs, backbone, CohortSettings(65536, torch.get_num_threads(), 100))
        with backbone.training(0.0):
            for _ in range(5):
                cohort.step()
        losses.append(torch.tensor([member.progress.losses for member in cohort.members]))
    torch.testing.assert_close(losses[1], losses[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_texts_are_written_on_the_gpu_as_on_the_cpu(backbone_folder, backbone_of, num_beams):
    gpu = load_backbone(str(backbone_folder("mt5")), device="cuda", dtype=torch.float32)
    found = []
    for backbone in (backbone_of("mt5"), gpu):
        bank = fill(backbone)
        for slot in range(3):
            head = HeadSpec("text", 0, WRITTEN, beams=num_beams, max_answer=6)
            bank.put(slot, SlotSpec(bank.specs[slot].method, head), bank.read(slot))
        found.append([text.tolist() for text in infer(bank, mixed_rows())])
    assert found[0] == found[1]


def test_a_bf16_backbone_scores_words_in_float32(backbone_folder):
    gpu = load_backbone(str(backbone_folder("mt5")), device="cuda")
    ids = torch.tensor([[5, 9, 11, 1]], device="cuda")
    with torch.no_grad():
        read = EncoderStates(gpu.model.encoder(input_ids=ids).last_hidden_state, torch.ones_like(ids))
        states = gpu.model.decoder(input_ids=ids, encoder_hidden_states=read.states_BTD).last_hidden_state
        logits, _ = gpu.write(read, ids)
    assert (states.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(logits, states.float() @ gpu.model.lm_head.weight.float().T, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("family", ["bert", "mt5"])
def test_a_task_is_trained_published_served_and_proved_from_the_gpu(backbone_folder, toy_task, tmp_path, family):
    gpu = load_backbone(str(backbone_folder(family)), device="cuda")
    store = Store(tmp_path)
    train = TrainConfig(batch_size=8, max_length=32, epochs=12, lr=1e-2)
    run = make_run(toy_task(num_rows=96), RunConfig(method=MethodConfig(size=8), train=train), gpu)
    (result,) = fit([run], gpu, tmp_path / "runs")
    assert result.dev_metric >= 0.85
    version = publish(run, result, gpu, store)
    (check,) = verify([version], gpu, store)
    assert check.stands, check.problem
    assert check.is_exact  # the canonical path runs on the CPU, also here
    answer = Engine(gpu, store).predict([Request("toy", "the movie was good")])[0]
    assert answer.outcome.label.startswith("label-")


def test_captured_inference_answers_any_mix_as_the_plain_path_does(backbone_folder):
    gpu = load_backbone(str(backbone_folder("bert")), device="cuda")
    bank = fill(gpu)
    graphed = GraphedForward(bank)
    for seed in range(4):
        slots = torch.randint(3, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
        rows = [Row(ROWS[index % len(ROWS)], slot) for index, slot in enumerate(slots)]
        assert all(map(graphed.takes, rows))
        for a, b in zip(graphed.logits(rows), infer(bank, rows), strict=True):
            torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)
    method = MethodConfig("houlsby", 12, init_std=0.3)
    bank.initialise(0, SlotSpec.of(method, HeadSpec("classify", 2, "mean")), seed=9)  # another task in the slot
    rows = [Row(ids, 0) for ids in ROWS]
    for a, b in zip(graphed.logits(rows), infer(bank, rows), strict=True):
        torch.testing.assert_close(a, b, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_compiled_steps_equal_the_definition(backbone_folder, toy_task, toy_tags, toy_answers, family):
    """Dropout off, float32: losses and answers after steps over ends of epochs, for kinds and sizes that differ."""
    gpu = load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32)
    tasks = [
        toy_task("two", num_labels=2, num_rows=22),
        toy_task("five", num_labels=5, num_rows=19, seed=1),
        toy_task("number", kind="regress", num_rows=20, seed=2),
        toy_task("several", kind="multilabel", num_labels=3, num_rows=21, seed=3),
        replace(toy_tags(num_rows=18), metric="token_accuracy"),  # which needs no seqeval
        toy_answers(num_rows=18, longest=20),
    ]
    own = [(8, "none"), (16, "tanh"), (3, "pooler"), (8, "none"), (8, "tanh"), (8, "none")]
    runs = [
        make_run(
            task,
            RunConfig(method=MethodConfig(size=size), train=TrainConfig(**{**QUIET, "seed": size, "hidden": hidden})),
            gpu,
        )
        for task, (size, hidden) in zip(tasks, own, strict=True)
    ]
    ours, plain = (Cohort(runs, gpu, CohortSettings(65536, torch.get_num_threads(), 100)) for _ in range(2))
    assert isinstance(ours.stepper, CompiledStepper)
    plain.stepper = Stepper(plain.bank, plain.slot_update, 65536)
    for cohort in (ours, plain):
        with cohort.training():
            for _ in range(5):
                cohort.step()
                gpu.model.eval()
                cohort.finish_epochs()
                gpu.model.train()
    for a, b in zip(ours.members, plain.members, strict=True):
        torch.testing.assert_close(
            torch.tensor(a.progress.losses), torch.tensor(b.progress.losses), atol=1e-3, rtol=1e-3
        )
    answers = [infer(cohort.bank, [Row(ids, slot) for slot in range(6) for ids in ROWS]) for cohort in (ours, plain)]
    for here, there in zip(*answers, strict=True):
        torch.testing.assert_close(there, here, atol=1e-2, rtol=1e-2)


def test_what_cannot_be_captured_leaves_random_numbers_memory_and_later_captures_sound():
    recorder, number = GraphRecorder(), torch.ones(8, device="cuda")
    with pytest.raises(RuntimeError):
        recorder.capture(lambda: number.sum().item())  # waits for the device
    assert torch.randint(9, (3,), device="cuda").shape == (3,)
    graph = recorder.capture(lambda: number.mul_(2))
    graph.replay()
    assert number.tolist() == [2.0] * 8
    torch.cuda.empty_cache()


@pytest.mark.parametrize("method", [{"name": "full"}, {"name": "top", "layers": "-1:"}], ids=str)
def test_a_copy_that_takes_anothers_slot_is_captured_once_and_ends_as_alone(
    backbone_folder, toy_task, tmp_path, method
):
    """Float32, dropout on: the second draws its own numbers, and is stepped by the graphs of the first."""
    gpu = load_backbone(str(backbone_folder("bert")), device="cuda", dtype=torch.float32)
    tasks = [toy_task("two", num_labels=2, num_rows=24), toy_task("five", num_labels=5, num_rows=24, seed=1)]
    train = TrainConfig(lr=1e-3, epochs=3, batch_size=8, max_length=32)
    runs = [make_run(task, RunConfig(method=MethodConfig(**method), train=train), gpu) for task in tasks]
    graphs = []

    class Watch(Hooks):
        def on_end(self, member):
            graphs.append({id(program.graph) for program in self.cohort.stepper._programs.values() if program.graph})

        def on_start(self, cohort):
            self.cohort = cohort

    queued = fit(runs, gpu, tmp_path / "queued", FitSettings(), Watch())
    assert graphs[0] <= graphs[1]
    assert graphs[0]
    for run, result in zip(runs, queued, strict=True):
        (alone,) = fit([run], gpu, tmp_path / "alone")
        losses = [[line["train_loss"] for line in each.history] for each in (result, alone)]
        torch.testing.assert_close(*map(torch.tensor, losses), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("method", ["houlsby", "pfeiffer", "lora"])
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_gated_slots_that_share_tensors_answer_as_on_the_cpu(backbone_folder, backbone_of, family, method):
    answers = []
    for backbone in (
        backbone_of(family),
        load_backbone(str(backbone_folder(family)), device="cuda", dtype=torch.float32),
    ):
        bank = Bank(backbone, 1)
        spec = SlotSpec.of(MethodConfig(method, 8), HeadSpec("classify", 2, "mean"))
        bank.initialise(0, spec, seed=0)
        noise = torch.Generator().manual_seed(0)
        bank.put(0, spec, {key: t + 0.2 * torch.randn(t.shape, generator=noise) for key, t in bank.read(0).items()})
        spans = [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]
        many = bank.repeated(0, len(spans))
        for slot, span in enumerate(spans):
            many.gate(slot, span)
        answers.append(infer(many, [Row(ids, slot) for slot in range(len(spans)) for ids in ROWS]))
    for there, here in zip(*reversed(answers), strict=True):
        torch.testing.assert_close(there, here, atol=2e-3, rtol=2e-3)
    assert len({tuple((100 * row).round().tolist()) for row in answers[0]}) > len(ROWS)
