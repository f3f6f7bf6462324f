"""Memory: measured, chosen by, and fallen back on when it runs out all the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys

import numpy as np
import pytest
import torch

from hooks import Hooks
from inlay.errors import OutOfMemory
from inlay.model.backbone.families import find_family
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training import FitSettings, fit, make_run
from inlay.training.cohort import memory
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.cohort.memory import TOKEN_BUDGET, choose_budget, choose_slots, counting_saved
from inlay.training.cohort.parallel import World
from inlay.training.run.plan import make_plan
from inlay.training.step.eager import Stepper

SETTINGS = CohortSettings(token_budget=65536, num_threads=1, save_every=100)
QUIET = {"dropout": 0.0, "head_dropout": 0.0, "batch_size": 8, "max_length": 32, "lr": 3e-3, "epochs": 2}


def make(backbone, task, *, size=8, method=None, **train):
    method = MethodConfig(**{"size": size} | (method or {}))
    return make_run(task, RunConfig(method=method, train=TrainConfig(**QUIET | train)), backbone)


class Ear(Hooks):
    def __init__(self):
        self.told, self.seen = [], []

    def on_start(self, cohort):
        self.seen.append((cohort.num_seats, cohort.settings.token_budget))

    def on_fallback(self, message):
        self.told.append(message)


def assert_equal_results(found, expected):
    """But for the order of sums, which differs with who is beside: far less than one step of the optimizer (3e-3)."""
    for one, other in zip(found, expected, strict=True):
        assert [line["step"] for line in one.history] == [line["step"] for line in other.history]
        for name, tensor in other.tensors.items():
            torch.testing.assert_close(one.tensors[name], tensor, atol=5e-5, rtol=1e-4, msg=name)


@pytest.fixture
def small_memory(monkeypatch):
    """A function: make `differentiate` fail, with gradients left behind, beyond so many tokens or slots."""
    original = Stepper.differentiate

    def plant(*, tokens=10**9, slots=10**9, error=torch.OutOfMemoryError):
        failures = []

        def differentiate(self, active, batches):
            if self.token_budget > tokens or self._bank.num_slots > slots:
                torch.rand(7)  # a pass that fails has drawn for its dropout
                for stack in self._slot_update._own.bank.stacks:
                    stack.grad = torch.full_like(stack, 3.0)
                failures.append((self._bank.num_slots, self.token_budget))
                raise error("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 9 GiB. Process 7 …\nmore")
            return original(self, active, batches)

        monkeypatch.setattr(Stepper, "differentiate", differentiate)
        return failures

    return plant


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_step_that_does_not_fit_is_taken_in_halves(tiny_bert, toy_task, tmp_path, small_memory, error):
    runs = [make(tiny_bert, toy_task(), seed=seed) for seed in range(3)]
    whole = fit(runs, tiny_bert, tmp_path / "whole")
    failures, ear = small_memory(tokens=100, error=error), Ear()
    pieces = fit(runs, tiny_bert, tmp_path / "pieces", FitSettings(token_budget=4096), ear)
    assert_equal_results(pieces, whole)
    budgets = [budget for _, budget in failures]
    assert budgets[0] == 4096
    assert all(second <= first / 2 for first, second in itertools.pairwise(budgets))
    assert len(ear.told) == len(failures)  # every one is told, and none happens twice
    assert "Tried to allocate 2.00 GiB" in ear.told[0]
    assert "GPU 0" not in ear.told[0]
    (membership,) = (tmp_path / "pieces" / "cohorts").glob("*/cohort.json")
    content = json.loads(membership.read_text())
    assert content["fallbacks"] == ear.told
    assert content["token_budget"] <= 100


def test_dev_rows_that_do_not_fit_are_scored_in_halves_and_training_keeps_its_budget(
    tiny_bert, toy_task, tmp_path, monkeypatch
):
    runs = [make(tiny_bert, toy_task(num_rows=200), seed=seed) for seed in range(2)]
    whole = fit(runs, tiny_bert, tmp_path / "whole")
    original, failures, ear = World.infer, [], Ear()

    def infer(self, bank, rows, *, token_budget, **options):
        if token_budget > 100:
            failures.append(token_budget)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return original(self, bank, rows, token_budget=token_budget, **options)

    monkeypatch.setattr(World, "infer", infer)
    pieces = fit(runs, tiny_bert, tmp_path / "pieces", FitSettings(token_budget=512), ear)
    assert_equal_results(pieces, whole)
    for one, other in zip(pieces, whole, strict=True):
        assert one.history[-1]["dev"] == pytest.approx(other.history[-1]["dev"], abs=1e-6)
    assert failures == [2048, 1024, 512, 256, 128], "what keeps nothing is larger, and none happens twice"
    assert [message.endswith("over dev rows from here on") for message in ear.told] == [True] * 5
    (membership,) = (tmp_path / "pieces" / "cohorts").glob("*/cohort.json")
    assert json.loads(membership.read_text())["token_budget"] == 512


def test_a_cohort_whose_row_does_not_fit_is_halved_and_its_runs_keep_their_steps(
    tiny_bert, toy_task, tmp_path, small_memory
):
    runs = [make(tiny_bert, toy_task(), seed=seed, epochs=1 + seed % 2, size=4 + seed) for seed in range(5)]
    whole = fit(runs, tiny_bert, tmp_path / "whole")
    steps = []

    class Shrinking(Ear):
        def on_step(self, cohort, num_rows):
            steps.append((cohort.num_steps, cohort.num_seats))
            if len(steps) == 3:  # now memory is taken by somebody else
                small_memory(slots=1)

    ear = Shrinking()
    pieces = fit(runs, tiny_bert, tmp_path / "pieces", FitSettings(max_cohort=4), ear)
    assert_equal_results(pieces, whole)
    assert [slots for slots, _ in ear.seen] == [4, 2, 1]
    # No step was lost, none taken twice: three of four runs together, the others one by one.
    num_steps = 3 + sum(run.num_steps for run in runs) - 3 * 4
    assert steps == [(number, 4 if number <= 3 else 1) for number in range(1, num_steps + 1)]
    assert any("2 runs together" in message for message in ear.told)


def test_a_smaller_cohort_and_budget_are_what_a_resume_begins_with(tiny_bert, toy_task, tmp_path, small_memory):
    runs = [make(tiny_bert, toy_task(), seed=seed) for seed in range(4)]
    whole = fit(runs, tiny_bert, tmp_path / "whole")
    small_memory(tokens=120, slots=2)

    class Stop(Ear):
        def on_step(self, cohort, num_rows):
            if cohort.num_steps == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(runs, tiny_bert, tmp_path / "cut", FitSettings(save_every=1), Stop())
    ear = Ear()
    assert_equal_results(fit(runs, tiny_bert, tmp_path / "cut", emit=ear), whole)
    assert ear.told == []
    assert ear.seen[0][0] == 2
    assert ear.seen[0][1] <= 120


def test_running_statistics_move_once_though_the_step_was_tried_twice(tiny_bert, toy_task, tmp_path, monkeypatch):
    method = {"inner_norm": "batch"}
    runs = [make(tiny_bert, toy_task(), seed=seed, method=method) for seed in range(2)]
    cohorts = [Cohort(runs, tiny_bert, SETTINGS) for _ in range(2)]
    with cohorts[0].training():
        cohorts[0].step()
    original, calls = Stepper.differentiate, []

    def fails_once_at_its_end(self, active, batches):
        found = original(self, active, batches)
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return found

    monkeypatch.setattr(Stepper, "differentiate", fails_once_at_its_end)
    with cohorts[1].training():
        with pytest.raises(OutOfMemory):
            cohorts[1].step()
        assert [member.progress.step for member in cohorts[1].members] == [0, 0]
        cohorts[1].step()
    assert torch.equal(cohorts[0].flat.values_SP, cohorts[1].flat.values_SP)


def test_one_run_with_one_row_that_does_not_fit_is_an_error_that_says_what_to_try(
    tiny_bert, toy_task, tmp_path, small_memory
):
    small_memory(slots=0)
    with pytest.raises(OutOfMemory, match=r"one run with one row .* GB .*Tried to allocate 2.00 GiB") as caught:
        fit([make(tiny_bert, toy_task(), seed=seed) for seed in range(3)], tiny_bert, tmp_path)
    assert "--checkpointing" in caught.value.hint
    assert "a smaller `train.max_length` or `method.size`, or a smaller backbone" in caught.value.hint


def test_what_was_asked_for_already_is_not_suggested_again(tiny_bert, toy_task, tmp_path, small_memory):
    small_memory(slots=0)
    run = make(tiny_bert, toy_task(), method={"layers": "1:"}, epochs=2)
    for settings, named in (
        (FitSettings(), ["`--checkpointing`", "`--reuse-memory 0`"]),
        (FitSettings(prefix_bytes=0), ["`--checkpointing`"]),
        (FitSettings(checkpointing=True, prefix_bytes=1000), ["`--reuse-memory 0`"]),
        (FitSettings(checkpointing=True, prefix_bytes=0), []),
        (FitSettings(checkpointing=True, reuse_prefix=False), []),
    ):
        with pytest.raises(OutOfMemory) as caught:
            fit([run], tiny_bert, tmp_path / str(settings), settings)
        assert [word for word in ("`--checkpointing`", "`--reuse-memory 0`") if word in caught.value.hint] == named


def test_numbers_of_numpy_are_written_to_the_membership_of_a_cohort(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task(), seed=seed, epochs=1) for seed in range(2)]
    values = {"max_cohort": 1, "token_budget": 700, "save_every": 3}
    fit(runs, tiny_bert, tmp_path, FitSettings(**{name: np.int64(value) for name, value in values.items()}))
    (path,) = (tmp_path / "cohorts").glob("*/cohort.json")
    written = json.loads(path.read_text())
    assert (written["num_slots"], written["token_budget"], written["save_every"]) == (1, 700, 3)


def test_a_cohort_that_cannot_be_built_is_halved(tiny_bert, toy_task, tmp_path, monkeypatch):
    original = Cohort.__init__

    def build(self, runs, backbone, settings, emit, *, world):
        if settings.num_slots > 1:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        original(self, runs, backbone, settings, emit, world=world)

    monkeypatch.setattr(Cohort, "__init__", build)
    ear = Ear()
    runs = [make(tiny_bert, toy_task(), seed=seed, epochs=1) for seed in range(3)]
    assert len(fit(runs, tiny_bert, tmp_path, emit=ear)) == 3
    assert [slots for slots, _ in ear.seen] == [1]
    assert len(ear.told) == 1


def test_other_errors_are_not_taken_for_memory(tiny_bert, toy_task, tmp_path, monkeypatch):
    def differentiate(self, active, batches):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Stepper, "differentiate", differentiate)
    with pytest.raises(RuntimeError, match="mat1"):
        fit([make(tiny_bert, toy_task())], tiny_bert, tmp_path)


def test_little_memory_means_fewer_slots_and_tokens_and_the_same_results(tiny_bert, toy_task, tmp_path, monkeypatch):
    runs = [make(tiny_bert, toy_task(), seed=seed, size=256) for seed in range(4)]
    ear = Ear()
    whole = fit(runs, tiny_bert, tmp_path / "whole", emit=ear)
    assert ear.seen == [(4, TOKEN_BUDGET["cpu"])]
    slot_bytes = memory.count_slot_bytes(runs, tiny_bert)
    cohort = Cohort(runs, tiny_bert, SETTINGS)
    token_bytes = memory.measure_token_bytes(cohort)
    free = int(5 * slot_bytes / 0.8)  # two and a half slots fit in half of the usable four fifths
    monkeypatch.setattr(sys.modules["inlay.training.cohort.fit"], "available_bytes", lambda device: free)
    small = fit(runs, tiny_bert, tmp_path / "small", emit=ear)
    slots, budget = ear.seen[-1]
    assert slots == 2
    fitting = (0.8 * free - 2 * slot_bytes) / token_bytes
    assert fitting / 2 < budget <= fitting
    assert budget < TOKEN_BUDGET["cpu"]
    assert_equal_results(small, whole)
    # What the user asks for wins.
    asked = FitSettings(max_cohort=3, token_budget=777)
    fit(runs, tiny_bert, tmp_path / "asked", asked, ear)
    assert ear.seen[-1] == (3, 777)


def test_choices_follow_from_the_bytes():
    assert choose_slots(32, 10, None) == 32
    assert choose_slots(32, 10, 10**6) == 32
    assert choose_slots(32, 100, 1000) == 4  # of 800 bytes half: four slots; twice as much while they are stepped
    assert choose_slots(32, 100, 10) == 1
    assert choose_budget("cpu", 1e12, 10.0) == TOKEN_BUDGET["cpu"]
    assert choose_budget("cpu", 1000 * 10.0, 10.0) == 512
    assert choose_budget("cpu", -5.0, 10.0) == 1


def test_measured_bytes_predict_a_larger_pass_and_measuring_leaves_no_trace(tiny_bert, toy_task):
    for method in ({}, {"inner_norm": "batch"}):
        run = make(tiny_bert, toy_task(), method=method, dropout=0.1, pooling="mean")  # every block is whole
        cohort = Cohort([run], tiny_bert, SETTINGS)
        (member,) = cohort.members
        before, rng = {name: stored.clone() for name, stored in cohort.stored.items()}, torch.get_rng_state()
        token_bytes = memory.measure_token_bytes(cohort)
        assert torch.equal(rng, torch.get_rng_state())
        assert all(torch.equal(before[name], stored) for name, stored in cohort.stored.items())
        assert all(stack.grad is None for stack in cohort.flat.stacks)
        assert not tiny_bert.model.training
        row = int(member.train.lengths.argmax())
        ignored = [*tiny_bert.model.parameters(), *cohort.flat.stacks]
        with cohort.rehearsing(), cohort.training(), counting_saved(ignored) as saved:
            cohort.stepper.differentiate([member], {0: np.full(200, row)})
        predicted = token_bytes * 200 * int(member.train.lengths[row])
        blocks = tiny_bert.anatomy.num_layers
        assert predicted == pytest.approx(saved.num_bytes * (1 + 1 / blocks), rel=0.05)


def test_on_a_cpu_memory_is_measured_on_one_row_and_two(tiny_bert, toy_task, monkeypatch):
    cohort, seen, original = Cohort([make(tiny_bert, toy_task())], tiny_bert, SETTINGS), [], Stepper.differentiate

    def differentiate(self, active, batches):
        seen.append([len(rows) for rows in batches.values()])
        return original(self, active, batches)

    monkeypatch.setattr(Stepper, "differentiate", differentiate)
    memory.measure_token_bytes(cohort)
    assert seen == [[1], [2]]


def test_saved_bytes_are_those_of_the_formula():
    x, weight = torch.randn(50, 8), torch.randn(8, 4, requires_grad=True)
    with counting_saved([weight]) as saved:
        torch.relu(x @ weight).sum().backward()
    assert saved.num_bytes == 50 * 8 * 4 + 50 * 4 * 4  # the product's input, the activation's output; sums save none


def test_a_container_s_limit_counts(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "self"
    (root / "inner").mkdir(parents=True)
    own.write_text("3:cpu:/elsewhere\n0::/inner\n")
    for folder, limit in ((root, "max"), (root / "inner", "5000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("1500\n")
        (folder / "memory.stat").write_text("anon 900\ninactive_file 400\n")
    assert list(memory._free_in_groups(root, own)) == [5000 - 1500 + 400]
    own.write_text("4:memory:/box\n")
    (root / "memory" / "box").mkdir(parents=True)
    for name, text in {"limit_in_bytes": "900", "usage_in_bytes": "300", "stat": "total_inactive_file 50"}.items():
        (root / "memory" / "box" / f"memory.{name}").write_text(text)
    assert list(memory._free_in_groups(root, own)) == [650]
    assert list(memory._free_in_groups(root, tmp_path / "absent")) == []
    assert (memory.available_bytes(torch.device("cpu")) or 0) > 10**6


def test_plan_tells_the_budget_and_cohort_that_fit_would_choose(tiny_bert, toy_task, tmp_path, monkeypatch):
    run = make(tiny_bert, toy_task())
    plan = make_plan(run, tiny_bert)
    ear = Ear()
    fit([run], tiny_bert, tmp_path, emit=ear)
    assert ear.seen == [(1, plan.token_budget)]
    assert plan.max_together == memory.MAX_COHORT
    free = int(5 * memory.count_slot_bytes([run], tiny_bert) / 0.8)
    monkeypatch.setattr("inlay.training.run.plan.available_bytes", lambda device: free)
    assert make_plan(run, tiny_bert).max_together == 2
    assert make_plan(make(tiny_bert, toy_task(), size=None, method={"name": "full"}), tiny_bert).max_together == 1


def saved_of(cohort, *, seed=0):
    """Bytes saved by a step's passes, and its gradients."""
    torch.manual_seed(seed)
    batches = {member.slot: member.next_batch() for member in cohort.members}
    ignored = [*cohort.backbone.model.parameters(), *cohort.flat.stacks]
    with cohort.training(), counting_saved(ignored) as saved:
        _, grads = cohort.stepper.differentiate(cohort.active, batches)
    return saved.num_bytes, grads


METHODS = [
    {},
    {"name": "pfeiffer"},
    {"name": "parallel"},
    {"name": "lora"},
    {"inner_norm": "batch"},
    {"layers": "2:"},
    {"name": "full"},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet"])
def test_checkpointed_gradients_are_the_same_with_less_saved(backbone_of, toy_task, family, method):
    backbone = backbone_of(family)
    size = None if method.get("name") == "full" else 8
    # The mean: of a last block that only computes first tokens there is little to save.
    rates = {"dropout": 0.2, "head_dropout": 0.1}
    run = make(backbone, toy_task(), size=size, method=method, batch_size=16, pooling="mean", **rates)
    found = []
    for checkpointing in (False, True):
        with torch.random.fork_rng():
            cohort = Cohort([run], backbone, dataclasses.replace(SETTINGS, checkpointing=checkpointing))
            found.append((*saved_of(cohort), cohort.flat.values_SP.clone()))
    (plain_bytes, plain, values), (bytes_left, grads, same_values) = found
    torch.testing.assert_close(grads, plain, atol=1e-6, rtol=1e-6)
    assert torch.equal(values, same_values)  # running statistics moved once, though the block ran twice
    assert bytes_left < 0.6 * plain_bytes
    blocks = backbone.model.get_submodule(find_family(backbone.anatomy.family).stack)
    assert not any("forward" in vars(block) for block in blocks)


def test_a_run_is_the_same_with_and_without_checkpointing(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task(), dropout=0.1, head_dropout=0.1)
    (plain,) = fit([run], tiny_bert, tmp_path / "plain")
    (less,) = fit([run], tiny_bert, tmp_path / "less", FitSettings(checkpointing=True))
    assert all(torch.equal(plain.tensors[name], less.tensors[name]) for name in plain.tensors)
    (membership,) = (tmp_path / "less" / "cohorts").glob("*/cohort.json")
    assert json.loads(membership.read_text())["checkpointing"] is True


@pytest.mark.parametrize("family", ["bert", "modernbert", "distilbert", "deberta-v2"])
def test_nothing_below_the_first_adapted_layer_is_saved(backbone_of, toy_task, family):
    backbone = backbone_of(family)
    blocks = backbone.model.get_submodule(find_family(backbone.anatomy.family).stack)
    lowest = len(blocks) - 1
    run = make(backbone, toy_task(), method={"layers": f"{lowest}:"}, dropout=0.1)
    cohort = Cohort([run], backbone, SETTINGS)
    ignored = [*backbone.model.parameters(), *cohort.flat.stacks]
    at_entry = []
    with counting_saved(ignored) as saved:
        hook = blocks[lowest].register_forward_pre_hook(lambda *_: at_entry.append(saved.num_bytes))
        try:
            with cohort.training():
                cohort.stepper.differentiate(cohort.active, {0: cohort.members[0].next_batch()})
        finally:
            hook.remove()
    assert at_entry == [0]
    assert saved.num_bytes > 0
