"""Units of work sent out and taken back, with a Ray that does them here at once; with Ray itself: tests/cluster."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from test_session import Counter, file_of, make_plan, without_times

from inlay.cluster import RaySettings, messages, own_versions
from inlay.errors import LostProcess, Missing, Unsupported
from inlay.model import load_backbone
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.studies.run import units_on_ray
from inlay.studies.run.records import StudyDirs, read_appended
from inlay.studies.run.session import Deadline, Session, run_studies
from inlay.studies.run.units_on_ray import run_studies_on_ray
from inlay.studies.spec.toy import WORDS
from inlay.training import list_stopped

SMALL = """
title = "small"
tasks = ["glue/cola"]
[arms.baseline]
kind = "baseline"
[arms.adapters]
method = { name = "houlsby" }
axes = { size = [2, 3, 4] }
[arms.full]
method = { name = "full" }
[profiles.tiny]
backbone = "tiny"
rows = "toy"
seeds = 2
train = { epochs = 2, batch_size = 8, lr = 1e-3, dropout = 0.0, head_dropout = 0.0 }
fit = { token_budget = 4096 }
"""


class LostError(Exception):
    """What Ray raises of a task that it has given up."""


@dataclass(eq=False)
class Reference:
    value: Any


class HereRay:
    """As much of Ray as is asked for: what is sent is done at once, in this process."""

    exceptions = SimpleNamespace(RayError=LostError)

    def __init__(self, num_cpus: int = 2) -> None:
        self.num_sent, self.num_cpus, self.loses = 0, num_cpus, lambda unit: False

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": self.num_cpus}}]

    def put(self, value):
        return Reference(value)

    def get(self, reference):
        if isinstance(reference, list):
            return [self.get(each) for each in reference]
        if isinstance(reference.value, Exception):
            raise reference.value
        return reference.value

    def wait(self, references, timeout):
        return references, []

    def remote(self, **_):
        return lambda thing: SimpleNamespace(remote=lambda *given: self._begin(thing, given))

    def _begin(self, thing, given):
        if isinstance(thing, type):
            return _Actor(self, thing())
        self.num_sent += 1
        is_lost = self.loses(given[0].unit)
        return self.put(LostError("its machine died\nand more") if is_lost else thing(*given))

    def kill(self, actor):
        actor.is_killed = True

    def cancel(self, reference, force):
        pass


class _Actor:
    is_killed = False

    def __init__(self, ray, made):
        self._ray, self._made = ray, made

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *given: self._ray.put(getattr(self._made, name)(*given)))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_backbone(str(make_tiny_folder(tmp_path_factory.mktemp("backbones") / "tiny", WORDS)), device="cpu")


@pytest.fixture
def ray(monkeypatch):
    here = HereRay()
    monkeypatch.setitem(sys.modules, "ray", here)
    monkeypatch.setattr(units_on_ray, "connect", lambda address: here)
    return here


def dirs_in(folder):
    return StudyDirs(folder / "results", folder / "runs")


def send(plan, dirs, **more):
    return run_studies_on_ray([plan], dirs, RaySettings(), commit="abc", device="cpu", **more)


@pytest.mark.parametrize("is_shared", [True, False], ids=["one folder", "folders of their own"])
def test_units_sent_out_come_to_the_records_of_one_machine(tmp_path, backbone, ray, monkeypatch, is_shared):
    if not is_shared:  # as where no machine sees another's disk
        monkeypatch.setattr(messages.Path, "touch", lambda path, **_: None)
    plan, dirs, stage = make_plan(tmp_path, backbone, SMALL), dirs_in(tmp_path), Counter()
    found = send(plan, dirs, progress=stage)
    assert (found.missing, found.failed, found.total_trained) == ([], [], len(plan.items))
    assert [unit.num_runs for unit in stage.units].count(5) == 1, "every machine gets a part of the cohort"
    alone = run_studies([plan], dirs_in(tmp_path / "alone"), commit="abc").records
    expected = {(record["id"], record["arm"]): record for record in without_times(alone)}
    written = read_appended(file_of(dirs))[0]
    assert len(written) == len(expected), "each is recorded once"
    for record in without_times(written):
        other = expected[record["id"], record["arm"]]
        assert record["dev"] == pytest.approx(other["dev"], abs=1e-5)
        assert {**record, "dev": 0, "curve": 0} == {**other, "dev": 0, "curve": 0}
    adapters = [item.id for item in plan.items if item.arm.name == "adapters"]
    assert all((dirs.runs / run_id / "best.safetensors").is_file() for run_id in adapters), "as trained here"
    copies = [item.id for item in plan.items if item.arm.name == "full"]
    assert not any((dirs.runs / run_id / "best.safetensors").is_file() for run_id in copies), "as trained here"
    assert not [*dirs.runs.glob(".ray-*"), *dirs.runs.glob("claims/*.json")]
    number = ray.num_sent
    assert send(plan, dirs).total_trained == 0
    assert ray.num_sent == number, "nothing is trained twice"


def test_a_unit_that_is_lost_for_good_fails_alone_and_is_tried_again_next_time(tmp_path, backbone, ray):
    plan, dirs, stage = make_plan(tmp_path, backbone, SMALL), dirs_in(tmp_path), Counter()
    ray.loses = lambda unit: unit.kind == "baseline" and unit.items[0].seed == 0
    found = send(plan, dirs, progress=stage)
    assert [(item.arm.name, said) for item, said in found.failed] == [("baseline", "its machine died")]
    assert [item.arm.name for item in found.missing] == ["baseline"]
    assert stage.warnings[0].endswith("seed 0: its machine died")
    ray.loses = lambda unit: False
    assert send(plan, dirs).total_trained == 1


def test_when_one_unit_after_another_is_lost_the_session_ends(tmp_path, backbone, ray):
    ray.loses, plan = lambda unit: True, make_plan(tmp_path, backbone, SMALL)
    with pytest.raises(LostProcess, match="lost one after another"):
        send(plan, dirs_in(tmp_path))
    assert ray.num_sent < len(plan.items)
    assert not list((tmp_path / "runs" / "claims").glob("*.json"))


def test_a_machine_with_other_versions_or_without_the_backbone_ends_the_session(tmp_path, backbone, ray, monkeypatch):
    plan = make_plan(tmp_path, backbone, SMALL)
    monkeypatch.setattr(units_on_ray, "own_versions", lambda: ("inlay 0.0.1",))
    with pytest.raises(Unsupported, match=r"a machine of the cluster has inlay .*, and this one inlay 0\.0\.1"):
        send(plan, dirs_in(tmp_path))
    monkeypatch.setattr(units_on_ray, "own_versions", own_versions)
    monkeypatch.setattr(units_on_ray, "_open_backbone", lambda *_: load_backbone(str(tmp_path / "not-there")))
    with pytest.raises(Missing, match="not-there"):
        send(plan, dirs_in(tmp_path))
    assert not list((tmp_path / "results").rglob("*.jsonl"))


def test_a_cluster_without_room_is_refused_before_anything_is_sent(tmp_path, backbone, ray):
    ray.num_cpus = 0
    with pytest.raises(Missing, match="no machine of the cluster has 1 processors"):
        send(make_plan(tmp_path, backbone, SMALL), dirs_in(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_what_another_process_has_in_hand_is_left_to_it(tmp_path, backbone, ray):
    plan, dirs, stage = make_plan(tmp_path, backbone, SMALL), dirs_in(tmp_path), Counter()
    other = Session([plan], dirs, deadline=Deadline(None))
    with other.claim_next() as (unit, _):
        found = send(plan, dirs, progress=stage)
        assert {item.id for item in found.missing} == unit.run_ids
        assert stage.warnings == ["other processes are working on what is left"]
    assert {item.id for item in send(plan, dirs).missing} == set()


def test_a_task_that_is_asked_to_stop_keeps_its_state_and_goes_on_later(tmp_path, backbone, ray, monkeypatch):
    monkeypatch.setattr(units_on_ray, "_LISTEN_SECONDS", 0.0)
    asked = []

    def put(relay, word):
        asked.append(word[1])
        return asked.count("rows") > 1  # from the second time on

    class Stage(Counter):
        def end(self, unit, seconds):
            raise KeyboardInterrupt

    plan, dirs = make_plan(tmp_path, backbone, SMALL), dirs_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(messages._MessageRelay, "put", put)
        with pytest.raises(KeyboardInterrupt):
            send(plan, dirs, progress=Stage())
    assert list_stopped(dirs.runs / "cohorts"), "its state is kept"
    assert not list((dirs.runs / "claims").glob("*.json"))
    assert send(plan, dirs).missing == []
