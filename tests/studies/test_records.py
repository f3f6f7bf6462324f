"""Records: kept by run id, merged from sessions and machines, never half read."""

from __future__ import annotations

import dataclasses
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inlay.errors import BadData
from inlay.studies.run.records import (
    Record,
    append_records,
    list_files,
    merge_records,
    read_appended,
    read_records,
    read_study,
    results_file,
)

RESULTS = Path(__file__).parents[2] / "results"


def make_record(run_id="a", **known):
    usual = {
        "id": run_id,
        "study": "glue",
        "arm": "full",
        "task": "glue/cola",
        "backbone": "tiny",
        "fingerprint": "f",
        "profile": "device",
        "seed": 0,
        "axes": {"lr": 1e-3},
        "trained_parameters": 10,
        "backbone_parameters": 100,
        "num_train": 5,
        "metric": "matthews",
        "dev": {"matthews": 0.5},
        "test": None,
        "majority": 0.7,
        "status": "finished",
        "curve": [[1, 0.5]],
        "seconds": 1.0,
        "commit": "c",
        "hardware": "H200",
        "versions": {"torch": "2"},
        "date": "2026-01-01T00:00:00+00:00",
        "config": {"train": {"lr": 1e-3}},
    }
    return Record(**{**usual, **known})


def test_the_same_run_from_other_hardware_is_kept_as_a_repeat():
    here, there = make_record(), make_record(hardware="CPU")
    assert merge_records([here], [there], [here]) == [there, here]


def test_of_one_run_on_one_machine_the_newer_stands_and_a_failure_never_replaces_a_result():
    old = make_record()
    new = dataclasses.replace(old, date="2026-02-01T00:00:00+00:00", dev={"matthews": 0.6})
    failed = dataclasses.replace(old, date="2026-03-01T00:00:00+00:00", status="failed", dev={})
    assert merge_records([old], [new], [failed]) == [new]


def test_a_run_may_stand_in_several_arms():
    assert len(merge_records([make_record(arm="adapters")], [make_record(arm="adapters-64")])) == 2


def test_a_run_that_reads_no_backbone_stands_beside_each_and_in_every_profile(tmp_path):
    places = [("small", "f", "device"), ("large", "g", "device"), ("small", "f", "paper")]
    records = [make_record("tfidf", backbone=name, fingerprint=of, profile=profile) for name, of, profile in places]
    for record in records:
        append_records(results_file(tmp_path, "glue", record.backbone, record.profile), [record])
    found = {(record.backbone, record.profile) for record in read_study(tmp_path, "glue")}
    assert found == {("small", "device"), ("large", "device"), ("small", "paper")}


def test_merging_does_not_depend_on_the_order():
    records = [make_record(name, hardware=where) for name in "abc" for where in ("CPU", "H200")]
    merged = merge_records(records)
    for seed in range(5):
        shuffled = random.Random(seed).sample(records, len(records))
        assert merge_records(shuffled[:2], shuffled[2:], shuffled[:4]) == merged


def test_what_is_written_is_what_is_read_and_a_merge_of_files_is_a_merge_of_lines(tmp_path):
    path = results_file(tmp_path, "glue", "/somewhere/tiny", "device")
    assert path == tmp_path / "glue" / "tiny-device.jsonl"
    append_records(path, [make_record("b"), make_record("a", dev={"matthews": float("nan")})])
    assert [record.id for record in read_records(path)] == ["a", "b"]
    assert read_records(path)[0].dev == {"matthews": None}, "JSON has no NaN"
    assert len(path.read_text().splitlines()) == 2, "a line each"
    append_records(path, [make_record("c")])
    assert [record.id for record in read_study(tmp_path, "glue")] == ["a", "b", "c"]


def test_several_writers_lose_nothing(tmp_path):
    path = tmp_path / "glue" / "tiny-device.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: append_records(path, [make_record(f"{number:02}")]), range(16)))
    assert [record.id for record in read_records(path)] == [f"{number:02}" for number in range(16)]


def write_first_format(path, *records):
    """As all results were written once, and many still are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"study": "glue", "records": [record.to_json() for record in records]}))


def test_a_file_of_the_first_format_is_read_and_goes_on_in_lines_beside_it(tmp_path):
    path = tmp_path / "glue" / "tiny-device.jsonl"
    before = make_record("a")
    write_first_format(path.with_suffix(".json"), before, make_record("b"))
    assert [record.id for record in read_study(tmp_path, "glue")] == ["a", "b"]
    revised = dataclasses.replace(before, extra={"more": 1})
    append_records(path, [make_record("c"), revised])
    append_records(
        path, [make_record("b", date="2025-01-01T00:00:00+00:00", dev={}), make_record("c", status="failed")]
    )
    expected = [revised, make_record("b"), make_record("c")]
    assert read_records(path) == expected, "of the same date the later line stands; an older one and a failure do not"
    assert list_files(tmp_path) == [path]
    assert read_study(tmp_path, "glue") == expected


@pytest.mark.parametrize("num_bytes", [1, 20, 300])
def test_a_line_cut_off_by_a_kill_is_not_read_and_the_next_append_clears_it(tmp_path, num_bytes):
    path = tmp_path / "glue" / "tiny-device.jsonl"
    append_records(path, [make_record("a"), make_record("b")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_bytes])
    assert [record.id for record in read_records(path)] == ["a"]
    assert read_appended(path)[1] == len(whole) // 2
    append_records(path, [make_record("b")])
    assert path.read_bytes() == whole
    path.write_bytes(whole[: len(whole) // 2 - num_bytes])
    assert read_records(path) == []
    append_records(path, [make_record("a"), make_record("b")])
    assert path.read_bytes() == whole, "also where no line is whole"


def test_a_line_that_is_no_record_is_refused(tmp_path):
    path = tmp_path / "glue" / "tiny-device.jsonl"
    append_records(path, [make_record("a")])
    path.write_text('{"half": \n' + path.read_text())
    with pytest.raises(BadData, match="not JSON"):
        read_records(path)


def test_what_is_appended_is_all_that_is_written_and_read_however_much_there_is(tmp_path):
    """So a thousand records take a thousand times what one takes."""
    path = tmp_path / "glue" / "tiny-device.jsonl"
    read_to, sizes = 0, []
    for number in range(1000):
        record = make_record(f"{number:04}")
        before = path.stat().st_ino if number else None
        append_records(path, [record])
        assert before in (None, path.stat().st_ino), "nothing is written anew"
        found, end = read_appended(path, read_to)
        assert found == [record]
        sizes.append(end - read_to)
        read_to = end
    assert set(sizes) == {sizes[0]}
    assert len(read_records(path)) == 1000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda item: item.pop("dev"), "record `a` has no field `dev`"),
        (lambda item: item.update(more=1), "record `a` has an unknown field `more`"),
        (lambda item: item.update(status="done"), "record `a` has the status `done`"),
    ],
)
def test_a_damaged_record_is_refused_by_name(tmp_path, change, reason):
    content = make_record().to_json()
    change(content)
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"study": "glue", "records": [content]}))
    with pytest.raises(BadData, match=reason):
        read_records(path)


def test_other_files_of_a_results_folder_are_left_alone(tmp_path):
    append_records(tmp_path / "glue" / "tiny-device.jsonl", [make_record()])
    (tmp_path / "glue" / "scores.json").write_text('{"rows": {}}')
    assert len(read_study(tmp_path, "glue")) == 1


def test_records_in_a_deeper_folder_are_of_no_study(tmp_path):
    append_records(tmp_path / "apart" / "glue" / "tiny-device.jsonl", [make_record()])
    assert not list_files(tmp_path)
    assert not read_study(tmp_path, "glue")
    assert not read_study(tmp_path, "apart")


def test_no_shipped_record_that_a_report_shows_reads_a_pooler_which_was_never_trained():
    """MiniLM's and MPNet-base's are noise; the runs that read them lie apart, and a head on tokens reads none."""
    shown = [record for path in list_files(RESULTS) for record in read_records(path)]
    assert len(shown) > 3000
    assert not [record.id for record in shown if record.pooling == "pooler"]
    unknown = [record for record in shown if record.pooling == "auto" and record.arm not in ("baseline", "tfidf")]
    assert {record.backbone for record in unknown} <= {"flan-t5-small"}, "which writes its answers"
    apart = [record for path in RESULTS.glob("untrained-pooler/*/*.json") for record in read_records(path)]
    assert {record.pooling for record in apart} == {"pooler"}
    assert {record.backbone for record in apart} == {"minilm", "mpnet-base"}
    assert not {record.id for record in apart} & {record.id for record in shown}
