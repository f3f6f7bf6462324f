"""How often a block is compiled, whatever the rungs: shapes are traced as for a GPU, and nothing is computed."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from counted import Traced, trace_graphs
from inlay.errors import OutOfMemory
from inlay.model.kernels import launch
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.training.cohort.cohort import Cohort, CohortSettings
from inlay.training.events import CompileEnded, CompileStarted
from inlay.training.run.make_run import make_run
from inlay.training.step import compiled


@pytest.fixture
def compilations(monkeypatch):
    """The forward graphs that were compiled."""
    yield trace_graphs(monkeypatch, compiled)
    torch._dynamo.reset()


def make_cohort(backbone, toy_task, method):
    train = TrainConfig(batch_size=4, max_length=16, lr=5e-4)
    tasks = [toy_task("two", num_labels=2, num_rows=22), toy_task("five", num_labels=5, num_rows=19, seed=1)]
    runs = [
        make_run(task, RunConfig(method=MethodConfig(name=method, size=size, norms="encoder"), train=train), backbone)
        for task, size in zip(tasks, (8, 16), strict=True)
    ]
    return Cohort(runs, backbone, CohortSettings(token_budget=65536, num_threads=1, save_every=100))


@pytest.mark.parametrize(("family", "longest"), [("bert", 500), ("mpnet", 60)])
def test_a_block_is_compiled_for_one_rung_then_for_all_others(backbone_of, toy_task, compilations, family, longest):
    cohort = make_cohort(backbone_of(family), toy_task, "houlsby")
    stepper, counts = cohort.stepper, []
    for num_tokens, num_rows in [(300, 8), (300, 8), (700, 8), (1500, 12), (5000, 12), (20000, 200), (40000, 200)]:
        lengths = np.full(num_rows, min(num_tokens // num_rows, longest))
        program = stepper._find_program(num_tokens, lengths, None)
        with cohort.training(), cohort.backbone.compiled(compiled.BACKEND), pytest.raises(Traced):
            stepper._compute(program)
        counts.append(len(compilations))
    # For the first rung, then for any number of tokens, rows and lengths, for long rows, then for larger tiles too.
    assert counts == [1, 1, 2, 2, 3, 4, 4]


def trace(cohort, shapes):
    """Let a cohort's steps of these shapes be compiled, as far as they are not."""
    stepper = cohort.stepper
    for num_tokens, num_rows in shapes:
        lengths = np.full(num_rows, num_tokens // num_rows)
        program = stepper._find_program(num_tokens, lengths, None)
        with cohort.training(), cohort.backbone.compiled(compiled.BACKEND), pytest.raises(Traced):
            stepper._compute(program)


@pytest.mark.parametrize(
    ("method", "sizes", "expected"),
    [(MethodConfig(size=8, norms="encoder"), [1, 1, 2, 5], [2, 2, 3, 3]), (MethodConfig("full"), [1, 1], [2, 2])],
    ids=["houlsby", "full"],
)
def test_another_cohort_compiles_nothing_but_once_for_any_number_of_slots(
    backbone_of, toy_task, compilations, method, sizes, expected
):
    backbone, counts = backbone_of("bert"), []
    for seed, num_runs in enumerate(sizes):
        train = TrainConfig(batch_size=4, max_length=16, seed=seed)
        tasks = [toy_task(f"{seed} {i}", num_labels=2 + i, num_rows=22, seed=seed) for i in range(num_runs)]
        runs = [make_run(task, RunConfig(method=method, train=train), backbone) for task in tasks]
        trace(Cohort(runs, backbone, CohortSettings(65536, 1, 100)), [(300, 8), (700, 8)])
        counts.append(len(compilations))
    assert counts == expected


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(4096, [3]), (448, [2, 1]), (256, [1, 1, 1]), (128, [])],
    ids=["all", "two", "each", "none"],
)
def test_runs_are_stepped_in_as_few_programs_as_hold_them(backbone_of, toy_task, monkeypatch, budget, expected):
    """Rungs of 256, 320 and 512 tokens hold steps of one, two and three runs of 152 each."""
    monkeypatch.setattr(launch, "is_available", lambda device: True)
    cohort = make_cohort(backbone_of("bert"), toy_task, "houlsby")
    stepper = cohort.stepper
    stepper.token_budget = budget
    active = [SimpleNamespace(slot=slot, lengths=np.full(8, 19)) for slot in range(3)]
    groups = stepper._group(active, {slot: np.arange(8) for slot in range(3)})
    assert sorted(map(len, groups), reverse=True) == expected
    assert sorted(member.slot for group in groups for member in group) == ([0, 1, 2] if expected else [])
    assert all(group == sorted(group, key=lambda member: member.slot) for group in groups)  # as rows are laid


def test_who_listens_hears_what_is_compiled_and_how_long_it_took(backbone_of, toy_task, monkeypatch):
    heard = []
    monkeypatch.setattr(launch, "is_available", lambda device: True)
    cohort = make_cohort(backbone_of("bert"), toy_task, "houlsby")
    stepper = cohort.stepper
    stepper.emit = heard.append
    monkeypatch.setattr(stepper, "_compute", lambda program: time.sleep(0.05))
    monkeypatch.setattr(stepper, "_is_captured", False)
    program = stepper._find_program(300, np.full(8, 37), None)
    for _ in range(2):  # the second time nothing is new
        stepper._launch(program)
    started, ended = heard
    assert started == CompileStarted("compiling steps of up to 320 tokens")
    assert ended == CompileEnded(started.what, ended.seconds)
    assert 0.05 <= ended.seconds < 5


def test_a_program_whose_first_launch_failed_is_launched_again_before_it_is_captured(
    backbone_of, toy_task, monkeypatch
):
    monkeypatch.setattr(launch, "is_available", lambda device: True)
    stepper, done = make_cohort(backbone_of("bert"), toy_task, "houlsby").stepper, []

    def compute(program):
        done.append("launched")
        if len(done) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def capture(program):
        done.append("captured")
        return SimpleNamespace(replay=lambda: done.append("replayed"))

    monkeypatch.setattr(stepper, "_compute", compute)
    monkeypatch.setattr(stepper, "_try_to_capture", capture)
    monkeypatch.setattr(stepper, "_is_captured", True)
    program = stepper._find_program(300, np.full(8, 37), None)
    with pytest.raises(torch.OutOfMemoryError):
        stepper._launch(program)
    for _ in range(3):
        stepper._launch(program)
    assert done == ["launched", "launched", "captured", "replayed", "replayed"]


def test_a_step_that_has_moved_some_runs_is_not_taken_again_when_memory_runs_out(backbone_of, toy_task, monkeypatch):
    """A replayed program changes no tensor's version: only its count says that runs have moved."""
    monkeypatch.setattr(launch, "is_available", lambda device: True)
    cohort = make_cohort(backbone_of("bert"), toy_task, "houlsby")

    def work(num_programs):
        cohort.stepper.num_moved += num_programs
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemory):  # which is answered by half the tokens
        cohort.attempt(lambda: work(0))
    with pytest.raises(torch.OutOfMemoryError):
        cohort.attempt(lambda: work(1))


def test_a_step_laid_out_early_is_dealt_anew_when_memory_runs_out(backbone_of, toy_task, monkeypatch):
    """Who is stepped together is found once for each step, while the one before it runs; not for another budget."""
    monkeypatch.setattr(launch, "is_available", lambda device: True)
    monkeypatch.setattr(compiled.CompiledStepper, "_launch", lambda self, program: None)
    cohort, budgets = make_cohort(backbone_of("bert"), toy_task, "houlsby"), []
    group = compiled.CompiledStepper._group

    def count(self, active, batches):
        budgets.append(self.token_budget)
        return group(self, active, batches)

    monkeypatch.setattr(compiled.CompiledStepper, "_group", count)
    with cohort.training():
        cohort.step()
        assert len(budgets) == 2  # for this step and the next
        cohort.step()
        assert len(budgets) == 3
        cohort.stepper.token_budget //= 2
        cohort.step()
    assert [number == budgets[0] for number in budgets] == [True, True, True, False, False]


def test_a_step_that_a_coarse_rung_would_put_beyond_the_budget_has_a_finer_one():
    stepper = SimpleNamespace(_bank=SimpleNamespace(slots_per_run=6), token_budget=10_000)
    assert compiled.CompiledStepper._climb(stepper, 8_500) == 9_216
    assert compiled.CompiledStepper._climb(stepper, 9_300) == 9_472, "not 10,240"
    stepper._bank.slots_per_run = 1
    assert compiled.CompiledStepper._climb(stepper, 8_500) == 8_704
