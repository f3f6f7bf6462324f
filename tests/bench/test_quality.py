"""The benchmark of quality: its draws are a user's files, its records are kept, its checks can fail."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import quality
import quality_draws
import quality_report
import quality_systems
from quality_report import Record, make_checks, read_records, write_report
from quality_systems import Found, Place, measure, score_answers

SIZES = (10, 20, 40)


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder with SST-2 and STS-B as GLUE has them, and a set that is cut, all tiny."""
    (tmp_path / "SST-2").mkdir()
    for side, count in (("train", 60), ("dev", 12)):
        rows = [f"{side} text number {number}\t{number % 2}" for number in range(count)]
        (tmp_path / "SST-2" / f"{side}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    (tmp_path / "houlsby17" / "sms_spam_collection").mkdir(parents=True)
    names = ["ham"] * 28 + ["spam"] * 27 + ["rare"] * 5
    rows = [f"{name}\tmessage {number} of its kind" for number, name in enumerate(names)]
    (tmp_path / "houlsby17" / "sms_spam_collection" / "SMSSpamCollection").write_text("\n".join(rows) + "\n")
    return tmp_path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def test_draws_are_samples_of_the_pool_the_smaller_ones_beginnings_of_the_larger(root, tmp_path):
    draws = quality_draws.list_draws("glue/sst2", root, tmp_path / "draws", SIZES, 2)
    assert [(one.size, one.draw, one.num_train) for one in draws] == [
        *((10, 0, 10), (10, 1, 10), (20, 0, 20), (20, 1, 20), (40, 0, 40), (40, 1, 40))
    ]
    small, other, large = (rows_of(draws[place].train) for place in (0, 1, 2))
    assert large[:10] == small
    assert small != other
    assert {row["text"] for row in rows_of(draws[0].test)} == {f"dev text number {number}" for number in range(12)}
    again = quality_draws.list_draws("glue/sst2", root, tmp_path / "elsewhere", SIZES, 2)
    assert [one.digest for one in again] == [one.digest for one in draws]


def test_draws_are_apart_from_test_texts_and_say_which_labels_they_lack(root, tmp_path):
    draws = quality_draws.list_draws("extra/sms-spam", root, tmp_path / "draws", SIZES, 3)
    for draw in draws:
        train, test = rows_of(draw.train), rows_of(draw.test)
        assert (len(train), len(test)) == (draw.num_train, draw.num_test) == (draw.size, 15)
        assert not {row["text"] for row in train} & {row["text"] for row in test}
        assert {row["label"] for row in train} == set(draw.labels)
        assert {row["label"] for row in test} - set(draw.labels) == set(draw.unseen)
    assert any(draw.unseen for draw in draws)


@pytest.mark.parametrize(
    ("num_pool", "size", "count"),
    [(5000, 5000, 5000), (3000, 5000, 3000), (1999, 5000, None), (999, 1000, None), (60, 50, 50)],
)
def test_only_the_largest_size_takes_what_a_smaller_set_has(num_pool, size, count):
    assert quality_draws.count_rows(num_pool, size, quality_draws.SIZES) == count


def place(folder: Path, limit_s: int = 60) -> Place:
    return Place(Path(sys.executable), folder, folder / "scratch", limit_s, folder / "bytecode")


def test_cpu_seconds_and_memory_are_those_of_the_process_and_its_children(tmp_path):
    spend = "import time\nwhile time.process_time() < 0.4: pass\nkept = bytearray(80 << 20)"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spend!r}], check=True)"
    done = measure([sys.executable, "-c", parent], place(tmp_path))
    assert done.status == "ok"
    assert 0.4 <= done.cpu_s < 3
    assert done.peak_mb > 80


def test_a_process_beyond_its_limit_is_a_timeout_and_one_that_fails_an_error_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(quality_systems, "WALL_FACTOR", 0.05)
    asleep = measure([sys.executable, "-c", "import time; time.sleep(600)"], place(tmp_path))
    assert asleep.status == "stalled"
    monkeypatch.setattr(quality_systems, "WALL_FACTOR", 300)  # however busy the machine is
    endless = measure([sys.executable, "-c", "while True: pass"], place(tmp_path, limit_s=1))
    assert (endless.status, round(endless.cpu_s)) == ("timeout", 1)
    failed = measure([sys.executable, "-c", "import sys; sys.exit('no such thing')"], place(tmp_path))
    assert (failed.status, failed.message) == ("error", "no such thing")


def test_answers_are_scored_by_the_set_s_own_metric(root, tmp_path):
    draw = quality_draws.list_draws("glue/sst2", root, tmp_path / "draws", SIZES, 1)[0]
    wanted = [row["label"] for row in rows_of(draw.test)]
    assert score_answers(draw, wanted) == 100
    half_wrong = ["1" if number < 6 else label for number, label in enumerate(wanted)]
    assert score_answers(draw, half_wrong) == pytest.approx(100 * 9 / 12)
    # F1 of `1` when all are called 1: precision 1/2, recall 1
    by_f1 = dataclasses.replace(draw, metric="f1")
    assert score_answers(by_f1, ["1"] * len(wanted)) == pytest.approx(100 * 2 / 3)
    # a label that the draw does not have is wrong, whatever is said
    lacking = dataclasses.replace(draw, labels=("1",), unseen=("0",))
    assert score_answers(lacking, ["1"] * len(wanted)) == pytest.approx(50)
    with pytest.raises(ValueError, match="11 answers to 12 test rows"):
        score_answers(draw, wanted[:-1])


@pytest.fixture
def bench(root, tmp_path, monkeypatch):
    """The benchmark on tiny sets, with systems that train nothing; what was run, and a function that runs it."""
    ran = []

    @cache
    def fake(*names: str):
        def run(draw, place):
            ran.append((names[0], draw.set, draw.size, draw.draw))
            scores = {"inlay": 90.0, "probe": 80.0, "tfidf": 70.0, "setfit": 60.0}
            return {name: Found("ok", scores[name], 2.0, 3.0, 4.0) for name in names}

        return run

    names = {"inlay": ("inlay",), "probe": ("probe", "tfidf"), "tfidf": ("probe", "tfidf"), "setfit": ("setfit",)}
    for name, given in names.items():
        entry = dataclasses.replace(quality_systems.SYSTEMS[name], run=fake(*given))
        monkeypatch.setitem(quality_systems.SYSTEMS, name, entry)
    monkeypatch.setattr(quality, "list_draws", lambda *args: quality_draws.list_draws(*args, SIZES, 2))
    monkeypatch.setattr(quality, "describe_hardware", dict)
    (tmp_path / "work" / "bytecode").mkdir(parents=True)
    (tmp_path / "work" / "bytecode" / "run.warm").touch()

    def start(*words: str) -> list[tuple[str, str, int, int]]:
        ran.clear()
        folders = ("--data-root", str(root), "--folder", str(tmp_path / "work"), "--results", str(tmp_path / "results"))
        quality.main([*folders, "--sets", "glue/sst2", "--sizes", "10,20", "--commit", "abc", *words])
        return list(ran)

    return start


def test_what_has_a_record_is_not_measured_again_unless_inlay_has_changed(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "find_source", lambda: "first")
    words = ("--systems", "inlay,probe,tfidf,setfit")
    assert len(bench(*words, "--draws", "0")) == 6  # probe and TF-IDF are one command
    assert {item[3] for item in bench(*words)} == {1}
    assert bench(*words) == []
    monkeypatch.setattr(quality, "find_source", lambda: "second")
    assert bench(*words) == []
    assert {item[0] for item in bench(*words, "--again")} == {"inlay", "probe"}
    assert len(read_records(tmp_path / "results")) == 16
    assert {one.source for one in read_records(tmp_path / "results") if one.system == "inlay"} == {"second"}


def test_the_cheapest_is_measured_first_and_nothing_begins_when_the_time_is_over(bench):
    order = bench("--systems", "inlay,probe", "--draws", "0")
    assert order == [("probe", "glue/sst2", 10, 0), ("probe", "glue/sst2", 20, 0), *(
        ("inlay", "glue/sst2", 10, 0), ("inlay", "glue/sst2", 20, 0))]  # fmt: skip
    assert bench("--systems", "inlay,probe", "--draws", "1", "--minutes", "0") == []


def test_records_hold_no_text_of_the_data(bench, tmp_path):
    bench("--systems", "inlay", "--draws", "0")
    text = (tmp_path / "results" / "inlay.jsonl").read_text(encoding="utf8")
    assert "text number" not in text
    first = json.loads(text.splitlines()[0])
    assert (first["score"], first["metric"], first["commit"], first["num_test"]) == (90.0, "accuracy", "abc", 12)


def record(
    system: str, score: float | None, name: str = "glue/stsb", size: int = 1000, draw: int = 0, **more
) -> Record:
    status = "ok" if score is not None else "timeout"
    usual = {"metric": "spearman", "cpu_s": 10.0, "num_train": size, "num_test": 500, "digest": "d", "source": "s"}
    said = {**usual, **more}
    return Record(name, size, draw, system, status, score, **{"cost_s": said["cpu_s"], **said})


def verdicts(records: list[Record]) -> dict[str, bool | None]:
    found = {check.what: check.passes for check in make_checks(records)}
    words = {"first": "first on", "probe": "never more", "best": "within", "stsb": "STS-B", "cpu": "quarter"}
    return {key: next((value for what, value in found.items() if word in what), None) for key, word in words.items()}


def test_the_checks_pass_and_fail_by_what_the_goal_says():
    good = [record("inlay", 84.0), record("probe", 84.5), record("best", 85.0), record("setfit", None, cpu_s=40.0)]
    assert verdicts(good) == {"first": False, "probe": True, "best": True, "stsb": True, "cpu": True}
    bad = [record("inlay", 83.9), record("probe", 84.5), record("best", 85.0), record("setfit", 80.0, cpu_s=39.0)]
    assert verdicts(bad) == {"first": False, "probe": False, "best": False, "stsb": False, "cpu": False}
    assert verdicts([record("inlay", 85.0), record("probe", 84.5)])["first"] is True
    assert verdicts([record("probe", 84.5)]) == dict.fromkeys(("first", "probe", "best", "stsb", "cpu"))


def test_the_best_settings_of_few_of_the_sets_decide_nothing():
    names = ("glue/stsb", "glue/cola", "glue/rte", "glue/sst2")
    ours = [record("inlay", 80.0, name) for name in names]
    assert verdicts([*ours, record("best", 90.0)])["best"] is None
    assert verdicts([*ours, *(record("best", 90.0, name) for name in names[:2])])["best"] is False


def test_a_set_with_few_test_rows_does_not_count_against_the_probe():
    few = [record("inlay", 50.0, num_test=199), record("probe", 60.0, num_test=199)]
    assert verdicts(few)["probe"] is None


def test_means_are_over_the_same_sets_and_draws_and_each_set_counts_once():
    records = [
        *(record("inlay", 60.0 + draw, "glue/cola", draw=draw) for draw in range(3)),
        *(record("probe", 50.0, "glue/cola", draw=draw) for draw in range(2)),
        *(record(system, 90.0, "glue/sst2") for system in ("inlay", "probe")),
        record("inlay", 10.0, "glue/rte"),  # which the probe does not have
    ]
    scores = quality_report.Scores(records)
    cells = scores.cells(1000, ("inlay", "probe"))
    assert len(cells) == 3
    assert scores.mean("inlay", cells) == pytest.approx((60.5 + 90) / 2)
    assert scores.mean("probe", cells) == pytest.approx((50 + 90) / 2)


def test_records_of_other_rows_than_the_newest_are_left_out(tmp_path):
    lines = {"inlay": ("2026-01-02", "new"), "probe": ("2026-01-01", "old")}
    for system, (date, digest) in lines.items():
        line = dataclasses.asdict(record(system, 50.0, digest=digest)) | {"date": date}
        (tmp_path / f"{system}.jsonl").write_text(json.dumps(line) + "\n")
    assert [one.system for one in read_records(tmp_path)] == ["inlay"]


def test_the_report_shows_means_checks_sets_and_what_has_no_score(tmp_path):
    records = [
        *(
            record(system, score, size=size)
            for size in (50, 200)
            for system, score in (("inlay", 80.04), ("probe", 70.0))
        ),
        record("setfit", None, "glue/cola", size=50),
    ]
    text = write_report(records, tmp_path)
    assert text == (tmp_path / "report.md").read_text(encoding="utf8").removesuffix("\n")
    assert "| 50 | 1 set, 1 draw | **80.0** | 70.0 |" in text
    assert "| linear probe | 200 | 1 set, 1 draw | 80.0 | 70.0 | +10.0 |" in text
    assert "| glue/stsb | spearman | 500 | 80.0 | 70.0 |" in text
    assert "| SetFit | glue/cola | 50 | 0 | timeout | 10 |" in text
    assert (tmp_path / "quality.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / "quality.svg").read_bytes()


def test_a_dear_system_is_shown_beside_the_others_on_what_they_share(tmp_path):
    records = [
        *(
            record(name, 70.0, size=size, draw=draw)
            for name in ("inlay", "probe")
            for size in (50, 200)
            for draw in (0, 1)
        ),
        record("setfit", 60.0, size=50),
        record("full", 50.0, size=200),
    ]
    text = write_report(records, tmp_path)
    assert "| 50 | 1 set, 1 draw | **70.0** | **70.0** | 60.0 |  |" in text
    assert "| 50 | 1 set, 2 draws | **70.0** | **70.0** |  |  |" in text
    assert "| 200 | 1 set, 1 draw | **70.0** | **70.0** |  | 50.0 |" in text


def test_a_mixture_of_commits_is_said_in_the_table(tmp_path):
    records = [
        record("inlay", 80.0, "glue/sst2", size=50, commit="1111111aaaa", date="2026-01-01T10:00:00"),
        record("inlay", 80.0, "glue/cola", size=50, commit="2222222bbbb", date="2026-01-03T10:00:00"),
        record("inlay", 80.0, "glue/rte", size=50, commit="1111111aaaa", date="2026-01-02T10:00:00"),
    ]
    text = write_report(records, tmp_path)
    assert "They are of Inlay at 2222222, 1111111." in text
    assert "| 50 | 3 sets, 3 draws | **80.0** | 2222222, 1111111 |" in text
    assert "| Inlay, no options | 1111111 | 2026-01-01 to 2026-01-02 | processors | 50 | 2 |" in text
    assert "| Inlay, no options | 2222222 | 2026-01-03 | processors | 50 | 1 |" in text


def test_the_newest_line_says_the_score_and_the_newest_without_a_gpu_what_a_run_costs(tmp_path):
    def write(date: str, gpu: str | None, score: float, cpu_s: float, draw: int = 0) -> None:
        said = dataclasses.asdict(record("probe", score, draw=draw)) | {"date": date, "cpu_s": cpu_s}
        with (tmp_path / "probe.jsonl").open("a") as file:
            file.write(json.dumps(said | {"hardware": {"gpu": gpu}}) + "\n")

    write("2026-01-01", None, 70, 11)
    write("2025-12-31", None, 65, 12)
    write("2026-01-02", "H200", 90, 22)
    write("2025-12-30", "H200", 50, 44)
    write("2026-01-02", "H200", 60, 33, draw=1)
    scores = quality_report.Scores(read_records(tmp_path))
    assert sorted(one.score for one in scores.records.values()) == [60, 90]
    [cell] = scores.timed_cells(1000, "probe")
    assert scores.mean_cpu("probe", [cell]) == 11
