"""How many threads compute: what was asked for, what a container may use, what others leave."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inlay import threads
from inlay.threads import Threads, choose_number, find_quota, generator_lock, own_threads, spin_briefly

SOURCE = Path(__file__).parents[1] / "src"
TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """A made-up machine of so many cores, whose clock goes on when somebody sleeps."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int = 2) -> None:
        self.root, self.num_cores, self.now, self.idle_s, self.own_s = root, num_cores, 100.0, 50.0, 0.0
        self.busy, self.own = 0.0, 0.0
        (root / "proc/self").mkdir(parents=True)
        for name in threads.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(num_cores)), raising=False)
        monkeypatch.setattr(threads.os, "times", lambda: os.times_result((self.own_s, 0.0, 0.0, 0.0, 0.0)))
        monkeypatch.setattr(threads.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(threads.time, "sleep", self.go_on)
        self.go_on(0.0)

    def go_on(self, seconds: float) -> None:
        """Others compute on `busy` cores meanwhile, this process on `own`."""
        self.now += seconds
        self.own_s += seconds * self.own
        self.idle_s += seconds * max(0.0, self.num_cores - self.busy - self.own)
        lines = ["cpu  1 2 3 4 5 6 7 8 0 0"]
        lines += [f"cpu{core} 9 9 9 {round(self.idle_s * TICKS / self.num_cores)} 0 0 0 0 0 0" for core in range(9)]
        (self.root / "proc/stat").write_text("\n".join([*lines, "intr 5"]) + "\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(("busy", "expected"), [(0.0, 2), (0.1, 2), (0.5, 1), (1.0, 1), (2.0, 1)])
def test_training_begins_with_the_cores_that_others_leave(machine, busy, expected):
    machine.busy = busy
    chosen = Threads(2, root=machine.root)
    assert chosen.number == expected
    assert bool(chosen.note) == (expected < 2)


def test_the_note_says_how_many_and_why(machine):
    machine.busy = 1.0
    assert Threads(2, root=machine.root).note == "threads: 1 of 2: other processes keep 1.0 cores busy"


def test_an_explicit_number_wins_and_is_held(machine, monkeypatch):
    machine.busy = 2.0
    asked = Threads(2, 2, root=machine.root)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    by_variable = Threads(2, root=machine.root)
    for chosen in (asked, by_variable):
        machine.go_on(60.0)
        assert (chosen.number, chosen.look_again(), chosen.note) == (2, False, "")


def test_more_than_there_are_cores_may_be_asked_for(machine):
    assert Threads(2, 5, root=machine.root).number == 5


def test_threads_follow_others_that_come_and_go_and_own_work_is_not_theirs(machine):
    chosen = Threads(2, root=machine.root)
    machine.own = 2.0
    machine.go_on(6.0)
    assert not chosen.look_again(), "two threads of its own keep both cores busy"
    machine.own, machine.busy = 1.33, 0.67  # three that want a core share two
    machine.go_on(1.0)
    assert not chosen.look_again(), "not yet"
    machine.go_on(5.0)
    assert chosen.look_again()
    assert chosen.number == 1
    machine.own, machine.busy = 1.0, 1.0
    machine.go_on(6.0)
    assert not chosen.look_again()
    machine.own, machine.busy = 1.0, 0.0
    machine.go_on(6.0)
    assert chosen.look_again()
    assert chosen.number == 2


def test_a_neighbour_that_comes_and_goes_is_told_of_twice_at_most(machine):
    chosen, told = Threads(2, root=machine.root), 0
    for turn in range(6):
        machine.busy = float(turn % 2 == 0)
        machine.go_on(6.0)
        assert chosen.look_again()
        told += chosen.is_news
    assert told == 2


def test_a_number_does_not_swing_where_others_take_about_a_quarter_of_a_core():
    assert choose_number(2, 2, 1.75) == 2, "two are kept"
    assert choose_number(1, 2, 1.75) == 1, "and so is one"
    assert choose_number(8, 8, 6.9) == 7
    assert choose_number(7, 8, 7.9) == 8
    assert choose_number(4, 4, 0.0) == 1
    assert choose_number(2, 4, 9.0) == 4


def test_a_machine_that_does_not_tell_keeps_what_torch_has(machine):
    (machine.root / "proc/stat").unlink()
    chosen = Threads(2, root=machine.root)
    machine.busy = 2.0
    assert (chosen.number, chosen.look_again(0.0)) == (2, False)


def test_a_container_that_may_use_less_has_fewer_threads(tmp_path, monkeypatch):
    machine = Machine(tmp_path, monkeypatch, num_cores=8)
    group = tmp_path / "sys/fs/cgroup/pod/box"
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert find_quota(tmp_path) == math.inf
    (group.parent / "cpu.max").write_text("200000 100000\n")
    assert find_quota(tmp_path) == 2.0, "a limit of the group above holds too"
    assert Threads(8, root=machine.root).note == "threads: 2 of 8: this container may use 2 cores"


def test_the_older_control_groups_are_read_too(tmp_path):
    group = tmp_path / "sys/fs/cgroup/cpu/box"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert find_quota(tmp_path) == math.inf
    (group / "cpu.cfs_quota_us").write_text("150000\n")
    assert find_quota(tmp_path) == 1.5


def test_threads_are_as_before_after_the_block_also_if_it_fails():
    before = torch.get_num_threads()
    seen = []

    @own_threads(before + 1)
    def compute():
        seen.append(torch.get_num_threads())
        torch.set_num_threads(before + 2)
        raise KeyError

    with pytest.raises(KeyError):
        compute()
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_how_threads_wait_is_the_users_if_the_user_says(name, monkeypatch):
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "7")
    spin_briefly()
    assert {key: os.environ.get(key) for key in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if key in os.environ} == {
        name: "7"
    }


def test_the_command_line_says_how_threads_wait_before_torch_is_loaded():
    program = (
        "import os, sys\nfrom inlay.cli import main\n"
        "try: main(['presets', '--json'])\nexcept SystemExit: pass\n"
        "print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": str(SOURCE)}
    )
    assert done.stderr.split()[-2:] == ["10000", "False"], done.stderr


def test_every_device_has_one_lock_for_its_generator_by_whatever_name():
    first, same, second = (generator_lock(torch.device(name)) for name in ("cuda", "cuda:0", "cuda:1"))
    assert first is same
    assert len({first, second, generator_lock(torch.device("cpu"))}) == 3
