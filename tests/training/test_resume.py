"""Killed at any moment, resumed: the same weights to the last bit, dropout on."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hooks import Hooks
from inlay.errors import InlayError, StoreDamaged
from inlay.model.heads.inference import infer
from inlay.settings.run_config import MethodConfig, RunConfig, TrainConfig
from inlay.threads import Threads
from inlay.training import FitSettings, fit, make_run, read_result
from inlay.training.cohort import parallel
from inlay.training.cohort.cohort import CohortSettings
from inlay.training.cohort.fit import Interrupted
from inlay.training.cohort.resume import cohort_id, find_stopped, write_membership
from inlay.training.events import ignore

PROGRAM = Path(__file__).with_name("kill_and_resume.py")


@pytest.mark.parametrize(
    "kind", ["several", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("one", "queued", "upper"))]
)
def test_sigkill_at_twenty_random_moments_changes_nothing(tiny_bert_folder, tmp_path, kind):
    command = [sys.executable, str(PROGRAM), str(tiny_bert_folder), str(tmp_path), kind, "20", "7"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["kills"] == 20
    assert report["events"] > 50


def make(backbone, toy_task, **train):
    settings = {"batch_size": 8, "max_length": 32, "epochs": 2, "lr": 5e-4, **train}
    return make_run(toy_task(), RunConfig(method=MethodConfig(size=4), train=TrainConfig(**settings)), backbone)


class InterruptAt(Hooks):
    def __init__(self, step):
        self.step = step

    def on_step(self, cohort, num_rows):
        if cohort.num_steps == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_saves_and_the_next_call_goes_on(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task)
    with pytest.raises(Interrupted):
        fit([run], tiny_bert, tmp_path / "a", emit=InterruptAt(4))
    assert not (tmp_path / "a" / run.id / "result.json").exists()
    steps = []

    class Count(Hooks):
        def on_step(self, cohort, num_rows):
            steps.append(cohort.num_steps)

    (resumed,) = fit([run], tiny_bert, tmp_path / "a", emit=Count())
    (whole,) = fit([run], tiny_bert, tmp_path / "b")
    assert steps[0] == 5  # the step in hand was finished and saved: nothing is done twice
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_ctrl_c_while_dev_rows_are_answered_stops_between_passes_and_they_are_answered_again(
    tiny_bert, toy_task, tmp_path, monkeypatch
):
    runs = [make(tiny_bert, toy_task, seed=seed) for seed in range(2)]
    settings = FitSettings(token_budget=64)
    answered, steps = [], []

    def infer_and_interrupt(bank, rows, on_batch, **options):
        def hear(num_rows):
            answered.append(num_rows)
            if sum(answered) == num_rows:  # the first pass of the first epoch
                os.kill(os.getpid(), signal.SIGINT)
            on_batch(num_rows)

        return infer(bank, rows, on_batch=hear, **options)

    class Count(Hooks):
        def on_step(self, cohort, num_rows):
            steps.append((cohort.num_steps, num_rows))

    whole = fit(runs, tiny_bert, tmp_path / "whole", settings)
    monkeypatch.setattr(parallel, "infer", infer_and_interrupt)
    with pytest.raises(Interrupted):
        fit(runs, tiny_bert, tmp_path / "cut", settings)
    assert len(answered) == 1
    resumed = fit(runs, tiny_bert, tmp_path / "cut", settings, emit=Count())
    first = runs[0].steps_per_epoch
    assert steps[:2] == [(first, 0), (first + 1, 16)], "scored first, no step taken again"
    for one, other in zip(whole, resumed, strict=True):
        assert [line["dev"] for line in one.history] == [line["dev"] for line in other.history]
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_a_cohort_of_the_runs_that_were_left_is_found_again(tiny_bert, toy_task, tmp_path):
    done, short, long = (make(tiny_bert, toy_task, seed=seed, epochs=epochs) for seed, epochs in enumerate((1, 1, 2)))

    def train(folder, emit=ignore):
        fit([done], tiny_bert, folder)
        return fit([done, short, long], tiny_bert, folder, emit=emit)  # a cohort of two

    whole = train(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(tmp_path / "cut", InterruptAt(short.num_steps + 2))
    assert (tmp_path / "cut" / short.id / "result.json").exists()
    steps = []

    class Count(Hooks):
        def on_step(self, cohort, num_rows):
            steps.append((cohort.num_steps, len(cohort.members)))

    resumed = train(tmp_path / "cut", Count())
    assert steps[0] == (short.num_steps + 3, 2)
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)
    assert not list((tmp_path / "cut" / "cohorts").rglob("state.safetensors"))


def test_a_smaller_budget_holds_for_a_resumed_run(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task)
    with pytest.raises(Interrupted):
        fit([run], tiny_bert, tmp_path, emit=InterruptAt(4))
    budgets = set()

    class Look(Hooks):
        def on_step(self, cohort, num_rows):
            budgets.add(cohort.settings.token_budget)

    fit([run], tiny_bert, tmp_path, FitSettings(token_budget=64), emit=Look())
    assert budgets == {64}


def test_restart_begins_anew(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task)
    with pytest.raises(Interrupted):
        fit([run], tiny_bert, tmp_path, emit=InterruptAt(4))
    steps = []

    class Count(Hooks):
        def on_step(self, cohort, num_rows):
            steps.append(cohort.num_steps)

    fit([run], tiny_bert, tmp_path, FitSettings(restart=True), emit=Count())
    assert steps == list(range(1, run.num_steps + 1))


def test_membership_budget_and_threads_are_on_disk_before_the_first_step(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task, seed=seed) for seed in (3, 1)]
    seen = {}

    class Look(Hooks):
        def on_start(self, cohort):
            seen.update(json.loads((tmp_path / "cohorts" / cohort_id(runs) / "cohort.json").read_text()))

    fit(runs, tiny_bert, tmp_path, FitSettings(token_budget=500, save_every=7), emit=Look())
    assert seen["runs"] == [run.id for run in runs]
    assert (seen["token_budget"], seen["save_every"]) == (500, 7)
    assert seen["num_threads"] == torch.get_num_threads()


def stop(runs, backbone, folder, step):
    """Stop training after a step; returns the folder of the cohort."""
    with pytest.raises(Interrupted):
        fit(runs, backbone, folder, FitSettings(save_every=1), emit=InterruptAt(step))
    return folder / "cohorts" / cohort_id(runs)


def flip_bit(path, share):
    """Damage a file by one bit, so far into it."""
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 4
    path.write_bytes(content)


class Hear(Hooks):
    """The steps that are taken, and what is said."""

    def __init__(self):
        self.steps, self.said = [], []

    def on_step(self, cohort, num_rows):
        self.steps.append(cohort.num_steps)

    def on_notice(self, message):
        self.said.append(message)


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.6, 0.9, 0.9999])
def test_a_flipped_bit_in_a_state_costs_the_steps_since_the_one_before_and_no_more(
    tiny_bert, toy_task, tmp_path, share
):
    run, hear = make(tiny_bert, toy_task), Hear()
    (whole,) = fit([run], tiny_bert, tmp_path / "whole")
    cohort_dir = stop([run], tiny_bert, tmp_path / "cut", 4)
    flip_bit(cohort_dir / "state.safetensors", share)
    (resumed,) = fit([run], tiny_bert, tmp_path / "cut", emit=hear)
    assert hear.steps[0] == 4, "step 4 again, from the state of step 3"
    assert "state.safetensors` cannot be read" in hear.said[0]
    assert hear.said[0].endswith("its runs go on from the state before it")
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)
    assert not list(cohort_dir.glob("*.safetensors"))


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_where_no_state_can_be_proved_training_begins_anew_and_says_so(tiny_bert, toy_task, tmp_path, damage):
    run, hear = make(tiny_bert, toy_task), Hear()
    (whole,) = fit([run], tiny_bert, tmp_path / "whole")
    cohort_dir = stop([run], tiny_bert, tmp_path / "cut", 4)
    state, previous = (cohort_dir / f"{name}.safetensors" for name in ("state", "previous"))
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:100])
    else:
        flip_bit(state, 0.7)
    if damage == "gone":
        previous.unlink()
    else:
        flip_bit(previous, 0.5)
    (resumed,) = fit([run], tiny_bert, tmp_path / "cut", emit=hear)
    assert hear.steps[0] == 1
    assert hear.said[0].endswith("its runs start again")
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_a_state_from_before_there_were_checksums_is_gone_on_with(tiny_bert, toy_task, tmp_path):
    run, hear = make(tiny_bert, toy_task), Hear()
    cohort_dir = stop([run], tiny_bert, tmp_path, 4)
    state, membership = cohort_dir / "state.safetensors", cohort_dir / "cohort.json"
    with safe_open(state, framework="pt") as file:
        content = json.loads(file.metadata()["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del content["membership"]
    save_file(tensors, state, {"state": json.dumps(content)})
    old = json.loads(membership.read_text())
    del old["crc32"]
    membership.write_text(json.dumps(old))
    fit([run], tiny_bert, tmp_path, emit=hear)
    assert hear.steps[0] == 5
    assert not hear.said


def test_the_state_before_the_last_takes_no_room_while_a_new_one_is_written(tiny_bert, toy_task, tmp_path, monkeypatch):
    run, sizes = make(tiny_bert, toy_task), []
    cohort_dir, replace = tmp_path / "cohorts" / cohort_id([run]), os.replace

    def look(source, target):
        if Path(target).name == "state.safetensors":
            sizes.append(len({path.stat().st_ino for path in cohort_dir.iterdir() if path.stat().st_size > 10_000}))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    fit([run], tiny_bert, tmp_path, FitSettings(save_every=1))
    assert max(sizes) == 2


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[]", b"{}", b'{"runs": 3}', b"[" * 100_000])
def test_a_damaged_membership_stops_no_other_run_and_is_read_from_the_state(tiny_bert, toy_task, tmp_path, content):
    run, other, hear = make(tiny_bert, toy_task), make(tiny_bert, toy_task, seed=7, epochs=1), Hear()
    cohort_dir = stop([run], tiny_bert, tmp_path, 4)
    (cohort_dir / "cohort.json").write_bytes(content)
    fit([other], tiny_bert, tmp_path)
    fit([run], tiny_bert, tmp_path, emit=hear)
    assert hear.steps[0] == 5
    assert not hear.said


def test_a_flipped_bit_in_a_membership_changes_nothing(tiny_bert, toy_task, tmp_path):
    run, hear = make(tiny_bert, toy_task), Hear()
    path = stop([run], tiny_bert, tmp_path, 4) / "cohort.json"
    path.write_bytes(path.read_bytes().replace(b'"num_threads": 1', b'"num_threads": 3'))
    fit([run], tiny_bert, tmp_path, emit=hear)
    assert hear.steps[0] == 5
    assert not hear.said, "the threads are as before"


def test_a_stopped_run_of_which_nothing_can_be_read_begins_anew_and_restart_works(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task)
    for settings in (FitSettings(), FitSettings(restart=True)):
        hear = Hear()
        cohort_dir = stop([run], tiny_bert, tmp_path / str(settings.restart), 4)
        for path in cohort_dir.iterdir():
            path.write_bytes(path.read_bytes()[:30])
        fit([run], tiny_bert, tmp_path / str(settings.restart), settings, emit=hear)
        assert hear.steps[0] == 1
        assert bool(hear.said) is not settings.restart
        assert all(said.endswith("they start again") for said in hear.said)


def test_one_flipped_bit_in_what_a_run_left_is_never_read_as_its_result(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task)
    (kept,) = fit([run], tiny_bert, tmp_path)
    folder = tmp_path / run.id
    for name in ("best.safetensors", "result.json"):
        content = (folder / name).read_bytes()
        for position in range(0, len(content), max(1, len(content) // 150)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 7
            (folder / name).write_bytes(damaged)
            try:
                found = read_result(folder)
            except StoreDamaged:
                continue
            assert found == kept, f"{name}, byte {position}"  # a blank of the JSON, or of the header
            assert all(torch.equal(found.tensors[key], kept.tensors[key]) for key in kept.tensors)
        (folder / name).write_bytes(content)


def test_weights_of_another_run_are_not_read_as_a_runs_own_and_old_folders_are_read(tiny_bert, toy_task, tmp_path):
    runs = [make(tiny_bert, toy_task, seed=seed) for seed in range(2)]
    fit(runs, tiny_bert, tmp_path)
    mine, other = (tmp_path / run.id for run in runs)
    own = (mine / "best.safetensors").read_bytes()
    (mine / "best.safetensors").write_bytes((other / "best.safetensors").read_bytes())
    with pytest.raises(StoreDamaged, match="not the weights"):
        read_result(mine)
    (mine / "best.safetensors").write_bytes(own)
    result = read_result(mine)
    save_file(result.tensors, mine / "best.safetensors")  # as they were before there were checksums
    old = json.loads((mine / "result.json").read_text())
    del old["crc32"], old["weights"]
    (mine / "result.json").write_text(json.dumps(old))
    assert read_result(mine) == result
    assert all(torch.equal(read_result(mine).tensors[name], result.tensors[name]) for name in result.tensors)


def test_a_full_disk_leaves_the_last_state_and_says_how_much_room_the_next_one_takes(
    tiny_bert, toy_task, tmp_path, monkeypatch
):
    run = make(tiny_bert, toy_task)
    (whole,) = fit([run], tiny_bert, tmp_path / "whole")
    cohort_dir, sync = tmp_path / "cut" / "cohorts" / cohort_id([run]), os.fsync
    states = []

    def fill(descriptor):
        if os.fstat(descriptor).st_size > 10_000:
            states.append(descriptor)
            if len(states) == 4:
                raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fill)
        with pytest.raises(InlayError, match=r"state.safetensors`: it takes [0-9,]+ bytes, and [0-9,]+ bytes are free"):
            fit([run], tiny_bert, tmp_path / "cut", FitSettings(save_every=1))
    assert sorted(path.name for path in cohort_dir.iterdir()) == [
        "cohort.json",
        "previous.safetensors",
        "state.safetensors",
        "training.lock",
    ]
    hear = Hear()
    (resumed,) = fit([run], tiny_bert, tmp_path / "cut", emit=hear)
    assert (hear.steps[0], hear.said) == (4, [])
    assert all(torch.equal(resumed.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_the_state_follows_the_umask(tiny_bert, toy_task, tmp_path):
    before = os.umask(0o002)
    try:
        cohort_dir = stop([make(tiny_bert, toy_task)], tiny_bert, tmp_path, 3)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in cohort_dir.iterdir()} == {0o664}


def test_a_stopped_cohort_goes_on_only_if_it_trains_all_that_is_asked_for_and_nothing_else(
    tiny_bert, toy_task, tmp_path
):
    first, second, third = (make(tiny_bert, toy_task, seed=seed) for seed in range(3))
    write_membership(tmp_path / "cohort", [first, second], CohortSettings(1024, 1, 100), [])
    (tmp_path / "cohort" / "state.safetensors").write_bytes(b"")
    for unfinished in ([first, second], [second], []):
        assert find_stopped(tmp_path, [first, second], unfinished).runs == [first, second]
    assert find_stopped(tmp_path, [first, second, third], [second]).runs == [first, second]
    assert find_stopped(tmp_path, [first, second, third], [second, third]) is None, "the third would not be trained"
    assert find_stopped(tmp_path, [first, third], [first]) is None, "nobody asks for the second"


class HearThreads(Hooks):
    """How many threads computed each step, what stood in the cohort's file then, and what was said."""

    def __init__(self, place, stop_at=0):
        self.place, self.stop_at, self.counted, self.written, self.said = place, stop_at, [], [], []

    def on_notice(self, message):
        self.said.append(message)

    def on_step(self, cohort, num_rows):
        self.counted.append(torch.get_num_threads())
        self.written.append(json.loads(self.place.read_text())["num_threads"])
        if cohort.num_steps == self.stop_at:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_resumed_run_takes_the_threads_there_are_now_and_says_so_if_they_are_others(tiny_bert, toy_task, tmp_path):
    run = make(tiny_bert, toy_task)
    place, before = tmp_path / "cohorts" / cohort_id([run]) / "cohort.json", torch.get_num_threads()
    first, same, other = HearThreads(place, stop_at=2), HearThreads(place, stop_at=4), HearThreads(place)
    for watch, threads in ((first, 1), (same, 1)):
        with pytest.raises(Interrupted):
            fit([run], tiny_bert, tmp_path, FitSettings(threads=threads), emit=watch)
        assert (set(watch.counted), set(watch.written), watch.said) == ({1}, {1}, [])
    fit([run], tiny_bert, tmp_path, FitSettings(threads=3), emit=other)
    assert (set(other.counted), set(other.written)) == ({3}, {3})
    rounded = "so sums are rounded differently from here on"
    assert other.said == [f"threads: 3; before it was stopped there were 1, {rounded}"]
    assert torch.get_num_threads() == before


def test_threads_change_between_two_steps_when_others_take_cores(tiny_bert, toy_task, tmp_path, monkeypatch):
    run = make(tiny_bert, toy_task)
    looks = []

    def look_again(threads):
        looks.append(threads.number)
        if len(looks) == 3:
            threads.number, threads.note, threads._changes = 1, "threads: 1 of 2: others", 1
        return len(looks) == 3

    monkeypatch.setattr(Threads, "look_again", look_again)
    watch = HearThreads(tmp_path / "cohorts" / cohort_id([run]) / "cohort.json")
    before = torch.get_num_threads()
    fit([run], tiny_bert, tmp_path, FitSettings(threads=2), emit=watch)
    assert watch.counted == watch.written == [2, 2] + [1] * (run.num_steps - 2)
    assert watch.said == ["threads: 1 of 2: others"]
    assert torch.get_num_threads() == before
