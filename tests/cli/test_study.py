"""`study`: every study of the repository, whole, in its tiny profile; what it says and what it refuses."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from inlay.studies.spec.study import list_studies, read_study

from .conftest import Inlay

STUDIES = list_studies([Path(__file__).parents[2] / "studies"])


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What every study needs is imported: ten seconds are for the study."""
    import sklearn.linear_model  # noqa: F401

    import inlay.cli.study_progress  # noqa: F401
    from inlay.model import load_backbone
    from inlay.model.backbone.tiny import make_tiny_folder

    load_backbone(str(make_tiny_folder(tmp_path_factory.mktemp("tiny") / "tiny")), device="cpu")


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_whole_in_its_tiny_profile_within_ten_seconds(name: str, inlay: Inlay, tmp_path: Path) -> None:
    began = time.process_time()  # of this process: other tests run beside it
    ended = inlay("study", name, "--profile", "tiny", "--json")
    assert ended.status == 0, ended.err
    assert time.process_time() - began < 10
    (report,) = ended.data["studies"]
    assert report["missing"] == {}
    assert report["failed"] == []
    records = [json.loads(line) for line in Path(report["file"]).read_text().splitlines()]
    study = read_study(STUDIES[name], "tiny")
    too_deep = {arm.name for arm in study.arms.values() if arm.min_layers > 4}
    assert {record["arm"] for record in records} == set(study.arms) - too_deep
    assert {record["task"] for record in records} == set(study.tasks)
    assert all(record["status"] == "finished" for record in records)
    if study.report_on == "test":
        assert all(record["test"] for record in records if not record["task"].startswith("glue/"))
    assert not (tmp_path / "results").exists(), "a tiny result stays away from those that are committed"


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("name", ["multitask", "fewshot", "lowresource"])
def test_studies_of_several_tasks_run_on_a_backbone_that_writes(name: str, inlay: Inlay, backbone_folder) -> None:
    ended = inlay("study", name, "--profile", "tiny", "--backbone", backbone_folder("t5"), "--json")
    assert ended.status == 0, ended.err
    (report,) = ended.data["studies"]
    assert report["missing"] == {}
    assert report["failed"] == []


def test_a_study_is_planned_run_and_found_done(inlay: Inlay, tmp_path: Path) -> None:
    command = ("study", "uva", "--profile", "tiny", "--out", tmp_path / "out")
    planned = inlay(*command, "--dry-run")
    assert planned.status == 0, planned.err
    assert "8 to train, 0 done" in planned.out
    assert "full on 2 tasks, seed 0, lr " in planned.out
    assert not (tmp_path / "out").exists()
    ended = inlay(*command, "--commit", "abc")
    assert "trained  8 runs" in ended.out
    assert "missing  nothing" in ended.out
    records = [json.loads(line) for line in (tmp_path / "out" / "uva" / "tiny-tiny.jsonl").read_text().splitlines()]
    assert {record["commit"] for record in records} == {"abc"}
    assert "trained  0 runs" in inlay(*command).out
    assert inlay(*command, "--dry-run", "--json").data["studies"][0]["units"] == []


def test_rows_of_several_studies_are_counted_without_a_step_each_run_once(inlay: Inlay) -> None:
    command = ("study", "glue,sizes", "--profile", "tiny", "--dry-run", "--no-measure", "--json")
    counted = inlay(*command).data
    alone = inlay("study", "sizes", "--profile", "tiny", "--dry-run", "--no-measure", "--json").data
    assert counted["seconds"] is None
    glue, sizes = counted["studies"]
    assert glue["samples"].keys() == {"full", "adapters"}, "`adapters-64` is one of `adapters`"
    # glue has sizes 2 and 4 on CoLA too: what is left of `sizes` is MRPC, half of its rows
    assert 2 * sum(sizes["samples"].values()) == sum(alone["studies"][0]["samples"].values())
    assert counted["samples"]["copies"] == glue["samples"]["full"]
    assert sum(counted["samples"].values()) == sum(glue["samples"].values()) + sum(sizes["samples"].values())
    # 4 copies and 8 adapters of glue, 8 of sizes, of which glue has those of CoLA
    assert [(item["runs"], item["left"]) for item in (glue, sizes)] == [(12, 12), (8, 8)]
    assert [sum(unit["runs"] for unit in item["units"]) for item in (glue, sizes)] == [12, 8]
    assert (counted["left"], counted["done"]) == (16, 0)
    said = inlay("study", "glue,sizes", "--profile", "tiny", "--dry-run", "--no-measure").out
    assert "sizes  8 to train of 8" in said
    assert "16 to train, 0 done: runs of several studies are counted once" in said


def test_a_sequence_is_forecast_with_all_its_tasks(inlay: Inlay) -> None:
    forecast = inlay("study", "stream", "--profile", "tiny", "--dry-run", "--json").data
    for unit in forecast["studies"][0]["units"]:
        assert "on 2 tasks, one after another, seed 0, lr" in unit["work"]
        assert unit["together"] == 1
        assert unit["memory_bytes"] > 0


def test_runs_of_several_studies_are_counted_once_when_they_are_trained(inlay: Inlay) -> None:
    command = ("study", "sizes,ablation", "--profile", "tiny", "--no-report", "--tasks", "glue/cola")
    late = inlay(*command, "--budget", "0.001s", "--json").data
    assert [(item["trained"], item["left"]) for item in late["studies"]] == [(0, 4), (0, 2)]
    assert (late["trained"], late["left"]) == (0, 4)


def test_some_arms_and_tasks_may_be_asked_for(inlay: Inlay) -> None:
    ended = inlay("study", "tradeoff", "--profile", "tiny", "--arms", "full,top-*", "--tasks", "glue/cola", "--json")
    records = [json.loads(line) for line in Path(ended.data["studies"][0]["file"]).read_text().splitlines()]
    assert {record["arm"] for record in records} == {"full", "top-1", "top-4"}
    assert {record["task"] for record in records} == {"glue/cola"}


def test_the_list_names_every_study_with_its_runs(inlay: Inlay) -> None:
    listed = {item["study"]: item for item in inlay("study", "list", "--profile", "paper", "--json").data["studies"]}
    assert set(listed) == set(STUDIES)
    assert listed["glue"]["runs"] == 10 * (6 + 18) * 5, "adapters of size 64 are among those of every size"
    assert listed["multitask"]["runs"] == 4 + 2 * 8, "of all tasks together, or of each"
    assert "To tune or not to tune" in inlay("study", "list").out


def test_the_list_is_of_the_studies_that_have_the_profile(inlay: Inlay) -> None:
    listed = {item["study"]: item for item in inlay("study", "list", "--profile", "long", "--json").data["studies"]}
    assert {"multitask", "lowresource"} <= listed.keys()
    assert "glue" not in listed
    assert "no profile of study" in inlay("study", "list", "--profile", "longest").err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("glu",), "no study named `glu`\nhint: did you mean `glue`?"),
        (("glue", "--profile", "large"), "no profile of study `glue` named `large`"),
        (
            ("glue", "--profile", "tiny", "--memory-share", "1.5"),
            "`--memory-share 1.5` is not a share\nhint: give more",
        ),
        (("glue", "--profile", "tiny", "--budget", "10"), "`--budget` is `10`\nhint: write it as 90s, 10m or 1.5h"),
        (("glue", "--profile", "tiny", "--arms", "ful"), "did you mean `full`?"),
        (("glue", "--device", "tpu"), "no device named `tpu`"),
        (("glue",), "lacks 7 of 7 data sets"),
        (("uva", "--profile", "tiny", "--backbone", "no-such"), "no backbone named `no-such`"),
    ],
)
def test_bad_input_is_refused_before_the_first_run(
    arguments: tuple[str, ...], message: str, inlay: Inlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INLAY_DATA", raising=False)
    ended = inlay("study", *arguments)
    assert ended.status not in (0, 1)
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert not list(tmp_path.rglob("result.json"))


def test_a_budget_that_is_over_at_once_says_what_is_missing(inlay: Inlay) -> None:
    report = inlay("study", "uva", "--profile", "tiny", "--budget", "0.001s", "--json").data["studies"][0]
    assert report["trained"] == 0
    assert report["missing"]["full"] == [f"glue/{task} seed {seed}" for seed in (0, 1) for task in ("mrpc", "cola")]


@pytest.mark.long
def test_several_processes_train_several_studies_with_one_display(inlay: Inlay) -> None:
    ended = inlay("study", "uva,stream", "--profile", "tiny", "--jobs", "2", "--no-report", "--json")
    assert ended.status == 0, ended.err
    assert [report["missing"] for report in ended.data["studies"]] == [{}, {}]
    assert "report" not in ended.data
    assert "full on 2 tasks, seed 0, lr 0.001: 2 runs" in ended.err
    assert inlay("study", "uva", "--profile", "tiny", "--jobs", "0").status == 2


OWN = """
title = "CoLA, for the server"
tasks = ["glue/cola"]
submission = true
train = { epochs = 1, max_length = 16 }
arms.full = { method = { name = "full" }, axes = { lr = [1e-3] } }
arms.adapters = { method = { name = "houlsby", size = 4 }, axes = { lr = [1e-2] } }
profiles.device = { backbone = "tiny", seeds = 2, fit = { token_budget = 8192 } }
"""


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    """CoLA in the official layout, and a study of it."""
    folder = tmp_path / "data" / "CoLA"
    folder.mkdir(parents=True)
    for side, size in (("train", 16), ("dev", 8)):
        rows = [f"x\t{row % 2}\t\tthe {'cat' if row % 2 else 'dog'} sat {row} {side}" for row in range(size)]
        (folder / f"{side}.tsv").write_text("\n".join(rows) + "\n")
    tests = [f"{row}\tthe cat sat {row}" for row in range(1063)]
    (folder / "test.tsv").write_text("\n".join(["index\tsentence", *tests]) + "\n")
    (tmp_path / "own.toml").write_text(OWN)
    return folder


def test_a_study_of_ones_own_answers_the_test_sets_in_the_official_format(
    inlay: Inlay, tmp_path: Path, cola: Path
) -> None:
    (cola.parent / "WNLI").mkdir()
    (cola.parent / "WNLI" / "test.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    command = ("study", "own.toml", "--data-root", tmp_path / "data", "--out", "out")
    ended = inlay(*command)
    assert ended.status == 0, ended.err
    kept = tmp_path / "out" / "own" / "submission"
    for arm in ("full", "adapters"):
        written = kept / f"tiny-device-{arm}"
        lines = (written / "CoLA.tsv").read_text().splitlines()
        assert lines[0] == "index\tprediction"
        assert len(lines) == 1064
        assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
        assert f"submission: {arm}: out/own/submission/tiny-device-{arm}/submission.zip" in ended.out
    assert "without SST-2.tsv, MRPC.tsv" in ended.out
    assert "AX.tsv (no test file here); WNLI.tsv (no run): the server wants all" in ended.out

    # Without weights, what was answered stays; what was not is said, and can be trained again.
    (store,) = tmp_path.rglob("studies/runs")
    shutil.rmtree(store)
    shutil.rmtree(kept / "tiny-device-full")
    answers = (kept / "tiny-device-adapters" / "CoLA.tsv").read_bytes()
    gone = inlay(*command, "--json").data["studies"][0]
    said = gone["submission"]
    assert gone["trained"] == 0
    assert said[0].startswith("adapters: out/own/submission/tiny-device-adapters/submission.zip, without ")
    assert said[1].startswith("full: no weights here of the best runs glue/cola ")
    assert said[2].startswith("put the folders of these runs into ")
    assert "`--retrain`" in said[2]
    again = inlay(*command, "--retrain")
    assert again.status == 0, again.err
    assert "1 run without weights" in again.err
    assert "no weights" not in again.out
    assert len((kept / "tiny-device-full" / "CoLA.tsv").read_text().splitlines()) == 1064
    assert (kept / "tiny-device-adapters" / "CoLA.tsv").read_bytes() == answers


def test_answers_of_a_test_file_that_is_not_the_official_one_are_refused_in_words(inlay: Inlay, cola: Path) -> None:
    (cola / "test.tsv").write_text("index\tsentence\n0\tthe cat sat\n")
    ended = inlay("study", "own.toml", "--data-root", cola.parent, "--out", "out", "--arms", "adapters")
    assert ended.status == 0, ended.err
    assert "adapters, glue/cola: 1 answers for glue/cola, whose test file has 1063 rows" in ended.out
